"""The kernels of the glue and of the stem's end against float64."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from tests import kernel_checks
from tests.kernel_checks import DEVICE, MARKS, RELATIVE, kernels_run, values  # noqa: F401
from tests.noted import noted
from zoo.ops import common
from zoo.ops import images as operators
from zoo.ops.images import Norm, bias_act, bias_act_pool, conv_norm_act, norm_act, norm_act_pool
from zoo.ops.triton import batch_norm as kernels
from zoo.ops.triton import decode

pytestmark = MARKS
close = functools.partial(kernel_checks.close, layout=torch.contiguous_format)
# Rows and channels: whole tiles, parts of them, one alone, wider than a tile, several tiles and chunks.
SIZES = [(64, 64), (100, 7), (1, 1), (1, 100), (200, 16), (50, 130)]
EPS = 1e-5


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other, and smaller tiles let small sizes have many."""
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "ENOUGH", 3)
        monkeypatch.setattr(kernels, "PROGRAMS", 9)
        cut_into(monkeypatch, 16, 64)


def cut_into(monkeypatch: pytest.MonkeyPatch, rows: int, channels: int) -> None:
    for name in ("APPLY", "GRADIENTS", "SUMS"):
        monkeypatch.setattr(kernels, name, {**getattr(kernels, name), "ROWS": rows, "BLOCK": channels})
    monkeypatch.setattr(kernels, "FINISH", {**kernels.FINISH, "ROWS": 8, "BLOCK": channels})


def norm(channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, variance, weight of either sign and none, and bias [C]."""
    weight = torch.randn(channels)
    weight[3::7] = 0.0
    given = torch.randn(channels), torch.rand(channels) + 0.5, weight, torch.randn(channels)
    mean, variance, weight, bias = (tensor.to(DEVICE, dtype) for tensor in given)
    return mean, variance, weight, bias


def reference(x: Tensor, given: tuple[Tensor, ...], of_batch: bool) -> Tensor:
    mean, variance, weight, bias = (tensor.double() for tensor in given)
    if of_batch:
        return F.batch_norm(x.double(), None, None, weight, bias, True, 0.0, EPS)
    return F.batch_norm(x.double(), mean, variance, weight, bias, False, 0.0, EPS)


def as_norm(given: tuple[Tensor, ...], of_batch: bool = False) -> Norm:
    mean, variance, weight, bias = given
    return Norm(weight, bias, None if of_batch else mean, None if of_batch else variance, None, of_batch, 0.0, EPS)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(("rows", "channels"), SIZES)
def test_norm_and_bias_with_all_that_follows(rows: int, channels: int, dtype: torch.dtype) -> None:
    x, more = values(rows, channels, dtype=dtype), values(rows, channels, dtype=dtype, mean=0.5)
    # Weights of the same dtype, and of float32 as under autocast.
    for kind in {dtype, torch.float32}:
        given, other = norm(channels, kind), norm(channels, kind)
        own = reference(x, given, False)
        close(norm_act(x, as_norm(given)), own.relu(), dtype)
        close(norm_act(x, as_norm(given), more), (own + more.double()).relu(), dtype)
        found = norm_act(x, as_norm(given), more, as_norm(other))
        close(found, (own + reference(more, other, False)).relu(), dtype, times=2)
    bias = values(channels, dtype=dtype)
    close(bias_act(x, bias), (x.double() + bias.double()).relu(), dtype)
    close(bias_act(x, bias, more), (x.double() + bias.double() + more.double()).relu(), dtype)


@pytest.mark.skipif(DEVICE == "cuda" and not common.has_tma(torch.device("cuda")), reason="needs Hopper's TMA")
@pytest.mark.parametrize(("inputs", "channels"), [(64, 64), (8, 48), (200, 144), (256, 4096)])
def test_a_convolution_of_single_pixels_ends_in_the_norm(inputs: int, channels: int, monkeypatch) -> None:
    monkeypatch.setattr(common, "has_tma", lambda device: True)
    launched = noted(monkeypatch, kernels, "product_norm_act")
    half = torch.bfloat16
    conv = torch.nn.Conv2d(inputs, channels, 1, bias=False).to(DEVICE, half).requires_grad_(False)
    x, more = (values(3, wide, 9, 10, dtype=half).to(memory_format=torch.channels_last) for wide in (inputs, channels))
    given, other = norm(channels, half), norm(channels, torch.float32)
    product = F.conv2d(x.double(), conv.weight.double())
    own = reference(product, given, False)
    for found, expected in (
        (conv_norm_act(x, conv, as_norm(given)), own),
        (conv_norm_act(x, conv, as_norm(given), more), own + more.double()),
        (conv_norm_act(x, conv, as_norm(given), more, as_norm(other)), own + reference(more, other, False)),
    ):
        kernel_checks.close(found, expected.relu(), half, layout=torch.channels_last)
    assert len(launched) == 3
    # Batch statistics need the product, and so do gradients, hooks and other residuals.
    conv_norm_act(x, conv, as_norm(given, True))
    conv_norm_act(x.clone().requires_grad_(), conv, as_norm(given))
    conv_norm_act(x, conv, as_norm(given), more.float())
    for layout in (torch.channels_last, torch.contiguous_format):  # of one image the second is a view that is turned
        conv_norm_act(x[:1].contiguous(memory_format=layout), conv, as_norm(given), more[:1].contiguous())
        conv_norm_act(x[:1, :, :1, :1].contiguous(memory_format=layout), conv, as_norm(given))
    with pytest.raises(ValueError, match="residual has shape"):
        conv_norm_act(x, conv, as_norm(given), more[:1])
    with pytest.raises(RuntimeError, match="expected input"):
        conv_norm_act(x[:, ::2], conv, as_norm(given))
    biased = torch.nn.Conv2d(inputs, channels, 1).to(DEVICE, half).requires_grad_(False)
    expected = reference(F.conv2d(x.double(), biased.weight.double(), biased.bias.double()), given, False).relu()
    kernel_checks.close(conv_norm_act(x, biased, as_norm(given)), expected, half, layout=torch.channels_last)
    heard: list[int] = []
    conv.register_forward_hook(lambda *_: heard.append(1))
    conv_norm_act(x, conv, as_norm(given))
    assert len(launched) == 3 and heard == [1]


@pytest.mark.skipif(DEVICE == "cuda" and not common.has_tma(torch.device("cuda")), reason="needs Hopper's TMA")
@pytest.mark.parametrize(("size", "stride"), [((7, 7), 1), ((7, 8), 2), ((1, 1), 1), ((64, 1), 1)])
def test_a_convolution_of_few_pixels_is_a_product_of_a_few_rows(size, stride: int, monkeypatch) -> None:
    monkeypatch.setattr(common, "has_tma", lambda device: True)
    launched, half = noted(monkeypatch, decode, "linear"), torch.bfloat16
    conv = torch.nn.Conv2d(48, 80, 3, stride, 1).to(DEVICE, half, memory_format=torch.channels_last)  # type: ignore[call-overload]
    conv.requires_grad_(False)
    x = values(1, 48, *size, dtype=half).to(memory_format=torch.channels_last)
    product = F.conv2d(x.double(), conv.weight.double(), conv.bias.double(), stride, 1)
    more, given = values(*product.shape, dtype=half).to(memory_format=torch.channels_last), norm(80, half)
    close_images(operators.conv_bias_act(x, conv, more), (product + more.double()).relu(), half)
    bias, conv.bias = conv.bias, None
    own = reference(product - bias.double()[:, None, None], given, False)
    close_images(conv_norm_act(x, conv, as_norm(given), more), (own + more.double()).relu(), half, times=2)
    assert len(launched) == 2
    # Several images are a convolution, and so are groups, other paddings and what learns.
    conv_norm_act(x.repeat(2, 1, 1, 1), conv, as_norm(given))
    conv_norm_act(x.clone().requires_grad_(), conv, as_norm(given))
    conv.bias = torch.nn.Parameter(bias.detach())
    conv_norm_act(x, conv, as_norm(given)).sum().backward()
    assert conv.bias.grad is not None
    conv.bias = None
    with pytest.raises(RuntimeError, match="channels"):
        conv_norm_act(x[:, ::3], conv, as_norm(given))
    for options in ({"padding": 2, "dilation": 2}, {"padding": 1, "groups": 2}):
        other = torch.nn.Conv2d(48, 80, 3, bias=False, **options).to(DEVICE, half).requires_grad_(False)
        conv_norm_act(x, other, as_norm(given))
    assert len(launched) == 2


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("shape", [(1, 128, 7, 7), (3, 70, 5, 9), (70, 16, 1, 1), (1, 16, 9, 8)])
def test_a_product_of_means(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = values(*shape, dtype=dtype, mean=0.5)
    layer = torch.nn.Linear(shape[1], 10).to(DEVICE, dtype).requires_grad_(False)
    expected = F.linear(x.double().mean((2, 3)), layer.weight.double(), layer.bias.double())
    for each in (x, x.to(memory_format=torch.channels_last)):
        kernel_checks.close(kernels.mean(each), x.double().mean((2, 3)), dtype)
        close(operators.mean_linear(each, layer), expected, dtype, times=2)
    layer.bias.requires_grad_()
    operators.mean_linear(x, layer).sum().backward()
    assert layer.bias.grad.eq(shape[0]).all()


def test_rows_that_are_not_contiguous_images_empty_rows_and_other_dtypes() -> None:
    x, more, given = values(20, 11).t(), values(11, 40)[:, ::2], norm(20)
    expected = (reference(x, given, False) + more.double()).relu()
    close(norm_act(x, as_norm(given), more), expected, torch.float32)
    x, more = values(2, 20, 3, 5), values(2, 20, 3, 5).contiguous(memory_format=torch.channels_last)
    found = norm_act(x, as_norm(given), more)
    assert found.is_contiguous(memory_format=torch.channels_last)
    close(found.contiguous(), (reference(x, given, False) + more.double()).relu(), torch.float32)
    given = norm(5)
    assert norm_act(values(0, 5), as_norm(given)).shape == (0, 5)
    x, wide = values(3, 5, dtype=torch.bfloat16), values(3, 5)
    assert norm_act(x, as_norm(given), wide).dtype == torch.float32
    doubles = tuple(tensor.double() for tensor in given)
    assert norm_act(x.double(), as_norm(doubles)).dtype == torch.float64


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"residual": (3, 5)}, r"residual has shape \(3, 5\) on .*, expected that of x, \(4, 5\)"),
        ({"weight": (4,)}, r"weight has shape \(4,\) and stride \(1,\) on .*, expected \(5,\)"),
        ({"x": (4, 5, 1)}, r"x has shape \(4, 5, 1\), expected rows \[R, C\]"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_named(changes: dict[str, tuple[int, ...]], words: str) -> None:
    shapes = {"x": (4, 5), "mean": (5,), "variance": (5,), "weight": (5,), "bias": (5,), "residual": (4, 5)}
    x, *given, residual = (values(*shape) for shape in (shapes | changes).values())
    with pytest.raises(ValueError, match=words):
        norm_act(x, as_norm(tuple(given)), residual)
    with pytest.raises(ValueError, match=r"running_mean has shape \(5,\) and stride \(2,\) on"):
        norm_act(values(4, 5), as_norm((values(10)[::2], *(values(5) for _ in range(3)))))


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.batch_statistics(x, None, None, None, 0.0)


def moved(old: Tensor, towards: Tensor, momentum: float) -> Tensor:
    return old.double() * (1 - momentum) + towards * momentum


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(("rows", "channels"), [size for size in SIZES if size[0] > 1] + [(2, 3)])
def test_statistics(rows: int, channels: int, dtype: torch.dtype) -> None:
    x = values(rows, channels, dtype=dtype, mean=2.0)
    variance, mean = torch.var_mean(x.double(), dim=0)
    for kept in {torch.float32, dtype}:
        running = [values(channels, dtype=kept), values(channels, dtype=kept, mean=2.0)]
        before = [tensor.clone() for tensor in running]
        batches = torch.tensor(3, device=DEVICE)
        found = kernels.batch_statistics(x, *running, batches, 0.3)
        assert int(batches) == 4
        close(found[0], mean, torch.float32)
        close(found[1], variance * ((rows - 1) / rows), torch.float32, times=2)
        close(running[0], moved(before[0], mean, 0.3), kept)
        close(running[1], moved(before[1], variance, 0.3), kept, times=2)
    for got, wanted in zip(statistics(x), found, strict=True):
        assert torch.equal(got, wanted)


def test_statistics_of_one_row_are_refused_and_so_are_those_that_were_moved_before_a_backward() -> None:
    for shape in ((1, 3), (1, 3, 1, 1)):
        with pytest.raises(ValueError, match="one row has no variance; give more, or use model.eval"):
            statistics(values(*shape))
    x, given = values(20, 5).requires_grad_(), norm(5)
    out = norm_act(x, as_norm(given))
    kernels.batch_statistics(x.detach(), *given[:2], None, 0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    with torch.inference_mode():
        kernels.batch_statistics(values(20, 5), *norm(5)[:2], None, 0.1)


def test_a_mean_far_from_zero_costs_no_variance() -> None:
    # The mean of squares less the square of the mean would be lost: float32 tells 1e8 from 1e8 + 8 at best. One row
    # that is far off, the first of all, would spoil sums about it as well.
    for outlier in (None, 0.0):
        x = values(200, 20, mean=1e4)
        if outlier is not None:
            x[0] = outlier
        mean, variance = statistics(x)
        close(mean, x.double().mean(0), torch.float32)
        # One bit of the mean is a thousandth of the deviation.
        close(variance, x.double().var(0, correction=0), torch.float32, times=200)


@pytest.mark.parametrize("of_batch", [True, False], ids=["statistics of the batch", "running statistics"])
@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(("rows", "channels"), [size for size in SIZES if size[0] > 1])
def test_gradients(rows: int, channels: int, dtype: torch.dtype, of_batch: bool) -> None:
    x, more, grad = (values(rows, channels, dtype=dtype, mean=mean) for mean in (0.5, -0.5, 0.2))
    for kind in {dtype, torch.float32}:
        given, other = norm(channels, kind), norm(channels, kind)
        for name in ("norm", "residual", "shortcut"):
            mine = [tensor.detach().clone().requires_grad_() for tensor in (x, more, *given[2:], *other[2:])]
            out = norm_act(
                mine[0], as_norm((*given[:2], *mine[2:4]), of_batch), None if name == "norm" else mine[1],
                as_norm((*other[:2], *mine[4:]), of_batch) if name == "shortcut" else None,
            )  # fmt: skip
            found = torch.autograd.grad(out, mine, grad, allow_unused=True)
            exact = [tensor.detach().double().requires_grad_() for tensor in mine]
            value = reference(exact[0], (*given[:2], *exact[2:4]), of_batch)
            if name == "residual":
                value = value + exact[1]
            elif name == "shortcut":
                value = value + reference(exact[1], (*other[:2], *exact[4:]), of_batch)
            # Where rounding decides on which side of zero a value is, it decides for both.
            keep = value > 0 if name == "norm" else out > 0
            wanted = torch.autograd.grad(value, exact, grad.double() * keep, allow_unused=True)
            for index, (got, right) in enumerate(zip(found, wanted, strict=True)):
                assert (got is None) == (right is None)
                if got is not None:
                    close(got, right, dtype if index < 2 else kind, times=8)


def test_the_same_bits_every_time() -> None:
    x, more, grad, given, other = values(100, 70), values(100, 70), values(100, 70), norm(70), norm(70)

    def everything() -> list[Tensor]:
        running = [given[0].clone(), given[1].clone()]
        found = kernels.batch_statistics(x, *running, None, 0.1)
        tensors = x, (*found, *given[2:]), more, other
        out = kernels.norm_act(*tensors, EPS)
        return [*running, *found, out, *kernels.norm_act_backward(grad, *tensors, out, EPS, True, True)]

    first = everything()
    for _ in range(2):
        assert all(torch.equal(got, wanted) for got, wanted in zip(everything(), first, strict=True))


@pytest.mark.parametrize("of", ["batch", "frozen", "no running statistics", "evaluation"])
def test_a_model_learns_as_without_kernels(monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    if DEVICE == "cpu":
        cut_into(monkeypatch, 64, 512)
    changes = {"norm": "frozen"} if of == "frozen" else {"track_running_stats": of != "no running statistics"}
    model = zoo.create("resnet-debug", device=DEVICE, layers=(1, 1, 1, 1), **changes)
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2.0)
    model.train(of != "evaluation")
    images = torch.randn(4, 3, 33, 20, device=DEVICE)
    found = {}
    for kernels_on in (True, False):
        if not kernels_on:
            monkeypatch.setattr(operators, "kernels_run", lambda *_: False)
        own = copy.deepcopy(model)
        out = own(images)
        (out * torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)).sum().backward()
        found[kernels_on] = [out.detach(), *(p.grad for p in own.parameters()), *own.buffers()]
    for got, wanted in zip(found[True], found[False], strict=True):
        assert (got.double() - wanted.double()).norm() <= 1e-3 * wanted.double().norm() + 1e-5


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(
    ("shape", "arguments"),
    [((2, 3, 9, 10), (4, 8, 8, 16)), ((4, 3, 7, 7), (1, 4, 4, 16)), ((2, 1, 30, 31), (4, 18, 19, 8))],
)
def test_squares_of_pixels(shape: tuple[int, ...], arguments: tuple[int, ...], dtype: torch.dtype) -> None:
    x = values(*shape, dtype=dtype)
    expected = operators.space_to_depth(x.double(), *arguments, torch.float64)  # float64 is torch's own
    for images in (x, x.contiguous(memory_format=torch.channels_last), x.mT.contiguous().mT):
        found = operators.space_to_depth(images, *arguments, dtype)
        assert found.dtype == dtype and found.stride() == expected.stride()
        assert torch.equal(found.double(), expected)


# Odd and even, one pixel, one line, one column; parts of tiles, several of them; channels of less and more than a tile.
SHAPES = [
    (2, 64, 7, 9), (3, 7, 1, 1), (1, 130, 8, 6), (2, 16, 1, 37), (1, 1, 5, 4), (2, 5, 34, 1), (1, 64, 20, 33),
]  # fmt: skip
IN_DTYPES = [(shape, dtype) for shape in SHAPES for dtype in RELATIVE]


def programs_of(monkeypatch: pytest.MonkeyPatch, lines: int) -> None:
    """Let small sizes take this many lines a program, as large ones do."""
    monkeypatch.setattr(kernels, "ENOUGH", 1)
    monkeypatch.setattr(kernels, "MOST_TILES", lines)


def images(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(*shape).to(DEVICE, dtype)
    return torch.where(x.abs() < 0.2, 0.0, x).contiguous(memory_format=torch.channels_last)


def pooled(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2, 1)


close_images = functools.partial(kernel_checks.close, layout=torch.channels_last)


@pytest.mark.parametrize("lines", [1, 3])
@pytest.mark.parametrize(("shape", "dtype"), IN_DTYPES, ids=str)
def test_norm_and_bias_before_a_pool(monkeypatch, shape, dtype, lines):
    programs_of(monkeypatch, lines)
    x = images(*shape, dtype=dtype)
    # Weights of the same dtype, and of float32 as under autocast.
    for kind in {dtype, torch.float32}:
        given = norm(shape[1], kind)
        close_images(norm_act_pool(x, as_norm(given)), pooled(reference(x, given, False).relu()), dtype)
    bias = given[3].to(dtype)
    expected = pooled(F.relu(x.double() + bias.double()[:, None, None]))
    close_images(bias_act_pool(x, bias), expected, dtype)


@pytest.mark.parametrize("dtype", RELATIVE)
def test_nan_stays_in_its_windows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    programs_of(monkeypatch, 3)
    x, given = images(2, 5, 9, 21, dtype=dtype), norm(5, dtype)
    # On a border of two lines and four columns of windows, in one alone, and beside what is infinite.
    x[0, 2, 3, 5] = x[0, 3, 0, 0] = x[1, 4, 8, 20] = x[1, 1, 4, 10] = torch.nan
    x[1, 1, 5, 10], x[1, 1, 3, 10] = torch.inf, -torch.inf
    for found, expected in (
        (norm_act_pool(x, as_norm(given)), pooled(reference(x, given, False).relu())),
        (bias_act_pool(x, given[3]), pooled(x.double() + given[3].double()[:, None, None])),
    ):
        assert expected.isnan().sum() == 4 + 1 + 1 + 1
        assert torch.equal(found.isnan(), expected.isnan())


def test_norms_and_pools_of_other_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    programs_of(monkeypatch, 3)
    given = norm(6)
    parts = images(2, 6, 18, 8)[:, :, ::2], images(3, 7, 9, 8)[1:, 1:]
    for x in (images(2, 6, 9, 8).contiguous(), images(2, 6, 8, 9).mT, *parts):
        close_images(norm_act_pool(x, as_norm(given)), pooled(reference(x, given, False).relu()), torch.float32)
    forward, backward = (noted(monkeypatch, kernels, name) for name in ("max_pool", "max_pool_backward"))
    x = images(2, 8, 7, 6)
    for given in (x.contiguous(), x[:, :, 1:, 2:], x.transpose(2, 3)):
        (out, grad), (expected, expected_grad) = both_pools(given)
        assert torch.equal(out, expected) and torch.equal(grad, expected_grad)
    assert len(forward) == len(backward) == 3
    assert operators.max_pool(x[:0]).shape == (0, 8, 4, 3)


def both_pools(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    found = []
    for pool in (operators.max_pool, pooled):
        given = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        out = pool(given)
        # Numbers whose sums are exact in any dtype.
        weights = torch.arange(out.numel(), device=x.device).remainder(7).view(out.shape).to(x.dtype)
        (grad,) = torch.autograd.grad(out, given, weights)
        found.append((out.detach(), grad))
    return found


@pytest.mark.parametrize("lines", [1, 3])
@pytest.mark.parametrize(("shape", "dtype"), IN_DTYPES, ids=str)
def test_pooling_chooses_and_gives_back_as_torch_does(monkeypatch, shape, dtype, lines):
    programs_of(monkeypatch, lines)
    # After a relu most windows have equals, and the first of them is chosen.
    x = images(*shape, dtype=dtype).relu()
    (out, grad), (expected, expected_grad) = both_pools(x)
    assert torch.equal(out, expected) and torch.equal(grad, expected_grad)
    assert out.is_contiguous(memory_format=torch.channels_last) and out.dtype == grad.dtype == dtype
    assert int(kernels.max_pool(x)[1].max()) < 9


def test_pooling_of_nan_and_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    programs_of(monkeypatch, 3)
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


if DEVICE == "cuda":

    def test_all_stages_are_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
        import triton

        compiled: list[str] = []
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **about: compiled.append(about["repr"]))
        for rows, channels in ((401_408, 64), (100_352, 128), (3136, 2048), (49, 512), (2, 64)):
            x = values(rows, channels, dtype=torch.bfloat16)
            # Dtypes that no other check has, so that all of it is compiled here.
            given = *norm(channels, torch.float16)[:2], *norm(channels, torch.bfloat16)[2:]
            kernels.norm_act_backward(x, x, given, None, kernels.NO_NORM, x, EPS, True, True)
            norm_act(x, as_norm(given), x)
        for shape in ((4, 64, 112, 112), (1, 64, 16, 16), (2, 128, 7, 9), (1, 64, 1, 1)):
            given = *norm(shape[1], torch.float16)[:2], *norm(shape[1], torch.bfloat16)[2:]
            norm_act_pool(images(*shape, dtype=torch.bfloat16), as_norm(given))
        names = [text.partition("[")[0] for text in compiled]
        assert sorted(set(names)) == sorted(names), compiled
        assert {"_apply", "_sums", "_gradients"} <= set(names), compiled

    if torch.cuda.mem_get_info()[0] > 24 * 2**30:

        def test_more_elements_than_32_bits_count() -> None:
            x, given = torch.randn(2**25 + 3, 65, device=DEVICE, dtype=torch.bfloat16), norm(65)
            out = norm_act(x, as_norm(given))
            assert torch.equal(out[-99:], norm_act(x[-99:], as_norm(given)))
            del out
            rest = (given, None, kernels.NO_NORM, None, EPS, False, False)
            grad_x, *_ = kernels.norm_act_backward(x, x, *rest)
            wanted, *_ = kernels.norm_act_backward(x[-99:], x[-99:], *rest)
            assert torch.equal(grad_x[-99:], wanted)
            mean, variance = statistics(x)
            assert mean.abs().max() < 1e-2 and (variance - 1).abs().max() < 1e-2
            del x
            image = torch.randn(1, 2**18 + 1, 2**7, 65, device=DEVICE, dtype=torch.bfloat16).permute(0, 3, 1, 2)
            image = image.expand(2, -1, -1, -1).contiguous(memory_format=torch.channels_last)
            out = norm_act_pool(image, as_norm(given))
            assert torch.equal(out[1:, :, -3:], norm_act_pool(image[1:, :, -7:], as_norm(given))[:, :, -3:])
