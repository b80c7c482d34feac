"""What only language models meet in conversion: positions, special tokens, memory, damaged and old folders."""

import gc
import json
from pathlib import Path
from typing import Any

import llm_reference as reference
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

import zoo
from zoo.llm import LLM, LLMConfig, RopeScaling, load, save


def convert(module: nn.Module) -> LLM:
    model = zoo.from_upstream(module)
    assert isinstance(model, LLM) and not model.training
    return model


def test_a_padding_token_of_minus_one_freezes_no_row() -> None:
    # torch counts padding_idx=-1 from the end: transformers' last token would get no gradient.
    model = convert(reference.make("llama", pad_token_id=-1))
    last = model.config.vocab_size - 1
    model(torch.tensor([[3, last]])).sum().backward()
    assert model.config.pad_token_id is None and model.embed_tokens.weight.grad[last].norm() > 0


def test_tokens_are_kept() -> None:
    theirs = reference.make("llama", pad_token_id=3, bos_token_id=1, eos_token_id=[2, 5])
    config = convert(theirs).config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (3, 1, (2, 5))
    assert zoo.to_upstream(zoo.from_upstream(theirs)).config.eos_token_id == [2, 5]
    assert convert(reference.make("llama", eos_token_id=7)).config.eos_token_id == (7,)
    assert convert(reference.make("llama")).config.eos_token_id == ()
    theirs.generation_config.eos_token_id = 4  # which their generate stops at
    assert zoo.from_upstream(theirs).config.eos_token_id == (4,)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_peft_are_refused_with_what_merges_them() -> None:
    adapted = peft.get_peft_model(reference.make("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for model, error in ((adapted, TypeError), (adapted.base_model.model, ValueError)):
        with pytest.raises(error, match=r"merge_and_unload\(\)"):
            zoo.from_upstream(model)
    assert isinstance(zoo.from_upstream(adapted.merge_and_unload()), LLM)


def test_published_frequencies_of_llama() -> None:
    config = zoo.create("llama-3.2-1b", device="meta").config
    assert config.rope_theta == 500000.0 and config.max_position_embeddings == 131072
    assert config.rope_scaling == RopeScaling(
        kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )


def test_options_without_a_class_of_theirs() -> None:
    config = dict(zoo.create("llm-debug").config.__dict__)
    with pytest.raises(ValueError, match="qkv_bias and qk_norm"):
        zoo.to_upstream(LLM(LLMConfig(**{**config, "qkv_bias": True, "qk_norm": True})))


# --- folders ---

# The debug preset as one of theirs; its config.json then agrees with the preset.
PRESET = "llm-debug"


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_a_preset_takes_a_folder_that_agrees_but_for_overrides(tmp_path: Path) -> None:
    save(zoo.create(PRESET, dtype=torch.bfloat16), tmp_path)
    # How long texts may be is the user's to choose; what is computed is not, unless it is said.
    model = zoo.create(PRESET, weights=tmp_path, max_position_embeddings=64)
    assert model.rotary.table.shape == (64, 16) and load(tmp_path).rotary.table.dtype is torch.float32
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert zoo.create(PRESET, weights=tmp_path).config.eos_token_id == load(tmp_path).config.eos_token_id == (5, 9)
    assert zoo.create(PRESET, weights=tmp_path, eos_token_id=(3,)).config.eos_token_id == (3,)
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(ValueError, match=r"config.json has rms_norm_eps=0.001, the preset 1e-05"):
        zoo.create(PRESET, weights=tmp_path)
    for eps in (1e-3, 1e-4):
        assert zoo.create(PRESET, weights=tmp_path, rms_norm_eps=eps).config.rms_norm_eps == eps


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made inside that were alive at once; storages mapped from a file do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.most, self.mapped = 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out.is_meta and not out._is_view():
            if func is torch.ops.aten.lift_fresh.default:  # as safetensors makes its tensors
                self.mapped.add(out.untyped_storage().data_ptr())
            self.alive[out] = out.untyped_storage().nbytes()
            storages = {tensor.untyped_storage().data_ptr(): size for tensor, size in self.alive.items()}
            self.most = max(self.most, sum(size for place, size in storages.items() if place not in self.mapped))
        return out


def test_weights_are_never_in_memory_twice(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
    source = zoo.create(PRESET, **sizes)
    total = sum(parameter.nbytes for parameter in source.parameters())
    largest = max(parameter.nbytes for parameter in source.parameters())
    save(source, tmp_path, max_shard_size=200_000)
    assert len(files(tmp_path)) > 10 and total > 10 * largest
    del source
    gc.collect()
    with LiveBytes() as live:
        model = load(tmp_path)
    table = model.rotary.table.nbytes
    assert total <= live.most < total + 2 * largest + 3 * table


def test_tied_weights_stored_twice_and_buffers_of_old_releases(tmp_path: Path) -> None:
    save(zoo.create(PRESET), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in state
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(state, tmp_path / "model.safetensors")
    assert load(tmp_path).lm_head is None


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


def test_wrong_folders_are_named(tmp_path: Path) -> None:
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
