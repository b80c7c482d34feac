"""A graph with nothing to fuse runs as it is: library calls and Triton kernels, in straight-line Python.

Inductor earns its compile time by fusing pointwise operations and reductions. A block of the zoo leaves it none: what
lies between its products and convolutions is a Triton kernel already. For such a graph Inductor takes half a second or
more, and emits the same calls. Here Dynamo's graph is run directly, so that a region costs one trace. Where gradients
are wanted, graph and backward are traced operator by operator, and autograd sees one function. Every other graph goes
to Inductor.
"""

from __future__ import annotations

import copy
import functools
import operator
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zoo.engine.autograd import copy_overwritten_inputs, differentiable_once, is_view, trace_halves
from zoo.engine.lifted import take_other_floats_for_constants
from zoo.engine.traced import Run, Traced

# Products, convolutions and attention, which a library computes whoever calls it.
_LIBRARY = {torch.conv2d, F.linear, F.scaled_dot_product_attention, operator.matmul, "addmm_"} | {
    *(torch.mm, torch.bmm, torch.matmul, torch.addmm, torch._addmm_activation, torch.baddbmm),
}
_aten = torch.ops.aten
_ALLOCATIONS = {torch.empty, torch.empty_like, "new_empty", _aten.empty.memory_format, _aten.empty_like.default} | {
    *(_aten.empty_strided.default, _aten.new_empty.default, _aten.new_empty_strided.default),
}
# What moves no data: functions, and methods by name. ``contiguous`` copies nothing where the layout is right already.
_VIEWS = _ALLOCATIONS | {
    *(operator.getitem, _aten._unsafe_view.default),
    *("chunk", "contiguous", "detach", "expand", "expand_as", "flatten", "narrow", "permute", "reshape", "select"),
    *("size", "split", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as"),
}


class DirectOrInductor(torch._TorchCompileInductorWrapper):
    """A ``torch.compile`` backend: graphs with nothing to fuse run as they are, Inductor compiles the others.

    Takes the arguments of ``torch.compile(backend="inductor")``. Dynamo reuses code of an equal backend alone, so
    ``fullgraph`` is compared: a model that allows no graph breaks cannot use code that has some.
    """

    def __init__(self, options: dict[str, Any] | None, dynamic: bool | None, fullgraph: bool) -> None:
        super().__init__(None, options, dynamic)
        self.fullgraph = fullgraph

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.fullgraph == getattr(other, "fullgraph", None)

    def __call__(self, model_: fx.GraphModule, inputs_: Any, **options: Any) -> Any:
        """Return what runs in place of the graph."""
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

        tunes = self.config.get("max_autotune") or self.config.get("max_autotune_gemm")
        if not tunes and has_nothing_to_fuse(model_) and (run := run_directly(model_)) is not None:
            Traced(model_, product=run)
            return run
        take_other_floats_for_constants(model_)
        copy_overwritten_inputs(model_)
        inductor = self
        if any(free_unbacked_symbols(node.meta.get("example_value")) for node in model_.graph.nodes):
            # In a backward, these assertions define the names of sizes that depend on data.
            inductor = copy.copy(self)
            inductor.config = {**self.config, "size_asserts": True}
        compile = super(DirectOrInductor, inductor).__call__
        Traced(model_, by_inductor=compile)
        return compile(model_, inputs_, **options)  # type: ignore[no-untyped-call]


def has_nothing_to_fuse(graph: fx.GraphModule) -> bool:
    """Whether a graph has only library calls, zoo kernels and pointwise operations that do not read each other.

    Operations inside an autograd function do not count. A graph without kernels may have one pointwise operation at
    most, which must be a single operator of torch.
    """
    from torch._functorch.autograd_function import autograd_function_apply

    launches = False
    pointwise: list[fx.Node] = []
    reads: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        reads_pointwise = any(each in reads for each in node.all_input_nodes)
        if node.target is autograd_function_apply:
            halves = [getattr(graph, each.target).graph for each in node.args[:2]]
            within = [each for half in halves for each in half.nodes if _launches(each)]
            if node.kwargs.get("dirty_idx") or not all(map(_is_ours, within)):
                return False
            launches |= bool(within)
        elif _launches(node):
            if not _is_ours(node):
                return False
            launches = True
        elif node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator):
            return False
        elif node.target in _VIEWS or _is_idle_dropout(node):
            if reads_pointwise:
                reads.add(node)
        elif not _is_library(node) and isinstance(node.meta.get("example_value"), Tensor):
            if reads_pointwise:
                return False
            pointwise.append(node)
            reads.add(node)
    simple = all(isinstance(each.target, str | types.BuiltinFunctionType) for each in pointwise)
    return launches or (len(pointwise) <= 1 and simple)


def _view_once(graph: fx.Graph, of_gradients: bool) -> None:
    """Replace each chain of views by one view of its base, and remove views that change nothing.

    A view takes the host as long as a fifth of a product. An output that shares memory with an input or with another
    output keeps its views, so that autograd sees them, unless the outputs are gradients.
    """
    roots: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        value, source = node.meta.get("example_value"), _source(node)
        if source is None or not isinstance(value, Tensor):
            continue
        if value.untyped_storage()._cdata != source.meta["example_value"].untyped_storage()._cdata:
            continue
        if node.target == "contiguous":
            node.replace_all_uses_with(source)
        elif _has_fixed_layout(value):
            roots[node] = roots.get(source, source)
    outputs = [] if of_gradients else graph.find_nodes(op="output")
    returned = [each for node in outputs for each in node.all_input_nodes]
    returned_roots = [roots.get(each, each) for each in returned]
    for each, root in zip(returned, returned_roots, strict=True):
        watched: Any = each if root.op == "placeholder" or returned_roots.count(root) > 1 else None
        while watched in roots:
            del roots[watched]
            watched = _source(watched)
    for node, root in roots.items():
        value, base = node.meta["example_value"], root.meta["example_value"]
        if value.dtype == base.dtype and _has_fixed_layout(base):
            offset = value.storage_offset() - base.storage_offset()
            layout = (tuple(value.shape), value.stride(), offset)
            if layout == (tuple(base.shape), base.stride(), 0):
                node.replace_all_uses_with(root)
            else:
                _replace(graph, node, _compilers_own("_reinterpret_tensor"), (root, *layout))
    _erase_unread(graph)


def _source(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is a view of, also if the node picks one of several views."""
    if not _moves_nothing(node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source: Any = node.args[0]
    if node.target is operator.getitem and _moves_nothing(source) and source.args:
        source = source.args[0]
    return source if isinstance(source, fx.Node) and isinstance(source.meta.get("example_value"), Tensor) else None


def _moves_nothing(node: fx.Node) -> bool:
    return node.target in _VIEWS or is_view(node)


def _has_fixed_layout(tensor: Tensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return not is_traceable_wrapper_subclass(tensor) and all(isinstance(each, int) for each in numbers)


def _replace(graph: fx.Graph, node: fx.Node, call: Any, args: tuple[Any, ...], named: Any = None) -> None:
    with graph.inserting_before(node):
        new = graph.call_function(call, args, named)
    new.meta.update(node.meta)  # ``_launch`` reads the example of each of its tensors
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _erase_unread(graph: fx.Graph) -> None:
    """Erase views and attributes that nothing reads."""
    for node in reversed(graph.nodes):
        views = _moves_nothing(node) or node.target is _compilers_own("_reinterpret_tensor")
        if not node.users and (views or node.op == "get_attr"):
            graph.erase_node(node)


def _compilers_own(name: str) -> Run:
    """A function that Inductor's code calls in place of one of torch's, for a third of the host's time."""
    return getattr(torch._C._dynamo.guards, name)  # type: ignore[no-any-return]


def _allocated(node: fx.Node, gpu: torch.device | None) -> Tensor | None:
    """An example of the tensor that a node allocates on ``gpu``, if its sizes and strides are fixed."""
    value = node.meta.get("example_value")
    if node.target not in _ALLOCATIONS or not isinstance(value, Tensor):
        return None
    return value if _has_fixed_layout(value) and value.device == gpu else None


def _allocate_as_viewed(graph: fx.Graph, gpu: torch.device | None) -> None:
    """Allocate a kernel's output in the layout of its first view, which saves the view: kernels read addresses."""
    view = _compilers_own("_reinterpret_tensor")
    for node in graph.nodes:
        views = [each for each in node.users if each.target is view]
        if not views or (like := _allocated(node, gpu)) is None:
            continue
        viewed = views[0].meta["example_value"]
        rest = [each for each in node.users if each.target is not view]
        by_address = all(_launches(each) and not each.kwargs["tma_descriptor_metadata"] for each in rest)
        if by_address and like.untyped_storage().nbytes() == viewed.numel() * viewed.element_size():
            node.meta["example_value"] = viewed
            views[0].replace_all_uses_with(node)
            graph.erase_node(views[0])


def _call_libraries(graph: fx.Graph) -> None:
    """Replace convolutions, and ``F.linear`` on matrices, by the lower-level calls that they make.

    ``torch.convolution`` and ``torch.addmm`` take the host two thirds of the time of ``torch.conv2d`` and ``F.linear``.
    """
    for node in list(graph.nodes):
        if node.target in (torch.conv2d, _aten.convolution.default):
            _call_convolution(graph, node)
        if node.target is not F.linear or node.kwargs:
            continue
        rows, weight, bias = (*node.args, None)[:3]
        out, x, matrix = (each.meta["example_value"] for each in (node, rows, weight))
        if x.dim() == matrix.dim() == 2 and x.dtype == matrix.dtype == out.dtype:  # under autocast they differ
            with graph.inserting_before(node):
                transposed = graph.call_method("t", (weight,))
            transposed.meta["example_value"] = matrix.detach().t()
            product = (torch.mm, (rows, transposed)) if bias is None else (torch.addmm, (bias, rows, transposed))
            _replace(graph, node, *product)


def _call_convolution(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a convolution of a batch by cuDNN's where torch would call cuDNN, else by ``torch.convolution``.

    A convolution whose padding is a string, such as ``padding="same"``, is left unchanged.
    """
    names = ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
    if node.target is _aten.convolution.default:
        names[6:] = ["transposed", "output_padding", "groups"]
    defaults = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "transposed": False}
    given: dict[str, Any] = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    x, weight, bias, *geometry = (given[name] for name in names[:6])
    alike = {each.meta["example_value"].dtype for each in (node, x, weight, bias) if each is not None}
    # Autocast casts the arguments of torch.conv2d, and not those of torch.convolution.
    if x.meta["example_value"].dim() != 4 or len(alike) > 1 or isinstance(given["padding"], str) or given["transposed"]:
        return
    pairs = [(each, each) if isinstance(each, int) else each for each in geometry]
    if bias is None and given["groups"] == 1 and all(_suits_cudnn(each.meta["example_value"]) for each in (x, node)):
        _replace(graph, node, convolution_by_cudnn, (x, weight, *pairs))
    else:
        _replace(graph, node, torch.convolution, (x, weight, bias, *pairs, False, (0, 0), given["groups"]))


def _suits_cudnn(images: Tensor) -> bool:
    """Whether torch computes convolutions of these images by cuDNN, whatever its precision settings are."""
    if images.device.type != "cuda" or torch.version.hip is not None or not _has_fixed_layout(images):
        return False
    if images.dtype == torch.bfloat16 and torch.cuda.get_device_capability(images.device) < (8, 0):
        return False
    return images.dtype in (torch.float16, torch.bfloat16) and 0 < images.numel() < 2**31


def convolution_by_cudnn(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """``torch.convolution`` in half precision by cuDNN; saves the host torch's choice among libraries in each call."""
    settings = torch._C
    if not settings._get_cudnn_enabled():
        return torch.convolution(x, weight, None, stride, padding, dilation, False, (0, 0), 1)
    deterministic = settings._get_cudnn_deterministic() or settings._get_deterministic_algorithms()
    benchmark = settings._get_cudnn_benchmark()
    return torch.cudnn_convolution(x, weight, padding, stride, dilation, 1, benchmark, deterministic, False)


def _launches(node: fx.Node) -> bool:
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    return node.target is triton_kernel_wrapper_mutation


def _is_ours(node: fx.Node) -> bool:
    """Whether a launch is of a zoo ``Kernel``, which can be bound; an autotuner of several configurations is none."""
    from zoo.engine.kernel import Kernel

    return isinstance(_kernel(node.kwargs["kernel_idx"])[0], Kernel)


def _kernel(index: Any) -> tuple[Any, dict[str, Any]]:
    """A kernel that Dynamo knows by number, and the options of its launch."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel: Any = kernel_side_table.get_kernel(index)
    configs: list[Any] = getattr(kernel, "configs", [])
    if len(configs) != 1:
        return kernel, {}
    # Dynamo wraps a kernel launched with num_warps= in an autotuner of one configuration.
    given = {name: getattr(configs[0], name) for name in ("num_warps", "num_stages")}
    return kernel.fn, {name: value for name, value in given.items() if value is not None}


def _is_idle_dropout(node: fx.Node) -> bool:
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    return node.target is F.dropout and training is False


def _is_library(node: fx.Node) -> bool:
    """Whether a node is a library's call. An operator that is not torch's own is one, whatever it computes."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace not in ("aten", "prims")
    return node.target in _LIBRARY


def run_directly(graph: fx.GraphModule) -> Run | None:
    """Straight-line Python for a graph that :func:`has_nothing_to_fuse`; same results and gradients as eager code.

    The graph's kernels are compiled when this returns. None if the gradients need Inductor.
    """
    kernels: list[tuple[Any, list[Any], dict[str, Any]]] = []
    inputs = [each.meta.get("example_value") for each in graph.graph.nodes if each.op == "placeholder"]
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    gpus = {each.device for each in tensors if each.device.type == "cuda"}
    gpu = gpus.pop() if len(gpus) == 1 else None
    switches_grad = any(each.target is torch._C._set_grad_enabled for each in graph.graph.nodes)

    def program(half: fx.GraphModule, boxed: bool = False) -> Run:
        run = _straight_line(half, gpu, kernels, boxed)
        return run if gpu is None else _on(gpu, run)

    if (switches_grad or torch.is_grad_enabled()) and any(each.requires_grad for each in tensors):
        if switches_grad or (halves := trace_halves(graph)) is None:
            return None
        read = [bool(each.users) for each in halves.backward.graph.find_nodes(op="placeholder")]
        run = _function(program(halves.forward), program(halves.backward, boxed=True), read, halves.learns)
    else:
        run = program(graph)
    if kernels:
        from zoo.engine.kernel import compile_together

        compile_together(kernels)
    return run


def recorded(maker: Callable[..., Run]) -> Run:
    """Make ``maker`` set itself and its arguments as ``recipe`` of its result, for artifacts to store in its place."""

    @functools.wraps(maker)
    def make(*args: Any) -> Run:
        function = maker(*args)
        function.recipe = make, args  # type: ignore[attr-defined]
        return function

    return make


@recorded
def _program(source: str, names: dict[str, Any]) -> Run:
    """The function ``forward`` that a graph's source code defines, without the module that holds the graph."""
    space = dict(names)
    exec(compile(source, "<direct graph>", "exec"), space)
    return space["forward"]  # type: ignore[no-any-return]


@recorded
def _on(gpu: torch.device, run: Run) -> Run:
    """``run`` with ``gpu`` as the current device, where its allocations and launches go."""

    def run_there(*args: Any) -> Any:
        if torch._C._cuda_getDevice() == gpu.index:
            return run(*args)
        with torch.cuda.device(gpu):
            return run(*args)

    return run_there


def _straight_line(graph: fx.GraphModule, gpu: torch.device | None, kernels: list[Any], boxed: bool = False) -> Run:
    """A graph as a function of its inputs or, if ``boxed``, of a list that it empties, to free each input early."""
    for node in graph.graph.find_nodes(op="call_function", target=operator.pow):
        node.target = pow  # FX would print operator.pow(-1, n) as -1 ** n, which is -(1 ** n)
    _call_libraries(graph.graph)
    _view_once(graph.graph, of_gradients=boxed)
    _allocate_as_viewed(graph.graph, gpu)
    for node in list(graph.graph.nodes):
        args: Any
        named: dict[str, Any] = {}
        if (like := _allocated(node, gpu)) is not None:
            launch = _compilers_own("_empty_strided_cuda")  # on the current device
            args = [tuple(like.shape), like.stride(), like.dtype]
        elif _launches(node):
            launch, args, named = _launch(kernels, gpu, **node.kwargs)
        else:
            continue
        _replace(graph.graph, node, launch, tuple(args), named)
    _erase_unread(graph.graph)
    held = {each.target: operator.attrgetter(each.target)(graph) for each in graph.graph.find_nodes(op="get_attr")}
    code = graph.graph.python_code("self")
    source = re.sub(r"def forward\(self(, )?", "def forward(", code.src, count=1)
    if boxed:
        names = "".join(f"{each.target}, " for each in graph.graph.find_nodes(op="placeholder"))
        source = re.sub(r"def forward\(.*\n", f"def forward(box):\n    {names}= box; box.clear()\n", source, count=1)
    return _program(source, {**code.globals, "self": types.SimpleNamespace(**held)} if held else code.globals)


def _launch(
    kernels: list[Any], gpu: torch.device | None, *, kernel_idx: int, constant_args_idx: int, grid: list[Any],
    kwargs: dict[str, Any], tma_descriptor_metadata: dict[str, Any], **_: Any,
) -> tuple[Callable[..., None], list[Any], dict[str, Any]]:  # fmt: skip
    """A function that launches a kernel, and the arguments to call it with, by position and by name."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel, options = _kernel(kernel_idx)
    named = {**kernel_side_table.get_constant_args(constant_args_idx), **kwargs}
    positional, tiles = [], []
    for parameter in kernel.params:
        if parameter.is_constexpr or parameter.name not in named:
            break
        positional.append(named.pop(parameter.name))
        # ("stable", (shape,)) of a tensor that the kernel reads through a descriptor of tiles.
        _, (shape,) = tma_descriptor_metadata.get(parameter.name, ("", (None,)))
        tiles.append(shape)
    # A symbolic size that follows a constant.
    computed = {name: each for name, each in named.items() if isinstance(each, fx.Node)}
    options.update((name, each) for name, each in named.items() if name not in computed)
    if gpu is not None:
        options |= kernel.options_on(gpu.index)
    described = [*map(_described, positional, tiles)]
    kernels.append((kernel, described, {**options, **{name: _described(each) for name, each in computed.items()}}))
    varying = [index for index, each in enumerate(positional) if isinstance(each, fx.Node)]
    tensors = [positional[index] if tiles[index] else _at_its_address(positional[index]) for index in varying]
    examples = [(positional[index].meta.get("example_value"), tiles[index]) for index in varying]
    fixed = all(isinstance(each, Tensor) and (tile is None or _has_fixed_layout(each)) for each, tile in examples)
    if gpu is not None and fixed and not computed and not any(isinstance(each, fx.Node) for each in grid[0]):
        constants = [None if isinstance(each, fx.Node) else each for each in positional]
        of_tensors = [tiles[index] for index in varying]
        return _bound(kernel, tuple(grid[0]), constants, varying, options, of_tensors), tensors, computed
    return _launching(kernel, tiles, options), [tuple(grid[0]), *positional], computed


@recorded
def _bound(kernel: Any, *launch: Any) -> Callable[..., None]:
    return kernel.bound(*launch)  # type: ignore[no-any-return]


@recorded
def _launching(kernel: Any, tiles: list[Any], options: dict[str, Any]) -> Callable[..., None]:
    from zoo.engine.kernel import by_tile

    start, any_tiles = kernel.launch, any(tiles)

    def launch(grid: Any, *arguments: Any, **sizes: Any) -> None:
        if any_tiles:
            arguments = tuple(map(by_tile, arguments, arguments, tiles))
        start(grid, *arguments, **options, **sizes)

    return launch


def _at_its_address(tensor: fx.Node) -> fx.Node:
    """The base of a view that begins at the base's address, else the tensor: a bound launch needs only the address."""
    starts = tensor.target is _compilers_own("_reinterpret_tensor") and tensor.args[3] == 0
    return tensor.args[0] if starts else tensor  # type: ignore[return-value]


def _described(argument: Any, tile: list[int] | None = None) -> Any:
    """The property of a launch's argument that a kernel is compiled for.

    For a tensor it is the dtype or, if read by tiles, a descriptor without data; for a symbol, the current size; for
    anything else, the value.
    """
    value: Any = argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return value.node.hint
    if tile is not None:
        from zoo.engine.kernel import by_tile

        return by_tile(None, torch.empty(tile, dtype=value.dtype, device="meta"), tile)
    return value.dtype if isinstance(value, Tensor) else value


@recorded
def _function(forward: Run, backward: Run, read: Sequence[bool], learns: Sequence[bool]) -> Run:
    """An autograd function of two halves; ``read`` says which of its arguments the backward reads."""
    constant = [place for place, learned in enumerate(learns) if not learned]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with torch._C._DisableAutocast():  # the trace has its casts
                outputs, tensors, ctx.numbers = forward(*args)
            ctx.save_for_backward(*tensors)
            ctx.layouts = [(each.shape, each.stride(), each.dtype, each.device) for each in outputs]
            ctx.mark_non_differentiable(*(outputs[place] for place in constant))
            # Else each output that nobody reads would cost a launch, to fill its gradient with zeros.
            ctx.set_materialize_grads(False)
            return outputs

        @staticmethod
        @differentiable_once
        def backward(ctx: Any, *grads: Any) -> Any:
            if not any(grad is not None for grad in grads):  # as the gradient of a detached copy
                return (None,) * len(ctx.needs_input_grad)
            gradients = zip(grads, ctx.layouts, read, strict=False)
            laid_out = (_laid_out(grad, *layout) if is_read else None for grad, layout, is_read in gradients)
            given = [*laid_out, *ctx.saved_tensors, *ctx.numbers]
            ctx.maybe_clear_saved_tensors()  # unless the graph is retained
            with torch._C._DisableAutocast():
                return backward(given)

    # Torch's apply in Python searches every argument for wrappers of torch.func. The one in C takes no ``recipe``
    # attribute, so a function is around it.
    in_c = super(torch.autograd.Function, Function).apply
    return lambda *args: in_c(*args)


def _laid_out(grad: Tensor | None, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A gradient, zeros if None, in the layout of its output, which the backward was traced for."""
    if grad is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
    return grad if grad.stride() == stride else grad.new_empty_strided(shape, stride).copy_(grad)
