"""Models by name, weights from where people keep them, conversions."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zoo
from zoo.registry import families


def test_every_family_has_a_debug_preset() -> None:
    for family in families():
        assert any(name.endswith("-debug") for name in family.presets), family.name
        assert zoo.list_models(family.name) == list(family.presets)
    assert set(zoo.list_models()) == {name for family in families() for name in family.presets}


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean 'gnn'"):
        zoo.list_models("gn")
    with pytest.raises(ValueError, match="did you mean 'gcn-debug'"):
        zoo.create("gcn-debg")
    with pytest.raises(ValueError, match="no option 'hiden_channels', did you mean 'hidden_channels'"):
        zoo.create("gcn-debug", hiden_channels=3)


def test_overrides_dtype_and_device() -> None:
    model = zoo.create("gcn-debug", hidden_channels=24, dtype=torch.bfloat16, device="meta")
    assert model.config.hidden_channels == 24 and not model.training
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.bfloat16, "meta")}
    assert torch.get_default_dtype() is torch.float32
    with pytest.raises(ValueError, match="floating-point"):
        zoo.create("gcn-debug", dtype=torch.int64)
    with pytest.raises(ValueError, match=r"dtype is 'float16', but parameters need a floating-point torch\.dtype"):
        zoo.create("gcn-debug", dtype="float16")  # type: ignore[arg-type]


@pytest.mark.parametrize("loaded", [False, True], ids=["random", "loaded"])
@pytest.mark.parametrize("name", ["llm-debug", "resnet-debug"])
def test_a_model_that_is_made_in_inference_mode_can_be_trained(tmp_path: Path, name: str, loaded: bool) -> None:
    weights = tmp_path / "weights.pt" if loaded else None
    if weights is not None:
        torch.save(zoo.create(name).state_dict(), weights)
    with torch.inference_mode():
        model = zoo.create(name, weights=weights)
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("form", ["safetensors", "pt", "folder", "sharded"])
@pytest.mark.parametrize("keys", ["zoo", "upstream"])
def test_weights_from_files_with_either_librarys_keys(tmp_path: Path, form: str, keys: str) -> None:
    source = zoo.create("gcn-debug")
    state = (source if keys == "zoo" else zoo.to_upstream(source)).state_dict()
    path = tmp_path / f"weights.{form}"
    if form == "safetensors":
        save_file(state, path)
    elif form == "pt":
        torch.save(state, path)
    else:
        path.mkdir()
        if form == "folder":
            save_file(state, path / "model.safetensors")
        else:
            names = list(state)
            shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
            for shard, inside in shards.items():
                save_file({name: state[name] for name in inside}, path / shard)
            index = {"weight_map": {name: shard for shard, inside in shards.items() for name in inside}}
            (path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = zoo.create("gcn-debug", weights=path)
    inputs = zoo.example_inputs(source)
    torch.testing.assert_close(loaded(**inputs), source(**inputs), rtol=0, atol=0)


def test_wrong_weights_are_named(tmp_path: Path) -> None:
    state = zoo.create("gcn-debug").state_dict()
    first = next(iter(state))
    for name, broken, words in [
        ("missing", {k: v for k, v in state.items() if k != first}, f"{first}|convs"),
        ("extra", {**state, "surplus": torch.ones(2)}, "surplus"),
        ("shape", {**state, first: torch.ones(2, 3, 4)}, rf"{first} has shape \(2, 3, 4\), expected"),
    ]:
        save_file(broken, tmp_path / f"{name}.safetensors")
        with pytest.raises(ValueError, match=words):
            zoo.create("gcn-debug", weights=tmp_path / f"{name}.safetensors")
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        zoo.create("gcn-debug", weights=tmp_path / "nowhere.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no model\.safetensors"):
        zoo.create("gcn-debug", weights=tmp_path / "empty")
    (tmp_path / "x.txt").write_text("no")
    with pytest.raises(ValueError, match=r"unknown kind of weights '\.txt'"):
        zoo.create("gcn-debug", weights=tmp_path / "x.txt")


class Payload:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("/tmp/should-not-exist-from-weights",)


def test_weights_that_hold_code_are_refused(tmp_path: Path) -> None:
    torch.save({"a": Payload()}, tmp_path / "evil.pt")
    with pytest.raises(Exception, match="(?i)weights.only"):
        zoo.create("gcn-debug", weights=tmp_path / "evil.pt")
    assert not Path("/tmp/should-not-exist-from-weights").exists()


def test_foreign_modules_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"no family converts torch\.nn.*Linear; families and their libraries: .*gnn"):
        zoo.from_upstream(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="zoo.from_upstream"):
        zoo.to_upstream(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="not a model of the zoo"):
        zoo.example_inputs(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="expected an nn.Module"):
        zoo.from_upstream("gcn")  # type: ignore[arg-type]
