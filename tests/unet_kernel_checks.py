"""The group-norm kernels against float64."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import kernel_checks
from tests.kernel_checks import DEVICE, MARKS, RELATIVE, kernels_run  # noqa: F401
from tests.operator_checks import Call, check, tensors
from zoo.ops import norms as ops
from zoo.ops.triton import group_norm as kernels

pytestmark = MARKS
close = functools.partial(kernel_checks.close, layout=torch.channels_last)
# Channels, groups, and channels of the first of two images side by side. Channels of a group in the models: 10, 20, 30,
# 40, 60, 80, and more groups than a program takes. Others: one alone, odd widths, wider than a block; seams within a
# group and between two. The first, which the interpreter computes in all dtypes, is a small one.
WIDTHS = [
    (21, 3, 1), (130, 13, 64), (140, 7, 3), (150, 5, 30), (160, 4, 40), (180, 3, 90), (160, 2, 80), (8, 8, 4),
    (30, 5, 7), (6, 1, 5), (300, 2, 299), (120, 2, 80),
]  # fmt: skip
# Of an image, that no chunk divides.
SIZE = (5, 7) if DEVICE == "cpu" else (7, 11)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other."""
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "ENOUGH", 6)
        monkeypatch.setattr(kernels, "GRADIENT_PROGRAMS", 24)


@pytest.fixture(params=["one launch", "two launches"])
def _ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to a norm, whatever the image would take."""
    for limit in ("PIXELS", "PIXELS_OF_BOTH"):
        monkeypatch.setattr(kernels, limit, 1 << 30 if request.param == "one launch" else 0)


both_ways = pytest.mark.usefixtures("_ways")


def values(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> Tensor:
    drawn = kernel_checks.values(*shape, dtype=dtype, mean=mean)
    return drawn.contiguous(memory_format=torch.channels_last) if drawn.dim() == 4 else drawn


def contiguous(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.double() for tensor in tensors]


def calls(channels: int, groups: int, first: int, dtype: torch.dtype, size: tuple[int, int] = SIZE) -> dict[str, Call]:
    x, weight, bias = values(2, channels, *size, dtype=dtype, mean=0.5), values(channels, mean=1.0), values(channels)
    weight, bias, shifts = weight.to(dtype), bias.to(dtype), values(2, 3 * channels, dtype=dtype)

    def norm(silu: bool) -> Any:
        return lambda x, shift, weight, bias: ops.group_norm(x, shift, weight, bias, groups, 1e-5, silu)

    def joined(*given: Tensor) -> tuple[Tensor, Tensor]:
        return ops.cat_group_norm(*given, groups, 1e-5, True)

    given: dict[str, Any] = {
        "alone": (lambda x, *norm: ops.group_norm(x, None, *norm, groups, 1e-5, False), (x, weight, bias)),
        "a slice of all blocks' shifts": (norm(True), (x, shifts[:, channels : 2 * channels], weight, bias)),
        "one shift for all rows": (norm(False), (x, shifts[:1, :channels].expand(2, -1), weight, bias)),
        "a shift with gaps": (norm(True), (x, shifts[:, ::3], weight, bias)),
        "two side by side": (joined, (*map(contiguous, x.split([first, channels - first], dim=1)), weight, bias)),
    }
    return {name: (call, [each.detach().requires_grad_() for each in given]) for name, (call, given) in given.items()}


@both_ways
@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(("channels", "groups", "first"), WIDTHS)
def test_norms(channels: int, groups: int, first: int, dtype: torch.dtype) -> None:
    with torch.no_grad():
        for call, given in calls(channels, groups, first, dtype).values():
            found, expected = tensors(call(*given)), tensors(call(*(each.double() for each in given)))
            close(found[0], expected[0], dtype)
            if len(found) == 2:
                assert torch.equal(found[1], torch.cat(given[:2], dim=1))
                assert found[1].is_contiguous(memory_format=torch.channels_last)


def test_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    # As many as are put together, and no more where an image could be cut into more.
    monkeypatch.setattr(kernels, "PIXELS", 0)
    monkeypatch.setattr(kernels, "ENOUGH", 1000)
    monkeypatch.setattr(kernels, "TILE", 128 * kernels.STEPS)
    for size, chunks in (((16, 16), 64), ((20, 17), 43), ((3, 3), 3)):
        x, weight, bias = values(1, 20, *size, mean=3.0), values(20), values(20)
        assert kernels.launch_plan(1, size[0] * size[1], 20, 2)[2][0] == chunks <= kernels.CHUNKS
        found = ops.group_norm(x, None, weight, bias, 2, 1e-5, True)
        close(found, ops.group_norm(*wide(x, None, weight, bias), 2, 1e-5, True), torch.float32)


@pytest.mark.parametrize("pixels", [1, 7, 64, 300 if DEVICE == "cpu" else 1000])
@pytest.mark.parametrize("size", [1, 3, 10, 30, 60, 80])
def test_one_launch_of_some_tiles(size: int, pixels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PIXELS_OF_BOTH", kernels.PIXELS)
    # Means that differ from channel to channel are most of a group's deviation.
    x, shift = values(2, 2 * size, pixels, 1), values(2, 2 * size, mean=-3.0)
    weight, bias = values(2 * size), values(2 * size)
    for dtype in RELATIVE if DEVICE == "cuda" else [list(RELATIVE)[(size + pixels) % 3]]:
        given = [tensor.to(dtype) for tensor in (x, shift, weight, bias)]
        # One number has no deviation, and what is not there would be as many away as the interpreter warns of.
        silu = pixels * size > 1
        found = ops.group_norm(*given, 2, 1e-5, silu)
        # Of a few numbers, some are cut off by more: the interpreter does not round to bfloat16.
        close(found, ops.group_norm(*wide(*given), 2, 1e-5, silu), dtype, times=2)
    # Two images, whose seam lies within a group, as one.
    launch_plan = size // 2 if size > 1 else 1
    halves = [
        part.contiguous(memory_format=torch.channels_last)
        for part in x.split([launch_plan, 2 * size - launch_plan], dim=1)
    ]
    found, joined = ops.cat_group_norm(*halves, weight, bias, 2, 1e-5, False)
    assert torch.equal(joined, x)
    torch.testing.assert_close(found, ops.group_norm(x, None, weight, bias, 2, 1e-5, False))


class Recorder:
    """In place of a kernel: launches, and with which constants."""

    def __init__(self, launched: list[tuple[str, dict[str, Any]]], name: str) -> None:
        self.launched, self.name = launched, name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **constants: self.launched.append((self.name, constants))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for module, name in ((kernels, "_small"), (kernels, "_partial"), (kernels, "_apply")):
        monkeypatch.setattr(module, name, Recorder(found, name))
    return found


def test_small_images_take_one_launch_and_large_ones_two(launched: list[tuple[str, dict[str, Any]]]) -> None:
    one, two = ["_small"], ["_partial", "_apply"]
    for channels, side, first, names, names_of_both in (
        (20, 32, 10, one, one),
        (20, 32, 9, one, two),
        (20, 16, 9, one, one),
        (20, 33, 10, two, two),
        (2 * 32 * kernels.SMALL_WARPS + 2, 1, 9, two, two),
        (20, 0, 9, [], []),
    ):
        x, weight = values(1, channels, side, side), values(channels)
        launched.clear()
        ops.group_norm(x, None, weight, weight, 2, 1e-5, True)
        assert [name for name, _ in launched] == names, (channels, side)
        launched.clear()
        ops.cat_group_norm(x[:, :first], x[:, first:], weight, weight, 2, 1e-5, True)
        assert [name for name, _ in launched] == names_of_both, (channels, side)


def test_one_launch_has_two_sets_of_constants(launched: list[tuple[str, dict[str, Any]]]) -> None:
    # Of whole groups, and of two images whose seam lies within one.
    for size in (10, 20, 30, 40, 60, 80):
        x, weight = values(1, 32 * size, 2, 2), values(32 * size)
        ops.group_norm(x, None, weight, weight, 32, 1e-5, True)
        ops.cat_group_norm(x[:, : 16 * size + 8], x[:, 16 * size + 8 :], weight, weight, 32, 1e-5, True)
    constants = {tuple(constants.items()) for _, constants in launched}
    assert len(launched) == 12 and len(constants) == 2


@both_ways
def test_a_mean_far_from_zero_costs_no_variance() -> None:
    # The mean of squares less the square of the mean would be lost: float32 tells 1e8 from 1e8 + 8 at best.
    x, weight, bias = values(1, 20, 16, 16, mean=1e4), values(20), values(20)
    x[:, :, 0, 0] = 0.0
    found = ops.group_norm(x, None, weight, bias, 2, 1e-5, False)
    # Half a bit of the mean is a millionth of this deviation.
    close(found, ops.group_norm(*wide(x, None, weight, bias), 2, 1e-5, False), torch.float32, times=2)
    x[:, :, 0, 0] = 1e4
    found = ops.group_norm(x, None, weight, bias, 2, 1e-5, False)
    # Here one bit of the mean is a thousandth of the deviation.
    close(found, ops.group_norm(*wide(x, None, weight, bias), 2, 1e-5, False), torch.float32, times=2000)


@both_ways
def test_other_memory_formats_and_weights_of_another_dtype() -> None:
    # As autocast hands them over.
    x, skip = values(2, 20, 6, 7, dtype=torch.bfloat16), values(2, 10, 6, 7)
    weight, bias = values(20), values(20)
    expected = ops.group_norm(*wide(x, None, weight, bias), 2, 1e-5, True)
    for given in (x, x.contiguous(), x.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)):
        close(ops.group_norm(given, None, weight, bias, 2, 1e-5, True), expected, torch.bfloat16)
    weight, bias = values(30), values(30)
    _, joined = ops.cat_group_norm(x, skip.contiguous(), weight, bias, 3, 1e-5, True)
    assert joined.dtype == torch.bfloat16
    torch.testing.assert_close(joined[:, 20:], skip.bfloat16())


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(("channels", "groups", "first"), [WIDTHS[i] for i in (0, 7, 8, 9, 10)])
def test_gradients(channels: int, groups: int, first: int, dtype: torch.dtype) -> None:
    for name, call in calls(channels, groups, first, dtype).items():
        if "shift" not in name or groups < channels:  # a shift of a whole group changes nothing
            check(call, alone=False, times=8.0)


def test_gradients_of_many_chunks_and_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # More than are put together at once, of both images one behind the other; and no pixel at all.
    monkeypatch.setattr(kernels, "GRADIENT_PROGRAMS", 10000)
    function, given = calls(20, 2, 10, torch.float32, (35, 16))["a shift with gaps"]
    check((function, given), alone=False, times=8.0)
    none = [each[:0].detach().requires_grad_() for each in given[:2]]
    out = function(*none, *given[2:])
    found = torch.autograd.grad(out, [*none, *given[2:]], torch.ones_like(out))
    assert out.shape == (0, 20, 35, 16) and not any(each.any() for each in found)
