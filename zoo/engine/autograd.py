"""Gradients of kernels, of a graph, and of what a graph computes from an input that it overwrites.

Those of kernels refuse to be differentiated. A graph's are traced ahead of its first backward.
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


def _functorch_runs() -> bool:
    return torch._C._are_functorch_transforms_active()


# Marked, since Dynamo would trace the call as an operation. No guard is needed: Dynamo traces no region inside a
# transform, and enters a region's own transforms during tracing.
_functorch_runs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def transformed() -> bool:
    """Whether torch.func or forward mode is active; both ignore the zoo's backward. Callable inside a region."""
    return _functorch_runs() or torch.autograd.forward_ad._current_level >= 0


def differentiable_once(backward: Function) -> Function:
    """A backward whose outputs refuse to be differentiated, whatever they are computed of.

    Torch's ``once_differentiable`` refuses only where the gradient that came in depends on something.
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
            "trying to differentiate twice what is once_differentiable: the gradient is a kernel's or a compiled "
            "region's, which has none of its own; compute it without create_graph=True, or zoo.uncompile(model) where "
            "no kernel is in it"
        )


class Halves(NamedTuple):
    """A graph and its gradient: two graphs of single operators, in the order in which autograd runs them.

    ``forward`` takes the graph's inputs and returns its outputs, tensors that are saved, and numbers that are.
    ``backward`` takes a gradient of each output and what was saved; it returns a gradient of each input, None where an
    input needs none. ``learns`` says which outputs have a gradient.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    learns: list[bool]


def trace_halves(graph: fx.GraphModule) -> Halves | None:
    """Run a graph of Dynamo's and its gradient on fake tensors, or None where one autograd function cannot run it.

    That is where no output learns, one shares memory with an input or with another, the graph writes to an input that
    learns, or a tensor is made of others (DTensor).
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
    mode = tensors[0].fake_mode  # not that of the context, which Dynamo made for the backend

    def run(inputs: list[Any], grads: list[Tensor]) -> list[Any]:
        results = graph(*inputs)
        for node in get_proxy_mode().tracer.graph.nodes:  # type: ignore[union-attr]
            node.meta["of_forward"] = True
        wanted = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
        given = [each for each, learned in zip(results, learns, strict=True) if learned]
        with torch._C._DisableAutocast():
            found = torch.autograd.grad(given, wanted, grads, allow_unused=True)
        of = dict(zip(map(id, wanted), found, strict=True))
        return [*results, *(of.get(id(each)) for each in inputs)]

    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # it would keep fake weights
    try:
        with (
            tracing(TracingContext(mode)), mode, torch.autograd.set_multithreading_enabled(False),
            saved_tensors_hooks(lambda x: x, lambda x: x),  # in the place of a checkpoint's, which would count fakes
        ):  # fmt: skip
            inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in examples]
            grads = [torch.empty_like(each) for each, learned in zip(outputs, learns, strict=True) if learned]
            traced = make_fx(run)(inputs, grads)
    finally:
        torch.set_autocast_cache_enabled(caches)
    return _halves(traced, len(inputs), learns)


def _halves(traced: fx.GraphModule, inputs: int, learns: list[bool]) -> Halves:
    """Cut a trace where its backward begins. Of a view that the backward reads, what it is a view of is saved."""
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
    there: dict[fx.Node, fx.Node] = {}
    for node in nodes[:-1]:
        if node.meta.get("of_forward"):
            there[node] = forward.node_copy(node, there.__getitem__)
    tensors = [node for node in saved if isinstance(node.meta["val"], Tensor)]
    numbers = [node for node in saved if node not in tensors]
    forward.output(fx.node.map_arg((tuple(results), tuple(tensors), tuple(numbers)), there.__getitem__))

    grads = iter(given)
    taken = [next(grads) if learned else None for learned in learns]
    there = {}
    for place, node in enumerate([*taken, *tensors, *numbers]):
        new = backward.placeholder(f"x{place}")
        if node is not None:
            new.meta, there[node] = node.meta, new
    for node in nodes[:-1]:
        if node in of_backward and node not in given:
            there[node] = backward.node_copy(node, there.__getitem__)
    backward.output(fx.node.map_arg(tuple(found), there.__getitem__))
    for half in (forward, backward):  # gradients of outputs that an autograd function does not read are zeros
        half.eliminate_dead_code(lambda node: node.is_impure() or node.target is triton_kernel_wrapper_mutation)
    return Halves(fx.GraphModule(traced, forward), fx.GraphModule(traced, backward), learns)


def is_view(node: fx.Node) -> bool:
    """Whether a node of single operators views another tensor, perhaps as one of several."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and isinstance(source.target, torch._ops.OpOverload) and source.target.is_view


# A copy that AOTAutograd does not compute again in the backward, and that Inductor does not leave out.
_COPY = "zoo_engine::copy_of_input"
torch.library.define(_COPY, "(Tensor x) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
torch.library.impl(_COPY, "default", torch.clone)
torch.library.register_fake(_COPY, torch.empty_like)
torch.library.register_autograd(_COPY, lambda ctx, grad: grad)


def copy_overwritten_inputs(graph: fx.GraphModule) -> None:
    """Let a graph that learns work on copies of inputs that it overwrites and learns from.

    AOTAutograd computes again in the backward what the forward computed from such an input, and by then it holds
    another value; Inductor leaves out clones of it. Both give wrong gradients without an error, in torch 2.11 to 2.15.
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
    """Whether an operation with a gradient reads an input, or what is computed from it."""
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
