"""Saving in the libraries' formats: what stands in the folder stays until the new files are there, and none is left."""

from __future__ import annotations

import errno
import importlib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import zoo

MODELS = {"bert": "bert-debug", "llm": "llm-debug", "unet": "unet-debug"}


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> Any:
    """A family's module with ``save`` and ``load``."""
    return importlib.import_module(f"zoo.{request.param}")


def model_of(family: Any, *, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return zoo.create(MODELS[family.__name__.removeprefix("zoo.")])


def test_a_save_that_fails_leaves_the_folder_as_it_was(family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = (model_of(family, seed=seed) for seed in (1, 2))
    family.save(first, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(tensors: Any, path: Path, **options: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        family.save(second, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_saved_weights_that_are_not_finite_are_named(family: Any, tmp_path: Path):
    model = model_of(family, seed=1)
    key, tensor = list(model.named_parameters())[-1]
    with torch.no_grad():
        tensor[(0,) * tensor.dim()] = float("nan")
    family.save(model, tmp_path)
    with pytest.warns(zoo.WeightsWarning, match=f"NaN or infinite values: {key};") as caught:
        family.load(tmp_path)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(ValueError, match=f"NaN or infinite values: {key};"):
        family.load(tmp_path, strict=True)


def test_what_an_earlier_model_left_goes_and_other_files_stay(family: Any, tmp_path: Path):
    model = model_of(family, seed=1)
    family.save(model, tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    stem = weights.name.removesuffix(".safetensors")
    for stale in (f"{stem}-00001-of-00002.safetensors", f"{stem}.safetensors.index.json"):
        (tmp_path / stale).write_text("{}")
    (tmp_path / "README.md").write_text("mine")
    names = {weights.name, "config.json", "README.md"}
    family.save(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names
    again = family.load(tmp_path)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
