"""The operators of a training step, as compilers and callers need them; training_kernel_checks.py holds the kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fake_gpu import Gpu, traced
from zoo.ops.cross_entropy import cross_entropy_rows, scale_
from zoo.training import AdamW, losses


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
    (graph,) = traced(monkeypatch, losses.CrossEntropyRows(), torch.randn(4, 9), labels, scale)
    assert sum("triton_kernel_wrapper" in each for each in graph) == 1
    assert not any("exp" in each or "clone" in each for each in graph)


@pytest.mark.gpu
def test_the_gradient_takes_the_logits_place_also_in_a_compiled_region() -> None:
    rows = losses.CrossEntropyRows()
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
