"""The kernel of attention to few keys against float64."""

import pytest
import torch
from torch import Tensor

import zoo
from tests.kernel_checks import DEVICE, MARKS, kernels_run, values  # noqa: F401
from zoo.ops import attention as ops
from zoo.ops import common
from zoo.ops.attention import short_attention
from zoo.ops.triton import attention as kernels

pytestmark = MARKS
RELATIVE = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3}
if DEVICE == "cpu":
    # The interpreter multiplies matrices of bfloat16 as if they were integers.
    del RELATIVE[torch.bfloat16]
# Queries, keys, heads and their width. A text and the pixels of a small image, at the models' widths of heads; one key;
# whole tiles and one number more; a width that no power of two is.
SIZES = [(70, 77, 2, 40), (64, 64, 1, 160), (9, 128, 2, 80), (65, 1, 3, 64), (1, 65, 1, 8), (3, 100, 1, 24)]


def heads(*shape: int, dtype: torch.dtype = torch.float16, scale: float = 1.0) -> Tensor:
    return values(*shape, dtype=dtype, scale=scale)


def close(found: Tensor, query: Tensor, key: Tensor, value: Tensor) -> None:
    expected = short_attention(query.double(), key.double(), value.double())
    assert found.shape == expected.shape and found.dtype == query.dtype and found.is_contiguous()
    error = (found.double() - expected).norm() / expected.norm()
    assert error < RELATIVE[query.dtype], error


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(("queries", "keys", "count", "width"), SIZES)
def test_attends(queries: int, keys: int, count: int, width: int, dtype: torch.dtype) -> None:
    query = heads(2, queries, count, width, dtype=dtype, scale=2.0)
    key, value = (heads(2, keys, count, width, dtype=dtype) for _ in range(2))
    close(short_attention(query, key, value), query, key, value)


def test_reads_heads_where_they_lie_in_a_product() -> None:
    query, key, value = heads(2, 65, 3, 2, 40).unbind(2)
    found = short_attention(query, key, value)
    close(found, query, key, value)
    # Nothing is copied, and what has other strides is.
    assert all(kernels._in_vectors(each) is each for each in (query, key, value))
    scattered = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key, value)]
    assert torch.equal(short_attention(*scattered), found)
    shifted = heads(2 * 65 * 80 + 1)[1:].view(2, 65, 2, 40)
    close(short_attention(shifted, key, value), shifted, key, value)


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    query, key = heads(1, 4, 1, 16, scale=40.0), heads(1, 120, 1, 16, scale=40.0)
    close(short_attention(query, key, key), query, key, key)
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
    inner = kernels.short_attention
    monkeypatch.setattr(kernels, "short_attention", lambda *given: (ran.append(1), inner(*given))[1])
    query, key = heads(2, 5, 2, 16), heads(2, 7, 2, 16)
    close(short_attention(query, key, key, None), query, key, key)
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
        monkeypatch.setattr(ops, "kernels_run", lambda *_: True)
    ran: list[int] = []
    inner = kernels.short_attention
    monkeypatch.setattr(kernels, "short_attention", lambda *given: (ran.append(1), inner(*given))[1])
    model = zoo.create("unet-debug", device=DEVICE, dtype=torch.float16)
    inputs = zoo.example_inputs(model, batch=2, size=8, tokens=5)
    with torch.inference_mode():
        found = model(**inputs).sample
        count = len(ran)
        monkeypatch.setattr(ops, "MOST_KEYS", 0)
        expected = model(**inputs).sample
    assert count == len(ran) > 0
    assert (found - expected).float().norm() / expected.float().norm() < 3e-2
