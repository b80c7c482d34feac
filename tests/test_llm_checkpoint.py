"""Checkpoints in transformers' format, both ways; memory while loading; every wrong folder and its error."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import llm_reference as reference
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

import zoo
from zoo.llm import LLM, load, save

# The debug preset as one of theirs; its config.json then agrees with the preset.
PRESET = "llm-debug"


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def same(ours: LLM, theirs: Any) -> None:
    ids = torch.randint(ours.config.vocab_size, (2, 9))
    with torch.inference_mode():
        assert reference.relative_error(ours(ids), theirs(ids).logits) < 1e-5


@pytest.mark.parametrize("size", ["5GB", "20KB"], ids=["one-file", "shards"])
@pytest.mark.parametrize("kind", reference.KINDS)
def test_folders_that_transformers_wrote(kind: str, size: str, tmp_path: Path) -> None:
    theirs = reference.make(kind)
    theirs.save_pretrained(tmp_path, max_shard_size=size)
    assert (len(files(tmp_path)) > 2) == (size == "20KB")
    model = load(tmp_path)
    assert not model.training and model.config == zoo.from_upstream(theirs).config
    same(model, theirs)


@pytest.mark.parametrize("size", ["5GB", 20_000], ids=["one-file", "shards"])
@pytest.mark.parametrize("kind", reference.KINDS)
def test_folders_that_transformers_reads(kind: str, size: Any, tmp_path: Path) -> None:
    source = reference.make(kind)
    model = zoo.from_upstream(source)
    assert isinstance(model, LLM)
    save(model, tmp_path / "new", max_shard_size=size)
    written = files(tmp_path / "new")
    assert (len(written) > 2) == (size == 20_000)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not any(report.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert type(theirs) is type(source)
    same(model, theirs.eval())
    again = load(tmp_path / "new")
    assert again.config == model.config
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], tensor, rtol=0, atol=0)
    # A smaller model over a larger one leaves nothing behind.
    save(model, tmp_path / "new")
    assert files(tmp_path / "new") == ["model.safetensors"]
    same(load(tmp_path / "new"), theirs)


def test_a_preset_takes_a_folder_that_agrees(tmp_path: Path) -> None:
    source = zoo.create(PRESET)
    save(source, tmp_path)
    model = zoo.create(PRESET, weights=tmp_path)
    ids = zoo.example_inputs(model)["input_ids"]
    torch.testing.assert_close(model(ids), source(ids), rtol=0, atol=0)
    assert zoo.create(PRESET, weights=tmp_path, dtype=torch.bfloat16).layers[0].qkv_proj.weight.dtype is torch.bfloat16
    # How long texts may be is the user's to choose; what is computed is not, unless it is said.
    assert zoo.create(PRESET, weights=tmp_path, max_position_embeddings=64).rotary.table.shape == (64, 16)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rms_norm_eps"] = 1e-3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config.json has rms_norm_eps=0.001, the preset 1e-05"):
        zoo.create(PRESET, weights=tmp_path)
    assert zoo.create(PRESET, weights=tmp_path, rms_norm_eps=1e-3).config.rms_norm_eps == 1e-3
    assert zoo.create(PRESET, weights=tmp_path, rms_norm_eps=1e-4).config.rms_norm_eps == 1e-4
    config["hidden_size"] = 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config.json has (hidden_size=32|head_dim=)"):
        zoo.create(PRESET, weights=tmp_path, rms_norm_eps=1e-3)


def test_dtypes(tmp_path: Path) -> None:
    save(zoo.create(PRESET, dtype=torch.bfloat16), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {parameter.dtype for parameter in load(tmp_path).parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in load(tmp_path, dtype=torch.float16).parameters()} == {torch.float16}
    assert {parameter.dtype for parameter in zoo.create(PRESET, weights=tmp_path).parameters()} == {torch.float32}
    assert load(tmp_path).rotary.table.dtype is torch.float32
    with pytest.raises(ValueError, match="floating-point"):
        load(tmp_path, dtype=torch.int8)


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made inside that were alive at once; storages mapped from a file do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out.is_meta and not out._is_view():
            self.alive[out] = out.untyped_storage().nbytes()
            storages = {tensor.untyped_storage().data_ptr(): size for tensor, size in self.alive.items()}
            self.most = max(self.most, sum(storages.values()))
        return out


@pytest.mark.parametrize("how", ["load", "create"])
def test_weights_are_never_in_memory_twice(how: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
    source = zoo.create(PRESET, **sizes)
    total = sum(parameter.nbytes for parameter in source.parameters())
    largest = max(parameter.nbytes for parameter in source.parameters())
    save(source, tmp_path, max_shard_size=200_000)
    assert len(files(tmp_path)) > 10 and total > 10 * largest
    del source
    gc.collect()
    with LiveBytes() as live:
        model = load(tmp_path) if how == "load" else zoo.create(PRESET, weights=tmp_path, **sizes)
    table = model.rotary.table.nbytes
    assert total <= live.most < total + 2 * largest + 3 * table


def test_loading_reads_each_tensor_once_and_lets_it_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo import weights

    save(zoo.create(PRESET), tmp_path)
    reads: list[str] = []
    handed_out: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    original = weights.Tensors.__getitem__

    def noted(self: weights.Tensors, key: str) -> torch.Tensor:
        tensor = original(self, key)
        alive.append(sum(each() is not None for each in handed_out))
        handed_out.append(weakref.ref(tensor))
        reads.append(key)
        return tensor

    monkeypatch.setattr(weights.Tensors, "__getitem__", noted)
    load(tmp_path)
    assert sorted(reads) == sorted(load_file(tmp_path / "model.safetensors"))
    assert max(alive) <= 1


def test_loading_with_the_zoos_own_keys(tmp_path: Path) -> None:
    source = zoo.create(PRESET)
    save_file(source.state_dict(), tmp_path / "ours.safetensors")
    model = zoo.create(PRESET, weights=tmp_path / "ours.safetensors")
    ids = zoo.example_inputs(model)["input_ids"]
    torch.testing.assert_close(model(ids), source(ids), rtol=0, atol=0)
    state = source.state_dict()
    del state["layers.2.o_proj.weight"]
    save_file(state, tmp_path / "ours.safetensors")
    with pytest.raises(ValueError, match=r"missing tensors \['layers.2.o_proj.weight'\]"):
        zoo.create(PRESET, weights=tmp_path / "ours.safetensors")


def test_tied_weights_may_be_stored_twice_if_they_are_equal(tmp_path: Path) -> None:
    save(zoo.create(PRESET), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in state
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(state, tmp_path / "model.safetensors")
    assert load(tmp_path).lm_head is None
    state["lm_head.weight"][3, 4] += 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight differs from embed_tokens.weight"):
        load(tmp_path)


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    save(zoo.create(PRESET), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    key = "model.layers.1.self_attn.k_proj.weight"
    for broken, words in [
        ({k: v for k, v in state.items() if k != key}, rf"missing tensors \['{key}'\]"),
        ({**state, "model.layers.3.mlp.up_proj.weight": torch.ones(2)}, r"unexpected tensors \['model.layers.3"),
        ({**state, key: torch.ones(31, 64)}, rf"{key} has shape \(31, 64\), expected \(32, 64\)"),
        ({**state, key: state[key].bfloat16()}, r"torch.bfloat16.* in layers.1.qkv_proj.weight"),
    ]:
        save_file(broken, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=words):
            load(tmp_path)


@pytest.mark.parametrize("kept", [0, 10, 500], ids=["nothing", "its size", "the beginning"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_was_cut_off_is_named(name: str, kept: int, tmp_path: Path) -> None:
    save(zoo.create(PRESET), tmp_path)
    if name.endswith(".bin"):
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / name)
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"{name} is cut off or damaged.*; fetch or save it again"):
        load(tmp_path)


def test_weights_that_are_no_floating_point_numbers_are_named(tmp_path: Path) -> None:
    save(zoo.create(PRESET), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(state, tmp_path / "model.safetensors")
    for dtype in (None, torch.float32):
        with pytest.raises(ValueError, match=r"model.norm.weight is torch.int8, expected floating-point numbers"):
            load(tmp_path, dtype=dtype)


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        load(tmp_path / "nowhere.d" / "x")
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        load(tmp_path)
    transformers.GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type='gpt2' is not supported"):
        load(tmp_path)
    transformers.LlamaConfig(mlp_bias=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mlp_bias=True"):
        load(tmp_path)
    save(zoo.create(PRESET), tmp_path, max_shard_size="50KB")
    (tmp_path / files(tmp_path)[1]).unlink()
    with pytest.raises(FileNotFoundError, match="names model-00002-of-"):
        load(tmp_path)
    with pytest.raises(TypeError, match="GCN is not a language model"):
        save(zoo.create("gcn-debug"), tmp_path)  # type: ignore[arg-type]
    for size in ("5 lots", 0, "GB"):
        with pytest.raises(ValueError, match="max_shard_size is"):
            save(zoo.create(PRESET), tmp_path, max_shard_size=size)


def test_configs_from_before_transformers_5(tmp_path: Path) -> None:
    model = zoo.create(PRESET)
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).config == model.config


def test_a_dtype_by_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype is 'bfloat16', but parameters need a floating-point torch.dtype"):
        load(tmp_path, dtype="bfloat16")  # type: ignore[arg-type]
