"""The conditional UNet of Stable Diffusion 1.5, 2.1 and XL, as diffusers builds it.

    sample ─ conv ─┬─ level ─ halve ─┬─ level ─ halve ─ ... ─ middle ─ ... ─ level ─ double ─ level ─ norm ─ conv ─▶
                   └──── skips ──────┴───────────────────────────────────────┴───────────────┘
    timestep ─▶ shifts of all resnet blocks            text ─▶ keys and values of all cross-attentions

Shifts, keys and values do not depend on the sample: each is one product for all blocks, and may be computed once for a
whole run. Convolutions that halve and double are library calls between the regions. Activations are in channels_last.

Shape legend: B images, C channels, H height, W width, T = H W tokens of an image, L tokens of the text, D its width, K
channels of all its keys and values, S channels of all shifts, X width of the pooled text, Y sizes, F width of
``timestep_cond``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from zoo import validate
from zoo.engine.captured import side_stream
from zoo.engine.region import Region
from zoo.ops.conv import conv
from zoo.ops.norms import group_norm
from zoo.unet.blocks import (
    Conditioning,
    Conditions,
    DownLevel,
    Embedding,
    MiddleLevel,
    ResnetBlock,
    TextProjections,
    TimeProjections,
    TransformerBlock,
    UpLevel,
    hiding_bias,
)
from zoo.unet.config import UNetConfig
from zoo.weights import keep_channels_last

# Stable Diffusion has 14 + 4 + 1: a level's blocks differ in the width of their skip connection.
REGIONS = (
    Region(ResnetBlock, graphs=15, why="norms, convolutions and residual of a block, a graph for each shape"),
    Region(TransformerBlock, graphs=4, why="attention, MLP and norms of a block, a graph for each shape at any depth"),
    Region(TextProjections, graphs=1, why="keys and values of the text for all blocks, a large part of XL's weights"),
)


class TimeShifts(NamedTuple):
    """The timesteps' shifts of all resnet blocks, [B, S] or [1, S] for all rows; ``UNet.time_shifts`` makes it."""

    shifts: Tensor


class TextKeysValues(NamedTuple):
    """Keys and values [B, L, K] of a condition in every cross-attention; ``UNet.text_keys_values`` makes it."""

    keys_values: Tensor


class UNetOutput(NamedTuple):
    """A prediction [B, C_out, H, W] under diffusers' name."""

    sample: Tensor


class UNet(nn.Module):
    """Predicts the noise, or what it was trained on, in a sample, given a timestep and a text; of a ``UNetConfig``.

    Takes the place of diffusers' ``UNet2DConditionModel`` in its pipelines.
    """

    regions: ClassVar[tuple[Region, ...]] = REGIONS

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        first, blocks = config.block_out_channels[0], config.blocks()
        pad = config.conv_in_kernel // 2, config.conv_out_kernel // 2
        self.conditions = Conditions(config)
        self.time_projections = TimeProjections(config.time_width, [block.outputs for block in blocks])
        attending = [block.outputs for block in blocks for _ in range(block.depth or 0)]
        self.text_projections = TextProjections(config.cross_attention_dim, attending)
        self.conv_in = nn.Conv2d(config.in_channels, first, config.conv_in_kernel, padding=pad[0])
        self.down = nn.ModuleList(DownLevel(config, level) for level in config.down())
        self.middle = MiddleLevel(config, config.middle())
        self.up = nn.ModuleList(UpLevel(config, level) for level in config.up())
        levels = (*config.down(), config.middle(), *config.up())
        self._depths = [[block.depth or 0 for block in level.blocks] for level in levels]
        self.norm_out = nn.GroupNorm(config.norm_num_groups, first, eps=config.norm_eps)
        self.conv_out = nn.Conv2d(first, config.out_channels, config.conv_out_kernel, padding=pad[1])
        keep_channels_last(self)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights; pipelines ask for it."""
        return self.conv_in.weight.dtype

    @property
    def device(self) -> torch.device:
        """Of the weights; pipelines ask for it."""
        return self.conv_in.weight.device

    @property
    def add_embedding(self) -> Embedding | None:
        """What embeds the pooled condition and sizes; pipelines ask for its width."""
        return self.conditions.add_embedding

    def forward(
        self, sample: Tensor, timestep: Tensor | float | int | TimeShifts,
        encoder_hidden_states: Tensor | TextKeysValues, class_labels: None = None, timestep_cond: Tensor | None = None,
        attention_mask: Tensor | None = None, cross_attention_kwargs: Mapping[str, Any] | None = None,
        added_cond_kwargs: Mapping[str, Tensor] | None = None,
        down_block_additional_residuals: Sequence[Tensor] | None = None,
        mid_block_additional_residual: Tensor | None = None, down_intrablock_additional_residuals: None = None,
        encoder_attention_mask: Tensor | None = None, return_dict: bool = True,
    ) -> UNetOutput:  # fmt: skip
        """Predict: ``UNetOutput(sample)`` of [B, C_out, H, W].

        Timestep and text may be given as what ``time_shifts`` and ``text_keys_values`` made of them: in a run of many
        steps they are computed once. A number as timestep is copied to the device, which an outer CUDA graph cannot do;
        a tensor there is not.

        Args:
            sample: [B, C_in, H, W], in any memory format; H and W divisible by ``config.reduction``.
            timestep: A number, [], [1] or [B]; or ``TimeShifts``.
            encoder_hidden_states: [B, L, D]; or ``TextKeysValues``.
            class_labels: Not supported.
            timestep_cond: [B, F] with ``config.time_cond_proj_dim``.
            attention_mask: [B, T], 0 for pixels that none sees in self-attention; for models with transformers of one
                size, T pixels, alone.
            cross_attention_kwargs: Nothing but ``{"scale": 1.0}``: LoRA weights are merged on conversion.
            added_cond_kwargs: ``text_embeds`` [B, X] and ``time_ids`` [B, Y] with ``addition_embed_type``.
            down_block_additional_residuals: Of a ControlNet, added to the skip connections, one for each.
            mid_block_additional_residual: Of a ControlNet, added after the middle.
            down_intrablock_additional_residuals: Not supported.
            encoder_attention_mask: [B, L], 0 for tokens of the condition that are not seen.
            return_dict: Either way the result is a tuple with a name in it.

        Raises:
            TypeError, ValueError: If an input does not fit, before anything runs. Values are looked at on the host
                only.
        """
        config, weight = self.config, self.conv_in.weight
        _check_unsupported(class_labels, cross_attention_kwargs, down_intrablock_additional_residuals)
        _check_sample(sample, config, weight)
        batch = sample.shape[0]
        wait: Callable[[], None] | None = None
        if not isinstance(timestep, TimeShifts):
            # On a GPU these dozen small kernels run on a side stream, during the first convolution.
            with side_stream(sample.device) as wait:
                timesteps = _as_timesteps(timestep, batch, weight.device)
                timestep = self.time_shifts(timesteps, added_cond_kwargs, timestep_cond)
        if not isinstance(encoder_hidden_states, TextKeysValues):
            encoder_hidden_states = self.text_keys_values(encoder_hidden_states)
        shifts, keys_values = timestep.shifts, encoder_hidden_states.keys_values
        _check_projected(self, shifts, keys_values, sample)
        _check_masks(attention_mask, encoder_attention_mask, config, sample, keys_values.shape[1])
        _check_residuals(down_block_additional_residuals, mid_block_additional_residual, config, sample)
        x = sample.contiguous(memory_format=torch.channels_last)
        x = conv(2 * x - 1.0 if config.center_input_sample else x, self.conv_in)
        if wait is not None:
            wait()
        masks = attention_mask, encoder_attention_mask
        conditioning = self._conditioning(shifts.expand(batch, -1), keys_values, masks)
        skips = [x]
        for level, given in zip(self.down, conditioning, strict=False):
            skips += level(skips[-1], given)
        # The middle's input is the last skip without a ControlNet's residual.
        x = self.middle(skips[-1], conditioning[len(self.down)])
        if down_block_additional_residuals is not None:
            skips = [skip + added for skip, added in zip(skips, down_block_additional_residuals, strict=True)]
        if mid_block_additional_residual is not None:
            x = x + mid_block_additional_residual
        for level, given in zip(self.up, conditioning[-len(self.up) :], strict=True):
            x = level(x, [skips.pop() for _ in given.shifts], given)
        norm = self.norm_out
        x = self.conv_out(group_norm(x, None, norm.weight, norm.bias, norm.num_groups, norm.eps, True))
        return UNetOutput(x.contiguous())

    def time_shifts(
        self, timesteps: Tensor, added_cond_kwargs: Mapping[str, Tensor] | None = None,
        timestep_cond: Tensor | None = None,
    ) -> TimeShifts:  # fmt: skip
        """What timesteps, and all conditions but the text, add inside the resnet blocks; ``forward`` takes it.

        Timesteps [B] or [1] give shifts [B, S] or [1, S]. Those of a whole run [steps, 1], for conditions of B rows or
        none, give [steps, B, S] or [steps, 1, S], of which ``TimeShifts(shifts[step])`` is one step's. The conditions
        are as ``forward`` takes them; what does not fit is a TypeError or ValueError.
        """
        _check_conditions(timesteps, added_cond_kwargs, timestep_cond, self.config, self.device)
        return TimeShifts(self.time_projections(self.conditions(timesteps, added_cond_kwargs, timestep_cond)))

    def text_keys_values(self, encoder_hidden_states: Tensor) -> TextKeysValues:
        """Keys and values of a condition [B, L, D] in all cross-attentions; ``forward`` takes it.

        A condition that does not fit is a TypeError or ValueError.
        """
        weight, width = self.text_projections.weight, self.config.cross_attention_dim
        hint = ": the text encoder must be the one that the model was trained with"
        validate.tensor("encoder_hidden_states", encoder_hidden_states, f"B L {width}", like=weight, hint=hint)
        _check_values("encoder_hidden_states", encoder_hidden_states)
        return TextKeysValues(self.text_projections(encoder_hidden_states))

    def _conditioning(self, shifts: Tensor, keys_values: Tensor, masks: Sequence[Tensor | None]) -> list[Conditioning]:
        """[B, S], [B, L, K] and masks of pixels and text -> what each level takes, in the order in which they run."""
        own_shifts = list(shifts.split(self.time_projections.channels, dim=-1))
        texts = list(keys_values.split([2 * channels for channels in self.text_projections.channels], dim=-1))
        biases = [None if mask is None else hiding_bias(mask, keys_values.dtype) for mask in masks]
        found = []
        for depths in self._depths:
            own_texts = [[texts.pop(0) for _ in range(depth)] for depth in depths]
            found.append(Conditioning([own_shifts.pop(0) for _ in depths], own_texts, *biases))
        return found


def example_inputs(
    model: UNet, *, batch: int = 2, size: int | None = None, tokens: int = 77, seed: int = 0
) -> dict[str, Any]:
    """Normal latents and texts, and random timesteps, the same on every device.

    ``sample`` [B, C_in, size, size] in channels_last, ``timestep`` [B], ``encoder_hidden_states`` [B, L, D], and
    ``added_cond_kwargs`` where the model takes them. The size is the one that the model was trained on if left out.
    """
    config = model.config
    if size is None:
        trained = config.sample_size or 64
        size = trained if isinstance(trained, int) else trained[0]
    if batch < 1 or tokens < 1 or size < 1 or size % config.reduction:
        given = f"batch is {batch}, tokens {tokens}, size {size}"
        raise ValueError(f"{given}: expected 1 or more, and size divisible by {config.reduction}")
    generator = validate.seeded(seed)

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


# Checks of inputs. Values are read on the host only, so that no device is waited for.


def _check_unsupported(labels: Any, attention: Mapping[str, Any] | None, adapter: Any) -> None:
    """Refuse arguments of diffusers' forward that this one does not take."""
    if labels is not None:
        raise ValueError("class_labels is given, and conditions by class are not supported; leave it out")
    if adapter is not None:
        raise ValueError("down_intrablock_additional_residuals is given, and adapters are not supported; leave it out")
    for name, value in (attention or {}).items():
        if name != "scale" or value != 1.0:
            raise ValueError(f"cross_attention_kwargs has {name}={value!r}, which is not supported; merge LoRA weights")


def _check_sample(sample: Tensor, config: UNetConfig, weight: Tensor) -> None:
    channels, reduction, hint = config.in_channels, config.reduction, ""
    if isinstance(sample, Tensor) and sample.dim() == 3 and sample.shape[0] == channels:
        hint = "; use sample[None] for one sample"
    if isinstance(sample, Tensor) and sample.dim() == 4 and sample.shape[3] == channels:
        hint = "; channels come first here, use sample.permute(0, 3, 1, 2)"
    validate.tensor("sample", sample, f"B {channels} H W", like=weight, empty=False, hint=hint)
    height, width = sample.shape[2:]
    if height % reduction or width % reduction:
        fitting = [max(reduction, side // reduction * reduction) for side in (height, width)]
        raise ValueError(
            f"sample is {height} × {width}, which {len(config.block_out_channels)} levels cannot halve evenly: "
            f"both sides must be divisible by {reduction}; crop or pad, to {fitting[0]} × {fitting[1]} for one"
        )
    _check_values("sample", sample)


def _as_timesteps(timestep: Any, batch: int, device: torch.device) -> Tensor:
    """A number or tensor as a tensor [1] or [B] on the device."""
    if isinstance(timestep, bool) or not isinstance(timestep, (int, float, Tensor)):
        raise TypeError(f"timestep is {timestep!r}, expected a number, a tensor [] or [{batch}], or TimeShifts")
    if not isinstance(timestep, Tensor):
        dtype = torch.int64 if isinstance(timestep, int) else torch.float32
        return torch.tensor([timestep], dtype=dtype, device=device)
    if timestep.numel() not in (1, batch) or timestep.dim() > 1:
        raise ValueError(f"timestep has shape {list(timestep.shape)}, expected [], [1] or [{batch}]")
    return timestep.reshape(-1).to(device)


def _check_conditions(
    timesteps: Tensor, added: Mapping[str, Tensor] | None, cond: Tensor | None, config: UNetConfig,
    device: torch.device,
) -> None:  # fmt: skip
    """Refuse timesteps that do not fit, and conditions that the model does not take or lacks."""
    validate.tensor("timesteps", timesteps, "B | steps 1", like=device, hint=" for a whole run")
    if timesteps.dtype == torch.bool or timesteps.is_complex():
        raise TypeError(f"timesteps is {timesteps.dtype}, expected a tensor of numbers")
    rows = timesteps.shape[0] if timesteps.dim() == 1 and timesteps.shape[0] > 1 else "B"
    if cond is not None:
        if config.time_cond_proj_dim is None:
            raise ValueError("timestep_cond is given, but this model has no time_cond_proj_dim: leave it out")
        validate.tensor("timestep_cond", cond, f"{rows} {config.time_cond_proj_dim}")
    if config.addition_embed_type is None:
        if added:
            raise ValueError(f"added_cond_kwargs has {', '.join(added)}, but this model has no added conditions")
        return
    added = added or {}
    for name, what, width in (("text_embeds", "the pooled text", "X"), ("time_ids", "sizes and crop", "Y")):
        if name not in added:
            raise ValueError(f"added_cond_kwargs has no {name!r} ({what}), which this model needs")
        validate.tensor(name, added[name], f"{rows} {width}")
    if extra := sorted(set(added) - {"text_embeds", "time_ids"}):
        raise ValueError(f"added_cond_kwargs has {', '.join(extra)}, which is not supported")
    (batch, pooled), (other, sizes) = added["text_embeds"].shape, added["time_ids"].shape
    if batch != other:
        raise ValueError(f"text_embeds has {batch} row(s) and time_ids {other}; give both as many")
    assert config.addition_time_embed_dim is not None
    channels = pooled + sizes * config.addition_time_embed_dim
    if channels != config.projection_class_embeddings_input_dim:
        raise ValueError(
            f"text_embeds and time_ids: {pooled} + {sizes} × {config.addition_time_embed_dim} = {channels} channels; "
            f"the model takes {config.projection_class_embeddings_input_dim}"
        )


def _check_projected(model: UNet, shifts: Tensor, keys_values: Tensor, sample: Tensor) -> None:
    """Refuse shifts, keys and values that another model made, or of other rows than the sample's."""
    batch = sample.shape[0]
    of_sample: dict[str, Any] = {"like": sample.device, "like_name": "sample"}
    channels = sum(model.time_projections.channels)
    hint = "; make it with this model's time_shifts, and take one step's of a whole run"
    validate.tensor("timestep", shifts, f"{batch} {channels} | 1 {channels}", hint=hint, **of_sample)
    channels = model.text_projections.weight.shape[0]
    hint = "; make keys and values with this model's text_keys_values"
    validate.tensor("encoder_hidden_states", keys_values, f"B L {channels}", hint=hint, **of_sample)
    if keys_values.shape[0] != batch:
        raise ValueError(
            f"encoder_hidden_states has {keys_values.shape[0]} row(s) and sample {batch}; repeat the text, or with "
            "guidance double the sample"
        )


def _check_masks(
    attention_mask: Tensor | None, text_mask: Tensor | None, config: UNetConfig, sample: Tensor, tokens: int
) -> None:
    batch, _, height, width = sample.shape
    options: dict[str, Any] = {"like": sample.device, "like_name": "sample", "hint": ": 1 is seen and 0 is not"}
    if text_mask is not None:
        validate.tensor("encoder_attention_mask", text_mask, f"{batch} {tokens}", **options)
    if attention_mask is not None:
        # A level's size by its number, 0 the largest; the middle has that of the last one.
        levels, last = (*config.down(), *config.up()[::-1]), len(config.block_out_channels) - 1
        attending = {index % (last + 1) for index, level in enumerate(levels) if level.blocks[0].depth is not None}
        sizes = sorted({height * width // 4**level for level in attending | {last}})
        if len(sizes) != 1:
            raise ValueError(
                f"attention_mask is given, but self-attention runs over {sizes} pixels: a mask fits one of them; "
                "leave it out (encoder_attention_mask hides tokens of the text)"
            )
        validate.tensor("attention_mask", attention_mask, f"{batch} {sizes[0]}", **options)


def _check_residuals(
    residuals: Sequence[Tensor] | None, middle: Tensor | None, config: UNetConfig, sample: Tensor
) -> None:
    """Refuse what is not a ControlNet's: a tensor for each skip connection and one for the middle."""
    if residuals is None and middle is None:
        return
    if residuals is None or middle is None:
        missing = "mid_block_additional_residual" if middle is None else "down_block_additional_residuals"
        raise ValueError(f"a ControlNet gives both residuals, and {missing} is missing (adapters are not supported)")
    batch, _, height, width = sample.shape
    ends = [*config.skips(), (config.block_out_channels[-1], config.reduction)]
    if len(residuals) != len(ends) - 1:
        raise ValueError(f"down_block_additional_residuals has {len(residuals)} tensors, expected {len(ends) - 1}")
    names = [*(f"down_block_additional_residuals[{i}]" for i in range(len(residuals))), "mid_block_additional_residual"]
    for name, residual, (channels, size) in zip(names, (*residuals, middle), ends, strict=True):
        shape = f"{batch} {channels} {height // size} {width // size}"
        validate.tensor(name, residual, shape, like=sample.device, like_name="sample")


def _check_values(name: str, given: Tensor) -> None:
    if given.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = int((~given.isfinite()).sum())
    if wrong:
        raise ValueError(
            f"{name} has {wrong} value(s) that are not finite, of {given.numel()}: the model before overflowed; if in "
            "float16, run that in float32 or bfloat16"
        )
