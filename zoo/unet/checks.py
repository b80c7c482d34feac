"""What a UNet is given, checked before anything runs. Each error says what was wrong and what to do.

Values are read on the host only, so that no device is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.unet.config import UNetConfig


def check_sample(sample: Tensor, config: UNetConfig, weight: Tensor) -> None:
    """A sample [B, C_in, H, W] that the weights can be applied to, and the levels can divide.

    Raises:
        TypeError: If it is no dense floating-point tensor of the weights' dtype.
        ValueError: If its shape or device does not fit, or a value on the host is not finite.
    """
    _check_kind("sample", sample, weight)
    channels, shape, reduction = config.in_channels, tuple(sample.shape), config.reduction
    if sample.dim() != 4 or shape[1] != channels:
        hint = "; use sample[None] for one sample" if sample.dim() == 3 and shape[0] == channels else ""
        if sample.dim() == 4 and shape[3] == channels:
            hint = "; channels come first here, use sample.permute(0, 3, 1, 2)"
        raise ValueError(f"sample has shape {shape}, expected [B, {channels}, H, W]{hint}")
    if 0 in shape:
        raise ValueError(f"sample has shape {shape}; there must be a row, and a pixel in each")
    if shape[2] % reduction or shape[3] % reduction:
        fitting = tuple(max(reduction, side // reduction * reduction) for side in shape[2:])
        raise ValueError(
            f"sample is {shape[2]} × {shape[3]}, which {len(config.block_out_channels)} levels cannot halve evenly: "
            f"both sides must be divisible by {reduction}; crop or pad, to {fitting[0]} × {fitting[1]} for one"
        )
    _check_finite("sample", sample)


def check_condition(text: Tensor, config: UNetConfig, weight: Tensor) -> None:
    """A condition [B, L, D] that the weights can be applied to.

    Raises:
        TypeError: If it is no dense floating-point tensor of the weights' dtype.
        ValueError: If its shape or device does not fit, or a value on the host is not finite.
    """
    width = config.cross_attention_dim
    if text is None:
        raise TypeError(f"encoder_hidden_states is None, expected the text as a tensor [B, L, {width}]")
    _check_kind("encoder_hidden_states", text, weight)
    if text.dim() != 3 or text.shape[2] != width or 0 in text.shape:
        raise ValueError(
            f"encoder_hidden_states has shape {tuple(text.shape)}, expected [B, L, {width}]: the text encoder must be "
            "the one that the model was trained with"
        )
    _check_finite("encoder_hidden_states", text)


def check_text(tensor: Tensor, batch: int, channels: int, sample: Tensor) -> None:
    """Keys and values [B, L, K] of this model and batch.

    Raises:
        ValueError: If they are of another model, batch or device.
    """
    if tensor.dim() != 3 or tensor.shape[2] != channels:
        raise ValueError(
            f"keys and values have shape {tuple(tensor.shape)}, expected [{batch}, L, {channels}]; make them with this "
            "model's text_keys_values"
        )
    if tensor.shape[0] != batch:
        raise ValueError(
            f"encoder_hidden_states has {tensor.shape[0]} row(s) and sample {batch}; repeat the text, or with guidance "
            "double the sample"
        )
    _check_device("encoder_hidden_states", tensor, sample)


def check_time(tensor: Tensor, batch: int, channels: int, sample: Tensor) -> None:
    """Shifts [B, S] or [1, S] of this model and batch.

    Raises:
        ValueError: If they are of another model, batch or device.
    """
    if tensor.dim() != 2 or tensor.shape[1] != channels or tensor.shape[0] not in (1, batch):
        raise ValueError(
            f"the timestep's shifts have shape {tuple(tensor.shape)}, expected [{batch}, {channels}] or "
            f"[1, {channels}]; make them with this model's time_shifts, and take one step's of a whole run"
        )
    _check_device("timestep", tensor, sample)


def as_timesteps(timestep: Any, batch: int, device: torch.device) -> Tensor:
    """A timestep as a tensor [1] or [B] on the device.

    Raises:
        TypeError: If it is neither a number nor a tensor.
        ValueError: If it is of another batch.
    """
    if isinstance(timestep, bool) or not isinstance(timestep, (int, float, Tensor)):
        raise TypeError(f"timestep is {timestep!r}, expected a number, a tensor [] or [{batch}], or TimeShifts")
    if not isinstance(timestep, Tensor):
        dtype = torch.int64 if isinstance(timestep, int) else torch.float32
        return torch.tensor([timestep], dtype=dtype, device=device)
    if timestep.numel() not in (1, batch) or timestep.dim() > 1:
        raise ValueError(f"timestep has shape {tuple(timestep.shape)}, expected [], [1] or [{batch}]")
    return timestep.reshape(-1).to(device)


def check_conditions(
    timesteps: Tensor,
    added: Mapping[str, Tensor] | None,
    further: Tensor | None,
    config: UNetConfig,
    device: torch.device,
) -> None:
    """Timesteps, and every condition beside the text that the model takes, and no other.

    Raises:
        TypeError: If timesteps are no tensor of numbers.
        ValueError: If a condition is missing, superfluous or of another shape.
    """
    if not isinstance(timesteps, Tensor) or timesteps.dtype in (torch.bool, torch.complex64, torch.complex128):
        found = timesteps.dtype if isinstance(timesteps, Tensor) else type(timesteps).__name__
        raise TypeError(f"timesteps is {found}, expected a tensor of numbers")
    if timesteps.dim() not in (1, 2) or (timesteps.dim() == 2 and timesteps.shape[1] != 1):
        raise ValueError(f"timesteps has shape {tuple(timesteps.shape)}, expected [B], or [steps, 1] for a whole run")
    if timesteps.device != device:
        raise ValueError(f"timesteps is on {timesteps.device} and the weights are on {device}; move one of them")
    rows: int | None = timesteps.shape[0] if timesteps.dim() == 1 and timesteps.shape[0] > 1 else None
    if further is not None:
        width = config.time_cond_proj_dim
        if width is None:
            raise ValueError("timestep_cond is given, but this model has no time_cond_proj_dim: leave it out")
        if further.dim() != 2 or further.shape[1] != width or rows not in (None, further.shape[0]):
            raise ValueError(f"timestep_cond has shape {tuple(further.shape)}, expected [{rows or 'B'}, {width}]")
    if config.addition_embed_type is None:
        if added:
            raise ValueError(f"added_cond_kwargs has {', '.join(added)}, but this model has no added conditions")
        return
    added = added or {}
    for name, what in (("text_embeds", "the pooled text"), ("time_ids", "sizes and crop")):
        if name not in added:
            raise ValueError(f"added_cond_kwargs has no {name!r} ({what}), which this model needs")
    extra = sorted(set(added) - {"text_embeds", "time_ids"})
    if extra:
        raise ValueError(f"added_cond_kwargs has {', '.join(extra)}, which is not supported")
    pooled, sizes = added["text_embeds"], added["time_ids"]
    assert config.addition_time_embed_dim is not None
    shapes = f"text_embeds {tuple(pooled.shape)} and time_ids {tuple(sizes.shape)}"
    if pooled.dim() != 2 or sizes.dim() != 2 or len({pooled.shape[0], sizes.shape[0], rows or pooled.shape[0]}) > 1:
        raise ValueError(f"{shapes}: expected [{rows or 'B'}, X] and [{rows or 'B'}, Y]")
    width = pooled.shape[1] + sizes.shape[1] * config.addition_time_embed_dim
    if width != config.projection_class_embeddings_input_dim:
        raise ValueError(
            f"{shapes}: {pooled.shape[1]} + {sizes.shape[1]} × {config.addition_time_embed_dim} are {width} channels, "
            f"and the model takes {config.projection_class_embeddings_input_dim}"
        )


def check_masks(
    attention_mask: Tensor | None, text_mask: Tensor | None, config: UNetConfig, sample: Tensor, tokens: int
) -> None:
    """Masks [B, T] of pixels and [B, L] of the condition.

    Raises:
        ValueError: If a mask is of another shape or device.
    """
    batch, _, height, width = sample.shape
    if text_mask is not None:
        _check_mask("encoder_attention_mask", text_mask, batch, tokens, sample)
    if attention_mask is None:
        return
    sizes = {height * width // 4**level for level in _attending_levels(config)}
    if len(sizes) != 1:
        raise ValueError(
            f"attention_mask is given, but self-attention runs over {sorted(sizes)} pixels: a mask fits one of them; "
            "leave it out (encoder_attention_mask hides tokens of the text)"
        )
    _check_mask("attention_mask", attention_mask, batch, sizes.pop(), sample)


def check_residuals(
    residuals: Sequence[Tensor] | None, middle: Tensor | None, config: UNetConfig, sample: Tensor
) -> None:
    """What a ControlNet adds: a tensor for each skip connection and one for the middle.

    Raises:
        ValueError: If there is one without the other, or a tensor is missing or of another shape.
    """
    if (residuals is None) != (middle is None):
        missing = "mid_block_additional_residual" if middle is None else "down_block_additional_residuals"
        raise ValueError(f"a ControlNet gives both residuals, and {missing} is missing (adapters are not supported)")
    if residuals is None or middle is None:
        return
    batch, _, height, width = sample.shape
    skips = config.skips()
    if len(residuals) != len(skips):
        raise ValueError(f"down_block_additional_residuals has {len(residuals)} tensors, expected {len(skips)}")
    names = [f"down_block_additional_residuals[{index}]" for index in range(len(skips))]
    expected = [(batch, channels, height // size, width // size) for channels, size in skips]
    names.append("mid_block_additional_residual")
    expected.append((batch, config.block_out_channels[-1], height // config.reduction, width // config.reduction))
    for name, shape, residual in zip(names, expected, [*residuals, middle], strict=True):
        if tuple(residual.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(residual.shape)}, expected {shape}")
        _check_device(name, residual, sample)


def check_unsupported(labels: Any, attention: Mapping[str, Any] | None, adapter: Any) -> None:
    """Arguments of diffusers' forward that this one does not take.

    Raises:
        ValueError: If one is given; the message names it.
    """
    if labels is not None:
        raise ValueError("class_labels is given, and conditions by class are not supported; leave it out")
    if adapter is not None:
        raise ValueError("down_intrablock_additional_residuals is given, and adapters are not supported; leave it out")
    for name, value in (attention or {}).items():
        if name != "scale" or value != 1.0:
            raise ValueError(
                f"cross_attention_kwargs has {name}={value!r}, which is not supported: LoRA weights are merged on "
                "conversion, in the strength that they then have"
            )


def _attending_levels(config: UNetConfig) -> set[int]:
    """Levels with transformers, 0 the largest size; the middle is of the last one's."""
    last = len(config.block_out_channels) - 1
    levels = {index for index, level in enumerate(config.down()) if level.blocks[0].depth is not None}
    levels |= {last - index for index, level in enumerate(config.up()) if level.blocks[0].depth is not None}
    return levels | {last}


def _check_kind(name: str, tensor: Any, weight: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        found = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} is a {found}, expected a dense tensor")
    if tensor.device != weight.device:
        raise ValueError(f"{name} is on {tensor.device} and the weights are on {weight.device}; move one of them")
    if tensor.dtype != weight.dtype and not (
        tensor.dtype.is_floating_point and torch.is_autocast_enabled(tensor.device.type)
    ):
        raise TypeError(
            f"{name} is {tensor.dtype} and the weights are {weight.dtype}; use {name}.to({weight.dtype}), or "
            "torch.autocast"
        )


def _check_mask(name: str, mask: Tensor, batch: int, tokens: int, sample: Tensor) -> None:
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (batch, tokens):
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{name} is {found}, expected a tensor ({batch}, {tokens}): 1 is seen and 0 is not")
    _check_device(name, mask, sample)


def _check_device(name: str, tensor: Tensor, sample: Tensor) -> None:
    if tensor.device != sample.device:
        raise ValueError(f"{name} is on {tensor.device} and sample on {sample.device}; move one of them")


def _check_finite(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = int((~tensor.isfinite()).sum())
    if wrong:
        raise ValueError(
            f"{name} has {wrong} value(s) that are not finite, of {tensor.numel()}: what it came from overflowed; in "
            "float16 run that in float32 or bfloat16"
        )
