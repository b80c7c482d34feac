"""Checkpoints in diffusers' format, both ways: folders, shards, pipelines, the hub; what is wrong and its error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import unet_reference as reference
from diffusers import UNet2DConditionModel

import zoo
from zoo.unet import load, save
from zoo.unet.convert import upstream_config

WEIGHTS = "diffusion_pytorch_model.safetensors"


def same(ours: Any, theirs: Any) -> None:
    inputs = reference.inputs(theirs)
    with torch.inference_mode():
        assert reference.relative_error(ours(**inputs).sample, theirs(**inputs).sample) < 1e-5


@pytest.mark.parametrize("case", reference.CASES)
def test_saved_folders_load_in_both_libraries(case: str, tmp_path: Path) -> None:
    theirs = reference.make(case)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    assert not model.training and model.config == zoo.from_upstream(theirs).config
    same(model, theirs)
    save(model, tmp_path / "ours")
    read, report = UNet2DConditionModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    same(model, read.eval())
    assert zoo.from_upstream(read).config == model.config
    again = load(tmp_path / "ours", dtype=torch.bfloat16)
    assert again.config == model.config and again.dtype == torch.bfloat16


def test_shards(tmp_path: Path) -> None:
    theirs = reference.make("sd")
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and WEIGHTS not in shards
    model = load(tmp_path)
    same(model, theirs)
    # What is written in their place is what is read.
    with torch.no_grad():
        model.conv_out.bias.add_(1.0)
    save(model, tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == [WEIGHTS]
    same(load(tmp_path), model)


def test_presets_take_the_folder_of_a_pipeline(tmp_path: Path) -> None:
    source = zoo.create("unet-debug")
    save(source, tmp_path / "pipe" / "unet")
    for place in (tmp_path / "pipe", tmp_path / "pipe" / "unet", tmp_path / "pipe" / "unet" / WEIGHTS):
        model = zoo.create("unet-debug", weights=place)
        torch.testing.assert_close(model.state_dict(), source.state_dict(), rtol=0, atol=0)
    assert zoo.create("unet-debug", weights=tmp_path / "pipe", sample_size=32).config.sample_size == 32


@pytest.mark.parametrize("inside", ["unet", "."])
def test_of_a_hub_id_the_unet_alone_is_fetched(inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = zoo.create("unet-debug")
    save(source, tmp_path / inside)
    asked: list[tuple[str, list[str]]] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    inputs = zoo.example_inputs(source)
    for model in (zoo.create("unet-debug", weights="someone/pipe-1.5"), load("someone/pipe-1.5")):
        with torch.no_grad():
            assert torch.equal(model(**inputs).sample, source(**inputs).sample)
    assert [name for name, _ in asked] == ["someone/pipe-1.5"] * 2
    wanted = asked[0][1]
    assert f"unet/{WEIGHTS}" in wanted and "config.json" in wanted and "*.safetensors" not in wanted


def test_files_of_old_releases(tmp_path: Path) -> None:
    """A config.json that says little leaves diffusers' defaults; what older releases wrote is not in the way."""
    theirs = UNet2DConditionModel(**reference.SIZES).eval()
    theirs.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    short = {key: value for key, value in stored.items() if key in reference.SIZES}
    (tmp_path / "config.json").write_text(json.dumps({**short, "upcast_softmax": False, "_diffusers_version": "0.2.2"}))
    same(load(tmp_path), theirs)


def test_configs_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    with pytest.raises(ValueError, match="config.json is of a AutoencoderKL"):
        load(tmp_path)
    for options, words in (
        ({"encoder_hid_dim_type": "text_proj"}, "encoder_hid_dim_type='text_proj'"),
        ({"cross_attention_dim": [24, 32]}, r"cross_attention_dim=\[24, 32\]"),
        ({"norm_num_groups": None}, "norm_num_groups=None"),
        ({"brand_new": 1}, "brand_new=1"),
    ):
        (tmp_path / "config.json").write_text(
            json.dumps({**upstream_config(zoo.create("unet-debug").config), **options})
        )
        with pytest.raises(ValueError, match=words):
            load(tmp_path)
