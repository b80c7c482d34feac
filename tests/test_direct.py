"""Graphs with nothing to fuse run as they are: same results and gradients, and Inductor never sees them."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

pytest.importorskip("triton", reason="torch came without Triton, which GPUs only need")

import triton
import triton.language as tl
from torch.utils.checkpoint import checkpoint

import zoo
from tests.blocks import Wired
from tests.fake_gpu import Gpu, let_dynamo_see_triton
from tests.test_kernel import _scaled
from zoo.engine import direct
from zoo.engine.autograd import differentiable_once, trace_halves
from zoo.engine.kernel import Kernel
from zoo.ops.images import group_norm
from zoo.ops.triton.tiles import product


def launch(x: Tensor, scale: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _scaled[(x.shape[0],)](x, scale, out, x.shape[0], x.shape[1], COLUMNS=x.shape[1], num_warps=2)
    return out


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return launch(x, scale)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return launch(grad.contiguous(), scale), (grad.t() @ x).diagonal()


class Block(nn.Module):
    """Two products, what a kernel computes between them, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        learns = torch.is_grad_enabled() and hidden.requires_grad
        hidden = Scale.apply(hidden, self.scale) if learns else launch(hidden, self.scale)
        return x + self.down(hidden)


@pytest.fixture
def launches(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """Grids and options of launches, each of which torch computes in the kernel's place."""
    seen: list[tuple[Any, dict[str, Any]]] = []

    def compute(_: Kernel, grid: Any, x: Tensor, scale: Tensor, out: Tensor, *sizes: int, **options: Any) -> None:
        assert sizes == tuple(x.shape)
        seen.append((grid, options))
        with torch.no_grad():
            out.copy_(x * scale)

    monkeypatch.setattr(Kernel, "launch", compute)
    let_dynamo_see_triton(monkeypatch)
    return seen


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Graphs that Inductor was given; they are run as they are."""
    given: list[fx.GraphModule] = []

    def compile_fx(_: Any, graph: fx.GraphModule, inputs: Any, **__: Any) -> Callable[..., Any]:
        given.append(graph)
        return graph.forward

    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", compile_fx)
    return given


def compiled(function: Callable[..., Any], backend: Any = None) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend or direct.DirectOrInductor(None, False, True), fullgraph=True)


def test_a_block_of_products_and_kernels_runs_as_it_is(launches: list[Any], inductor: list[Any]) -> None:
    block, x = Block(), torch.randn(3, 8)
    with torch.no_grad():
        expected = block(x)
        step = compiled(block)
        assert torch.equal(step(x), expected) and torch.equal(step(x), expected)
    assert not inductor
    options = {"COLUMNS": 16, "num_warps": 2}
    traced = (3, 1, 1), {**options, "num_stages": launches[1][1]["num_stages"]}
    assert launches == [((3,), options), traced, traced]  # eager code leaves the grid as it was written


def test_a_launch_knows_the_tensors_of_the_graph_and_one_that_it_fills_is_allocated_as_it_is_viewed(
    launches, monkeypatch
):
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", torch.empty_strided, raising=False)
    sources, kernels = [], []
    monkeypatch.setattr(direct, "_program", lambda source, _: sources.append(source))

    def images(x: Tensor, scale: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1).reshape(-1, 16)
        return launch(rows, scale).view(3, 2, 2, 16).permute(0, 3, 1, 2)

    def compile_graph(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        direct._straight_line(graph, torch.device("cpu"), kernels)
        return lambda x, scale: (x * scale.view(-1, 1, 1),)

    x = torch.randn(3, 16, 2, 2).to(memory_format=torch.channels_last)
    with torch.no_grad():
        compiled(images, compile_graph)(x, torch.ones(16))
    assert [described for _, described, _ in kernels] == [[torch.float32] * 3 + [12, 16]]
    assert "((3, 16, 2, 2), (64, 1, 32, 16), torch.float32)" in sources[0] and "_reinterpret_tensor" not in sources[0]


@pytest.mark.parametrize("learns", [False, True])
def test_a_convolution_in_half_precision_is_cudnns(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def cudnn(x: Tensor, weight: Tensor, padding: Any, stride: Any, dilation: Any, groups: int, *_: bool) -> Tensor:
        calls.append((padding, stride, dilation))
        return F.conv2d(x, weight, None, stride, padding, dilation, groups)

    monkeypatch.setattr(torch, "cudnn_convolution", cudnn)
    monkeypatch.setattr(direct, "_suits_cudnn", lambda images: images.dtype == torch.bfloat16)

    def two(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, weight, None, (2, 1), (1, 2), 3), weight, padding="same")

    given = [torch.randn(size, dtype=torch.bfloat16, requires_grad=learns) for size in ((2, 4, 16, 16), (4, 4, 3, 3))]
    torch.testing.assert_close(compiled(two)(*given), two(*given))
    assert [[*map(tuple, each)] for each in calls] == [[(1, 2), (2, 1), (3, 3)]] + [[(1, 1)] * 3] * learns
    monkeypatch.setattr(torch._C, "_get_cudnn_enabled", lambda: False)
    torch.testing.assert_close(compiled(two)(*given), two(*given))
    assert len(calls) == 1 + learns


def calls_of(function: Callable[..., Any], *args: Any) -> list[str]:
    """Compile a function to straight-line code, compare its result, and name what the code calls."""
    names: list[str] = []

    def compile_graph(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        run = direct._straight_line(graph, None, [])
        names.extend(str(getattr(each.target, "__name__", each.target)) for each in graph.graph.nodes)
        return run

    found, expected = compiled(function, compile_graph)(*args), function(*args)
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    assert found.requires_grad == expected.requires_grad and found._is_view() == expected._is_view()
    return [name for name in names if not name.startswith(("l_", "L_", "output"))]


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": (1, 0)}, {"padding": "same", "dilation": 2}, {"groups": 2, "bias": False}],
    ids=["plain", "strided", "same", "grouped"],
)
def test_a_convolution_goes_to_the_call_behind_conv2d(options: dict[str, Any], inductor: list[Any]) -> None:
    conv = nn.Conv2d(4, 6, 3, **options)
    seen: list[fx.GraphModule] = []

    def compile_graph(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.append(graph)
        return direct.run_directly(graph)

    step = compiled(conv, compile_graph)
    x = torch.randn(2, 4, 8, 7, requires_grad=True)
    assert torch.equal(step(x), conv(x))
    found, expected = (torch.autograd.grad(f(x).square().sum(), [x, *conv.parameters()]) for f in (step, conv))
    assert all(map(torch.equal, found, expected))
    seen.clear()
    with torch.no_grad():
        assert torch.equal(step(x), conv(x))
    targets = [node.target for graph in seen for node in graph.graph.nodes]
    assert (torch.conv2d in targets) == (options.get("padding") == "same")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(step(x), conv(x)) and step(x).dtype == torch.bfloat16
    assert torch.equal(step(x[0]), conv(x[0]))


class Powers(Wired):
    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), (-1) ** n


def test_a_negative_base_is_negative_before_its_power() -> None:
    model, x, n = zoo.compile_regions(Powers(), regions=[Powers]), torch.randn(2, 4), torch.arange(6)
    with torch.no_grad():
        assert model(x, n)[1].tolist() == [1, -1, 1, -1, 1, -1]


def test_a_chain_of_views_is_one() -> None:
    def pixels(image: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = image.permute(0, 2, 3, 1).contiguous().view(-1, 8)
        first, second = F.linear(rows, weight.flatten(1), bias).view(2, 6, 2, 4).unbind(2)
        return first.transpose(1, 2).contiguous() @ F.linear(second.reshape(-1, 4), weight[:4, :4, 0, 0]).view(2, 6, 4)

    image = torch.randn(2, 8, 2, 3).to(memory_format=torch.channels_last)
    weight, bias = nn.Parameter(torch.randn(8, 8, 1, 1)), torch.randn(8)
    with torch.no_grad():
        calls = calls_of(pixels, image, weight, bias)
    view = "_reinterpret_tensor"
    assert calls == [view, view, "addmm", view, "contiguous", view, view, "mm", view, "matmul"]


def test_an_output_that_is_a_view_of_an_input_stays_one() -> None:
    x = torch.randn(4, 6)
    assert calls_of(lambda x: x.view(2, 2, 6).transpose(0, 1), x) == ["view", "transpose"]


def test_the_gradients_of_joined_weights_are_one_view_each() -> None:
    lines: list[tuple[direct.Run, list[str]]] = []

    def compile_graph(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        backward = trace_halves(graph).backward
        run = direct._straight_line(backward, None, [], boxed=True)
        called = (node.target for node in backward.graph.nodes if node.op == "call_function")
        lines.append((run, [target.__name__ for target in called]))
        return graph

    x, weights = torch.randn(3, 5), [torch.randn(4, 5, requires_grad=True) for _ in range(2)]
    compiled(lambda x, *weights: x @ torch.cat(weights).t(), compile_graph)(x, *weights)
    ((backward, calls),) = lines
    assert calls[-2:] == ["_reinterpret_tensor"] * 2 and "mm.default" in calls and "slice.Tensor" not in calls
    grad = torch.randn(3, 8)
    found = [each for each in backward([grad, x]) if each is not None]
    torch.testing.assert_close(torch.cat(found), grad.t() @ x)


def test_a_kernel_that_reads_tiles_is_compiled_before_its_launch(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_before: list[list[str]] = []

    def compile_graph(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        run = direct.run_directly(graph)
        compiled_before.append(gpu.compiled.copy())
        return run

    let_dynamo_see_triton(monkeypatch)
    x, weight, bias = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((256, 64), (512, 64), (512,)))
    compiled(product, compile_graph)(x, weight, bias[:512], "gelu")
    assert compiled_before == [["_product"]] == [gpu.compiled]
    assert gpu.launches == ["_product"]


def test_gradients_are_those_of_eager_code(launches: list[Any], inductor: list[Any]) -> None:
    block, x = Block(), torch.randn(3, 8, requires_grad=True)
    wanted = [x, *block.parameters()]
    expected = torch.autograd.grad(block(x).square().sum(), wanted)
    out = compiled(block)(x)
    found = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
    assert not inductor and len(launches) == 4
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(found[0].sum(), block.scale)


def test_a_backward_runs_twice_if_the_graph_is_retained(launches: list[Any], inductor: list[Any]) -> None:
    block, x = Block(), torch.randn(3, 8, requires_grad=True)
    loss = compiled(block)(x).square().sum()
    first, second = (torch.autograd.grad(loss, block.up.weight, retain_graph=again)[0] for again in (True, False))
    assert torch.equal(first, second) and not inductor
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, block.up.weight)


def test_a_backward_frees_what_it_has_read() -> None:
    alive: list[bool] = []

    def look(x: Tensor) -> Tensor:
        alive.append(first() is not None)
        return x

    graph = fx.Graph()
    x, y = map(graph.placeholder, "xy")
    graph.output(graph.call_function(look, (graph.call_function(torch.mm, (x, y)),)))
    box = [torch.ones(4, 4), torch.ones(4, 4)]
    first = weakref.ref(box[0])
    direct._straight_line(fx.GraphModule({}, graph), None, [], boxed=True)(box)
    assert alive == [False] and box == []


@pytest.mark.parametrize("kind", ["writes", "views an input", "twice"])
def test_what_one_function_cannot_stand_for_goes_to_inductor(kind, launches, inductor):
    def step(x: Tensor, scale: Tensor) -> Any:
        if kind == "writes":
            x.mul_(2)
        out = Scale.apply(x, scale)
        return {"writes": out, "views an input": (out, x.view(-1)), "twice": (out, out.view(-1))}[kind]

    scale, leaf = torch.rand(16, requires_grad=True), torch.randn(3, 16, requires_grad=True)
    compiled(step)(leaf.clone(), scale)
    assert len(inductor) == 1


def test_a_trace_saves_nothing_for_a_checkpoint_around_it(launches: list[Any], inductor: list[Any]) -> None:
    block, x = Block(), torch.randn(3, 8, requires_grad=True)
    expected = torch.autograd.grad(block(x).square().sum(), [*block.parameters()])
    out = checkpoint(compiled(block), x, use_reentrant=False)
    found = torch.autograd.grad(out.square().sum(), [*block.parameters()])
    assert all(map(torch.equal, found, expected)) and not inductor


def test_casts_of_autocast_are_in_the_trace(launches: list[Any], inductor: list[Any]) -> None:
    block, x = Block(), torch.randn(3, 8, requires_grad=True)
    wanted = [x, *block.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        step, expected = compiled(block), block(x)
        found = step(x)
    assert torch.equal(found, expected) and found.dtype == expected.dtype and not inductor
    for ours, eager in zip(*(torch.autograd.grad(each.sum(), wanted) for each in (found, expected)), strict=True):
        assert torch.equal(ours, eager) and ours.dtype == eager.dtype


def test_a_write_to_what_is_saved_is_noticed(launches: list[Any], inductor: list[Any]) -> None:
    x, scale = torch.randn(3, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    out = compiled(lambda x, scale: Scale.apply(Scale.apply(x, scale), scale))(x, scale)
    with torch.no_grad():
        scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("learns", [False, True])
def test_symbolic_sizes_reach_the_grid_and_a_backward(learns: bool, launches: list[Any], inductor: list[Any]) -> None:
    backend, operator = direct.DirectOrInductor(None, True, True), Scale.apply if learns else launch
    step = torch.compile(lambda x, scale: operator(x, scale), backend=backend, fullgraph=True, dynamic=True)
    scale = torch.rand(16)
    for rows in (3, 5):
        x = torch.randn(rows, 16, requires_grad=learns)
        out = step(x, scale)
        assert torch.equal(out, x * scale) and launches[-1][0][0] == rows
        if learns:
            assert torch.equal(torch.autograd.grad(out.sum(), x)[0], scale.expand(rows, 16))
    assert not inductor


def test_a_gradient_is_laid_out_as_the_backward_was_traced(launches: list[Any], inductor: list[Any]) -> None:
    x, scale = torch.randn(3, 16, requires_grad=True), torch.rand(16)
    out = compiled(lambda x, scale: Scale.apply(x, scale))(x, scale)
    grad = torch.randn(16, 3).t()
    (found,) = torch.autograd.grad(out, x, grad)
    assert found.is_contiguous() and torch.equal(found, grad * scale)


class Halves(torch.autograd.Function):
    """Two outputs, of which the second is read by nobody."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(scale)
        return launch(x, scale), launch(x, scale)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return launch(grad + other, scale), None


def test_an_output_without_a_gradient_has_zeros(launches: list[Any], inductor: list[Any]) -> None:
    x, scale = torch.randn(3, 16, requires_grad=True), torch.rand(16)
    first, _ = compiled(lambda x, scale: Halves.apply(x, scale))(x, scale)
    grad = torch.randn(3, 16)
    (found,) = torch.autograd.grad(first, x, grad)
    torch.testing.assert_close(found, grad * scale)
    assert not inductor


def fused(x: Tensor, scale: Tensor) -> Tensor:
    return F.relu(launch(x, scale) + 1)


@triton.jit
def _foreign(x, out, columns, COLUMNS: tl.constexpr):
    place = tl.program_id(0) * columns + tl.arange(0, COLUMNS)
    tl.store(out + place, tl.load(x + place))


def foreign(x: Tensor, scale: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _foreign[(len(x),)](x, out, x.shape[1], COLUMNS=16)
    return out @ scale


def several(x: Tensor, scale: Tensor) -> Tensor:
    return F.softplus(F.layer_norm(x, (16,)) @ scale)


@pytest.mark.parametrize("function", [fused, foreign, several, lambda x, scale: F.cross_entropy(x, x.softmax(1))])
def test_inductor_compiles_every_other_graph(function, launches, inductor):
    compiled(function)(torch.randn(3, 16), torch.rand(16))
    assert len(inductor) == 1
    compiled(lambda x, weight: x.mean(1) @ weight)(torch.randn(3, 4, 16), torch.rand(16))  # one operation is not
    assert len(inductor) == 1
    with torch.no_grad():
        to_try_kernels = direct.DirectOrInductor({"max_autotune_gemm": True}, False, True)
        compiled(Block(), to_try_kernels)(torch.randn(3, 8))
    assert len(inductor) == 2


def test_blocks_share_their_graph() -> None:
    first, second = (direct.DirectOrInductor({"size_asserts": False}, False, True) for _ in range(2))
    assert first == second and first != direct.DirectOrInductor(None, False, True)
    assert first != direct.DirectOrInductor({"size_asserts": False}, False, False)


def test_the_gradient_of_a_shifted_norm_is_not_copied_to_another_layout(launches: list[Any]) -> None:
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return lambda *_: (torch.zeros(2, 8, 4, 4),)

    x, shift = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last), torch.randn(2, 8)
    learn = [each.requires_grad_() for each in (x, shift, torch.ones(8), torch.zeros(8))]
    torch.compile(lambda *given: group_norm(*given, 2, 1e-5, True), backend=keep, fullgraph=True)(*learn)
    parts = [part for part in graphs[0].modules() if isinstance(part, fx.GraphModule)]
    assert len(parts) == 3  # the graph, the norm and its gradient
    asked = [node for part in parts for node in part.graph.find_nodes(op="call_method", target="contiguous")]
    assert asked and all(node.kwargs == {"memory_format": torch.channels_last} for node in asked)
