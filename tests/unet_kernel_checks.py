"""The kernels of UNets against float64: group norms, the glue, and attention to few keys."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from tests import kernel_checks
from tests.blocks import graphs_of
from tests.kernel_checks import DEVICE, MARKS, RELATIVE, in_float64, kernels_run  # noqa: F401
from tests.noted import noted
from tests.operator_checks import Call, check, tensors
from zoo.ops import common, transformer
from zoo.ops import images as ops
from zoo.ops.transformer import add_norm, gated_gelu, gated_gelu_product, layer_norm, short_attention
from zoo.ops.triton import attention as attention_kernels
from zoo.ops.triton import group_norm, tiles
from zoo.ops.triton import group_norm as kernels
from zoo.ops.triton import norms as norm_kernels

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
def _as_a_hopper_with_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other, and reads by TMA, as a Hopper does."""
    if DEVICE == "cpu":
        monkeypatch.setattr(common, "has_tma", lambda device: True)
        monkeypatch.setattr(kernels, "ENOUGH", 6)
        monkeypatch.setattr(kernels, "GRADIENT_PROGRAMS", 24)


@pytest.fixture(params=["one launch", "two launches"])
def _ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to a norm, whatever the image would take."""
    monkeypatch.setattr(kernels, "PIXELS", 1 << 30 if request.param == "one launch" else 0)


both_ways = pytest.mark.usefixtures("_ways")


def values(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> Tensor:
    drawn = kernel_checks.values(*shape, dtype=dtype, mean=mean)
    return drawn.contiguous(memory_format=torch.channels_last) if drawn.dim() == 4 else drawn


def contiguous(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


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
        close(found, ops.group_norm(*in_float64(x, None, weight, bias), 2, 1e-5, True), torch.float32)


@pytest.mark.parametrize("pixels", [1, 7, 64, 300 if DEVICE == "cpu" else 1000])
@pytest.mark.parametrize("size", [1, 3, 10, 30, 60, 80])
def test_one_launch_of_some_tiles(size: int, pixels: int) -> None:
    # Means that differ from channel to channel are most of a group's deviation.
    x, shift = values(2, 2 * size, pixels, 1), values(2, 2 * size, mean=-3.0)
    weight, bias = values(2 * size), values(2 * size)
    for dtype in RELATIVE if DEVICE == "cuda" else [list(RELATIVE)[(size + pixels) % 3]]:
        given = [tensor.to(dtype) for tensor in (x, shift, weight, bias)]
        # One number has no deviation, and what is not there would be as many away as the interpreter warns of.
        silu = pixels * size > 1
        found = ops.group_norm(*given, 2, 1e-5, silu)
        close(found, ops.group_norm(*in_float64(*given), 2, 1e-5, silu), dtype)
    # Two images as one.
    halves = [part.contiguous(memory_format=torch.channels_last) for part in x.split(size, dim=1)]
    found, joined = ops.cat_group_norm(*halves, weight, bias, 2, 1e-5, False)
    assert torch.equal(joined, x)
    torch.testing.assert_close(found, ops.group_norm(x, None, weight, bias, 2, 1e-5, False))


@both_ways
def test_a_mean_far_from_zero_costs_no_variance() -> None:
    # The mean of squares less the square of the mean would be lost: float32 tells 1e8 from 1e8 + 8 at best.
    x, weight, bias = values(1, 20, 16, 16, mean=1e4), values(20), values(20)
    x[:, :, 0, 0] = 0.0
    found = ops.group_norm(x, None, weight, bias, 2, 1e-5, False)
    # Half a bit of the mean is a millionth of this deviation.
    close(found, ops.group_norm(*in_float64(x, None, weight, bias), 2, 1e-5, False), torch.float32, times=2)
    x[:, :, 0, 0] = 1e4
    found = ops.group_norm(x, None, weight, bias, 2, 1e-5, False)
    # Here one bit of the mean is a thousandth of the deviation.
    close(found, ops.group_norm(*in_float64(x, None, weight, bias), 2, 1e-5, False), torch.float32, times=2000)


@both_ways
def test_other_memory_formats_and_weights_of_another_dtype() -> None:
    # As autocast hands them over.
    x, skip = values(2, 20, 6, 7, dtype=torch.bfloat16), values(2, 10, 6, 7)
    weight, bias = values(20), values(20)
    expected = ops.group_norm(*in_float64(x, None, weight, bias), 2, 1e-5, True)
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


close_rows = functools.partial(kernel_checks.close, layout=torch.contiguous_format)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("shape", [(2, 5, 12, 40), (1, 1, 1, 320), (3, 4, 1, 7), (1, 2, 3, 64)])
def test_windows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = kernel_checks.values(*shape, dtype=dtype)
    image = x.permute(0, 3, 1, 2)
    for stride in (1, 2):
        around = F.unfold(image.float(), 3, padding=1, stride=stride).unflatten(1, (-1, 9)).permute(0, 3, 2, 1)
        assert torch.equal(tiles.windows(x, stride).float(), around.reshape(-1, 9 * x.shape[3]))


# Rows, channels, width inside: whole tiles of both; less than one of each; what divides neither.
PRODUCTS = [(256, 64, 128), (5, 8, 8), (130, 72, 136), (128, 640, 64)]
DESCRIBED = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DESCRIBED)
@pytest.mark.parametrize(("rows", "channels", "inner"), PRODUCTS)
def test_products_are_gated_on_the_way(rows, channels, inner, dtype, monkeypatch):
    monkeypatch.setattr(transformer, "LEAST_ROWS", 1)
    x = kernel_checks.values(rows, channels, dtype=dtype)
    weight, bias = (
        kernel_checks.values(2 * inner, channels, dtype=dtype, scale=channels**-0.5),
        kernel_checks.values(2 * inner, dtype=dtype),
    )
    found = gated_gelu_product(x, weight, bias)
    # One launch, where the GPU is of the kind.
    alone = tiles.product(x, weight, bias, "gated") if common.has_tma(x.device) else None
    assert alone is None or torch.equal(found, alone)
    close_rows(found, gated_gelu(F.linear(x.double(), weight.double()), bias.double()), dtype)


@pytest.mark.skipif(DEVICE == "cuda" and not common.has_tma(torch.device("cuda")), reason="needs Hopper's TMA")
@pytest.mark.parametrize("count", [None, 0, 1, 128, 200])
@pytest.mark.parametrize("activation", ["", "gelu", "tanh"])
def test_products_add_a_bias_and_activate_the_real_rows_on_the_way(activation: str, count: int | None) -> None:
    shapes = (300, 72), (136, 72), (136,)
    x, weight, bias = (kernel_checks.values(*shape, dtype=torch.bfloat16, scale=0.3) for shape in shapes)
    real = None if count is None else torch.tensor([count], dtype=torch.int32, device=DEVICE)
    exact = F.linear(x.double(), weight.double(), bias.double())
    if activation:
        exact = F.gelu(exact, approximate="tanh" if activation == "tanh" else "none")
    found = transformer.product(x.view(3, 100, 72), weight, bias, activation, real).flatten(0, 1)
    close_rows(found[:count], exact[:count], x.dtype)


def test_products_that_the_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "product", None)
    monkeypatch.setattr(transformer, "LEAST_ROWS", 64)
    half = torch.bfloat16
    weight, bias = kernel_checks.values(32, 24, dtype=half), kernel_checks.values(32, dtype=half)
    few = kernel_checks.values(transformer.LEAST_ROWS - 1, 24, dtype=half)
    shifted = kernel_checks.values(64 * 24 + 1, dtype=half)[1:].view(64, 24)
    wide = kernel_checks.values(64, 24)
    for x, w, b in (
        (few, weight, bias), (shifted, weight, bias), (wide, weight.float(), bias.float()),
        (kernel_checks.values(64, 20, dtype=half), weight[:, :20].contiguous(), bias),
        (kernel_checks.values(64, 24, dtype=half), weight[:12], bias[:12]),
    ):  # fmt: skip
        close_rows(gated_gelu_product(x, w, b), gated_gelu(F.linear(x, w).double(), b.double()), x.dtype)


def test_a_mean_far_from_zero_costs_a_layer_norm_no_variance_and_wide_rows_run_without_kernels(monkeypatch):
    x, weight, bias = kernel_checks.values(3, 320, mean=1e4), kernel_checks.values(320), kernel_checks.values(320)
    found = layer_norm(x, weight, bias, 1e-5)
    # One bit of the mean is a thousandth of the deviation, and the mean of 320 is within some of them.
    close_rows(found, layer_norm(x.double(), weight.double(), bias.double(), 1e-5), torch.float32, times=1000)
    x[:] = 3.0
    assert torch.equal(layer_norm(x, weight, bias, 1e-5), bias.expand(3, -1))
    monkeypatch.setattr(norm_kernels, "norm", lambda *_, **__: pytest.fail("a kernel ran"))
    x, weight, bias = kernel_checks.values(3, 8193), kernel_checks.values(8193), kernel_checks.values(8193)
    with torch.no_grad():
        found = layer_norm(x, weight, bias, 1e-5)
        torch.testing.assert_close(found, F.layer_norm(x, (8193,), weight, bias))
        torch.testing.assert_close(add_norm(x, x, weight, bias, None, 1e-5)[1], layer_norm(x + x, weight, bias, 1e-5))


def test_a_model_predicts_as_without_kernels_in_as_many_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_norm, "ENOUGH", 6)
    model = zoo.create("unet-debug", device=DEVICE, norm_num_groups=2)
    inputs = zoo.example_inputs(model, size=8, tokens=5)
    needed = zoo.find_regions(model, kwargs=inputs).graphs_needed
    with torch.inference_mode():
        found = [model(**inputs).sample]
        if DEVICE != "cpu":  # the compiler does not look into the interpreter
            zoo.compile_regions(model)
            with zoo.enforce_budget(model):
                found.append(model(**inputs).sample)
            assert sum(graphs_of(model).values()) == needed
            zoo.uncompile(model)
    monkeypatch.setattr(common, "triton_runs_on", lambda device: False)
    with torch.inference_mode():
        expected = model(**inputs).sample
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)


# Queries, keys, heads and their width. A text and the pixels of a small image, at the models' widths of heads; one key;
# whole tiles and one number more; a width that no power of two is.
ATTENDED = [(70, 77, 2, 40), (64, 64, 1, 160), (9, 128, 2, 80), (65, 1, 3, 64), (1, 65, 1, 8), (3, 100, 1, 24)]


def heads(*shape: int, dtype: torch.dtype = torch.float16, scale: float = 1.0) -> Tensor:
    return kernel_checks.values(*shape, dtype=dtype, scale=scale)


def attends(found: Tensor, query: Tensor, key: Tensor, value: Tensor) -> None:
    expected = short_attention(query.double(), key.double(), value.double())
    close_rows(found, expected, query.dtype, 6e-3 if query.dtype == torch.bfloat16 else 1.5e-3)


@pytest.mark.parametrize("dtype", DESCRIBED)
@pytest.mark.parametrize(("queries", "keys", "count", "width"), ATTENDED)
def test_attends(queries: int, keys: int, count: int, width: int, dtype: torch.dtype) -> None:
    query = heads(2, queries, count, width, dtype=dtype, scale=2.0)
    key, value = (heads(2, keys, count, width, dtype=dtype) for _ in range(2))
    attends(short_attention(query, key, value), query, key, value)


@pytest.mark.parametrize("dtype", DESCRIBED)
def test_attends_in_packed_rows(dtype: torch.dtype) -> None:
    lengths = [70, 0, 1, 129, 64]
    # What lies behind the last row is left out.
    query, key, value = heads(sum(lengths) + 9, 3, 2, 24, dtype=dtype, scale=2.0).unbind(1)
    offsets = torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    found = transformer.packed_attention(query, key, value, offsets, 140).split([*lengths, 9])
    for row, *given in zip(found, *(each.split([*lengths, 9]) for each in (query, key, value)), strict=True):
        if row is not found[-1] and len(row):
            attends(row, *(each[None] for each in given))


def test_reads_heads_where_they_lie_in_a_product() -> None:
    query, key, value = heads(2, 65, 3, 2, 40).unbind(2)
    found = short_attention(query, key, value)
    attends(found, query, key, value)
    # Nothing is copied, and what has other strides is.
    assert all(attention_kernels._in_vectors(each) is each for each in (query, key, value))
    scattered = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key, value)]
    assert torch.equal(short_attention(*scattered), found)
    shifted = heads(2 * 65 * 80 + 1)[1:].view(2, 65, 2, 40)
    attends(short_attention(shifted, key, value), shifted, key, value)


def test_scores_far_apart_neither_overflow_nor_vanish_and_no_queries_are_none() -> None:
    query, key = heads(1, 4, 1, 16, scale=40.0), heads(1, 120, 1, 16, scale=40.0)
    attends(short_attention(query, key, key), query, key, key)
    # All keys alike, and far below zero.
    key = -query[:, :1].expand(1, 100, 1, 16)
    value = heads(1, 100, 1, 16)
    found = short_attention(query[:, :1], key, value)
    torch.testing.assert_close(found, value.mean(1).flatten(1), rtol=2e-3, atol=2e-3)
    key = heads(2, 77, 2, 40)
    assert short_attention(key[:, :0], key, key).shape == (0, 80)
    assert short_attention(key[:0], key[:0], key[:0]).shape == (0, 80)


def test_when_the_kernel_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = noted(monkeypatch, attention_kernels, "short_attention")
    query, key = heads(2, 5, 2, 16), heads(2, 7, 2, 16)
    attends(short_attention(query, key, key, None), query, key, key)
    assert len(ran) == 1
    long, odd, wide = heads(2, 129, 2, 16), heads(2, 7, 2, 12), heads(1, 7, 1, 264)
    masked = torch.zeros(2, 1, 1, 7, device=DEVICE, dtype=query.dtype)
    short_attention(query, key, key, masked)
    short_attention(query, long, long, None)
    short_attention(odd, odd, odd, None)
    short_attention(wide, wide, wide, None)
    short_attention(query.float(), key.float(), key.float(), None)
    short_attention(query.clone().requires_grad_(), key, key, None).sum().backward()
    assert len(ran) == 1
