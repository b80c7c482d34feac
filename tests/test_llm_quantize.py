"""int8 weights: close outputs, unchanged budgets, fewer bytes; a clear error where torchao is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import zoo
from zoo.llm import generate, quantize_int8, save

# An optional package that no extra installs: without it there is only the error to test.
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ImportError, match="pip install torchao"):
        quantize_int8(zoo.create("llm-debug"))


def stored_bytes(tensor: torch.Tensor) -> int:
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(stored_bytes(getattr(tensor, name)) for name in names)


@needs_torchao
@pytest.mark.parametrize("tied", [True, False])
def test_outputs_are_close_and_budgets_hold(tied: bool, tmp_path: Path) -> None:
    model = zoo.create("llm-debug", tie_word_embeddings=tied, dtype=torch.bfloat16)
    ids = zoo.example_inputs(model)["input_ids"]
    before = stored_bytes(model.layers[0].down_proj.weight)
    with torch.inference_mode():
        exact = model(ids)
        assert quantize_int8(model) is model
        rounded = model(ids)
        assert 0 < float((rounded - exact).norm() / exact.norm()) < 0.05
        zoo.compile_regions(model, backend="aot_eager")
        with zoo.enforce_budget(model):
            torch.testing.assert_close(model(ids), rounded)
            generate(model, [[1, 2], [3]], max_new_tokens=3)
    assert stored_bytes(model.layers[0].down_proj.weight) < 0.6 * before
    for refused in (lambda: save(model, tmp_path), lambda: zoo.to_upstream(model)):
        with pytest.raises(ValueError, match="rounded to int8"):
            refused()
    with pytest.raises(ValueError, match="compiled already"):
        quantize_int8(model)
    with pytest.raises(TypeError, match="GCN"):
        quantize_int8(zoo.create("gcn-debug"))  # type: ignore[arg-type]
