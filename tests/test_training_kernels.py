"""The operators of a training step: kernels by training_kernel_checks.py, here what compilers and callers need."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zoo
from tests.kernel_runs import run_checks
from zoo.training import LinearCrossEntropy, fallback, losses, operators

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="torch came without Triton, which GPUs only need"
)
def test_kernels_in_the_interpreter() -> None:
    run_checks("training_kernel_checks.py", interpret=True)


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    run_checks("training_kernel_checks.py", "-m", "gpu", interpret=False)


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    labels, one = torch.tensor([3, -100, 8]), torch.ones(())
    return {
        "rows": (operators.cross_entropy_rows_, (torch.randn(3, 9), labels, one, -100)),
        "rows of half precision": (operators.cross_entropy_rows_, (torch.randn(3, 16).bfloat16(), labels, one, -100)),
        "scale": (operators.scale_, (torch.randn(5, 4), one)),
    }


@pytest.mark.parametrize("name", calls())
def test_operators_are_what_torch_expects(name: str) -> None:
    operator, arguments = calls()[name]
    torch.library.opcheck(operator, arguments)


def test_importing_the_training_brings_no_triton() -> None:
    code = (
        "import sys, torch, zoo.training\n"
        "weight = torch.nn.Parameter(torch.randn(9, 4))\n"
        "zoo.training.LinearCrossEntropy()(torch.randn(3, 4), weight, torch.tensor([1, 2, 3])).backward()\n"
        "assert 'triton' not in sys.modules\n"
        "zoo.training.AdamW([weight]).step()\n"  # torch's optimizers import its compiler, which imports Triton
        "assert 'zoo.training.kernels' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_region_is_one_graph_with_the_operator_in_it(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As where kernels run; what runs in the operator here is torch's own.
    monkeypatch.setattr(losses, "kernels_run", lambda x: True)
    ran: list[int] = []
    inner = fallback.cross_entropy_rows_
    monkeypatch.setattr(fallback, "cross_entropy_rows_", lambda *given: (ran.append(1), inner(*given))[1])
    x, weight = torch.randn(50, 16, requires_grad=True), torch.randn(37, 16, requires_grad=True)
    labels = torch.randint(37, (50,))
    module = zoo.compile_regions(LinearCrossEntropy(8), backend=backend)
    with zoo.enforce_budget(module):
        loss = module(x, weight, labels)
        found = torch.autograd.grad(loss, (x, weight))
        module(x, weight, labels)
    expected = F.cross_entropy(F.linear(x, weight), labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (x, weight)))
    # Of each of seven chunks, in both calls.
    assert len(ran) >= 14


def test_the_gradient_takes_the_logits_place_also_in_a_compiled_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "kernels_run", lambda x: True)
    rows = losses.CrossEntropyRows()
    rows.compile(fullgraph=True, backend="inductor")
    logits, labels, scale = torch.randn(4, 9), torch.tensor([1, 2, -100, 8]), torch.tensor(0.25)
    _, expected = fallback.cross_entropy_rows(logits, labels, scale, -100)
    with torch.no_grad():
        _, grad = rows(logits, labels, scale)
    assert grad.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(logits, expected)


def test_a_chunk_leaves_the_compiler_no_code_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "kernels_run", lambda x: True)
    graphs: list[list[str]] = []

    def compile_graph(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    rows = losses.CrossEntropyRows()
    rows.compile(fullgraph=True, backend=compile_graph)
    with torch.no_grad():
        rows(torch.randn(4, 9), torch.tensor([1, 2, -100, 8]), torch.tensor(0.25))
    assert graphs == [["zoo_training.cross_entropy_rows_.default"]]


@pytest.mark.gpu
def test_rows_of_a_whole_vocabulary_are_torchs() -> None:
    from zoo.training.kernels import rows

    generator = torch.Generator("cuda").manual_seed(0)
    logits = 4 * torch.randn(64, 128_256, device="cuda", dtype=torch.bfloat16, generator=generator)
    labels = torch.randint(128_256, (64,), device="cuda", generator=generator)
    labels[::7] = -100
    scale = torch.tensor(1 / 55, device="cuda")
    expected, slope = fallback.cross_entropy_rows(logits, labels, scale, -100)
    found = rows.cross_entropy_rows_(logits, labels, scale, -100)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, slope, rtol=2**-7, atol=1e-9)
