"""The kernels of the glue, and that of attention to few keys, against float64."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from tests import kernel_checks
from tests.blocks import graphs_of
from tests.kernel_checks import DEVICE, MARKS, RELATIVE, kernels_run, values  # noqa: F401
from zoo.ops import attention, common, products
from zoo.ops.attention import short_attention
from zoo.ops.conv import upsample, windows
from zoo.ops.norms import add_norm, layer_norm
from zoo.ops.products import gated_gelu, gated_gelu_product
from zoo.ops.triton import attention as attention_kernels
from zoo.ops.triton import glu as kernels
from zoo.ops.triton import group_norm
from zoo.ops.triton import norms as norm_kernels

pytestmark = MARKS
close = functools.partial(kernel_checks.close, layout=torch.contiguous_format)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(products, "_is_hopper", lambda device: True)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("shape", [(2, 5, 12, 40), (1, 1, 1, 320), (3, 4, 1, 7), (1, 2, 3, 64)])
def test_doubled_images_and_windows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = values(*shape, dtype=dtype)
    image = x.permute(0, 3, 1, 2)
    assert torch.equal(upsample(image).float(), F.interpolate(image.float(), scale_factor=2.0, mode="nearest"))
    for stride in (1, 2):
        assert torch.equal(windows(x, stride).double(), windows(x.double(), stride))


# Rows, channels, width inside: whole tiles of both; less than one of each; what divides neither.
PRODUCTS = [(256, 64, 128), (5, 8, 8), (130, 72, 136), (128, 640, 64)]
# The interpreter multiplies matrices of bfloat16 as if they were integers.
DESCRIBED = [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DESCRIBED)
@pytest.mark.parametrize(("rows", "channels", "inner"), PRODUCTS)
def test_products_are_gated_on_the_way(rows, channels, inner, dtype, monkeypatch):
    monkeypatch.setattr(products, "LEAST_ROWS", 1)
    x = values(rows, channels, dtype=dtype)
    weight, bias = values(2 * inner, channels, dtype=dtype, scale=channels**-0.5), values(2 * inner, dtype=dtype)
    found = gated_gelu_product(x, weight, bias)
    # One launch, where the GPU is of the kind.
    alone = kernels.gated_gelu_product(x, weight, bias) if products._is_hopper(x.device) else None
    assert alone is None or torch.equal(found, alone)
    close(found, gated_gelu(F.linear(x.double(), weight.double()), bias.double()), dtype)


def test_products_that_the_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "gated_gelu_product", None)
    monkeypatch.setattr(products, "LEAST_ROWS", 64)
    half = torch.bfloat16
    weight, bias = values(32, 24, dtype=half), values(32, dtype=half)
    few = values(products.LEAST_ROWS - 1, 24, dtype=half)
    shifted = values(64 * 24 + 1, dtype=half)[1:].view(64, 24)
    wide = values(64, 24)
    for x, w, b in (
        (few, weight, bias), (shifted, weight, bias), (wide, weight.float(), bias.float()),
        (values(64, 20, dtype=half), weight[:, :20].contiguous(), bias),
        (values(64, 24, dtype=half), weight[:12], bias[:12]),
    ):  # fmt: skip
        close(gated_gelu_product(x, w, b), gated_gelu(F.linear(x, w).double(), b.double()), x.dtype)


def test_a_mean_far_from_zero_costs_no_variance() -> None:
    x, weight, bias = values(3, 320, mean=1e4), values(320), values(320)
    found = layer_norm(x, weight, bias, 1e-5)
    # One bit of the mean is a thousandth of the deviation, and the mean of 320 is within some of them.
    close(found, layer_norm(x.double(), weight.double(), bias.double(), 1e-5), torch.float32, times=1000)
    x[:] = 3.0
    assert torch.equal(layer_norm(x, weight, bias, 1e-5), bias.expand(3, -1))


def test_rows_wider_than_a_program_run_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_kernels, "layer_norm", lambda *_, **__: pytest.fail("a kernel ran"))
    x, weight, bias = values(3, 2049), values(2049), values(2049)
    with torch.no_grad():
        found = layer_norm(x, weight, bias, 1e-5)
        torch.testing.assert_close(found, F.layer_norm(x, (2049,), weight, bias))
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
SIZES = [(70, 77, 2, 40), (64, 64, 1, 160), (9, 128, 2, 80), (65, 1, 3, 64), (1, 65, 1, 8), (3, 100, 1, 24)]


def heads(*shape: int, dtype: torch.dtype = torch.float16, scale: float = 1.0) -> Tensor:
    return values(*shape, dtype=dtype, scale=scale)


def attends(found: Tensor, query: Tensor, key: Tensor, value: Tensor) -> None:
    expected = short_attention(query.double(), key.double(), value.double())
    close(found, expected, query.dtype, 6e-3 if query.dtype == torch.bfloat16 else 1.5e-3)


@pytest.mark.parametrize("dtype", DESCRIBED)
@pytest.mark.parametrize(("queries", "keys", "count", "width"), SIZES)
def test_attends(queries: int, keys: int, count: int, width: int, dtype: torch.dtype) -> None:
    query = heads(2, queries, count, width, dtype=dtype, scale=2.0)
    key, value = (heads(2, keys, count, width, dtype=dtype) for _ in range(2))
    attends(short_attention(query, key, value), query, key, value)


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


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    query, key = heads(1, 4, 1, 16, scale=40.0), heads(1, 120, 1, 16, scale=40.0)
    attends(short_attention(query, key, key), query, key, key)
    # All keys alike, and far below zero.
    key = -query[:, :1].expand(1, 100, 1, 16)
    value = heads(1, 100, 1, 16)
    found = short_attention(query[:, :1], key, value)
    torch.testing.assert_close(found, value.mean(1).flatten(1), rtol=2e-3, atol=2e-3)


def test_no_queries() -> None:
    key = heads(2, 77, 2, 40)
    assert short_attention(key[:, :0], key, key).shape == (0, 80)
    assert short_attention(key[:0], key[:0], key[:0]).shape == (0, 80)


def test_when_the_kernel_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    inner = attention_kernels.short_attention
    monkeypatch.setattr(attention_kernels, "short_attention", lambda *given: (ran.append(1), inner(*given))[1])
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


def test_a_model_predicts_as_with_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # the other kernels have checks of their own, and take half a minute here
        monkeypatch.setattr(common, "triton_runs_on", lambda device: False)
        monkeypatch.setattr(attention, "kernels_run", lambda *_: True)
    ran: list[int] = []
    inner = attention_kernels.short_attention
    monkeypatch.setattr(attention_kernels, "short_attention", lambda *given: (ran.append(1), inner(*given))[1])
    model = zoo.create("unet-debug", device=DEVICE, dtype=torch.float16)
    inputs = zoo.example_inputs(model, batch=2, size=8, tokens=5)
    with torch.inference_mode():
        found = model(**inputs).sample
        count = len(ran)
        monkeypatch.setattr(attention, "MOST_KEYS", 0)
        expected = model(**inputs).sample
    assert count == len(ran) > 0
    assert (found - expected).float().norm() / expected.float().norm() < 3e-2
