"""Models by name, weights from where people keep them, conversions."""

import itertools
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zoo
from zoo.registry import families

NOT_FINITE = (math.nan, math.inf, -math.inf)
DEBUG = [name for name in zoo.list_models() if name.endswith("-debug")]


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
        zoo.create("gcn-debug", dtype="float16")


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
        ("neither", {"surplus": torch.ones(2)}, "missing .*convs"),
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


@pytest.mark.parametrize("name", DEBUG)
def test_upstream_keys_are_told_from_own_ones_though_some_are_the_same(tmp_path: Path, name: str) -> None:
    source = zoo.create(name)
    torch.save(zoo.to_upstream(source).state_dict(), tmp_path / "weights.pt")
    loaded = zoo.create(name, weights=tmp_path / "weights.pt")
    torch.testing.assert_close(loaded.state_dict(), source.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", DEBUG)
def test_one_key_too_few_or_too_many_is_named_alone(tmp_path: Path, name: str) -> None:
    state = zoo.create(name).state_dict()
    gone = list(state)[len(state) // 2]
    for broken, words in [
        ({key: tensor for key, tensor in state.items() if key != gone}, f"missing tensors ['{gone}'], unexpected []"),
        ({**state, "surplus": torch.ones(2)}, "missing tensors [], unexpected tensors ['surplus']"),
    ]:
        torch.save(broken, tmp_path / "weights.pt")
        with pytest.raises(ValueError, match=re.escape(words.replace("unexpected []", "unexpected tensors []"))):
            zoo.create(name, weights=tmp_path / "weights.pt")


# A value for each model, in turn.
@pytest.mark.parametrize(("name", "value"), list(zip(DEBUG, itertools.cycle(NOT_FINITE), strict=False)))
def test_weights_that_are_not_finite_are_named(tmp_path: Path, name: str, value: float) -> None:
    source = zoo.create(name)
    key, tensor = next(iter(source.named_parameters()))
    with torch.no_grad():
        tensor[(-1,) * tensor.dim()] = value
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    theirs = zoo.to_upstream(source)
    message = f"1 tensor.s. with NaN or infinite values: {re.escape(key)};"
    with pytest.warns(zoo.WeightsWarning, match=f"weights.pt: {message}") as caught:
        zoo.create(name, weights=tmp_path / "weights.pt")
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(zoo.WeightsWarning, match=f"{type(theirs).__name__}: {message}") as caught:
        zoo.from_upstream(theirs)
    assert [warning.filename for warning in caught] == [__file__]


def test_weights_that_a_smaller_dtype_cannot_hold_are_named(tmp_path: Path) -> None:
    source = zoo.create("gcn-debug")
    with torch.no_grad():
        source.layers[0].conv.bias.fill_(1e5)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    zoo.create("gcn-debug", weights=tmp_path / "weights.pt")
    with pytest.warns(zoo.WeightsWarning, match="NaN or infinite values: layers.0.conv.bias;"):
        zoo.create("gcn-debug", weights=tmp_path / "weights.pt", dtype=torch.float16)


class Payload:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("/tmp/should-not-exist-from-weights",)


def test_weights_that_hold_code_are_refused(tmp_path: Path) -> None:
    for new_format in (True, False):
        torch.save({"a": Payload()}, tmp_path / "evil.pt", _use_new_zipfile_serialization=new_format)
        with pytest.raises(ValueError, match=r"evil\.pt refers to posix\.mkdir; .* as \.safetensors"):
            zoo.create("gcn-debug", weights=tmp_path / "evil.pt")
    assert not Path("/tmp/should-not-exist-from-weights").exists()
    (tmp_path / "evil.pt").write_bytes(b"garbage" * 20)
    with pytest.raises(ValueError, match=r"evil\.pt cannot be unpickled"):
        zoo.create("gcn-debug", weights=tmp_path / "evil.pt")


def test_two_shards_with_one_key_are_refused(tmp_path: Path) -> None:
    state = zoo.create("gcn-debug").state_dict()
    names = list(state)
    save_file(state, tmp_path / "a.safetensors")
    save_file({names[-1]: state[names[-1]] + 1}, tmp_path / "b.safetensors")
    index = {"weight_map": dict.fromkeys(names[:-1], "a.safetensors") | {names[-1]: "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"two shards hold {names[-1]}"):
        zoo.create("gcn-debug", weights=tmp_path)


def test_foreign_modules_are_refused_by_name() -> None:
    import transformers

    llama = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    bert = transformers.BertConfig(**vars(llama) | {"model_type": "bert"})
    for refused in (nn.Linear(2, 2), transformers.LlamaModel(llama), transformers.BertForPreTraining(bert)):
        name = type(refused).__name__
        with pytest.raises(TypeError, match=rf"{name} is (no model of|not one of).*compile_regions"):
            zoo.from_upstream(refused)
    with pytest.raises(TypeError, match="zoo.from_upstream"):
        zoo.to_upstream(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="not a model of the zoo"):
        zoo.example_inputs(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="module is a str, expected a model"):
        zoo.from_upstream("gcn")
