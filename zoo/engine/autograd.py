"""Gradients of kernels and of directly run graphs, and correct gradients of graphs that overwrite their inputs.

The gradient of a kernel cannot be differentiated again. The gradient of a graph is traced before its first backward.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Function = Callable[..., Any]


def dynamo_constant(function: Callable[..., bool]) -> Callable[..., bool]:
    """Make Dynamo call a function instead of tracing it, and take the result for a constant without a guard."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# Dynamo would trace the call as an operation. No guard is needed: Dynamo traces no region inside a transform, and
# enters a region's own transforms during tracing.
@dynamo_constant
def _functorch_runs() -> bool:
    return torch._C._are_functorch_transforms_active()


def transformed() -> bool:
    """Whether torch.func or forward mode is active; both ignore the zoo's backward. Callable inside a region."""
    return _functorch_runs() or torch.autograd.forward_ad._current_level >= 0


def differentiable_once(backward: Function) -> Function:
    """Make a backward whose outputs raise an error if they are differentiated, even for a constant incoming gradient.

    Torch's ``once_differentiable`` raises it only if the incoming gradient requires a gradient.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        ctx = _UnpackedOnce(ctx)
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        many = outputs if isinstance(outputs, tuple) else (outputs,)
        marker = torch.ones((), requires_grad=True)
        # Autograd only follows paths to the inputs that it differentiates for; without these it would skip _Refused.
        paths = [each for each in (*grads, *ctx.saved_tensors) if isinstance(each, Tensor) and each.requires_grad]
        many = tuple(_Refused.apply(each, marker, *paths) if isinstance(each, Tensor) else each for each in many)
        return many if isinstance(outputs, tuple) else many[0]

    return run


class _UnpackedOnce:
    """A context that caches its saved tensors, since a checkpoint unpacks them only once."""

    def __init__(self, ctx: Any) -> None:
        self.__dict__["_ctx"] = ctx

    @functools.cached_property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        return self._ctx.saved_tensors  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *paths: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(
            "trying to differentiate twice a function that is once_differentiable: the gradient of a kernel or of a "
            "compiled region has no gradient itself; compute it without create_graph=True, or, if the model runs no "
            "kernel, call zoo.uncompile(model)"
        )


class Halves(NamedTuple):
    """A graph and its gradient, as two graphs of ATen operators in the order in which autograd runs them.

    ``forward`` takes the graph's inputs and returns its outputs, the saved tensors and the saved numbers. ``backward``
    takes a gradient per output, then the saved tensors and numbers. It returns a gradient per input, None for an input
    that needs none. ``learns`` says which outputs have a gradient.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    learns: list[bool]


def trace_halves(graph: fx.GraphModule) -> Halves | None:
    """Trace Dynamo's graph and its gradient on fake tensors; None if one autograd function cannot run the two.

    It cannot if no output has a gradient, an output shares memory with an input or another output, the graph writes to
    an input that requires a gradient, an output is no tensor, or a tensor wraps others (DTensor).
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensor
    from torch.autograd.graph import saved_tensors_hooks
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

    examples = [each.meta.get("example_value") for each in graph.graph.find_nodes(op="placeholder")]
    (output,) = graph.graph.find_nodes(op="output")
    outputs: list[Any] = [
        each.meta.get("example_value") if isinstance(each, fx.Node) else None for each in output.args[0]
    ]
    tensors: list[Any] = [each for each in examples if isinstance(each, Tensor)]
    if not all(isinstance(each, FakeTensor) for each in (*tensors, *outputs)):
        return None
    memory = [each.untyped_storage()._cdata for each in outputs]
    shared = len({*memory} - {each.untyped_storage()._cdata for each in tensors}) < len(memory)
    learns = [each.requires_grad for each in outputs]
    if shared or not any(learns) or any(each._version and each.requires_grad for each in tensors):
        return None
    mode = tensors[0].fake_mode  # the context has another fake mode, which Dynamo made for the backend

    def run(inputs: list[Any], grads: list[Tensor]) -> list[Any]:
        results = graph(*inputs)
        for node in get_proxy_mode().tracer.graph.nodes:  # type: ignore[union-attr]
            node.meta["of_forward"] = True
        wanted = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
        given = [each for each, learned in zip(results, learns, strict=True) if learned]
        with torch._C._DisableAutocast():
            found = torch.autograd.grad(given, wanted, grads, allow_unused=True)
        gradient_of = dict(zip(map(id, wanted), found, strict=True))
        return [*results, *(gradient_of.get(id(each)) for each in inputs)]

    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # the cache would keep casts of fake weights
    try:
        with (
            tracing(TracingContext(mode)), mode, torch.autograd.set_multithreading_enabled(False),
            saved_tensors_hooks(lambda x: x, lambda x: x),  # hide a checkpoint's hooks, which would count fake tensors
        ):  # fmt: skip
            inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in examples]
            grads = [torch.empty_like(each) for each, learned in zip(outputs, learns, strict=True) if learned]
            traced = make_fx(run)(inputs, grads)
    finally:
        torch.set_autocast_cache_enabled(caches)
    return _halves(traced, len(inputs), learns)


def _halves(traced: fx.GraphModule, inputs: int, learns: list[bool]) -> Halves:
    """Cut a trace into its forward and backward. The backward makes the views that it reads anew, from saved bases."""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    nodes = list(traced.graph.nodes)
    given = traced.graph.find_nodes(op="placeholder")[inputs:]  # gradients of the outputs that learn
    for node in nodes:
        node.meta["example_value"] = node.meta.get("val")
        if node in given:
            del node.meta["of_forward"]
    results, found = nodes[-1].args[0][: len(learns)], nodes[-1].args[0][len(learns) :]
    of_backward: set[fx.Node] = set()
    for node in reversed(nodes[:-1]):
        if not node.meta.get("of_forward") or (is_view(node) and not of_backward.isdisjoint(node.users)):
            of_backward.add(node)
    read = {each for node in of_backward for each in node.all_input_nodes} | set(found)
    saved = [node for node in nodes if node in read and node not in of_backward]

    forward, backward = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes[:-1]:
        if node.meta.get("of_forward"):
            copies[node] = forward.node_copy(node, copies.__getitem__)
    tensors = [node for node in saved if isinstance(node.meta["val"], Tensor)]
    numbers = [node for node in saved if node not in tensors]
    forward.output(fx.node.map_arg((tuple(results), tuple(tensors), tuple(numbers)), copies.__getitem__))

    grads = iter(given)
    taken = [next(grads) if learned else None for learned in learns]
    copies = {}
    for place, node in enumerate([*taken, *tensors, *numbers]):
        new = backward.placeholder(f"x{place}")
        if node is not None:
            new.meta, copies[node] = node.meta, new
    for node in nodes[:-1]:
        if node in of_backward and node not in given:
            copies[node] = backward.node_copy(node, copies.__getitem__)
    backward.output(fx.node.map_arg(tuple(found), copies.__getitem__))
    for half in (forward, backward):  # such as zeros in place of gradients that an inner autograd function ignores
        half.eliminate_dead_code(lambda node: node.is_impure() or node.target is triton_kernel_wrapper_mutation)
    return Halves(fx.GraphModule(traced, forward), fx.GraphModule(traced, backward), learns)


def is_view(node: fx.Node) -> bool:
    """Whether an ATen node returns a view of another tensor, or picks one of several such views."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and isinstance(source.target, torch._ops.OpOverload) and source.target.is_view


# A clone that AOTAutograd does not recompute in the backward and that Inductor does not remove.
_COPY = "zoo_engine::copy_of_input"
torch.library.define(_COPY, "(Tensor x) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
torch.library.impl(_COPY, "default", torch.clone)
torch.library.register_fake(_COPY, torch.empty_like)
torch.library.register_autograd(_COPY, lambda ctx, grad: grad)


def copy_overwritten_inputs(graph: fx.GraphModule) -> None:
    """Copy the inputs that a graph with gradients overwrites and differentiates through.

    AOTAutograd recomputes in the backward some results of such an input, which holds another value by then. Inductor
    removes clones of such an input. Both give wrong gradients without an error, in torch 2.11 to 2.15.
    """
    inputs = graph.graph.find_nodes(op="placeholder")
    overwritten = [node for node in inputs if _is_overwritten(node)] if any(map(_learns, inputs)) else []
    (output,) = graph.graph.find_nodes(op="output")
    for node in overwritten:
        with graph.graph.inserting_after(inputs[-1]):
            copy = graph.graph.call_function(torch.ops.zoo_engine.copy_of_input.default, (node,))
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
        with graph.graph.inserting_before(output):
            last = graph.graph.call_method("copy_", (node, copy))
        copy.meta["example_value"] = last.meta["example_value"] = node.meta["example_value"]
    if overwritten:
        graph.recompile()


def _is_overwritten(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or not value._version or is_traceable_wrapper_subclass(value):
        return False
    if value.requires_grad:  # AOTAutograd overwrites it after the graph has run
        return any(user.target in ("clone", torch.clone) for user in node.users)
    return _is_learned_from(node)


def _is_learned_from(node: fx.Node) -> bool:
    """Whether an operation with a gradient reads an input, or a value computed from the input."""
    seen, todo = {node}, [node]
    while todo:
        new = todo.pop().users.keys() - seen
        if any(map(_learns, new)):
            return True
        seen |= new
        todo += new
    return False


def _learns(node: fx.Node) -> bool:
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    return any(isinstance(each, Tensor) and each.requires_grad for each in leaves)
