"""The call of a compiled region: by its kept code where that is right, by Dynamo where anything changed."""

import copy
import functools
import gc
import re
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zoo
from tests.blocks import Wired, graphs_of
from tests.noted import noted
from zoo.engine.call import IdleWatch, RegionCall, region_call


class Inner(Wired):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class Louder(Inner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = Inner(width, scale=2.0)
        self.norm = nn.BatchNorm1d(width)
        self.flag = True
        self.scales = (1.0, 1.0)

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None, *, factor: float = 1.0) -> torch.Tensor:
        first, second = self.scales
        y = self.norm(self.inner(x)) * factor * first * second
        if self.flag:
            y = y + x
        return y if add is None else y + add


@pytest.fixture
def by_dynamo(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls that went through Dynamo."""
    return noted(monkeypatch, RegionCall, "_by_dynamo")


def blocks(*widths: int, backend: Any = "eager") -> nn.ModuleList:
    model = nn.ModuleList(Block(width) for width in widths or (8,)).eval()
    zoo.compile_regions(model, regions=[Block], backend=backend, dynamic=False)
    return model


def test_later_calls_are_direct_until_a_reset(by_dynamo: list[Any]) -> None:
    model, x = blocks(8, 8), torch.randn(3, 8)
    with torch.no_grad():
        for block in model:
            expected = block._call_impl(x, x, factor=0.5)
            for _ in range(3):
                torch.testing.assert_close(block(x, x, factor=0.5), expected)
                torch.testing.assert_close(block(x, add=x, factor=0.5), expected)
        assert len(by_dynamo) == 4  # each block's first call in each of two forms
        torch.compiler.reset()
        for _ in range(2):
            torch.testing.assert_close(block(x, x, factor=0.5), expected)
    assert len(by_dynamo) == 5


def _narrow(block: Any) -> None:
    block.inner, block.norm = Inner(4, scale=2.0), nn.BatchNorm1d(4).eval()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "flag": lambda block: setattr(block, "flag", False),
    "float inside": lambda block: setattr(block.inner, "scale", 3.0),
    "width": _narrow,
    "dtype": lambda block: block.double(),
    "replaced submodule": lambda block: setattr(block, "inner", nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
    "hook": lambda block: block.register_forward_hook(lambda module, args, output: output + 1),
    "pre-hook": lambda block: block.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "class of a submodule": lambda block: setattr(block.inner, "__class__", Louder),
    "tuple": lambda block: setattr(block, "scales", (1.0, 2.0)),
    "list for a tuple": lambda block: setattr(block, "scales", [1.0, 2.0]),
    "hook inside that takes names": lambda block: block.inner.register_forward_hook(
        lambda module, args, named, output: output + 1, with_kwargs=True
    ),
    "hook inside": lambda block: block.inner.register_forward_hook(lambda module, args, output: output + 1),
    "hook of torch's module": lambda block: block.norm.register_forward_hook(lambda module, args, output: output + 1),
    "training": lambda block: block.train(),
    "new values": lambda block: nn.init.ones_(block.inner.linear.weight),
    "assigned parameter": lambda block: setattr(block.inner.linear, "bias", nn.Parameter(torch.ones(8))),
    "no bias": lambda block: setattr(block.inner.linear, "bias", None),
    "frozen": lambda block: block.requires_grad_(False),
    "forward of its own": lambda block: setattr(block, "forward", functools.partial(Block.forward, block, factor=3.0)),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str, grad: bool, by_dynamo: list[Any]) -> None:
    (block,), x = blocks(), torch.randn(3, 8)
    with torch.set_grad_enabled(grad):
        block(x)
        block(x)
        assert len(by_dynamo) == 1
        CHANGES[name](block)
        x = {"dtype": x.double(), "width": x[:, :4].contiguous()}.get(name, x)
        expected = copy.deepcopy(block)._call_impl(x)
        output = block(x)
    torch.testing.assert_close(output, expected)
    assert output.requires_grad == expected.requires_grad and output.dtype == expected.dtype


def test_layers_that_are_unfrozen_after_some_steps_learn() -> None:
    model = blocks(8, 8, backend="aot_eager")
    for block in model:
        block.inner.requires_grad_(False)
    x = torch.randn(3, 8)
    for _ in range(3):  # guards look closer in the first calls than later
        model[1](model[0](x)).sum().backward()
    model.zero_grad()
    model.requires_grad_(True)
    model[1](model[0](x)).sum().backward()
    assert [name for name, param in model.named_parameters() if param.grad is None] == []


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.enable_grad(), lambda: torch.inference_mode(), lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.compiler.set_stance("force_eager"),
        lambda: torch.utils.flop_counter.FlopCounterMode(display=False),
    ],
    ids=["grad", "inference", "autocast", "stance", "dispatch mode"],
)  # fmt: skip
def test_a_mode_is_noticed(mode: Callable[[], Any], by_dynamo: list[Any]) -> None:
    (block,), x = blocks(backend="aot_eager"), torch.randn(3, 8)
    with torch.no_grad():
        for context in (nullcontext, mode, nullcontext, mode):
            before = len(by_dynamo)
            with context():
                output, expected = block(x), block._call_impl(x)
            torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)
            ours, eager = ((each.dtype, each.requires_grad, each.is_inference()) for each in (output, expected))
            assert ours == eager
            if context is nullcontext:
                assert len(by_dynamo) == max(before, 1)  # compiled in the first call alone


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(5, 8), torch.randn(8, 3).t(), torch.randn(3, 8, requires_grad=True),
        torch.randn(3, 8, dtype=torch.float64), nn.Parameter(torch.randn(3, 8)),
    ],
    ids=["shape", "strides", "requires grad", "dtype", "parameter"],
)  # fmt: skip
def test_another_kind_of_input_is_noticed(x: torch.Tensor, by_dynamo: list[Any]) -> None:
    (block,) = blocks()
    block(torch.randn(3, 8))
    if x.dtype == torch.float64:
        with pytest.raises(RuntimeError):
            block(x)
        return
    output = block(x)
    assert len(by_dynamo) == 2
    torch.testing.assert_close(output, block._call_impl(x))
    assert output.requires_grad


def test_threads_that_run_hooks_at_one_time_run_their_own() -> None:
    model, x = blocks(8), torch.randn(3, 8)
    expected = model[0](x)
    both = threading.Barrier(2)

    def wait(*_: Any) -> None:
        both.wait(20)

    model[0].register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            for found in pool.map(model[0], [x, x]):
                torch.testing.assert_close(found, expected)
    assert "forward" not in vars(model[0])


def test_wrong_arguments_fail_as_in_eager() -> None:
    (block,), x = blocks(), torch.randn(3, 8)
    block(x)
    for args, kwargs in (((), {}), ((x, x, x), {}), ((x,), {"unknown": 1}), ((x,), {"x": x})):
        with pytest.raises(TypeError):
            block(*args, **kwargs)


class Broken(Wired):
    def forward(self, x: torch.Tensor, cache: dict[int, torch.Tensor]) -> torch.Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        cache[self.index] = x + self.index
        return x


def test_calls_of_a_region_that_may_break_still_learn_sizes_once_nothing_compiles() -> None:
    model = nn.ModuleList(Broken(index=index) for index in range(4)).eval()
    zoo.compile_regions(model, backend="eager", fullgraph=False)

    def run(rows: int) -> None:
        for index, block in enumerate(model):
            cache: dict[int, torch.Tensor] = {}
            x = torch.randn(rows, 4)
            torch.testing.assert_close(block(x, cache), block.linear(x))
            torch.testing.assert_close(cache[index], block.linear(x) + index)

    with torch.no_grad():
        for _ in range(3):
            run(3)
        with pytest.warns(zoo.RegionWarning, match="became symbolic"):
            run(5)
        graphs = sum(graphs_of(model).values())
        run(7)
        assert sum(graphs_of(model).values()) == graphs


def doubled(forward: Any) -> Any:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return 2 * forward(*args, **kwargs)

    return run


class Decorated(Wired):
    @doubled
    def forward(self, x: torch.Tensor, *more: torch.Tensor, bias: float = 0.0, **named: torch.Tensor) -> torch.Tensor:
        return self.linear(x) ** self.power + sum(more) + bias + sum(named.values())


def test_a_decorated_forward_with_any_arguments(by_dynamo: list[Any]) -> None:
    model = nn.ModuleList(Decorated(power=1) for _ in range(2)).eval()
    zoo.compile_regions(model, regions=[Decorated], backend="eager", dynamic=False)
    block, x = model[0], torch.randn(2, 4)
    with torch.no_grad():
        for args, kwargs in (((x, x, x), {}), ((x,), {"bias": 1.0, "y": x})):
            for _ in range(3):
                torch.testing.assert_close(block(*args, **kwargs), block._call_impl(*args, **kwargs))
        assert len(by_dynamo) == 2
        block.power = 2
        torch.testing.assert_close(block(x), block._call_impl(x))
        torch.testing.assert_close(block(x, bias=2.0), block._call_impl(x, bias=2.0))


def test_a_closure_is_read_at_each_call(by_dynamo: list[Any]) -> None:
    factor = 2.0

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor

    model = nn.ModuleList([Scaled(), Scaled()])
    zoo.compile_regions(model, regions=[Scaled], backend="eager", dynamic=False)
    x = torch.randn(3)
    for value in (2.0, 2.0, 3.0, 3.0):
        factor = value
        torch.testing.assert_close(model[0](x), x * value)
    assert len(by_dynamo) == 2


def test_entries_of_many_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch, by_dynamo: list[Any]) -> None:
    monkeypatch.setattr("zoo.engine.call._MOST_SHAPES", 4)
    (block,) = blocks()
    with torch.no_grad():
        for rows in [*range(2, 10), 9, 2]:
            block(torch.randn(rows, 8))
    assert len(block._compiled_call_impl.entries) == 4 and len(by_dynamo) == 9


@pytest.mark.parametrize(("idle", "warned"), [(0.8, True), (0.7, False)])
def test_a_gpu_that_waits_for_the_host_is_warned_of_once(idle, warned, monkeypatch):
    model = blocks(8, 8)
    watch = IdleWatch(model, list(model))
    # Whether the stream has run out of work, look by look.
    looks = iter([place < idle * watch.SAMPLES for place in range(watch.SAMPLES)])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=looks.__next__))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always", zoo.RegionWarning)
        for _ in range(watch.SAMPLES):
            for block in model:
                block(torch.randn(3, 8))
    messages = [str(each.message) for each in caught if issubclass(each.category, zoo.RegionWarning)]
    assert [("model = zoo.cuda_graph(model)" in each) for each in messages] == [True] * warned
    assert list(looks) == []


class Asking(nn.Module):
    """Asks its input for an attribute that it lacks, of which torch 2.11 makes a guard."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if hasattr(x, "__tensor_flatten__") else x * 2


def test_a_compilation_keeps_no_input() -> None:
    model, x = nn.Sequential(Asking()), torch.randn(3, requires_grad=True) * 1
    zoo.compile_regions(model, regions=[Asking], backend="aot_eager")
    model(x)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


class WithArray(Wired):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.from_numpy(self.array)


@torch.no_grad()
def test_arrays_that_blocks_make_tensors_of_share_a_graph() -> None:
    model, x = nn.Sequential(*(WithArray(array=np.full(4, n, np.float32)) for n in range(1, 4))), torch.randn(2, 4)
    zoo.compile_regions(model, backend="aot_eager")
    model(x)
    model[0].array[:] = 7
    model[1].array = np.full(4, 5, dtype=np.float32)
    found = model(x)
    assert graphs_of(model) == {"WithArray": 1}
    torch.testing.assert_close(found, zoo.uncompile(model)(x))


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_a_region_compiles(enabled: bool) -> None:
    seen: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(gc.isenabled())
        return graph.forward

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    zoo.compile_regions(model, regions=[nn.Linear], backend=backend)
    try:
        gc.enable() if enabled else gc.disable()
        model(torch.randn(1, 2))
        assert seen == [False] and gc.isenabled() == enabled
    finally:
        gc.enable()


def test_functions_of_torch_and_the_zoo_have_no_guards() -> None:
    model = zoo.create("resnet-debug").eval()
    zoo.compile_regions(model, backend="eager")
    with torch.no_grad():
        model(**zoo.example_inputs(model))
    calls = [call for call in map(region_call, model.modules()) if call is not None]
    guards = [str(guard) for call in calls for entries in call.entries.values() for guard, *_ in entries]
    assert guards and not any(re.search(r"source=G\['\w+'\][\w.]*\.__code__", each) for each in guards)
