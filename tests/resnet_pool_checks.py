"""The kernel of the stem's end against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernel_checks import DEVICE, MARKS, RELATIVE, kernels_run  # noqa: F401
from zoo.ops import batch_norm as pooling
from zoo.ops.batch_norm import Norm
from zoo.ops.triton import batch_norm as kernels
from zoo.ops.triton import tiles

pytestmark = MARKS
# Odd and even, one pixel, one line, one column; parts of tiles, several of them; channels of less and more than a tile.
SHAPES = [
    (2, 64, 7, 9), (3, 7, 1, 1), (1, 130, 8, 6), (2, 16, 1, 37), (1, 1, 5, 4), (2, 5, 34, 1), (1, 64, 20, 33),
]  # fmt: skip
IN_DTYPES = [(shape, dtype) for shape in SHAPES for dtype in RELATIVE]
EPS = 1e-5


@pytest.fixture(autouse=True)
def _several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    programs_of(monkeypatch, 3)


def programs_of(monkeypatch: pytest.MonkeyPatch, lines: int) -> None:
    """Let small sizes take this many lines a program, as large ones do."""
    monkeypatch.setattr(tiles, "ENOUGH", 1)
    monkeypatch.setattr(tiles, "MOST_TILES", lines)


def images(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """In channels_last, with equal values among them."""
    x = torch.randn(*shape).to(DEVICE, dtype)
    return torch.where(x.abs() < 0.2, 0.0, x).contiguous(memory_format=torch.channels_last)


def norm(channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, variance, weight of either sign and none, and bias [C]."""
    weight = torch.randn(channels)
    weight[::7] = 0.0
    given = torch.randn(channels), torch.rand(channels) + 0.5, weight, torch.randn(channels)
    mean, variance, weight, bias = (tensor.to(DEVICE, dtype) for tensor in given)
    return mean, variance, weight, bias


def norm_act_pool(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS) -> Tensor:
    return pooling.norm_act_pool(x, Norm(weight, bias, mean, variance, eps=eps))


def plain(x: Tensor, given: tuple[Tensor, ...]) -> Tensor:
    mean, variance, weight, bias = (tensor.double() for tensor in given)
    value = F.batch_norm(x.double(), mean, variance, weight, bias, False, 0.0, EPS)
    return F.max_pool2d(F.relu(value), 3, 2, 1)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found.double(), expected, rtol=RELATIVE[dtype], atol=2e-5)


@pytest.mark.parametrize("lines", [1, 3])
@pytest.mark.parametrize(("shape", "dtype"), IN_DTYPES, ids=str)
def test_norm_and_bias(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype, lines: int) -> None:
    programs_of(monkeypatch, lines)
    x = images(*shape, dtype=dtype)
    # Weights of the same dtype, and of float32 as under autocast.
    for kind in {dtype, torch.float32}:
        given = norm(shape[1], kind)
        close(norm_act_pool(x, *given), plain(x, given), dtype)
    bias = given[3].to(dtype)
    expected = F.max_pool2d(F.relu(x.double() + bias.double()[:, None, None]), 3, 2, 1)
    close(pooling.bias_act_pool(x, bias), expected, dtype)


@pytest.mark.parametrize("dtype", RELATIVE)
def test_nan_stays_in_its_windows(dtype: torch.dtype) -> None:
    x, given = images(2, 5, 9, 21, dtype=dtype), norm(5, dtype)
    # On a border of two lines and four columns of windows, in one alone, and beside what is infinite.
    x[0, 2, 3, 5] = x[0, 3, 0, 0] = x[1, 4, 8, 20] = x[1, 1, 4, 10] = torch.nan
    x[1, 1, 5, 10], x[1, 1, 3, 10] = torch.inf, -torch.inf
    for found, expected in (
        (norm_act_pool(x, *given), plain(x, given)),
        (pooling.bias_act_pool(x, given[3]), F.max_pool2d(x.double() + given[3].double()[:, None, None], 3, 2, 1)),
    ):
        assert expected.isnan().sum() == 4 + 1 + 1 + 1
        assert torch.equal(found.isnan(), expected.isnan())


def test_images_that_are_not_in_channels_last() -> None:
    given = norm(6)
    parts = images(2, 6, 18, 8)[:, :, ::2], images(3, 7, 9, 8)[1:, 1:]
    for x in (images(2, 6, 9, 8).contiguous(), images(2, 6, 8, 9).mT, *parts):
        close(norm_act_pool(x, *given), plain(x, given), torch.float32)


# --- models ---


if DEVICE == "cuda":

    def test_all_sizes_are_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
        import triton

        compiled: list[str] = []
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **about: compiled.append(about["repr"]))
        for shape in ((4, 64, 112, 112), (1, 64, 16, 16), (2, 128, 7, 9), (1, 64, 1, 1)):
            x = images(*shape, dtype=torch.bfloat16)
            # Dtypes that no other check has, so that all of it is compiled here.
            given = *norm(shape[1], torch.float16)[:2], *norm(shape[1], torch.bfloat16)[2:]
            norm_act_pool(x, *given)
        assert len(compiled) == 1, compiled

    if torch.cuda.mem_get_info()[0] > 24 * 2**30:

        def test_more_elements_than_32_bits_count() -> None:
            x = torch.randn(1, 2**18 + 1, 2**7, 65, device=DEVICE, dtype=torch.bfloat16).permute(0, 3, 1, 2)
            x = x.expand(2, -1, -1, -1).contiguous(memory_format=torch.channels_last)
            given = norm(65)
            out = norm_act_pool(x, *given)
            assert torch.equal(out[1:, :, -3:], norm_act_pool(x[1:, :, -7:], *given)[:, :, -3:])


# --- with gradients ---


def both_pools(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The output and the gradient of x, ours and torch's."""
    found = []
    for pool in (pooling.max_pool, lambda x: F.max_pool2d(x, 3, 2, 1)):
        given = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        out = pool(given)
        # Numbers whose sums are exact in any dtype.
        weights = torch.arange(out.numel(), device=x.device).remainder(7).view(out.shape).to(x.dtype)
        (grad,) = torch.autograd.grad(out, given, weights)
        found.append((out.detach(), grad))
    return found


@pytest.mark.parametrize("lines", [1, 3])
@pytest.mark.parametrize(("shape", "dtype"), IN_DTYPES, ids=str)
def test_pooling_chooses_and_gives_back_as_torch_does(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype, lines: int
) -> None:
    programs_of(monkeypatch, lines)
    # After a relu most windows have equals, and the first of them is chosen.
    x = images(*shape, dtype=dtype).relu()
    (out, grad), (expected, expected_grad) = both_pools(x)
    assert torch.equal(out, expected) and torch.equal(grad, expected_grad)
    assert out.is_contiguous(memory_format=torch.channels_last) and out.dtype == grad.dtype == dtype
    assert int(kernels.max_pool(x)[1].max()) < 9


def test_pooling_of_nan_and_infinity() -> None:
    x = images(2, 16, 9, 8)
    x[0, :, 3, 4], x[1, :, 1, 1], x[1, :, 5] = float("nan"), float("inf"), float("-inf")
    # Whole windows without a greatest, in corners, at edges and inside: the first pixel that there is.
    nothing = torch.full_like(x, float("-inf"))
    corner = images(1, 16, 9, 8)
    corner[:, :, :2, :2] = corner[:, :, 3:6, 3:6] = corner[:, :, 7:, 5:] = float("-inf")
    for given in (x, nothing, corner):
        out, grad = both_pools(given)[0]
        # As torch does on a CPU. On a GPU it gives the gradient of a window of nothing but minus infinity to nobody.
        expected, expected_grad = both_pools(given.cpu())[1]
        torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(grad.cpu(), expected_grad)


def test_pooling_of_other_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for name in ("max_pool", "max_pool_backward"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *given, name=name, kernel=kernel: (ran.append(name), kernel(*given))[1]
        )
    x = images(2, 8, 7, 6)
    for given in (x.contiguous(), x[:, :, 1:, 2:], x.transpose(2, 3)):
        (out, grad), (expected, expected_grad) = both_pools(given)
        assert torch.equal(out, expected) and torch.equal(grad, expected_grad)
    assert ran == ["max_pool", "max_pool_backward"] * 3
    assert pooling.max_pool(x[:0]).shape == (0, 8, 4, 3)
    with pytest.raises(ValueError, match="expected images"):
        kernels.max_pool(x[0])
