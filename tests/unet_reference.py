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
    "guidance in the timestep": {"time_cond_proj_dim": 6},
    "other ends": {
        "in_channels": 9, "out_channels": 3, "norm_eps": 1e-3, "sample_size": [16, 24],
    },
}  # fmt: skip


def make(case: str, **options: Any) -> Any:
    return randomize(UNet2DConditionModel(**{**SIZES, **CASES[case], **options}), 0).eval()


def inputs(module: Any) -> dict[str, Any]:
    """As a pipeline passes them, with every condition that the model takes."""
    config = module.config
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    given: dict[str, Any] = {
        "sample": normal(2, config.in_channels, 16, 16),
        "timestep": torch.tensor(601),
        "encoder_hidden_states": normal(2, 7, 24),
    }
    if config.addition_embed_type is not None:
        sizes = torch.tensor([128.0, 96.0, 0.0, 8.0, 128.0, 96.0]) + torch.arange(2)[:, None]
        given["added_cond_kwargs"] = {"text_embeds": normal(2, 12), "time_ids": sizes}
    if config.time_cond_proj_dim is not None:
        given["timestep_cond"] = normal(2, config.time_cond_proj_dim)
    return given


def controlnet(config: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(2, channels, 16 // size, 16 // size) for channels, size in config.skips()]
    *down, middle = (torch.randn(shape, generator=generator) for shape in (*shapes, shapes[-1]))
    return {"down_block_additional_residuals": tuple(down), "mid_block_additional_residual": middle}
