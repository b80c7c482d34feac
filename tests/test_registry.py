"""Models by name, weights from where people keep them, tables of weights, and what every conversion keeps."""

import dataclasses
import errno
import importlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from torch import Tensor, nn

import zoo
from tests import llm_reference
from zoo.llm.convert import WEIGHTS
from zoo.registry import families
from zoo.weights import Placement

NOT_FINITE = (math.nan, math.inf, -math.inf)
DEBUG = [name for name in zoo.list_models() if name.endswith("-debug")]


def test_every_family_has_a_debug_preset_which_takes_overrides_a_dtype_and_a_device() -> None:
    for family in families():
        assert any(name.endswith("-debug") for name in family.presets), family.name
        assert zoo.list_models(family.name) == list(family.presets)
    assert set(zoo.list_models()) == {name for family in families() for name in family.presets}
    model = zoo.create("gcn-debug", hidden_channels=24, dtype=torch.bfloat16, device="meta")
    assert model.config.hidden_channels == 24 and not model.training
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.bfloat16, "meta")}
    assert torch.get_default_dtype() is torch.float32


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
    names = list(state)
    save_file(state, tmp_path / "a.safetensors")
    save_file({names[-1]: state[names[-1]] + 1}, tmp_path / "b.safetensors")
    index = {"weight_map": dict.fromkeys(names[:-1], "a.safetensors") | {names[-1]: "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"two shards hold {names[-1]}"):
        zoo.create("gcn-debug", weights=tmp_path)


@pytest.mark.parametrize("name", DEBUG)
def test_upstream_keys_are_told_from_own_ones_and_one_too_few_or_too_many_is_named_alone(tmp_path, name):
    source = zoo.create(name)
    torch.save(zoo.to_upstream(source).state_dict(), tmp_path / "weights.pt")
    loaded = zoo.create(name, weights=tmp_path / "weights.pt")
    torch.testing.assert_close(loaded.state_dict(), source.state_dict(), rtol=0, atol=0)
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
    package = importlib.import_module(".".join(type(source).__module__.split(".")[:2]))
    if hasattr(package, "save"):
        package.save(source, tmp_path / "folder")
        with pytest.warns(zoo.WeightsWarning, match=message) as caught:
            package.load(tmp_path / "folder")
        assert [warning.filename for warning in caught] == [__file__]


def test_weights_that_a_smaller_dtype_cannot_hold_or_that_hold_code_are_named(tmp_path: Path) -> None:
    source = zoo.create("gcn-debug")
    with torch.no_grad():
        source.layers[0].conv.bias.fill_(1e5)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    zoo.create("gcn-debug", weights=tmp_path / "weights.pt")
    with pytest.warns(zoo.WeightsWarning, match="NaN or infinite values: layers.0.conv.bias;"):
        zoo.create("gcn-debug", weights=tmp_path / "weights.pt", dtype=torch.float16)
    for new_format in (True, False):
        torch.save({"a": Payload(tmp_path / "made")}, tmp_path / "evil.pt", _use_new_zipfile_serialization=new_format)
        with pytest.raises(ValueError, match=r"evil\.pt refers to posix\.mkdir; .* as \.safetensors"):
            zoo.create("gcn-debug", weights=tmp_path / "evil.pt")
    assert not (tmp_path / "made").exists()
    for junk in (b"garbage" * 20, b"e\x05junk"):
        (tmp_path / "evil.pt").write_bytes(junk)
        with pytest.raises(ValueError, match=r"evil\.pt cannot be unpickled"):
            zoo.create("gcn-debug", weights=tmp_path / "evil.pt")


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


TIED = "llama-tied-llama3"


def test_rows_of_one_tensor_are_trained_together() -> None:
    theirs: Any = llm_reference.make(TIED)
    back: Any = zoo.to_upstream(zoo.from_upstream(theirs))
    assert back.lm_head.weight is back.model.embed_tokens.weight
    theirs.model.layers[0].self_attn.k_proj.requires_grad_(False)
    with pytest.raises(ValueError, match="k_proj.weight.requires_grad is False, but what shares layers.0.qkv_proj"):
        zoo.from_upstream(theirs)


QUERIES = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop(QUERIES), rf"missing tensors \['{QUERIES}'\], unexpected tensors \[\]"),
        (lambda state: state.update(extra=torch.ones(1)), r"unexpected tensors \['extra'\]"),
        (lambda state: state.update({QUERIES: torch.ones(4, 4)}), r"q_proj.weight has shape \(4, 4\), expected \("),
        (lambda state: state["lm_head.weight"].add_(1), "lm_head.weight differs from embed_tokens.weight"),
        (lambda state: state.update({QUERIES: state[QUERIES].int()}), "torch.int32, expected floating-point numbers"),
        (
            lambda state: state.update({QUERIES: state[QUERIES].half()}),
            "k_proj.weight is torch.float32, but layers.0.qkv_proj.weight has torch.float16 for others",
        ),
    ],
)
def test_tensors_of_theirs_that_do_not_fit_are_named(change: Callable[[dict[str, Tensor]], Any], words: str) -> None:
    theirs = llm_reference.make(TIED)
    state = {key: tensor.clone() for key, tensor in theirs.state_dict().items()}
    change(state)
    with pytest.raises(ValueError, match=words):
        WEIGHTS.convert_state_dict(state, zoo.from_upstream(theirs).config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.norm": None}, r"fills \['head.norm.weight'\] not at all"),
        ({"model.layers.{}.self_attn.q_proj": Placement("layers.{}.qkv_proj", 0, 4)}, "fills .*qkv_proj.* in part"),
        ({"again": "embed_tokens"}, "fills .*embed_tokens.weight.* twice"),
        ({"model.norm.weight": "head.norm.weight"}, "names model.norm.weight twice"),
    ],
)
def test_tables_that_do_not_fit_the_model(changes: dict[str, Any], words: str) -> None:
    def table(config: Any) -> dict[str, Any]:
        return {key: target for key, target in {**WEIGHTS.table(config), **changes}.items() if target is not None}

    with pytest.raises(ValueError, match=words):
        dataclasses.replace(WEIGHTS, table=table).from_upstream(llm_reference.make(TIED))


@pytest.mark.parametrize("name", DEBUG)
def test_conversion_copies_and_keeps_dtype_mode_and_flags(name: str) -> None:
    model = zoo.create(name).to(torch.bfloat16)
    theirs = zoo.to_upstream(model).train()
    frozen = next(child for child in theirs.children() if list(child.parameters()))
    frozen.requires_grad_(False)
    flags = {key: parameter.requires_grad for key, parameter in theirs.named_parameters()}
    ours = zoo.from_upstream(theirs)
    assert ours.training and {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    assert type(ours) is type(model) and ours.config == model.config
    torch.testing.assert_close(ours.state_dict(), model.state_dict(), rtol=0, atol=0)
    before = [tensor.clone() for tensor in ours.state_dict().values()]
    back = zoo.to_upstream(ours)
    assert back.training and {key: parameter.requires_grad for key, parameter in back.named_parameters()} == flags
    with torch.no_grad():
        for tensor in (*theirs.parameters(), *back.parameters()):
            tensor.zero_()
    torch.testing.assert_close(list(ours.state_dict().values()), before, rtol=0, atol=0)
    for family in families():
        if name not in family.presets:
            with pytest.raises(TypeError, match=" is not an? .* of the zoo"):
                family.weights.to_upstream(ours)


# A preset to save, and one that is larger.
MODELS = {"bert": ("bert-debug", "bert-base"), "llm": ("llm-debug", "qwen3-0.6b"), "unet": ("unet-debug", "sd15")}


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(f"zoo.{request.param}")


def model_of(family: Any, *, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return zoo.create(presets_of(family)[0])


def presets_of(family: Any) -> tuple[str, str]:
    return MODELS[family.__name__.removeprefix("zoo.")]


def test_presets_take_a_folder_that_agrees_in_any_dtype(family: Any, tmp_path: Path) -> None:
    model, (name, larger) = model_of(family, seed=1), presets_of(family)
    family.save(model.bfloat16(), tmp_path)
    for again, dtype in (
        (family.load(tmp_path), torch.bfloat16),
        (family.load(tmp_path, dtype=torch.float16), torch.float16),
        (zoo.create(name, weights=tmp_path), torch.float32),
        (zoo.create(name, weights=tmp_path, dtype=torch.bfloat16), torch.bfloat16),
    ):
        assert {parameter.dtype for parameter in again.parameters()} == {dtype} and not again.training
        rounded = {key: value.to(dtype) for key, value in model.state_dict().items()}
        torch.testing.assert_close(again.state_dict(), rounded, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"config.json has \w+=.*, the preset "):
        zoo.create(larger, weights=tmp_path)


def test_what_an_earlier_model_left_goes_and_a_failed_save_leaves_the_folder_as_it_was(family, tmp_path, monkeypatch):
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


def test_folders_and_arguments_that_are_wrong(family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        family.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="not a hub id"):
        family.load(tmp_path / "nowhere")
    download = Mock(side_effect=[LocalEntryNotFoundError("no route"), OSError(errno.ENOSPC, "disk full")])
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    unreachable = r"'owner/name': no such file .* \(LocalEntryNotFoundError\); check the name"
    for error, said in ((FileNotFoundError, unreachable), (OSError, "disk full")):
        with pytest.raises(error, match=said):
            family.load("owner/name")
    for dtype in (torch.int8, "bfloat16"):
        with pytest.raises(ValueError, match=f"dtype is {dtype!r}, but parameters need a floating-point torch.dtype"):
            family.load(tmp_path, dtype=dtype)
    with pytest.raises(TypeError, match="Linear is not an? .* of the zoo"):
        family.save(nn.Linear(2, 2), tmp_path)
