"""The outer CUDA graph. Everything but capture itself is shown on the CPU too, by the same copying and overwriting."""

import contextlib
import gc
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.blocks import Dropping, Stack
from zoo.engine.graphed_step import CaptureError


@pytest.mark.parametrize("compiled", ["eager", "regional", "whole"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_replay_computes_on_new_inputs(device: str, compiled: str, context: Any) -> None:
    model: Any = Stack().to(device).eval()
    backend = "aot_eager" if device == "cpu" else "inductor"
    if compiled == "regional":
        zoo.compile_regions(model, backend=backend)
    elif compiled == "whole":
        model = torch.compile(model, backend=backend)
    first, second = torch.randn(2, 4, device=device), torch.randn(2, 4, device=device)
    with context():
        step = zoo.cuda_graph(model, (first,))
        expected = [model(first), model(second)]
        torch.testing.assert_close([step(first), step(second)], expected)
    torch.testing.assert_close([step(first), step(second)], expected)


def test_outputs_are_overwritten_where_no_copies_are_wanted_and_inputs_are_copied(device: str) -> None:
    model, x, y = Stack().to(device).eval(), torch.randn(2, 4, device=device), torch.randn(2, 4, device=device)
    with torch.no_grad():
        static = zoo.cuda_graph(model, (x,), clone_outputs=False)
        overwritten = static(x)
        assert static(y).data_ptr() == overwritten.data_ptr()
        torch.testing.assert_close(overwritten, model(y))
    x = torch.ones(3, device=device)
    with pytest.warns(zoo.RegionWarning, match=r"writes to input 0, its replays to a copy: name it in static="):
        step = zoo.cuda_graph(lambda x: x.add_(1), (x,))
    assert torch.equal(x, torch.ones(3, device=device)), "warm-up must not write to the example"
    torch.testing.assert_close(step(x), x + 1)
    assert torch.equal(x, torch.ones(3, device=device))


def test_structures_of_inputs_and_outputs(device: str) -> None:
    def fn(pair: tuple[Tensor, Tensor], *, scale: float, more: dict[str, Tensor]) -> dict[str, Any]:
        return {"sum": [pair[0] + pair[1] * scale, more["x"]], "scale": scale}

    make = lambda: torch.randn(3, device=device)  # noqa: E731
    step = zoo.cuda_graph(fn, ((make(), make()),), {"scale": 2.0, "more": {"x": make()}})
    a, b, x = make(), make(), make()
    out = step((a, b), scale=2.0, more={"x": x})
    torch.testing.assert_close(out, {"sum": [a + 2 * b, x], "scale": 2.0})
    out = step((a, b), more={"x": x}, scale=2.0)
    torch.testing.assert_close(out["sum"][1], x)
    with pytest.raises(ValueError, match=r"called with \[0\]\[0\], .*, but captured with"):
        step((a, b, x), scale=2.0, more={"x": x})
    with pytest.raises(ValueError, match=r"3\.0, but 2\.0 was captured as a constant"):
        step((a, b), scale=3.0, more={"x": x})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda d: torch.randn(3, 4, device=d), r"float32\[3, 4\] on .*, but float32\[2, 4\]"),
        (lambda d: torch.randn(2, 4, device=d, dtype=torch.float64), r"float64\[2, 4\] on .*, but float32\[2, 4\]"),
        (lambda d: torch.randn(2, 4, device="meta"), r"float32\[2, 4\] on meta, but float32\[2, 4\] on"),
        (lambda d: 3, "input 0 is 3, but float32"),
    ],
)
def test_another_shape_dtype_or_device_names_both(device: str, wrong: Any, words: str) -> None:
    with torch.no_grad():
        step = zoo.cuda_graph(Stack().to(device), (torch.randn(2, 4, device=device),))
    with pytest.raises(ValueError, match=words):
        step(wrong(device))


def test_a_step_that_shows_no_tensor_is_refused_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = [torch.ones(3)]
    torch.testing.assert_close(zoo.cuda_graph(lambda: hidden[0] + 1)(), torch.full((3,), 2.0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # It might run there, and would silently be no CUDA graph.
    with pytest.raises(ValueError, match="nothing says which device it runs on; pass"):
        zoo.cuda_graph(lambda: hidden[0] + 1)
    # What cannot be copied in at all is said first: more arguments would not mend it.
    with pytest.raises(TypeError, match="is a UserDict, which cannot be copied in; give it as a dict"):
        zoo.cuda_graph(lambda batch: batch["x"], (UserDict(x=torch.ones(2)),))  # as transformers' BatchEncoding is


def test_buckets_replay_their_own_shape(device: str) -> None:
    model = Stack().to(device).eval()
    shapes = [(n, 4) for n in (2, 8, 4)]
    calls = [((torch.randn(shape, device=device),), {}) for shape in shapes]
    with torch.no_grad():
        step = zoo.cuda_graph(model, *calls[0], buckets=calls[1:])
        kept = []
        for shape in shapes * 2:
            x = torch.randn(shape, device=device)
            kept.append((step(x), model(x)))
        for got, expected in kept:
            torch.testing.assert_close(got, expected)
        assert len(step.shapes) == 3
        with pytest.raises(ValueError, match=r"no bucket for float32\[3, 4\].*captured: float32\[8, 4\]"):
            step(torch.randn(3, 4, device=device))
        with pytest.raises(ValueError, match="two buckets have the same shapes"):
            zoo.cuda_graph(model, *calls[0], buckets=[calls[0]])
        with pytest.raises(ValueError, match="bucket 1 is called with another structure"):
            zoo.cuda_graph(model, *calls[0], buckets=[((), {"x": calls[0][0][0]})])


def test_static_arguments_are_not_copied(device: str) -> None:
    cache = torch.zeros(3, device=device)

    def fn(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(x)
        return cache * 1

    step = zoo.cuda_graph(fn, (torch.ones(3, device=device), cache), static=(1,))
    cache.zero_()
    x = torch.ones(3, device=device)
    for calls in (1.0, 2.0):
        torch.testing.assert_close(step(x, cache), torch.full_like(cache, calls))
    assert cache[0] == 2
    with pytest.raises(ValueError, match="static argument 1 is another object"):
        step(x, cache.clone())
    with pytest.raises(ValueError, match="static argument 1 is missing"):
        step(x, cache=cache)
    named = zoo.cuda_graph(fn, (x,), {"cache": cache}, static=("cache",))
    named(x, cache=cache)
    for wrong in (2, -1, "chache"):
        with pytest.raises(ValueError, match="static names"):
            zoo.cuda_graph(fn, (x, cache), static=(wrong,))


def test_what_cannot_be_copied_in_is_refused(device: str) -> None:
    class Opaque:
        def __init__(self) -> None:
            self.x = torch.ones(2, device=device)

    graph = Opaque()
    with pytest.raises(TypeError, match="Opaque, which cannot be copied in; name it in static="):
        zoo.cuda_graph(lambda g: g.x + 1, (graph,))
    torch.testing.assert_close(zoo.cuda_graph(lambda g: g.x + 1, (graph,), static=(0,))(graph), graph.x + 1)
    with pytest.raises(ValueError, match="requires grad"):
        zoo.cuda_graph(torch.relu, (torch.ones(2, device=device, requires_grad=True),))
    step = zoo.cuda_graph(torch.relu, (torch.ones(2, device=device),))
    # It would come out without a history, and its gradient would be missing without a word.
    with pytest.raises(ValueError, match=r"input float32\[2\] on .* requires grad; run backward inside the step"):
        step(torch.ones(2, device=device, requires_grad=True))
    with pytest.raises(TypeError, match="sparse_coo"):
        step(torch.ones(2, device=device).to_sparse())
    with pytest.raises(TypeError, match="sparse_coo"):
        zoo.cuda_graph(lambda x: x, (torch.eye(2, device=device).to_sparse(),))
    with pytest.raises(ValueError, match="warmup is 1"):
        zoo.cuda_graph(torch.relu, (torch.ones(2),), warmup=1)


def _moved(model: nn.Module) -> None:
    before = [p.detach() for p in model.parameters()]  # alive meanwhile, so that no weight comes back to its address
    model.double().float()
    assert before


def _assigned(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def _replaced(model: nn.Module) -> None:
    model.blocks[1].linear.weight = nn.Parameter(model.blocks[1].linear.weight.clone())


MODELS: dict[str, nn.Module] = {}


def _run_all(x: Tensor) -> list[Tensor]:
    return list((lambda: [MODELS["one"](x)])())


REACHES: dict[str, Callable[[nn.Module], Callable[[Tensor], Any]]] = {
    "module": lambda model: model,
    "closure": lambda model: lambda x: model(x),
    "method": lambda model: model.forward,
    "default": lambda model: lambda x, inner=model: inner(x),
    "keyword default": lambda model: lambda x, *, models=frozenset([model]): [inner(x) for inner in models],
    "global of an inner function": lambda model: MODELS.update(one=model) or _run_all,
}


@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
@pytest.mark.parametrize("change", [_moved, _assigned, _replaced])
def test_weights_that_moved_are_an_error(device: str, change: Any, reach: Any) -> None:
    model, x = Stack().to(device).eval(), torch.randn(2, 4, device=device)
    with torch.no_grad():
        step = zoo.cuda_graph(reach(model), (x,))
        change(model)
        with pytest.raises(RuntimeError, match=r"(stem|blocks\.1\.linear)\.weight was moved or replaced"):
            step(x)


def test_a_step_is_not_reentrant() -> None:
    calls: list[Any] = []

    def fn(x: Tensor) -> Tensor:
        if calls:
            calls[0](x)
        return x + 1

    step = zoo.cuda_graph(fn, (torch.ones(2),))
    calls.append(step)
    with pytest.raises(RuntimeError, match="not reentrant"):
        step(torch.ones(2))
    calls.clear()
    step(torch.ones(2))  # and it is usable again


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_autocast_bakes_no_cast_in(device: str, place: str) -> None:
    model, x = Stack().to(device), torch.randn(2, 4, device=device)
    autocast = torch.autocast(device, torch.bfloat16)

    def fn(x: Tensor) -> Tensor:
        with autocast if place == "inside" else contextlib.nullcontext():
            return model(x)

    # Casts are cached where gradients are on.
    with autocast if place == "outside" else contextlib.nullcontext():
        step = zoo.cuda_graph(fn, (x,))
    with torch.no_grad():
        model.stem.weight.mul_(2)
    with autocast:
        torch.testing.assert_close(step(x), model(x))


def test_a_replay_runs_in_the_mode_of_its_capture_and_draws_as_if_nothing_had_been_captured(device: str) -> None:
    model, x = Stack().to(device), torch.randn(2, 4, device=device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        step = zoo.cuda_graph(model, (x,))
        expected = model(x)
    out = step(x)
    assert not out.requires_grad
    torch.testing.assert_close(out, expected)
    step = zoo.cuda_graph(model, (x,))
    with torch.inference_mode(), torch.autocast(device, torch.bfloat16):
        full_precision = step(x)
    torch.testing.assert_close(full_precision, model(x).detach())
    model, x = Dropping(16).to(device).train(), torch.randn(8, 16, device=device)
    with torch.no_grad():
        step = zoo.cuda_graph(model, (x,))
        torch.manual_seed(3)
        first, second = step(x), step(x)
        torch.manual_seed(3)
        again, eager = step(x), model(x)
    assert not torch.equal(first, second), "each replay draws anew"
    torch.testing.assert_close(first, again)
    torch.testing.assert_close(second, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_synchronising_step_is_named_and_a_failed_capture_leaves_the_process_usable(compiled: bool) -> None:
    model = Dropping(16).cuda().train()

    def fails(x: Tensor) -> Tensor:
        x = model(x)
        if torch.cuda.graphs.is_current_stream_capturing():
            raise ArithmeticError("only while capturing")
        return x

    def invalidates(x: Tensor) -> Tensor:
        x = model(x)
        if torch.cuda.graphs.is_current_stream_capturing():
            torch.cuda.synchronize()
        return x

    for step, words in (
        (lambda x: x * x.sum().item(), r"synchronises.*x\.sum\(\)\.item\(\)"),
        (fails, "only while capturing"),
        (invalidates, "capture failed"),
    ):
        with torch.no_grad(), pytest.raises(CaptureError, match=words):
            zoo.cuda_graph(step, (torch.randn(8, 16, device="cuda"),))
        _usable(compiled)


def _usable(compiled: bool) -> None:
    """Dropout draws, things compile, and a new capture works."""
    model, x = Dropping(16).cuda().train(), torch.randn(8, 16, device="cuda")
    torch.nn.functional.dropout(x)
    if compiled:
        model.compile(fullgraph=True, dynamic=False)
    with torch.no_grad():
        model(x)
        step = zoo.cuda_graph(model, (x,))
        assert not torch.equal(step(x), step(x))


@pytest.mark.gpu
def test_captures_leave_no_workspaces_behind() -> None:
    linear = nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        linear(torch.randn(8, 256, device="cuda", dtype=torch.bfloat16))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        first, *others = [(torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16),) for rows in (8, 16, 32, 64)]
        step = zoo.cuda_graph(linear, first, buckets=[(args, {}) for args in others])
        assert torch.cuda.memory_allocated() - before < 4 * 2**20
        for rows in (8, 16, 32, 64):
            x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
            torch.testing.assert_close(step(x), linear(x))


@pytest.mark.gpu
def test_an_older_graph_in_the_garbage_does_not_end_a_capture() -> None:
    x = torch.randn(4, device="cuda")
    threshold = gc.get_threshold()
    gc.set_threshold(10**6)  # nothing is collected before the capture
    older: list[Any] = [zoo.cuda_graph(torch.sin, (x,))]
    older.append(older)  # a circle, which only the garbage collector frees
    del older

    def step(x: Tensor) -> Tensor:
        if gc.isenabled():  # as it would by itself after enough allocations
            gc.collect()
        return x.cos()

    try:
        captured = zoo.cuda_graph(step, (x,), warmup=0)
    finally:
        gc.set_threshold(*threshold)
    torch.testing.assert_close(captured(x), x.cos())
