"""Outputs and gradients against diffusers' own models, both ways, every condition, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import unet_reference as reference
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor, SlicedAttnProcessor
from torch import nn

import zoo
from zoo.unet import PRESETS, UNet
from zoo.unet.convert import WEIGHTS, config_of


@pytest.mark.parametrize("case", reference.CASES)
def test_outputs_are_diffusers(case: str) -> None:
    theirs = reference.make(case)
    ours = zoo.from_upstream(theirs)
    assert isinstance(ours, UNet) and not ours.training
    for sizes in ({}, {"batch": 1, "height": 32, "width": 24, "tokens": 5}):
        inputs = reference.inputs(theirs, **sizes)
        with torch.no_grad():
            expected = theirs(**inputs, return_dict=False)[0]
            assert reference.relative_error(ours(**inputs, return_dict=False)[0], expected) < 1e-5
            assert reference.relative_error(ours(**inputs).sample, expected) < 1e-5


@pytest.mark.parametrize("case", reference.CASES)
def test_there_and_back_is_the_same_model(case: str) -> None:
    theirs = reference.make(case)
    back = zoo.to_upstream(zoo.from_upstream(theirs))
    assert type(back) is UNet2DConditionModel and not back.training
    assert list(back.state_dict()) == list(theirs.state_dict())
    for (key, ours), expected in zip(back.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(ours, expected), key
    assert config_of(back) == config_of(theirs)
    inputs = reference.inputs(theirs)
    with torch.no_grad():
        assert reference.relative_error(back(**inputs).sample, theirs(**inputs).sample) < 1e-5


@pytest.mark.parametrize("case", ["sd", "xl"])
def test_gradients_are_diffusers(case: str) -> None:
    theirs = reference.make(case).double()
    ours = zoo.from_upstream(theirs).train()
    theirs.train()
    inputs = reference.inputs(theirs)
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].double()
    sample = inputs.pop("sample").double()
    samples = [sample.clone().requires_grad_() for _ in range(2)]
    for model, given in zip((ours, theirs), samples, strict=True):
        out = model(sample=given, **inputs).sample
        (out * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
    # Frequencies of the timestep are float32 in both.
    assert reference.relative_error(samples[0].grad, samples[1].grad) < 1e-7  # type: ignore[arg-type]
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    expected = WEIGHTS.convert_state_dict(gradients, ours.config)  # type: ignore[arg-type]
    for key, parameter in ours.named_parameters():
        assert reference.relative_error(parameter.grad, expected[key]) < 1e-6, key  # type: ignore[arg-type]


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


# --- conditions ---


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


@pytest.mark.parametrize("case", ["sd", "xl", "three levels", "uneven depths"])
def test_what_a_controlnet_adds(case: str) -> None:
    theirs = reference.make(case)
    ours = zoo.from_upstream(theirs)
    inputs = reference.inputs(theirs)
    added = reference.controlnet(ours.config)
    with torch.no_grad():
        expected = theirs(**inputs, **added).sample
        assert reference.relative_error(ours(**inputs, **added).sample, expected) < 1e-5
        assert reference.relative_error(ours(**inputs).sample, expected) > 1e-2


@pytest.mark.parametrize("case", ["sd", "xl", "guidance in the timestep"])
def test_conditions_computed_once_give_the_same(case: str) -> None:
    ours = zoo.from_upstream(reference.make(case))
    inputs = reference.inputs(ours)
    steps = torch.tensor([901, 601, 1])
    others = {name: inputs[name] for name in ("added_cond_kwargs", "timestep_cond") if name in inputs}
    with torch.no_grad():
        run = ours.time_shifts(steps[:, None], **others).shifts
        text = ours.text_keys_values(inputs["encoder_hidden_states"])
        assert run.shape[:2] == (3, 1 if case == "sd" else 2)
        for step, shifts in zip(steps, run, strict=True):
            expected = ours(**{**inputs, "timestep": step}).sample
            found = ours(inputs["sample"], type(ours.time_shifts(steps[:1], **others))(shifts), text).sample
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# --- full size ---

THEIRS: dict[str, dict[str, Any]] = {
    "sd15": {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
    "sd21": {
        "sample_size": 96,
        "cross_attention_dim": 1024,
        "attention_head_dim": [5, 10, 20, 20],
        "use_linear_projection": True,
        "upcast_attention": True,
        "dual_cross_attention": False,
        "num_class_embeds": None,
    },
    "sdxl": {
        "sample_size": 128,
        "block_out_channels": [320, 640, 1280],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 2, 10],
        "attention_head_dim": [5, 10, 20],
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}
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


def test_weights_are_copied_and_their_gradients_wanted_as_before() -> None:
    theirs = reference.make("sd")
    theirs.down_blocks[0].requires_grad_(False)
    for name, parameter in theirs.named_parameters():
        # Rows of what all blocks share.
        if "attn2.to_k" in name or "attn2.to_v" in name or "time_emb_proj" in name or "conv1.bias" in name:
            parameter.requires_grad_(False)
    ours = zoo.from_upstream(theirs)
    frozen = {key for key, parameter in ours.named_parameters() if not parameter.requires_grad}
    assert all(key.startswith(("down.0.", "text_projections.", "time_projections.")) for key in frozen)
    assert "down.0.transformers.0.blocks.0.qkv.weight" in frozen and len(frozen) > 20
    back = zoo.to_upstream(ours)
    for (key, parameter), expected in zip(back.named_parameters(), theirs.parameters(), strict=True):
        assert parameter.requires_grad == expected.requires_grad, key
    before = copy.deepcopy(ours.state_dict())
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[key]) for key, tensor in ours.state_dict().items())
    theirs.mid_block.attentions[0].transformer_blocks[0].attn1.to_k.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"attn1\.to_k\.weight\.requires_grad is False.*trained together"):
        zoo.from_upstream(theirs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mid_block_type": "UNetMidBlock2D"}, "mid_block_type='UNetMidBlock2D' is not supported"),
        ({"mid_block_type": None}, "mid_block_type=None"),
        ({"down_block_types": ("AttnDownBlock2D", "DownBlock2D")}, "down_block_types has 'AttnDownBlock2D'"),
        (
            {"up_block_types": ("UpBlock2D", "SimpleCrossAttnUpBlock2D")},
            "up_block_types has 'SimpleCrossAttnUpBlock2D'",
        ),
        ({"only_cross_attention": True}, "only_cross_attention=True"),
        ({"act_fn": "gelu"}, "act_fn='gelu'"),
        ({"mid_block_scale_factor": 2}, "mid_block_scale_factor=2"),
        ({"resnet_time_scale_shift": "scale_shift"}, "resnet_time_scale_shift='scale_shift'"),
        ({"num_class_embeds": 5}, "num_class_embeds=5"),
        ({"class_embed_type": "timestep"}, "class_embed_type='timestep'"),
        ({"encoder_hid_dim": 8}, "encoder_hid_dim=8"),
        ({"addition_embed_type": "text", "addition_embed_type_num_heads": 4}, "addition_embed_type"),
        ({"time_embedding_type": "fourier"}, "time_embedding_type='fourier'"),
        ({"time_embedding_act_fn": "silu"}, "time_embedding_act_fn='silu'"),
        ({"timestep_post_act": "silu"}, "timestep_post_act='silu'"),
        ({"attention_type": "gated"}, "attention_type='gated'"),
        ({"dual_cross_attention": True}, "dual_cross_attention=True"),
    ],
    ids=str,
)
def test_options_that_are_not_supported_are_named(options: dict[str, Any], words: str) -> None:
    with torch.device("meta"):
        theirs = UNet2DConditionModel(**{**reference.SIZES, **options})
    with pytest.raises(ValueError, match=words):
        zoo.from_upstream(theirs)


def _freeu(module: Any) -> None:
    module.enable_freeu(0.9, 0.2, 1.2, 1.4)


def _hook(module: Any) -> None:
    module.mid_block.register_forward_hook(lambda *_: None)


def _replaced(module: Any) -> None:
    module.conv_in = nn.Conv2d(5, 16, 3, padding=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_freeu, "FreeU is on.*disable_freeu"),
        (_hook, "mid_block='a module with a hook'"),
        (_replaced, "conv_in=Conv2d.5"),
        (lambda module: module.fuse_qkv_projections(), "has a FusedAttnProcessor2_0.*unfuse_qkv"),
        (lambda module: module.set_attn_processor(SlicedAttnProcessor(1)), "has a SlicedAttnProcessor"),
        (lambda module: module.mid_block.attentions.append(nn.Identity()), "attentions.1=Identity"),
    ],
    ids=["FreeU", "hook", "replaced", "fused", "sliced", "added"],
)
def test_changed_models_are_refused(change: Any, words: str) -> None:
    theirs = reference.make("sd")
    change(theirs)
    with pytest.raises(ValueError, match=words):
        zoo.from_upstream(theirs)


def test_other_ways_to_attend_are_taken() -> None:
    theirs = reference.make("sd")
    theirs.set_attn_processor(AttnProcessor())
    inputs = reference.inputs(theirs)
    with torch.no_grad():
        expected = theirs(**inputs).sample
        assert reference.relative_error(zoo.from_upstream(theirs)(**inputs).sample, expected) < 1e-5


def test_other_classes_are_refused() -> None:
    class Mine(UNet2DConditionModel):
        pass

    with pytest.raises(ValueError, match="Mine is a subclass"):
        zoo.from_upstream(Mine(**reference.SIZES))
    from diffusers import AutoencoderKL

    with pytest.raises(TypeError, match=r"no family converts diffusers\..*AutoencoderKL"):
        zoo.from_upstream(AutoencoderKL(block_out_channels=(32,), norm_num_groups=8))


def test_state_dicts_that_do_not_fit() -> None:
    theirs = reference.make("sd")
    config = config_of(theirs)
    state = theirs.state_dict()
    key = "mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight"
    with pytest.raises(ValueError, match=f"missing tensors \\['{key}'\\]"):
        WEIGHTS.convert_state_dict({name: tensor for name, tensor in state.items() if name != key}, config)
    with pytest.raises(ValueError, match=r"unexpected tensors \['extra'\]"):
        WEIGHTS.convert_state_dict({**state, "extra": torch.zeros(1)}, config)
    with pytest.raises(ValueError, match=r"to_k\.weight has shape \(3, 24\), expected \(32, 24\)"):
        WEIGHTS.convert_state_dict({**state, key: torch.zeros(3, 24)}, config)
