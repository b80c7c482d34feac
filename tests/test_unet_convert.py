"""What only UNets meet in conversion: conditions, masks, published sizes, pipelines and changed models."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import unet_reference as reference
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import SlicedAttnProcessor
from torch import nn

import zoo
from zoo.unet import PRESETS, load, save
from zoo.unet.convert import config_of, upstream_config

# --- conditions ---


def test_dropout_is_drawn_where_diffusers_draws_it() -> None:
    theirs = reference.make("sd", dropout=0.3).train()
    ours = zoo.from_upstream(theirs)
    assert ours.training
    inputs = reference.inputs(theirs)
    found = []
    for model in (ours, theirs):
        torch.manual_seed(3)
        with torch.no_grad():
            found.append(model(**inputs).sample)
    # The layout of memory decides which element gets which draw, so that only the strength can be compared.
    assert not torch.allclose(found[0], ours.eval()(**inputs).sample)
    assert 0.5 < float((found[0].std() / found[1].std()).detach()) < 2.0


def test_timesteps_in_every_form() -> None:
    theirs = reference.make("sd")
    ours = zoo.from_upstream(theirs)
    inputs = reference.inputs(theirs)
    for timestep in (7, 7.5, torch.tensor(7), torch.tensor([7]), torch.tensor([7, 900]), torch.tensor([1.5, 2.25])):
        inputs["timestep"] = timestep
        with torch.no_grad():
            assert reference.relative_error(ours(**inputs).sample, theirs(**inputs).sample) < 1e-5


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("case", ["sd", "xl"])
def test_masks_of_the_text(case: str, kind: torch.dtype) -> None:
    theirs = reference.make(case)
    ours = zoo.from_upstream(theirs)
    inputs = reference.inputs(theirs)
    mask = torch.tensor([[1, 1, 1, 0, 1, 0, 0], [1, 0, 1, 1, 1, 1, 1]]).to(kind)
    with torch.no_grad():
        whole = ours(**inputs).sample
        expected = theirs(**inputs, encoder_attention_mask=mask).sample
        found = ours(**inputs, encoder_attention_mask=mask).sample
        inputs["encoder_hidden_states"][mask == 0] = 100.0
        blind = ours(**inputs, encoder_attention_mask=mask).sample
    assert reference.relative_error(found, expected) < 1e-5
    assert reference.relative_error(found, whole) > 1e-3
    assert reference.relative_error(blind, found) < 1e-5


def test_masks_of_pixels() -> None:
    theirs = reference.make("one level")
    ours = zoo.from_upstream(theirs)
    inputs = reference.inputs(theirs, height=8, width=6)
    mask = (torch.arange(48) % 3 != 0).float().expand(2, -1)
    with torch.no_grad():
        expected = theirs(**inputs, attention_mask=mask).sample
        assert reference.relative_error(ours(**inputs, attention_mask=mask).sample, expected) < 1e-5
        assert reference.relative_error(ours(**inputs).sample, expected) > 1e-3


@pytest.mark.parametrize("case", ["sd", "xl", "three levels", "one level", "uneven depths"])
def test_residuals_of_a_controlnet(case: str) -> None:
    theirs = reference.make(case)
    ours = zoo.from_upstream(theirs)
    inputs = reference.inputs(theirs)
    added = reference.controlnet(ours.config)
    with torch.no_grad():
        expected = theirs(**inputs, **added).sample
        assert reference.relative_error(ours(**inputs, **added).sample, expected) < 1e-5
        assert reference.relative_error(ours(**inputs).sample, expected) > 1e-2


# --- full size ---

THEIRS: dict[str, dict[str, Any]] = {
    "sd15": {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
    "sd21": {
        "sample_size": 96, "cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20],
        "use_linear_projection": True, "upcast_attention": True, "dual_cross_attention": False,
        "num_class_embeds": None,
    },
    "sdxl": {
        "sample_size": 128, "block_out_channels": [320, 640, 1280],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 2, 10], "attention_head_dim": [5, 10, 20], "cross_attention_dim": 2048,
        "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}  # fmt: skip
# As published.
PARAMETERS = {"sd15": 859_520_964, "sd21": 865_910_724, "sdxl": 2_567_463_684}


@pytest.mark.parametrize("name", THEIRS)
def test_presets_are_the_published_models(name: str) -> None:
    with torch.device("meta"):
        theirs = UNet2DConditionModel(**THEIRS[name])
    assert config_of(theirs) == PRESETS[name]
    ours = zoo.create(name, device="meta")
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters()) == PARAMETERS[name]


# --- what conversion keeps, and what it refuses ---


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda module: module.enable_freeu(0.9, 0.2, 1.2, 1.4), "FreeU is on.*disable_freeu"),
        (lambda module: module.mid_block.register_forward_hook(print), "mid_block=a module with a hook"),
        (lambda module: setattr(module, "conv_in", nn.Conv2d(5, 16, 3, padding=1)), "conv_in=Conv2d.5"),
        (lambda module: module.fuse_qkv_projections(), "is a FusedAttnProcessor2_0.*unfuse_qkv"),
        (lambda module: module.set_attn_processor(SlicedAttnProcessor(1)), "is a SlicedAttnProcessor"),
        (lambda module: module.mid_block.attentions.append(nn.Identity()), "attentions.1=Identity"),
    ],
    ids=["FreeU", "hook", "replaced", "fused", "sliced", "added"],
)
def test_changed_models_are_refused(change: Any, words: str) -> None:
    theirs = reference.make("sd")
    change(theirs)
    with pytest.raises(ValueError, match=words):
        zoo.from_upstream(theirs)


# --- checkpoints ---


FILE = "diffusion_pytorch_model.safetensors"


def same(ours: Any, theirs: Any) -> None:
    inputs = reference.inputs(theirs)
    with torch.inference_mode():
        assert reference.relative_error(ours(**inputs).sample, theirs(**inputs).sample) < 1e-5


def test_presets_take_the_folder_of_a_pipeline(tmp_path: Path) -> None:
    source = zoo.create("unet-debug")
    save(source, tmp_path / "pipe" / "unet")
    for place in (tmp_path / "pipe", tmp_path / "pipe" / "unet", tmp_path / "pipe" / "unet" / FILE):
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
    assert f"unet/{FILE}" in wanted and "config.json" in wanted and "*.safetensors" not in wanted


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
        ({"cross_attention_dim": [24, 32]}, r"cross_attention_dim is \[24, 32\], expected a positive integer"),
        ({"norm_num_groups": None}, "norm_num_groups is None"),
        ({"reverse_transformer_layers_per_block": [[2, 0], 1, 1]}, "expected a positive integer for each of 3 levels"),
        ({"timestep_post_act": "silu"}, "timestep_post_act='silu' is not supported: expected None"),
        ({"brand_new": 1}, "brand_new=1"),
    ):
        (tmp_path / "config.json").write_text(
            json.dumps({**upstream_config(zoo.create("unet-debug").config), **options})
        )
        with pytest.raises(ValueError, match=words):
            load(tmp_path)
