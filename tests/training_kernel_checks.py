"""The kernels of a training step against exact numbers."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from tests.kernel_checks import DEVICE, MARKS, kernels_run, values  # noqa: F401
from tests.noted import noted
from zoo.ops import common
from zoo.ops import training as operators
from zoo.ops.training import IGNORED
from zoo.ops.triton import training as kernels
from zoo.ops.triton.training import _one_minus_exp
from zoo.training import AdamW, LinearCrossEntropy

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    *([MARKS] if MARKS else []),
]
EPS = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "LARGE", 1)
    monkeypatch.setattr(operators, "SMALLEST", 1)


def number(value: float) -> Tensor:
    return torch.tensor(value, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numbers", [1, 9001])
@pytest.mark.parametrize("count", [1, 2, 100_000])
@pytest.mark.parametrize(
    "options", [{}, {"decay": 0.1, "rate_on_device": True}, {"scale": 1024.0, "maximize": True}], ids=str
)
def test_an_update_is_exact_but_for_rounding(
    dtype: torch.dtype, numbers: int, count: int, options: dict[str, Any]
) -> None:
    param, grad, average, square = (values(numbers, dtype=dtype) for _ in range(4))
    average, square = average * 0.1, square.square() * 0.01
    if count == 1:
        average, square = torch.zeros_like(average), torch.zeros_like(square)
    decay, rate, betas, eps = options.get("decay", 0.0), 1e-2, (0.9, 0.999), 1e-8
    scale, maximize = options.get("scale"), options.get("maximize", False)
    tensors = [each.clone() for each in (param, grad, average, square)]
    kernels.adamw(
        *([each] for each in (*tensors, number(float(count)))), number(rate) if "rate_on_device" in options else rate,
        None if scale is None else number(scale), number(0.0), betas, eps, decay, maximize,
    )  # fmt: skip
    p, g, m, v = (each.double() for each in (param, grad, average, square))
    g = g / (scale or 1.0)
    unscaled, g = g, -g if maximize else g
    p = p * (1 - rate * decay)
    m, v = 0.9 * m + (1 - 0.9) * g, 0.999 * v + (1 - 0.999) * g * g
    update = rate * (m / (1 - 0.9**count)) / ((v / (1 - 0.999**count)).sqrt() + eps)
    for found, expected in zip(tensors, (p - update, unscaled, m, v), strict=True):
        error = (found.double() - expected).abs()
        # Of sums that cancel, a summand's last digit.
        assert (error <= EPS[dtype] * (expected.abs() + 0.3 * update.abs().max()) + 1e-30).all(), error.max()
    if count == 1 and dtype == torch.float32 and scale is None:
        moved = (tensors[0].double() - param.double() * (1 - rate * decay)).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-4, atol=1e-6)


@triton.jit
def _corrections(x, out):
    tl.store(out, _one_minus_exp(tl.load(x)))


@pytest.mark.parametrize("x", [-1e-8, -1e-3, -0.1, -0.4999, -0.5, -0.5001, -3.0, -200.0, -math.inf])
def test_the_corrections_are_exact_to_the_last_digits(x: float) -> None:
    given, out = number(x), number(0.0)
    _corrections[(1,)](given, out)
    assert out.item() == pytest.approx(-math.expm1(given.item()), rel=4e-7)


def steps(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], count: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for param in params:
            grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
            param.grad = torch.empty_like(param).copy_(grad)
        optimizer.step()


def close(found: Iterable[Tensor], expected: Iterable[Tensor], dtype: torch.dtype) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
        apart = (ours.detach().double() - theirs.detach().double()).norm() / theirs.detach().double().norm()
        # Each of a few steps rounds; and torch's on a GPU takes a rounded 0.999 off one.
        assert float(apart) < max(4 * EPS[dtype], 3e-5)


def sizes(launches: list[tuple[Any, ...]]) -> list[list[int]]:
    """Of the parameters that each launch updates."""
    return [[each.numel() for each in params] for params, *_ in launches]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("together", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("rate_on_device", [False, True], ids=["rate on the host", "rate on the device"])
def test_parameters_together_are_updated_as_alone(rate_on_device: bool, together: int, dtype: torch.dtype) -> None:
    drawn = [[values(4097, dtype=dtype) for _ in range(together)] for _ in range(4)]
    drawn[3] = [each.square() for each in drawn[3]]
    counts = [number(float(1 + 7 * index)) for index in range(together)]
    rate, rest = number(1e-2) if rate_on_device else 1e-2, ((0.9, 0.999), 1e-8, 0.1, False)
    joined, alone = ([[each.clone() for each in held] for held in drawn] for _ in range(2))
    # The gradients are divided in place: by a program too many, twice.
    kernels.adamw(*joined, counts, rate, number(4.0), number(0.0), *rest)
    for index in range(together):
        own = [[held[index]] for held in alone]
        kernels.adamw(*own, [counts[index]], rate, number(4.0), number(0.0), *rest)
    torch.testing.assert_close(joined, alone, rtol=0, atol=0)
    torch.testing.assert_close(joined[1], [each / 4 for each in drawn[1]], rtol=0, atol=0)
    assert all(not torch.equal(new, old) for new, old in zip(joined[0], drawn[0], strict=True))


def alike(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    """Parameters of these shapes twice, those of four dimensions in channels-last, for ours and for torch's."""
    drawn = [values(*shape, dtype=dtype) for shape in shapes]
    drawn = [each.to(memory_format=torch.channels_last) if each.dim() == 4 else each for each in drawn]
    return [[nn.Parameter(each.clone()) for each in drawn] for _ in range(2)]


SAME = ((6, 8), (48,), (2, 3, 2, 4), (1, 48), (8, 6), (3, 4, 4), (12, 4), (4, 3, 2, 2), (24, 2), (48,), (16, 3))
ALL = [[48] * 8, [48] * 3, [30]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("large", "launches", "options"),
    [
        (1, ALL, {}), (1, ALL, {"weight_decay": 0.3}), (1, ALL, {"maximize": True, "betas": (0.0, 0.5)}),
        (144, ALL[:2], {}), (145, ALL[:1], {}), (8 * 48 + 1, [], {}),
    ],
    ids=["all", "decay", "maximize", "remainder", "no remainder", "none"],
)  # fmt: skip
def test_parameters_of_one_size_share_launches(large, launches, options, dtype, monkeypatch):
    monkeypatch.setattr(operators, "LARGE", large)
    monkeypatch.setattr(operators, "SMALLEST", 30)
    launched = noted(monkeypatch, kernels, "adamw")
    # They do not lie in a row.
    ours, theirs = alike(*SAME[:4], (5, 6), *SAME[4:], (29,), dtype=dtype)
    mine, torchs = (AdamW(ours, lr=1e-2, **options), torch.optim.AdamW(theirs, lr=1e-2, fused=True, **options))
    for params, optimizer in ((ours, mine), (theirs, torchs)):
        steps(optimizer, params, 3)
    assert sizes(launched) == launches * 3
    # Torch's counts no versions of what it updates.
    assert sum(each._version == 3 for each in ours) == sum(map(len, launches))
    close(ours, theirs, dtype)
    for found, expected in zip(ours, theirs, strict=True):
        assert mine.state[found].keys() == torchs.state[expected].keys()
        close(mine.state[found].values(), torchs.state[expected].values(), dtype)


def test_an_unaligned_parameter_is_updated_alone_or_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = noted(monkeypatch, kernels, "adamw")
    (*ours, last), theirs = alike((6, 8), (48,), (8, 6))
    held = torch.zeros(49, device=DEVICE)
    shifted = nn.Parameter(held[1:].view(8, 6).copy_(last.detach()))
    ours.insert(1, shifted)
    theirs.insert(1, theirs.pop())
    assert shifted.data_ptr() % 16 and not any(each.data_ptr() % 16 for each in (ours[0], ours[2]))
    mine, torchs = AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for params, optimizer in ((ours, mine), (theirs, torchs)):
        steps(optimizer, params, 2)
    assert sizes(launched) == [[48, 48], [48]] * 2
    monkeypatch.setattr(operators, "LARGE", 49)
    for params, optimizer in ((ours, mine), (theirs, torchs)):
        steps(optimizer, params, 1, seed=1)
    assert sizes(launched)[4:] == [[48, 48]]
    close(ours, theirs, torch.float32)
    assert held[0] == 0


@pytest.mark.parametrize("rate", [1, 1e-2, None], ids=["whole number", "number", "tensor"])
def test_counts_of_one_launch_differ_and_a_skipped_step_is_none(rate, monkeypatch):
    launched = noted(monkeypatch, kernels, "adamw")
    ours, theirs = alike(*SAME[:3])
    lr = number(1e-2) if rate is None else rate
    both = (ours, AdamW(ours, lr=lr)), (theirs, torch.optim.AdamW(theirs, lr=lr, fused=True))
    for params, optimizer in both:
        steps(optimizer, params[1:2], 3)
        steps(optimizer, params, 1, seed=1)
        optimizer.grad_scale, optimizer.found_inf = number(8.0), number(1.0)
        held = [param.detach().clone() for param in params]
        state = [value.clone() for values in optimizer.state.values() for value in values.values()]
        steps(optimizer, params, 1, seed=2)
        torch.testing.assert_close([param.detach() for param in params], held, rtol=0, atol=0)
        now = [value for values in optimizer.state.values() for value in values.values()]
        torch.testing.assert_close(now, state, rtol=0, atol=0)
        optimizer.found_inf = number(0.0)
        steps(optimizer, params, 1, seed=3)
        assert [float(optimizer.state[each]["step"]) for each in params] == [2.0, 5.0, 2.0]
    assert sizes(launched) == [[48]] * 3 + [[48] * 3] * 3
    close(ours, theirs, torch.float32)
    close([each.grad for each in ours], [each.grad for each in theirs], torch.float32)


@pytest.fixture(params=[512, None], ids=["small blocks", "blocks as they are"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(kernels, "BYTES", request.param)
        monkeypatch.setattr(kernels, "WARPS", 1)


def reference(logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and gradient by torch's operators, which take rows that do not lie without gaps."""
    apart = torch.cat([logits, logits], 1)[:, : logits.shape[1]]
    return operators.cross_entropy_rows(apart, labels, scale)


def check_rows(logits: Tensor, labels: Tensor, scale: float) -> None:
    expected, slope = reference(logits, labels, number(scale))
    found = logits.clone()
    got = kernels.cross_entropy_rows_(found, labels, number(scale), IGNORED)
    assert got.dtype == torch.float32 and found.dtype == logits.dtype
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(found, slope, rtol=4 * EPS[logits.dtype], atol=1e-6 * scale, equal_nan=True)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("columns", [1, 7, 37, 256, 1000, 17001])
def test_rows_match_torch(columns: int, dtype: torch.dtype) -> None:
    logits = values(5, columns, dtype=dtype, scale=4.0)
    labels = torch.randint(columns, (5,)).to(DEVICE)
    labels[3] = IGNORED
    labels[4] = columns - 1
    check_rows(logits, labels, 1.0 if dtype == torch.float16 else 0.037)
    check_rows(logits, torch.full_like(labels, IGNORED), 1.0)


@pytest.mark.usefixtures("_blocks")
def test_rows_with_nan_and_infinity_match_torch_and_a_label_that_is_no_class_is_no_number() -> None:
    logits = values(10, 600, scale=3.0)
    logits[0, 5:] = -math.inf
    logits[1, :590] = -math.inf
    logits[2] = -math.inf
    logits[3, 17] = math.nan
    logits[4] = math.nan
    logits[5, 300] = math.inf
    logits[6] = math.inf
    logits[7] = torch.finfo(torch.float32).min
    logits[8] += 30
    logits[9, 599] = math.nan
    labels = torch.tensor([2, 595, 0, 4, 0, 7, 0, 3, 100, IGNORED], device=DEVICE)
    check_rows(logits, labels, 0.5)
    check_rows(logits, torch.tensor([100, 3, 1, 17, 1, 300, 2, 599, 5, 599], device=DEVICE), 1.0)
    logits = values(4, 50)
    labels = torch.tensor([3, 50, -1, 2**40], device=DEVICE)
    found = logits.clone()
    got = kernels.cross_entropy_rows_(found, labels, number(1.0), IGNORED)
    assert got.isnan().tolist() == [False, True, True, True]
    assert found.isnan().all(1).tolist() == [False, True, True, True] and found[0].isfinite().all()


@pytest.mark.parametrize("norms", [None, [1.0, 2.0, math.inf, 1.0]], ids=["loss", "norm"])
@pytest.mark.parametrize("losses", [[0.5, 1.0, 2.0, 3.0], [0.5, math.inf, math.nan, 1.0], [math.nan, 1.0, 2.0, 3.0]])
def test_a_step_is_judged_by_its_loss_and_norm(losses, norms, monkeypatch):
    monkeypatch.setattr(operators, "kernels_run", lambda *_: False)

    def state() -> list[Tensor]:
        return [torch.full((), 5, device=DEVICE), torch.zeros((), device=DEVICE).long(), number(0.0), number(0.0)]

    found, expected = state(), state()
    for loss, norm in zip(losses, norms or [None] * 4, strict=True):
        given = number(loss), None if norm is None else number(norm)
        kernels.judge_step(*given, *found)
        operators.judge_step(*given, *expected)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found[0] == 9 and found[3] == float(norms is not None or not math.isfinite(sum(losses)))


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("numbers", [1, 4096, 12_289])
def test_scaling(numbers: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SCALE_PROGRAMS", 2)  # which go round
    x = values(numbers, dtype=dtype)
    for factor in (1.0, 0.3, 0.0, math.nan):
        found = x.clone()
        kernels.scale_(found, number(factor))
        expected = (x.float() * factor).to(dtype)
        torch.testing.assert_close(found, expected, rtol=EPS[dtype], atol=0, equal_nan=True)
        assert factor != 1.0 or torch.equal(found, x)


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("chunk", [4, 7, 100])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_the_loss_and_its_gradients(chunk: int, factor: float, dtype: torch.dtype) -> None:
    x, weight = values(20, 16, dtype=dtype).requires_grad_(), values(37, 16, dtype=dtype).requires_grad_()
    labels = torch.randint(37, (20,)).to(DEVICE)
    labels[[0, 18]] = IGNORED
    assert common.kernels_run(x)
    loss = LinearCrossEntropy(chunk)(x, weight, labels)
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    expected = F.cross_entropy(F.linear(*exact), labels)
    assert loss.item() == pytest.approx(expected.item(), rel=max(1e-5, 2 * EPS[dtype]))
    wanted = torch.autograd.grad(factor * expected, exact)
    for found, exactly in zip(torch.autograd.grad(factor * loss, (x, weight)), wanted, strict=True):
        assert found.dtype is dtype
        assert float((found.double() - exactly).norm() / exactly.norm()) < 6 * EPS[dtype]


@pytest.mark.parametrize("shape", [(1, 3), (37, 70), (130, 65)])
def test_rows_and_columns_are_rounded_to_float8_as_by_torch(shape: tuple[int, int]) -> None:
    # Numbers of float8 themselves: what lies between two of them goes to a wrong one in Triton's interpreter.
    x = values(*shape).to(torch.float8_e4m3fn).float()
    for index in range(max(shape)):
        x[index % shape[0], index % shape[1]] = 448  # a scale is then a power of two
    x[:, 1], x[:, 2] = 0, 448
    x /= 32
    greatest = operators._magnitudes(x)
    rows, columns = operators._round(x, greatest, True, True)
    assert operators._round(x, greatest, False, False) == (None, None)
    assert columns.numbers.shape[1] % 16 == 0
    assert not columns.numbers[:, shape[0] :].float().any()
    for found, given in ((rows, x), (columns._replace(numbers=columns.numbers[:, : shape[0]]), x.t())):
        expected = operators._rounded(given)
        torch.testing.assert_close(found.scale, expected.scale, rtol=0, atol=0)
        torch.testing.assert_close(found.numbers.float(), expected.numbers.float(), rtol=0, atol=0)
    if DEVICE != "cpu":  # the interpreter makes a number of it
        x[0, 0] = float("nan")
        rows, columns = operators._round(x, operators._magnitudes(x), True, True)
        assert rows.numbers[0, 0].float().isnan() and columns.numbers[0, 0].float().isnan()
