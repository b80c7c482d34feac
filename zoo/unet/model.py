"""The conditional UNet of Stable Diffusion 1.5, 2.1 and XL, as diffusers builds it.

    sample ─ conv ─┬─ level ─ halve ─┬─ level ─ halve ─ ... ─ middle ─ ... ─ level ─ double ─ level ─ norm ─ conv ─▶
                   └──── skips ──────┴───────────────────────────────────────┴───────────────┘
    timestep ─▶ shifts of all resnet blocks            text ─▶ keys and values of all cross-attentions

Shifts, keys and values do not depend on the sample. Each is one product for all blocks, and can be computed once for a
whole run. The convolutions that halve and double are library calls between the regions. Activations are channels_last.

Shape legend: B images, C channels, H height, W width, L tokens of the text, D its width, K channels of all keys and
values of the text, E width of the embedded timestep, S channels of all shifts, X width of the pooled text, Y sizes, F
width of ``timestep_cond``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import validate
from zoo.engine.region import Region
from zoo.ops.images import conv, group_norm
from zoo.unet.blocks import Conditioning, Level, ResnetBlock, TransformerBlock, UNetConfig, linear
from zoo.weights import keep_channels_last


class Embedding(nn.Module):
    """Two products with SiLU between them; diffusers' ``TimestepEmbedding``."""

    def __init__(self, inputs: int, width: int, cond: int | None = None) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inputs, width)
        self.cond_proj = None if cond is None else nn.Linear(cond, inputs, bias=False)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        """X [..., I], plus a condition [..., F] in models that take one -> [..., E]."""
        if cond is not None:
            assert self.cond_proj is not None
            x = x + self.cond_proj(cond)
        return self.linear_2(F.silu(self.linear_1(x)))


class Conditions(nn.Module):
    """The embedded timestep, with the pooled text and image sizes of SDXL added."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        width = config.time_width
        self.time_embedding = Embedding(config.block_out_channels[0], width, config.time_cond_proj_dim)
        self.add_embedding = None
        if config.addition_embed_type == "text_time":
            assert config.projection_class_embeddings_input_dim is not None
            self.add_embedding = Embedding(config.projection_class_embeddings_input_dim, width)

    def forward(self, timesteps: Tensor, added: Mapping[str, Tensor] | None, cond: Tensor | None) -> Tensor:
        """Embed timesteps [B], [1] or, for a whole run, [steps, 1]: [B, E], [1, E] or [steps, B, E].

        For models that take them, ``added`` holds ``text_embeds`` [B, X] and ``time_ids`` [B, Y], and ``cond`` is
        [B, F].
        """
        config, dtype = self.config, self.time_embedding.linear_1.weight.dtype
        embedded = self.time_embedding(sinusoids(timesteps, config.block_out_channels[0]).to(dtype), cond)
        if self.add_embedding is None:
            return embedded
        assert added is not None and config.addition_time_embed_dim is not None
        sizes = sinusoids(added["time_ids"], config.addition_time_embed_dim).flatten(1)
        pooled = torch.cat([added["text_embeds"], sizes], dim=-1)
        return embedded + self.add_embedding(pooled.to(dtype))


class TimeProjections(nn.Module):
    """The projections of the embedded timestep for all resnet blocks, in their order, as one product.

    A block's shift includes the bias of its first convolution.
    """

    def __init__(self, width: int, channels: Sequence[int]) -> None:
        super().__init__()
        self.channels = tuple(channels)
        total = sum(channels)
        self.weight = nn.Parameter(torch.empty(total, width))
        self.bias = nn.Parameter(torch.empty(total))
        self.conv_bias = nn.Parameter(torch.empty(total))
        bound = width**-0.5
        for parameter in (self.weight, self.bias, self.conv_bias):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, embedded: Tensor) -> Tensor:
        """[..., E] -> [..., S]."""
        return linear(F.silu(embedded), self.weight, self.bias + self.conv_bias)


class TextProjections(nn.Module):
    """Keys and values of all cross-attentions, in the order of the blocks, as one product."""

    def __init__(self, width: int, channels: Sequence[int]) -> None:
        super().__init__()
        self.channels = tuple(channels)
        self.weight = nn.Parameter(torch.empty(2 * sum(channels), width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def forward(self, text: Tensor) -> Tensor:
        """[B, L, D] -> [B, L, K]: keys, then values, block after block."""
        return linear(text, self.weight)


def sinusoids(values: Tensor, width: int) -> Tensor:
    """Cosines and sines of falling frequencies: [...] -> [..., width] in float32, or in float64 for float64 input."""
    half = width // 2
    # Rounded in diffusers' order: half an ulp of a frequency becomes many ulps in the angle of a late timestep.
    exponents = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=values.device)
    angles = values[..., None] * torch.exp(exponents / half)
    joined = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return F.pad(joined, (0, 1)) if width % 2 else joined


# Stable Diffusion has 14 + 4 + 1 graphs, since blocks of a level differ in the width of their skip connection.
REGIONS = (
    Region(ResnetBlock, graphs=15, why="norms, convolutions and residual of a block, a graph for each shape"),
    Region(TransformerBlock, graphs=4, why="attention, MLP and norms of a block, a graph for each shape at any depth"),
    Region(TextProjections, graphs=1, why="keys and values of the text for all blocks, a large part of XL's weights"),
)


class TimeShifts(NamedTuple):
    """The timesteps' shifts of all resnet blocks, [B, S], or [1, S] for all rows. From ``UNet.time_shifts``."""

    shifts: Tensor


class TextKeysValues(NamedTuple):
    """Keys and values [B, L, K] of a condition for all cross-attentions. From ``UNet.text_keys_values``."""

    keys_values: Tensor


class UNetOutput(NamedTuple):
    """A prediction [B, C_out, H, W] under diffusers' name."""

    sample: Tensor


class UNet(nn.Module):
    """Predicts the noise (or another training target) of a sample from a timestep and a text; of a ``UNetConfig``.

    Replaces diffusers' ``UNet2DConditionModel`` in diffusers' pipelines.
    """

    regions: ClassVar[tuple[Region, ...]] = REGIONS

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        first, blocks = config.block_out_channels[0], config.blocks()
        self.conditions = Conditions(config)
        self.time_projections = TimeProjections(config.time_width, [block.outputs for block in blocks])
        attending = [block.outputs for block in blocks for _ in range(block.depth or 0)]
        self.text_projections = TextProjections(config.cross_attention_dim, attending)
        self.conv_in = nn.Conv2d(config.in_channels, first, 3, padding=1)
        self.down = nn.ModuleList(Level(config, level) for level in config.down())
        self.middle = Level(config, config.middle())
        self.up = nn.ModuleList(Level(config, level) for level in config.up())
        self._depths = [[block.depth or 0 for block in level.blocks] for level in config.levels()]
        self.norm_out = nn.GroupNorm(config.norm_num_groups, first, eps=config.norm_eps)
        self.conv_out = nn.Conv2d(first, config.out_channels, 3, padding=1)
        keep_channels_last(self)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype, which pipelines read."""
        return self.conv_in.weight.dtype

    @property
    def device(self) -> torch.device:
        """The weights' device, which pipelines read."""
        return self.conv_in.weight.device

    @property
    def add_embedding(self) -> Embedding | None:
        """The embedding of the pooled condition and the sizes; pipelines read its width."""
        return self.conditions.add_embedding

    def load_lora_adapter(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError; ``pipe.load_lora_weights`` calls it."""
        raise NotImplementedError(
            "LoRA weights are merged when a UNet is converted: put diffusers' back by "
            "pipe.unet = zoo.to_upstream(pipe.unet), load them, then convert it with zoo.from_upstream"
        )

    def forward(
        self, sample: Tensor, timestep: Tensor | float | int | TimeShifts,
        encoder_hidden_states: Tensor | TextKeysValues, class_labels: None = None, timestep_cond: Tensor | None = None,
        attention_mask: None = None, cross_attention_kwargs: Mapping[str, Any] | None = None,
        added_cond_kwargs: Mapping[str, Tensor] | None = None,
        down_block_additional_residuals: Sequence[Tensor] | None = None,
        mid_block_additional_residual: Tensor | None = None, down_intrablock_additional_residuals: None = None,
        encoder_attention_mask: Tensor | None = None, return_dict: bool = True,
    ) -> UNetOutput:  # fmt: skip
        """Predict: ``UNetOutput(sample)`` of [B, C_out, H, W].

        Timestep and text may be results of ``time_shifts`` and ``text_keys_values``, so that a run of many steps
        computes them once. A Python number as timestep is copied to the device, which an outer CUDA graph cannot do; a
        tensor on the device needs no copy.

        Args:
            sample: [B, C_in, H, W], in any memory format; H and W divisible by ``config.reduction``.
            timestep: A number, [], [1] or [B]; or ``TimeShifts``.
            encoder_hidden_states: [B, L, D]; or ``TextKeysValues``.
            class_labels: Not supported.
            timestep_cond: [B, F] with ``config.time_cond_proj_dim``.
            attention_mask: Not supported.
            cross_attention_kwargs: Only ``{"scale": 1.0}``: LoRA weights are merged on conversion.
            added_cond_kwargs: ``text_embeds`` [B, X] and ``time_ids`` [B, Y] with ``addition_embed_type``.
            down_block_additional_residuals: ControlNet residuals, one per skip connection, added to it.
            mid_block_additional_residual: ControlNet residual, added after the middle.
            down_intrablock_additional_residuals: Not supported.
            encoder_attention_mask: [B, L], 0 for tokens of the condition that attention ignores.
            return_dict: No effect: the result is always a named tuple.

        Raises:
            TypeError, ValueError: If an input does not fit, before anything runs.
        """
        config, weight = self.config, self.conv_in.weight
        for name, value in (
            ("class_labels", class_labels), ("attention_mask", attention_mask),
            ("down_intrablock_additional_residuals", down_intrablock_additional_residuals),
        ):  # fmt: skip
            if value is not None:
                raise ValueError(f"{name} is given, which is not supported; leave it out")
        if cross_attention_kwargs and cross_attention_kwargs != {"scale": 1.0}:
            has = f"cross_attention_kwargs has {sorted(cross_attention_kwargs)}"
            raise ValueError(f"{has}, and only a scale of 1 is taken: LoRA weights are merged when a UNet is converted")
        _check_sample(sample, config, weight)
        batch = sample.shape[0]
        if not isinstance(timestep, TimeShifts):
            timesteps = _as_timesteps(timestep, batch, weight.device)
            timestep = self.time_shifts(timesteps, added_cond_kwargs, timestep_cond)
        if not isinstance(encoder_hidden_states, TextKeysValues):
            hint = ", a row for each row of the sample, which guidance doubles: torch.cat([sample] * 2)"
            validate.tensor("encoder_hidden_states", encoder_hidden_states, f"{batch} L D", hint=hint)
            encoder_hidden_states = self.text_keys_values(encoder_hidden_states)
        shifts, keys_values = timestep.shifts, encoder_hidden_states.keys_values
        _check_projected(self, shifts, keys_values, encoder_attention_mask, sample)
        _check_residuals(down_block_additional_residuals, mid_block_additional_residual, config, sample)
        x = conv(sample.contiguous(memory_format=torch.channels_last), self.conv_in)
        conditioning = self._conditioning(shifts.expand(batch, -1), keys_values, encoder_attention_mask)
        skips = [x]
        for level, given in zip(self.down, conditioning, strict=False):
            skips += level(skips[-1], given)
        # The middle's input is the last skip, without the ControlNet's residual.
        x = self.middle(skips[-1], conditioning[len(self.down)])[-1]
        if down_block_additional_residuals is not None:
            skips = [skip + added for skip, added in zip(skips, down_block_additional_residuals, strict=True)]
        if mid_block_additional_residual is not None:
            x = x + mid_block_additional_residual
        for level, given in zip(self.up, conditioning[-len(self.up) :], strict=True):
            (x,) = level(x, given, [skips.pop() for _ in given.shifts])
        norm = self.norm_out
        x = self.conv_out(group_norm(x, None, norm.weight, norm.bias, norm.num_groups, norm.eps, True))
        return UNetOutput(x.contiguous())

    def time_shifts(
        self, timesteps: Tensor, added_cond_kwargs: Mapping[str, Tensor] | None = None,
        timestep_cond: Tensor | None = None,
    ) -> TimeShifts:  # fmt: skip
        """Shifts of the resnet blocks from timesteps and all conditions except the text; ``forward`` takes them.

        Timesteps [B] or [1] give shifts [B, S] or [1, S]. Timesteps [steps, 1] of a whole run give [steps, B, S] for
        conditions of B rows, else [steps, 1, S]; ``TimeShifts(shifts[step])`` is for one step. Conditions are as in
        ``forward``. Raises TypeError or ValueError if an input does not fit.
        """
        _check_conditions(timesteps, added_cond_kwargs or {}, timestep_cond, self.config, self.device)
        return TimeShifts(self.time_projections(self.conditions(timesteps, added_cond_kwargs, timestep_cond)))

    def text_keys_values(self, encoder_hidden_states: Tensor) -> TextKeysValues:
        """Keys and values of a condition [B, L, D] for all cross-attentions; ``forward`` takes them.

        Raises TypeError or ValueError if the condition does not fit.
        """
        weight, width = self.text_projections.weight, self.config.cross_attention_dim
        hint = ": the text encoder must be the one that the model was trained with"
        validate.tensor("encoder_hidden_states", encoder_hidden_states, f"B L {width}", like=weight, hint=hint)
        return TextKeysValues(self.text_projections(encoder_hidden_states))

    def _conditioning(self, shifts: Tensor, keys_values: Tensor, mask: Tensor | None) -> list[Conditioning]:
        """Split shifts [B, S] and keys and values [B, L, K] among levels, in running order; turn the mask to a bias."""
        own_shifts = list(shifts.split(self.time_projections.channels, dim=-1))
        texts = list(keys_values.split([2 * channels for channels in self.text_projections.channels], dim=-1))
        # As in diffusers: 0 for a visible token, -10000 for a masked token.
        bias = None if mask is None else ((1 - mask.to(keys_values.dtype)) * -10000.0)[:, None, None]
        found = []
        for depths in self._depths:
            own_texts = [[texts.pop(0) for _ in range(depth)] for depth in depths]
            found.append(Conditioning([own_shifts.pop(0) for _ in depths], own_texts, bias))
        return found


def example_inputs(
    model: UNet, *, batch: int = 2, size: int | None = None, tokens: int = 77, seed: int = 0
) -> dict[str, Any]:
    """Normal latents and texts, and random timesteps, the same on every device.

    ``sample`` [B, C_in, size, size] in channels_last, ``timestep`` [B], ``encoder_hidden_states`` [B, L, D], and
    ``added_cond_kwargs`` if the model takes them. The default size is the training size.
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

    inputs: dict[str, Any] = {
        "sample": normal(batch, config.in_channels, size, size).contiguous(memory_format=torch.channels_last),
        "timestep": torch.randint(1000, (batch,), generator=generator, device="cpu").to(model.device),
        "encoder_hidden_states": normal(batch, tokens, config.cross_attention_dim),
    }
    if config.addition_embed_type is not None:
        assert config.addition_time_embed_dim is not None and config.projection_class_embeddings_input_dim is not None
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        # Original size, upper left corner and target size, in pixels of the image.
        sizes = torch.tensor([[8.0, 8.0, 0.0, 0.0, 8.0, 8.0]], device=model.device, dtype=model.dtype) * size
        inputs["added_cond_kwargs"] = {"text_embeds": normal(batch, pooled), "time_ids": sizes.expand(batch, -1)}
    return inputs


def _check_sample(sample: Tensor, config: UNetConfig, weight: Tensor) -> None:
    hint = "; sample[None] makes a batch of one sample, and sample.permute(0, 3, 1, 2) puts channels first"
    validate.tensor("sample", sample, f"B {config.in_channels} H W", like=weight, empty=False, hint=hint)
    (height, width), reduction = sample.shape[2:], config.reduction
    if height % reduction or width % reduction:
        raise ValueError(
            f"sample is {height} × {width}, which {len(config.block_out_channels)} levels cannot halve evenly: crop or "
            f"pad both sides to a multiple of {reduction}"
        )


def _as_timesteps(timestep: Any, batch: int, device: torch.device) -> Tensor:
    """Convert a number or tensor to a tensor [1] or [B] on the device."""
    if isinstance(timestep, bool) or not isinstance(timestep, (int, float, Tensor)):
        raise TypeError(f"timestep is {timestep!r}, expected a number, a tensor [] or [{batch}], or TimeShifts")
    if not isinstance(timestep, Tensor):
        dtype = torch.int64 if isinstance(timestep, int) else torch.float32
        return torch.tensor([timestep], dtype=dtype, device=device)
    if timestep.numel() not in (1, batch) or timestep.dim() > 1:
        known = "[] or [1]" if batch == 1 else f"[], [1] or [{batch}]"
        raise ValueError(f"timestep has shape {list(timestep.shape)}, expected {known}")
    return timestep.reshape(-1).to(device)


def _check_conditions(
    timesteps: Tensor, added: Mapping[str, Tensor], cond: Tensor | None, config: UNetConfig, device: torch.device
) -> None:
    validate.tensor("timesteps", timesteps, "B | steps 1", like=device, hint=" for a whole run")
    rows = timesteps.shape[0] if timesteps.dim() == 1 and timesteps.shape[0] > 1 else "B"
    if cond is not None:
        if config.time_cond_proj_dim is None:
            raise ValueError("timestep_cond is given, but this model has no time_cond_proj_dim: leave it out")
        validate.tensor("timestep_cond", cond, f"{rows} {config.time_cond_proj_dim}")
    width: Any = config.addition_time_embed_dim
    wanted = [] if config.addition_embed_type is None else ["text_embeds", "time_ids"]
    if sorted(added) != wanted:
        remedy = f"pass {' and '.join(wanted)}, to a Sampler as added" if wanted else "leave it out"
        raise ValueError(f"added_cond_kwargs has {sorted(added)}, and this model takes {wanted}: {remedy}")
    if wanted:
        text, sizes = added["text_embeds"], added["time_ids"]
        validate.tensor("text_embeds", text, f"{rows} X")
        validate.tensor("time_ids", sizes, f"{text.shape[0]} Y", hint=", as many rows as text_embeds")
        channels, takes = text.shape[1] + sizes.shape[1] * width, config.projection_class_embeddings_input_dim
        if channels != takes:
            sums = f"{text.shape[1]} + {sizes.shape[1]} × {width} = {channels} channels"
            raise ValueError(f"text_embeds and time_ids: {sums}; the model takes {takes}")


def _check_projected(
    model: UNet, shifts: Tensor, keys_values: Tensor, text_mask: Tensor | None, sample: Tensor
) -> None:
    sizes = {"B": sample.shape[0], "S": len(model.time_projections.bias), "K": len(model.text_projections.weight)}
    like: dict[str, Any] = {"sizes": sizes, "like": sample.device, "like_name": "sample"}
    hint = "; make it with this model's time_shifts, and take one step's of a whole run"
    validate.tensor("timestep", shifts, "B S | 1 S", hint=hint, **like)
    hint = "; use this model's text_keys_values, with a row for each row of the sample"
    validate.tensor("encoder_hidden_states", keys_values, "B L K", hint=hint, **like)
    if text_mask is not None:
        shape = f"B {keys_values.shape[1]}"
        validate.tensor("encoder_attention_mask", text_mask, shape, hint=": 1 is seen and 0 is not", **like)


def _check_residuals(
    residuals: Sequence[Tensor] | None, middle: Tensor | None, config: UNetConfig, sample: Tensor
) -> None:
    (batch, _, height, width), skips = sample.shape, config.skips()
    if residuals is not None and len(residuals) != len(skips):
        raise ValueError(f"down_block_additional_residuals has {len(residuals)} tensors, expected {len(skips)}")
    given = [(f"down_block_additional_residuals[{i}]", each, skips[i]) for i, each in enumerate(residuals or ())]
    if middle is not None:
        given.append(("mid_block_additional_residual", middle, skips[-1]))
    for name, residual, (channels, size) in given:
        shape = f"{batch} {channels} {height // size} {width // size}"
        validate.tensor(name, residual, shape, like=sample.device, like_name="sample")
