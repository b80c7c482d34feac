"""diffusers' UNets at a tiny size, with every weight drawn, and inputs to try them on."""

from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

from tests.fuzzing import randomize, relative_error  # noqa: F401

SIZES: dict[str, Any] = {
    "sample_size": 16, "block_out_channels": (16, 32), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "layers_per_block": 1, "attention_head_dim": 2,
    "cross_attention_dim": 24, "norm_num_groups": 8,
}  # fmt: skip
XL: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "transformer_layers_per_block": [1, 2],
    "attention_head_dim": [2, 4], "use_linear_projection": True, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 12 + 6 * 8,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "sd": {},
    "sd, linear": {"use_linear_projection": True, "upcast_attention": True, "attention_head_dim": [1, 4]},
    "xl": XL,
    "xl, conv": {**XL, "use_linear_projection": False},
    "three levels": {
        "block_out_channels": (8, 16, 40),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": [1, 2, 1],
        "attention_head_dim": [2, 4, 5],
        "transformer_layers_per_block": [1, 2, 3],
    },
    "one level": {
        "block_out_channels": (16,),
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("CrossAttnUpBlock2D",),
        "layers_per_block": 2,
    },
    "groups of six and twelve": {"block_out_channels": (24, 48), "norm_num_groups": 4, "attention_head_dim": 3},
    "guidance in the timestep": {"time_cond_proj_dim": 6},
    "other ends": {
        "in_channels": 9, "out_channels": 3, "norm_eps": 1e-3, "sample_size": [16, 24],
    },
}  # fmt: skip


def make(case: str, **options: Any) -> Any:
    return randomize(UNet2DConditionModel(**{**SIZES, **CASES[case], **options}), 0).eval()


def inputs(module: Any, batch: int = 2, height: int = 16, width: int = 16, tokens: int = 7) -> dict[str, Any]:
    """As a pipeline passes them, with every condition that the model takes."""
    config = module.config
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    given: dict[str, Any] = {
        "sample": normal(batch, config.in_channels, height, width),
        "timestep": torch.tensor(601),
        "encoder_hidden_states": normal(batch, tokens, 24),
    }
    if config.addition_embed_type is not None:
        sizes = torch.tensor([128.0, 96.0, 0.0, 8.0, 128.0, 96.0]) + torch.arange(batch)[:, None]
        given["added_cond_kwargs"] = {"text_embeds": normal(batch, 12), "time_ids": sizes}
    if config.time_cond_proj_dim is not None:
        given["timestep_cond"] = normal(batch, config.time_cond_proj_dim)
    return given


def controlnet(config: Any, batch: int = 2, height: int = 16, width: int = 16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    down = [
        torch.randn(batch, channels, height // size, width // size, generator=generator)
        for channels, size in config.skips()
    ]
    return {
        "down_block_additional_residuals": tuple(down),
        "mid_block_additional_residual": torch.randn(down[-1].shape, generator=generator),
    }
