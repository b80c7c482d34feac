"""Cross entropy over a large vocabulary, some rows at a time, against torch's over all of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from tests.fake_gpu import Gpu, traced
from zoo.ops.training import cross_entropy_rows, scale_
from zoo.training import AdamW, LinearCrossEntropy
from zoo.training.fused import CrossEntropyRows


def draw(rows: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*rows, 16, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(37, 16, generator=generator).to(device, dtype).requires_grad_()
    labels = torch.randint(37, rows, generator=generator).to(device)
    return x, weight, labels


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("chunk", [1, 4, 5, 12, 100])
@pytest.mark.parametrize("ignored", [0, 1, 5, 12])
def test_loss_and_gradients_match_torch(device: str, chunk: int, ignored: int):
    x, weight, labels = draw((3, 4), torch.float64, device)
    labels.view(-1)[:ignored] = -100
    loss = LinearCrossEntropy(chunk)(x, weight, labels)
    logits = F.linear(x, weight).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="sum") / max(12 - ignored, 1)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected.float())
    for got, wanted in zip(gradients(3 * loss, x, weight), gradients(3 * expected, x, weight), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_exact_as_its_inputs(device: str, dtype: torch.dtype):
    x, weight, labels = draw((50,), dtype, device)
    # 49 rows that count: a scale that half precision cannot hold.
    labels[0] = -100
    loss = LinearCrossEntropy(16)(x, weight, labels)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = F.cross_entropy(F.linear(*exact), labels)
    assert loss.item() == pytest.approx(expected.item(), rel=5e-3)
    for got, wanted in zip(gradients(loss, x, weight), gradients(expected, *exact), strict=True):
        assert got.dtype is dtype
        assert float((got.double() - wanted).norm() / wanted.norm()) < 8 * torch.finfo(dtype).eps


def test_autocast_multiplies_in_half_precision_and_gives_float32_gradients():
    x, weight, labels = draw((20,), torch.float32)
    seen = []
    loss_module = LinearCrossEntropy(8)
    loss_module.rows.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_module(x, weight, labels)
        expected = F.cross_entropy(F.linear(x, weight), labels)
    assert set(seen) == {torch.bfloat16}
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    for got, wanted in zip(gradients(loss, x, weight), gradients(expected, x, weight), strict=True):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=2e-3)


def test_no_more_than_a_chunk_of_logits_exists():
    x, weight, labels = draw((50,), torch.float32)
    shapes = []
    module = LinearCrossEntropy(8)
    module.rows.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    module(x, weight, labels)
    assert shapes == [(8, 37)] * 7


def test_its_region_is_one_graph_whatever_is_left_over():
    x, weight, labels = draw((50,), torch.float32)
    module = zoo.compile_regions(LinearCrossEntropy(8), backend="aot_eager")
    with zoo.enforce_budget(module):
        first = module(x, weight, labels)
        module(x, weight, labels).backward()
    torch.testing.assert_close(first, F.cross_entropy(F.linear(x, weight), labels))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_computes_no_gradients(mode: Any, monkeypatch: pytest.MonkeyPatch):
    x, weight, labels = draw((20,), torch.float32)
    expected = LinearCrossEntropy(8)(x, weight, labels).detach()
    monkeypatch.setattr(torch, "empty_like", lambda _: pytest.fail("memory is taken for a gradient"))
    with mode():
        loss = LinearCrossEntropy(8)(x, weight, labels)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)


def test_the_backward_runs_once():
    x, weight, labels = draw((20,), torch.float32)
    loss = LinearCrossEntropy(8)(x, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="frees its gradients in the backward; compute the loss again"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": torch.ones(37, 15)}, ValueError, r"x \[20, 16\] and weight \[37, 15\] do not fit"),
        ({"labels": torch.zeros(19, dtype=torch.int64)}, ValueError, r"labels are \[19\], expected .*\[20\]"),
        ({"labels": torch.zeros(20, dtype=torch.int32)}, TypeError, r"torch\.int32, expected torch\.int64"),
        ({"weight": torch.ones(37, 16).bfloat16()}, TypeError, r"float32 and weight torch\.bfloat16; convert"),
        (
            {"labels": torch.full((20,), 37)},
            ValueError,
            "from 37 to 37, but the number of classes is 37: pass 0 to 36, or -100",
        ),
        ({"labels": torch.full((20,), -1)}, ValueError, "labels has values from -1 to -1"),
        ({"x": torch.ones(0, 16), "labels": torch.zeros(0, dtype=torch.int64)}, ValueError, "there are no rows"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception], message: str):
    x, weight, labels = draw((20,), torch.float32)
    with pytest.raises(error, match=message):
        LinearCrossEntropy(8)(**{"x": x, "weight": weight, "labels": labels} | change)


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    labels, one = torch.tensor([3, -100, 8]), torch.ones(())

    def rows(logits: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy_rows(logits.clone(), *rest)  # their gradient takes their place

    return {
        "rows": (rows, (torch.randn(3, 9), labels, one)),
        "rows of half precision": (rows, (torch.randn(3, 16).bfloat16(), labels, one)),
        "scale": (scale_, (torch.randn(5, 4), one)),
        "adamw": (adamw_step, (torch.randn(1 << 19, requires_grad=True),)),
    }


def adamw_step(param: Tensor) -> None:
    param.grad = torch.zeros_like(param)
    AdamW([param]).step()


def test_the_region_is_one_graph_with_the_kernel_in_it(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    labels, scale = torch.tensor([1, 2, -100, 8]), torch.tensor(0.25)
    (graph,) = traced(monkeypatch, CrossEntropyRows(), torch.randn(4, 9), labels, scale)
    assert sum("triton_kernel_wrapper" in each for each in graph) == 1
    assert not any("exp" in each or "clone" in each for each in graph)


@pytest.mark.gpu
def test_the_gradient_takes_the_logits_place_also_in_a_compiled_region() -> None:
    rows = CrossEntropyRows()
    rows.compile(fullgraph=True, backend="inductor")
    logits, labels = torch.randn(2048, 4096, device="cuda"), torch.randint(4096, (2048,), device="cuda")
    scale = torch.tensor(0.25, device="cuda")
    losses_apart, expected = cross_entropy_rows(logits.clone(), labels, scale)
    with torch.no_grad():
        rows(logits.clone(), labels, scale)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found, grad = rows(logits, labels, scale)
    assert grad.data_ptr() == logits.data_ptr()
    assert torch.cuda.max_memory_allocated() - held < logits.nbytes // 2, "the logits were copied"
    torch.testing.assert_close((found, logits), (losses_apart, expected))


@pytest.mark.gpu
def test_rows_of_a_whole_vocabulary_match_torch() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 4 * torch.randn(64, 128_256, device="cuda", dtype=torch.bfloat16, generator=generator)
    labels = torch.randint(128_256, (64,), device="cuda", generator=generator)
    labels[::7] = -100
    scale = torch.tensor(1 / 55, device="cuda")
    expected = F.cross_entropy(logits.float(), labels, reduction="none")
    slope = (logits.float().softmax(-1) - F.one_hot(labels.clamp_min(0), 128_256)) * (labels >= 0)[:, None] * scale
    found, _ = cross_entropy_rows(logits, labels, scale)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.float(), slope, rtol=2**-7, atol=1e-9)
