"""The training step: equal to the plain loop, captured where it can be, and never trained on what is not finite."""

import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.noted import noted
from tests.training_models import Weighted, build, draw, loss_of, optimizer_of, plain_losses
from zoo.engine.graphed_step import CaptureError
from zoo.training import NonFiniteError, TrainingStep, TrainingWarning, capture_obstacles

OPTIMIZERS = ["adamw", "sgd", "plain"]


def made(
    model: nn.Module | None = None, loss: Callable[..., Any] = loss_of, optimizer: Any = None, *,
    device: str = "cpu", kind: str = "adamw", **options: Any,
) -> TrainingStep:  # fmt: skip
    model = build(device) if model is None else model
    return TrainingStep(model, loss, optimizer or optimizer_of(model, kind), **options)


def train(step: TrainingStep, batches: Any) -> list[float]:
    return [step(batch).item() for batch in batches]


def plainly(batches: Any, device: str = "cpu") -> list[float]:
    model = build(device)
    return plain_losses(model, optimizer_of(model), [[batch] for batch in batches])


@pytest.mark.parametrize(("kind", "captures"), [("adamw", False), ("adamw", True), ("sgd", True), ("plain", False)])
@pytest.mark.parametrize("clip_norm", [None, 1e-3, 0.5])
@pytest.mark.parametrize("counts", [(1,) * 10, (3, 2) * 6], ids=str)
def test_the_losses_are_those_of_the_plain_loop(kind, captures, clip_norm, counts, device):
    batches = iter(draw(sum(counts), device=device))
    updates = [list(itertools.islice(batches, count)) for count in counts]
    expected_model, model = build(device), build(device)
    expected = plain_losses(expected_model, optimizer_of(expected_model, kind), updates, clip_norm)
    step = TrainingStep(model, loss_of, optimizer_of(model, kind), clip_norm=clip_norm, cuda_graph=captures)
    assert [step(*update).item() for update in updates] == pytest.approx(expected, rel=1e-5)
    assert len(step.captured) == captures * len(set(counts))
    torch.testing.assert_close(list(model.parameters()), list(expected_model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_loss_is_a_tensor_of_its_own(device: str):
    step = made(device=device, cuda_graph=True)
    losses = [step(batch) for batch in draw(8, device=device)]
    assert len({loss.item() for loss in losses}) == 8
    assert not any(loss.requires_grad for loss in losses)


def test_the_norm_is_that_before_clipping(device: str):
    model, (batch,) = build(device), draw(1, device=device)
    loss_of(model, batch).backward()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
    step = made(model, clip_norm=1e-3)
    step(batch)
    torch.testing.assert_close(step.grad_norm, expected)


def test_shapes_are_captured_each_and_no_more_than_allowed():
    step = made(cuda_graph=True, warmup=2, most_graphs=2)
    sizes = [draw(1, rows=rows)[0] for rows in (3, 4, 5)]
    with pytest.warns(TrainingWarning, match=r"2 shapes are captured already.*pad batches") as caught:
        for batch in sizes * 5:
            step(batch)
    assert len(caught) == 1
    assert len(step.captured) == 2


@pytest.mark.parametrize("captures", [False, True], ids=["uncaptured", "captured"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_bad_loss_is_reported_with_its_step_and_changes_nothing(device: str, kind: str, captures: bool):
    step = made(device=device, kind=kind, cuda_graph=captures, report_every=1000)
    model, optimizer = step.model, step.optimizer
    batches = draw(12, device=device)
    train(step, batches[:6])
    weights = [parameter.clone() for parameter in model.parameters()]
    state = [value.clone() for values in optimizer.state.values() for value in values.values()]
    step((batches[6][0] * float("inf"), batches[6][1]))
    step(batches[7])
    torch.testing.assert_close(list(model.parameters()), weights, rtol=0, atol=0)
    with pytest.raises(NonFiniteError, match=r"step 7: the loss is nan; no update was made") as caught:
        step.check()
    assert caught.value.step == 7
    held = [value for values in optimizer.state.values() for value in values.values()]
    torch.testing.assert_close(held, state, rtol=0, atol=0)
    step(batches[8])
    step.check()
    assert not torch.equal(next(iter(model.parameters())), weights[0])


# An optimizer that cannot skip is never given a bad gradient.
@pytest.mark.parametrize(("kind", "after"), [*((kind, 0) for kind in OPTIMIZERS), ("plain", 1)])
def test_a_bad_loss_is_reported_at_once_where_it_is_the_first_or_cannot_be_skipped(kind: str, after: int):
    step = made(kind=kind)
    *before, (x, y) = draw(1 + after)
    train(step, before)
    weights = [parameter.clone() for parameter in step.model.parameters()]
    with pytest.raises(NonFiniteError, match=f"step {1 + after}"):
        step((x * float("nan"), y))
    torch.testing.assert_close(list(step.model.parameters()), weights, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert step((x, y)).isfinite()


def test_a_bad_gradient_of_a_finite_loss_is_noticed_where_the_norm_is_known():
    def root(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * 0).sum().sqrt()

    step = made(loss=root, clip_norm=1.0)
    with pytest.raises(NonFiniteError, match=r"a gradient is not finite \(the loss is 0\)"):
        step(torch.ones(2, 8))


def test_reports_come_in_strides():
    step = made(report_every=4)
    batches = draw(8)
    batches[5] = (batches[5][0] * float("nan"), batches[5][1])
    with pytest.raises(NonFiniteError, match="step 6"):
        for batch in batches:
            step(batch)
    assert step.steps == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_trains_like_single(device: str, dtype: torch.dtype):
    batches = draw(40, device=device)
    losses = {}
    for autocast in (None, dtype):
        step = made(device=device, autocast=autocast, cuda_graph=True, clip_norm=1.0)
        losses[autocast] = train(step, batches)
        assert next(step.model.parameters()).dtype is torch.float32
    assert losses[dtype] != losses[None]
    assert losses[dtype] == pytest.approx(losses[None], abs=0.05)


@pytest.mark.parametrize("captures", [False, True], ids=["uncaptured", "captured"])
def test_an_overflow_of_scaled_gradients_is_skipped_and_the_scale_lowered(device: str, captures: bool):
    step = made(device=device, autocast=torch.float16, cuda_graph=captures)
    step.scaler = torch.amp.GradScaler(device, init_scale=2.0**40)
    train(step, draw(60, device=device))
    step.check()
    assert step.scaler.get_scale() < 2.0**30
    assert all(parameter.isfinite().all() for parameter in step.model.parameters())


@pytest.mark.parametrize("captures", [False, True], ids=["uncaptured", "captured"])
@pytest.mark.parametrize("options", [{}, {"dampening": 0.1}, {"nesterov": True}], ids=str)
def test_an_overflow_of_the_first_update_leaves_no_undefined_momentum(device, captures, options, monkeypatch):
    empty = torch.empty_like

    def dirty(x: Tensor, **more: Any) -> Tensor:
        return empty(x, **more).fill_(torch.nan if x.is_floating_point() else 0)

    monkeypatch.setattr(torch, "empty_like", dirty)
    losses = []
    for scale in (2.0**8, 2.0**120):
        model = build(device)
        rate = torch.tensor(1e-2, device=device) if device == "cuda" else 1e-2
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True, **options)
        step = TrainingStep(model, loss_of, optimizer, autocast=torch.float16, warmup=2, cuda_graph=captures)
        step.scaler = torch.amp.GradScaler(device, init_scale=scale, backoff_factor=2.0**-112)
        first, *batches = draw(9, device=device)
        for batch in ([first] if scale > 2.0**8 else []) + batches:
            losses.append(step(batch).item())
        step.check()
    assert losses[:8] == pytest.approx(losses[9:], abs=1e-3)


def test_bad_losses_of_all_rehearsals_are_not_captured(monkeypatch: pytest.MonkeyPatch):
    step = made(cuda_graph=True, warmup=2)
    x, y = draw(1)[0]
    for _ in range(4):
        with pytest.raises(NonFiniteError):
            step((x * torch.nan, y))
    assert not step.captured
    for _ in range(3):
        step((x, y))
    assert step.captured


def test_an_infinite_loss_of_finite_gradients_is_left_out_of_scaled_training_too(device: str):
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return loss_of(model, batch[:2]) + batch[2]

    model = build(device)
    step = TrainingStep(model, loss, optimizer_of(model), autocast=torch.float16)
    fine, bad = torch.zeros((), device=device), torch.full((), torch.inf, device=device)
    batches = draw(6, device=device)
    for batch in batches[:3]:
        step((*batch, fine))
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    step((*batches[3], bad))
    torch.testing.assert_close([parameter.detach() for parameter in model.parameters()], weights, rtol=0, atol=0)
    step((*batches[4], fine))
    assert not torch.equal(next(iter(model.parameters())), weights[0])
    with pytest.raises(NonFiniteError, match=r"step 4: the loss is inf; this update was left out\..*bfloat16"):
        step.check()


def test_the_host_looks_once_where_the_optimizer_skips(device: str, monkeypatch: pytest.MonkeyPatch):
    model = build(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)  # has no state, ever
    step = TrainingStep(model, loss_of, optimizer, cuda_graph=False)
    looks, batches = noted(monkeypatch, step._watch, "check"), draw(6, device=device)
    for given in (batches[:1], batches[1:]):
        train(step, given)
        assert len(looks) == 1


def test_a_cpu_is_not_captured_unless_asked():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = made()
    train(step, draw(5))
    assert not step.captured
    first, *others = capture_obstacles(step.model, step.optimizer)
    assert first == "the parameters are on cpu; a CUDA graph needs one GPU: model.to('cuda')"
    assert any("lr=torch.tensor" in each for each in others)  # also what the optimizer lacks


@pytest.mark.parametrize(("where", "found"), [("cpu", ["on the CPU"]), ("cuda", [])])
def test_a_learning_rate_that_is_a_tensor_on_the_cpu_stands_in_the_way(where: str, found: list[str]):
    with FakeTensorMode():  # a GPU need not be there
        model = nn.Linear(4, 4, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-3, device=where)
        obstacles = capture_obstacles(model, optimizer)
    assert len(obstacles) == len(found) and all(map(str.__contains__, obstacles, found))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"foreach": True, "capturable": True}, r"AdamW\(\.\.\., fused=True\)"),
        ({"fused": True}, r"AdamW\(\.\.\., capturable=True\)"),
        ({"fused": True, "capturable": True, "lr": 1e-3}, r"lr=torch\.tensor\(0\.001, device='cuda'\)"),
    ],
)
def test_what_an_optimizer_lacks_is_named(options: dict[str, Any], remedy: str):
    model = build("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": torch.tensor(1e-3, device="cuda")} | options)
    with pytest.raises(ValueError, match=remedy):
        TrainingStep(model, loss_of, optimizer, cuda_graph=True)
    with pytest.warns(TrainingWarning, match=remedy):
        step = TrainingStep(model, loss_of, optimizer)
    train(step, draw(5, device="cuda"))
    assert not step.captured


@pytest.mark.gpu
def test_a_loss_that_waits_for_the_device_is_noticed_and_trained_all_the_same():
    def waits(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        return loss * (1.0 if loss.item() > 0 else 2.0)

    batches = draw(8, device="cuda")
    expected = plainly(batches, "cuda")
    step = made(loss=waits, device="cuda")
    with pytest.warns(TrainingWarning, match=r"waits for the device \(.*test_training_step.py") as caught:
        losses = train(step, batches)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert [warning.filename for warning in caught] == [__file__]
    assert not step.captured


class Opaque:
    """What a loss may hold, and what a CUDA graph could not be given anew."""


def fail_captures(monkeypatch: pytest.MonkeyPatch, after: Callable[..., Any] | None = None) -> list[Any]:
    """Have captures fail once they called ``after``; weak references to what each held by then."""
    held: list[Any] = []

    def capture(fn: Callable[..., Any], buckets: list[Any], **options: Any) -> None:
        activation = Opaque()
        held.append(weakref.ref(activation))
        try:
            if after is not None:
                after(fn, buckets[0][0])
            raise RuntimeError("no reason")
        except RuntimeError as error:
            raise CaptureError(f"capture failed: {error}") from error

    monkeypatch.setattr("zoo.training.step.GraphedStep", capture)
    return held


def test_a_capture_that_fails_is_an_error_at_every_try_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    def run(fn: Callable[..., Any], batches: tuple[Any, ...]) -> None:
        with monkeypatch.context() as inside:
            inside.setattr(step.optimizer, "step", lambda *_, **__: pytest.fail("not permitted while capturing"))
            with pytest.raises(pytest.fail.Exception):
                fn(*batches)

    fail_captures(monkeypatch, run)
    step = made(cuda_graph=True)
    batches = draw(6)
    train(step, batches[:3])
    for batch in batches[3:]:
        with pytest.raises(CaptureError, match="capture failed: no reason"):
            step(batch)
        assert all(parameter.grad is None for parameter in step.model.parameters())


def test_training_goes_on_without_a_cuda_graph_where_the_capture_fails(monkeypatch: pytest.MonkeyPatch):
    held = fail_captures(monkeypatch)
    batches = draw(8)
    expected = plainly(batches)
    alive: list[bool] = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        alive.extend(ref() is not None for ref in held)
        return loss_of(model, batch)

    step = made(loss=loss, cuda_graph=True)
    step._must_capture = False  # as on a GPU where nothing was said
    with pytest.warns(TrainingWarning, match=r"without a CUDA graph: float32.*: capture failed: no reason") as caught:
        losses = train(step, batches)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert [warning.filename for warning in caught] == [__file__]
    # Short of memory is why most captures fail.
    assert alive == [False] * 5


@pytest.mark.parametrize("make", [Opaque, lambda: numpy.zeros(1), lambda: torch.ones(1, requires_grad=True)])
def test_batches_that_cannot_be_copied_in_are_trained_on_uncaptured(make: Callable[[], Any]):
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return loss_of(model, batch[0])

    batches = draw(6)
    expected = plainly(batches)
    step = made(loss=loss, cuda_graph=True)
    with pytest.raises(CaptureError, match="the step cannot be captured: .*input .*; make batches of dense tensors"):
        step((batches[0], make()))
    step._must_capture = False  # as on a GPU where nothing was said
    held: list[weakref.ref[Any]] = []
    with pytest.warns(TrainingWarning, match="CUDA graph: .*input .*; make batches of dense tensors") as caught:
        losses = []
        for batch in batches:
            given = make()
            held.append(weakref.ref(given))
            losses.append(step((batch, given)).item())
            del given
    assert losses == pytest.approx(expected, rel=1e-5)
    assert [warning.filename for warning in caught] == [__file__] and not step.captured
    assert not any(ref() is not None for ref in held)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_history_that_outlives_its_step_is_named():
    step = made(device="cuda")
    batches = draw(8, device="cuda")
    train(step, batches[:3])
    held = [parameter.clone() for parameter in step.model.parameters()]
    with pytest.warns(TrainingWarning, match=r"holds the history of a parameter.*\.detach\(\)"):
        step(batches[3])
    assert len(held) and step(batches[4]).isfinite()


@pytest.mark.gpu
def test_memory_between_steps_holds_no_gradients():
    before = torch.cuda.memory_allocated()
    model = nn.Linear(1024, 1024, device="cuda")
    step = made(model, lambda model, x: model(x).square().mean(), cuda_graph=False)
    x = torch.randn(8, 1024, device="cuda")
    step(x)
    torch._C._cuda_clearCublasWorkspaces()  # the library's own memory is no gradient
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert torch.cuda.memory_allocated() - before < 3.6 * weights  # weights and two moments


def setting(**values: Any) -> Callable[[Any, Any], Any]:
    return lambda model, optimizer: optimizer.param_groups[0].update(values)


OTHERS_LEARN = r"other parameters learn than when the step was captured: call step\.release\(\)"
CHANGES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "weight_decay": (setting(weight_decay=0.5), r"weight_decay of parameter group 0 was .* and is 0\.5 now.*release"),
    "lr": (setting(lr=0.5), r"lr of parameter group 0 was .* and is 0\.5 now.*release"),
    "betas": (setting(betas=(0.5, 0.9)), r"betas of parameter group 0 was .*cycle_momentum=False"),
    "group": (lambda _, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(()))]}), OTHERS_LEARN),
    "frozen": (lambda model, _: model[0].requires_grad_(False), OTHERS_LEARN),
    "replaced": (
        lambda model, optimizer: setattr(model[0], "weight", nn.Parameter(model[0].weight.detach().clone())),
        "moved or replaced since capture",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_captured_step_refuses_what_changed_since(name: str):
    change, words = CHANGES[name]
    step = made(cuda_graph=True)
    model = step.model
    batches = draw(8)
    train(step, batches[:5])
    assert step.captured
    change(model, step.optimizer)
    with pytest.raises(RuntimeError, match=words):
        step(batches[5])
    step.release()
    before = model[0].weight.detach().clone()
    assert step(batches[6]).isfinite() and not step.captured
    assert torch.equal(model[0].weight, before) == (name in ("frozen", "replaced"))


@pytest.mark.parametrize("autocast", [None, torch.float16], ids=str)
@pytest.mark.parametrize("where", ["loss", "optimizer"])
def test_a_step_that_was_cut_off_leaves_nothing_behind(autocast: torch.dtype | None, where: str):
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if batch is bad:
            fail()
        return loss_of(model, batch)

    batches, (bad,) = draw(6), draw(1, seed=1)
    losses = []
    for cut_off in (False, True):
        step = made(loss=loss, autocast=autocast, clip_norm=0.5)
        found = [step(batch) for batch in batches[:3]]
        if cut_off and where == "loss":
            with pytest.raises(KeyboardInterrupt):
                step(batches[3], bad)
        elif cut_off:
            handle = step.optimizer.register_step_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                step(batches[3])
            handle.remove()
        assert all(parameter.grad is None for parameter in step.model.parameters())
        losses.append([each.item() for each in [*found, *(step(batch) for batch in batches[3:])]])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: made(m, autocast=torch.float64), r"autocast is torch\.float64; it is torch\.bfloat16"),
        (lambda m: made(m, clip_norm=0.0), r"clip_norm is 0\.0; it is a positive number"),
        (lambda m: made(m, clip_norm=float("inf")), "clip_norm is inf"),
        (lambda m: made(m, warmup=1), "warmup is 1, expected an integer of at least 2"),
        (lambda m: made(m, report_every=0), "report_every is 0, expected a positive integer"),
        (lambda m: made(m, most_graphs=0), "most_graphs is 0, expected a positive integer"),
        (lambda m: made(m.eval()), r"Sequential is in eval mode: call model\.train\(\) first"),
        (lambda m: made(m, optimizer=optimizer_of(build())), "has none of the 4 parameters of this Sequential"),
        (lambda m: made(m, optimizer=torch.optim.LBFGS(m.parameters())), r"LBFGS\.step\(\) needs a closure"),
        (lambda m: made(m.requires_grad_(False))(draw(1)[0]), "depends on no parameter that learns"),
        (lambda m: made(m, optimizer=[optimizer_of(m)] * 2), r"is a list, expected one torch\.optim\.Optimizer"),
        (lambda m: made(m)(), "at least one batch"),
        (lambda m: made(m)(torch.ones(2, 4), torch.ones(2).long()), r"step\(\(x, y\)\) is one batch"),
        (lambda m: made(m, lambda m, b: loss_of(m, b).detach())(draw(1)[0]), "loss has no gradient: it was detached"),
        (lambda m: made(m, lambda *_: torch.ones(3))(0), r"returned torch\.float32 \[3\].*a floating-point scalar"),
        (lambda m: made(m, lambda *_: torch.tensor(1))(0), r"returned torch\.int64.*expected a floating-point scalar"),
        (lambda m: made(m, lambda *_: 0.5)(0), "returned float.*expected a floating-point scalar"),
    ],
)
def test_what_cannot_train_is_refused(call: Callable[[nn.Module], Any], message: str):
    model = build()
    with pytest.raises((TypeError, ValueError), match=message):
        call(model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parameters_that_the_optimizer_lacks_are_named(recwarn: pytest.WarningsRecorder):
    model, loss = build(), Weighted()
    with pytest.warns(TrainingWarning, match=r"2 parameters .* SGD .* \(3\.bias, loss\.factor\): add them"):
        TrainingStep(model, loss, torch.optim.SGD([*model.parameters()][:-1], 0.1))
    recwarn.clear()
    list(model.parameters())[-1].requires_grad_(False)
    TrainingStep(model, loss, torch.optim.SGD([*model.parameters(), *loss.parameters()], 0.1))
    assert not recwarn


@pytest.mark.parametrize("captures", [False, True], ids=["uncaptured", "captured"])
def test_a_step_after_an_evaluation_is_refused_until_the_model_trains(captures: bool):
    step = made(cuda_graph=captures)
    batches = draw(6)
    train(step, batches[:5])
    step.model.eval()
    with pytest.raises(ValueError, match=r"Sequential is in eval mode: call model\.train\(\) first"):
        step(batches[5])
    step.model.train()
    assert step(batches[5]).isfinite() and step.steps == 6


@pytest.mark.slow
def test_a_step_is_freed_before_its_optimizer():
    model = build()
    optimizer = optimizer_of(model)
    step = made(model, optimizer=optimizer, cuda_graph=True)
    train(step, draw(5))
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None and not optimizer._optimizer_load_state_dict_post_hooks
    optimizer.load_state_dict(optimizer.state_dict())
