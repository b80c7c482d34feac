"""Models by name, and inputs to try them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.unet.config import UNetConfig
from zoo.unet.model import UNet
from zoo.validate import seeded

_SD: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "layers_per_block": 2,
    "transformer_layers_per_block": 1,
}
_XL: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
}

PRESETS: dict[str, UNetConfig] = {
    "sd15": UNetConfig(num_attention_heads=8, cross_attention_dim=768, sample_size=64, **_SD),
    "sd21": UNetConfig(
        num_attention_heads=(5, 10, 20, 20),
        cross_attention_dim=1024,
        use_linear_projection=True,
        upcast_attention=True,
        sample_size=96,
        **_SD,
    ),
    "sdxl": UNetConfig(
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=2,
        transformer_layers_per_block=(1, 2, 10),
        num_attention_heads=(5, 10, 20),
        cross_attention_dim=2048,
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
        sample_size=128,
        **_XL,
    ),
    # As SD 1.5: projections by convolution, transformers on the larger sizes.
    "unet-debug": UNetConfig(
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32, 32),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        transformer_layers_per_block=1,
        num_attention_heads=2,
        cross_attention_dim=24,
        norm_num_groups=8,
        sample_size=16,
    ),
    # As SDXL: deep transformers on the smaller sizes, a pooled condition and sizes.
    "unet-xl-debug": UNetConfig(
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        transformer_layers_per_block=(1, 2),
        num_attention_heads=(2, 4),
        cross_attention_dim=24,
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=12 + 6 * 8,
        norm_num_groups=8,
        sample_size=16,
        **_XL,
    ),
}


def example_inputs(
    model: nn.Module, *, batch: int = 2, size: int | None = None, tokens: int = 77, seed: int = 0
) -> dict[str, Any]:
    """Normal values in place of latents and texts, and random timesteps; the same on every device.

    Args:
        model: A UNet of the zoo.
        batch: B; with guidance twice the images.
        size: Height and width of the sample; what the model was trained on when left out.
        tokens: L.
        seed: Of the random values.

    Returns:
        ``sample`` [B, C_in, size, size] in channels_last, ``timestep`` [B], ``encoder_hidden_states`` [B, L, D], and
        ``added_cond_kwargs`` where the model takes them.
    """
    if not isinstance(model, UNet):
        raise TypeError(f"{type(model).__name__} is not a UNet of the zoo")
    config = model.config
    if size is None:
        trained = config.sample_size
        size = 64 if trained is None else trained if isinstance(trained, int) else trained[0]
    if batch < 1 or tokens < 1 or size < 1 or size % config.reduction:
        raise ValueError(
            f"batch is {batch}, tokens {tokens} and size {size}: all must be positive, and size divisible by "
            f"{config.reduction}"
        )
    generator = seeded(seed)

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        return drawn.to(model.device, model.dtype)

    sample = normal(batch, config.in_channels, size, size).contiguous(memory_format=torch.channels_last)
    inputs: dict[str, Any] = {
        "sample": sample,
        "timestep": torch.randint(1000, (batch,), generator=generator, device="cpu").to(model.device),
        "encoder_hidden_states": normal(batch, tokens, config.cross_attention_dim),
    }
    if config.addition_embed_type is not None:
        assert config.addition_time_embed_dim is not None and config.projection_class_embeddings_input_dim is not None
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        # Original size, upper left corner and target size, in pixels of the image.
        sizes = torch.tensor([8.0 * size, 8.0 * size, 0.0, 0.0, 8.0 * size, 8.0 * size], device="cpu")
        inputs["added_cond_kwargs"] = {
            "text_embeds": normal(batch, pooled),
            "time_ids": sizes.expand(batch, -1).to(model.device, model.dtype),
        }
    return inputs
