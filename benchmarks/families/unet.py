"""Conditional UNets over latents: both libraries' arms from one set of weights, in channels_last.

Shape legend: B rows, C channels, H × W pixels, L tokens of the text, D its width, X width of the pooled text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from benchmarks.families import base, unet_arms
from benchmarks.plan import Case
from benchmarks.strategies import READY_BATCHES, reference_losses
from zoo.unet import Sampler, UNet, UNetConfig, make_schedule
from zoo.unet.blocks import PRESETS
from zoo.unet.convert import WEIGHTS

# Diffusers' Euler with Stable Diffusion's noise. Its tables are on the host, and it synchronises once per run.
SCHEDULER: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "timestep_spacing": "leading",
    "steps_offset": 1,
}
GUIDANCE = 7.5
# Rows of a step: one without the text and one with it.
ROWS = 2
# Ratio of an image's side to its latents' side.
_SCALE = 8

RUN_BYTES_FORMULA = f"All steps, but keys and values of the text once. Of a step: {unet_arms.BYTES_FORMULA}"
# Learning rate times width of the first level, since wide models need smaller steps: 1e-4 at 320.
_RATE_TIMES_WIDTH = 0.032
# Latents are a grid of this many squares per side, so that they differ from noise.
SQUARES = 4
# Stable Diffusion's noise schedule: number of steps, and the variance added by the first and the last.
_STEPS, _FIRST, _LAST = 1000, 0.00085, 0.012
# Copies of each weight in training's reference: weight, gradient and two moments.
_COPIES = 4


class UNetWorkload(base.Workload):
    """Inference with random weights: one call predicts the noise of a batch of square latents, for a text of 77 tokens.

    ``BxHxW``: the rows of the batch (with guidance twice the images) and their pixels.

    ``loop-NxHxW``, ``pipeline-NxHxW``: one call is all N steps of one image with guidance, from noise to latents. In a
    loop the zoo's sampler runs the zoo's model; in a pipeline diffusers' own ``StableDiffusionPipeline`` runs it.

    Training predicts the noise in latents, with float32 weights; the dtype is that of autocast.
    """

    family = "unet"
    models = tuple(PRESETS)
    inputs = (
        *("2x64x64", "2x96x96", "2x128x128", "4x64x64", "8x64x64", "2x8x8"),
        *("loop-30x64x64", "loop-30x96x96", "loop-30x128x128", "loop-3x8x8"),
        *("pipeline-30x64x64", "pipeline-30x128x128", "pipeline-3x8x8"),
    )

    workloads = ("inference", "train")
    cpu_race = ("unet-debug", "2x8x8")
    gpu_races, gpu_training = (("sd15", "2x64x64"),), (("sd15", "4x64x64"),)

    def cannot(self, case: Case) -> str | None:
        if _is_run(case) and case.workload == "train":
            return f"{case.input} is for inference"
        if _is_run(case) and case.strategy == "hierarchical":
            return "hierarchical is for single calls of the model"
        if case.workload == "train" and case.impl == "upstream-tuned":
            return "tuned has fused projections, which are for inference; to train, diffusers' users have no better way"
        return None

    def estimate(self, case: Case, *, reference: bool) -> int:
        """Estimated device memory: weights, skips, and tensors that are live at once or saved for the backward."""
        config, (batch, size) = PRESETS[case.model], sizes(case.input)
        batch = ROWS if _is_run(case) else batch
        itemsize, parameters = base.dtype_of(case).itemsize, unet_arms.parameters(config)
        skips, alive = unet_arms.skips(config, size), unet_arms.alive(config, size)
        training = case.workload == "train"
        wide = unet_arms.reference_dtype(config, _COPIES if training else 1).itemsize
        # In float64 every attention materialises scores and their softmax.
        scores = 3 * unet_arms.scores(config, size) if wide == 8 else 0
        if training:
            # The backward saves about all inputs and outputs of calls; autocast keeps a narrow copy of the weights.
            running = (batch * sum(unet_arms.calls(config, size)) + parameters) * itemsize
            # The reference saves each block's input, and the inside of one block.
            exact = (_COPIES * parameters + batch * (2 * skips + 2 * alive + scores)) * wide
            given = (config.in_channels + config.out_channels) * size**2
            given += unet_arms.TOKENS * config.cross_attention_dim
            held = 4 * _COPIES * parameters + 4 * READY_BATCHES * batch * given
        else:
            fused = unet_arms.fused_weights(config) if case.impl == "upstream-tuned" else 0
            held, running = (parameters + fused) * itemsize, batch * (skips + alive) * itemsize
            exact = (parameters + skips + alive + scores) * wide  # a row at a time
        return held + (max(running, exact) if reference else running)

    def build(self, case: Case, *, data_root: str | None, seed: int) -> base.Prepared:
        config, (batch, size) = PRESETS[case.model], sizes(case.input)
        device, dtype = torch.device(case.device), base.weights_dtype(case)
        weights = unet_arms.Weights(unet_arms.skeleton(config), seed=seed, dtype=dtype, device=device)
        preparation: dict[str, float] = {}
        model: Any
        if case.impl == "zoo":
            model = base.zoo_model(UNet, config, weights, WEIGHTS.placements(config))
        else:
            model = unet_arms.build(config, weights)
            if case.impl == "upstream-tuned":
                with base.timed("fused projections", preparation, case.device):
                    unet_arms.fuse_projections(model)
        if _is_run(case):
            return prepare_run(case, model.eval(), config, weights, batch, size, preparation)
        inputs = unet_arms.draw_inputs(config, batch, size, seed=seed, dtype=dtype, device=device)
        precision, training = unet_arms.reference_dtype(config), case.workload == "train"
        prepared = base.Prepared(
            model=model.eval(),
            inputs=inputs,
            compile_regions=base.upstream_regions(case, unet_arms.compile_blocks),
            reference=lambda: unet_arms.reference_output(config, weights, inputs, precision),
            reference_dtype=str(precision).removeprefix("torch."),
            bytes=unet_arms.bytes_moved(config, batch, size, dtype.itemsize),
            bytes_formula=unet_arms.BYTES_FORMULA,
            flops=unet_arms.flops(config, batch, size, training=training),
            data="generated, normal",
            preparation_seconds=preparation,
            sizes={"batch": batch, "pixels": size, "blocks": len(config.blocks()), **unet_arms.model_sizes(config)},
        )
        return _for_training(case, prepared, config, weights, batch, size) if training else prepared


def sizes(input: str) -> tuple[int, int]:
    """Rows (or steps of a run) and pixels per side."""
    count, size, _ = input.rpartition("-")[2].split("x")
    return int(count), int(size)


def _is_run(case: Case) -> bool:
    return case.input.startswith(("loop-", "pipeline-"))


# --- a whole run from noise to latents, text and pixels apart ---


class ZooLoop(nn.Module):
    """The zoo's sampler around a UNet."""

    def __init__(self, unet: UNet, steps: int, size: int) -> None:
        super().__init__()
        self.unet, self.steps, self.size = unet, steps, size
        self.sampler = self._make(cuda_graph=False)

    def forward(
        self, prompt_embeds: Tensor, negative_prompt_embeds: Tensor, latents: Tensor,
        pooled_prompt_embeds: Tensor | None = None, negative_pooled_prompt_embeds: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Text and negative text [1, L, D], noise [1, C, H, W] -> latents [1, C, H, W] float32.

        Models that take them also get the pooled texts [1, X], and sizes that match the run's image.
        """
        added: dict[str, Any] = {}
        if pooled_prompt_embeds is not None:
            _, time_ids = unet_arms.added_conditions(self.unet.config, 1, self.size, latents.device)
            sizes = time_ids.to(prompt_embeds.dtype)
            added["added"] = {"text_embeds": pooled_prompt_embeds, "time_ids": sizes}
            added["negative_added"] = {"text_embeds": negative_pooled_prompt_embeds, "time_ids": sizes}
        return self.sampler(prompt_embeds, negative_prompt_embeds, latents=latents, **added)

    def capture(self) -> None:
        """Let the sampler capture a step in the next call."""
        self.sampler = self._make(cuda_graph=True)

    def _make(self, *, cuda_graph: bool) -> Sampler:
        from diffusers import EulerDiscreteScheduler

        shape = (1, self.unet.config.in_channels, self.size, self.size)
        schedule = make_schedule(EulerDiscreteScheduler(**SCHEDULER), self.steps)
        return Sampler(self.unet, schedule, shape=shape, guidance_scale=GUIDANCE, cuda_graph=cuda_graph)


class PipelineLoop(nn.Module):
    """diffusers' pipeline around a UNet of either library, from encoded text to latents, like ``ZooLoop``."""

    def __init__(self, unet: Any, steps: int, size: int) -> None:
        super().__init__()
        from diffusers import EulerDiscreteScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline

        self.unet, self.steps, self.size = unet, steps, size
        scheduler = EulerDiscreteScheduler(**SCHEDULER)
        kind, parts = StableDiffusionPipeline, ["vae", "text_encoder", "tokenizer"]
        options = {"requires_safety_checker": False, "safety_checker": None, "feature_extractor": None}
        if unet.config.addition_embed_type is not None:
            kind, options = StableDiffusionXLPipeline, {"add_watermarker": False}
            parts += ["text_encoder_2", "tokenizer_2"]
        self.pipeline: Any = kind(**dict.fromkeys(parts), unet=unet, scheduler=scheduler, **options)
        self.pipeline.set_progress_bar_config(disable=True)

    def forward(self, **inputs: Tensor) -> Tensor:
        """Same arguments as in ``ZooLoop``; latents in the dtype of the model."""
        pixels = self.size * _SCALE
        how = {"num_inference_steps": self.steps, "guidance_scale": GUIDANCE, "height": pixels, "width": pixels}
        found: Tensor = self.pipeline(**inputs, **how, output_type="latent", return_dict=False)[0]
        return found

    def capture(self) -> None:
        """Capture the UNet's calls; the pipeline's scheduler and guidance stay outside."""
        self.pipeline.unet = zoo.cuda_graph(self.unet)


def prepare_run(
    case: Case, model: nn.Module, config: UNetConfig, weights: base.SeededWeights, steps: int, size: int,
    preparation: Mapping[str, float],
) -> base.Prepared:  # fmt: skip
    device, dtype = weights.device, weights.dtype
    text = (1, unet_arms.TOKENS, config.cross_attention_dim)
    shapes: dict[str, tuple[int, ...]] = {"prompt_embeds": text, "negative_prompt_embeds": text}
    shapes["latents"] = (1, config.in_channels, size, size)
    if config.addition_embed_type is not None:
        width, _ = unet_arms.added_conditions(config, 1, size, device)
        shapes |= {"pooled_prompt_embeds": (1, width), "negative_pooled_prompt_embeds": (1, width)}
    how: dict[str, Any] = {"seed": weights.seed, "dtype": dtype, "device": device}
    inputs = {name: base.draw(shape, name, **how) for name, shape in shapes.items()}
    kind = ZooLoop if isinstance(model, UNet) and case.input.startswith("loop-") else PipelineLoop
    # The loop declares the regions of its model, so that every strategy finds them.
    loop: Any = type(kind.__name__, (kind,), {"regions": getattr(type(model), "regions", ())})(model, steps, size)
    precision = unet_arms.reference_dtype(config)

    def compile_full(loop: Any, **options: Any) -> None:
        # diffusers' documentation compiles the pipeline's UNet with fullgraph; the zoo's has no break either.
        loop.unet.compile(fullgraph=True, **options)

    def compile_blocks(loop: Any, **options: Any) -> None:
        unet_arms.compile_blocks(loop.unet, **options)

    @torch.no_grad()
    def reference() -> Tensor:
        theirs = unet_arms.reference_model(config, weights, precision)
        with unet_arms.in_full_float32():
            found: Tensor = PipelineLoop(theirs, steps, size)(**base.converted(inputs, case.device, precision))
        return found

    of_weights, values = unet_arms.text_projections(config)
    projected = (of_weights + ROWS * values) * dtype.itemsize
    return base.Prepared(
        model=loop.eval(),
        inputs=inputs,
        compile_regions=base.upstream_regions(case, compile_blocks),
        compile_full=compile_full,
        capture=loop.capture,
        reference=reference,
        reference_dtype=str(precision).removeprefix("torch."),
        # Each step moves what a call does, except that the text is projected once.
        bytes=steps * unet_arms.bytes_moved(config, ROWS, size, dtype.itemsize) - (steps - 1) * projected,
        bytes_formula=RUN_BYTES_FORMULA,
        flops=steps * unet_arms.flops(config, ROWS, size),
        data="generated, normal",
        preparation_seconds=preparation,
        sizes={"images": 1, "steps": steps, "pixels": size, **unet_arms.model_sizes(config)},
        count=1,
        unit="images",
    )


# --- training ---


class NoiseLoss:
    """Mean squared error of the predicted noise. The shares of latents and noise per timestep are on ``device``."""

    def __init__(self, device: torch.device | str) -> None:
        variances = torch.linspace(_FIRST**0.5, _LAST**0.5, _STEPS, dtype=torch.float64).square()
        left = (1 - variances).cumprod(0)
        self.latents, self.noise = (table.sqrt().float().to(device) for table in (left, 1 - left))

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Scalar loss of ``latents`` and ``noise`` [B, C, H, W], ``timesteps`` [B] and ``text`` [B, L, D].

        Models that take them also get ``text_embeds`` [B, X] and ``time_ids`` [B, 6].
        """
        noise, timesteps = batch["noise"], batch["timesteps"]
        rows = (-1, 1, 1, 1)
        mixed = self.latents[timesteps].view(rows) * batch["latents"] + self.noise[timesteps].view(rows) * noise
        added = {name: batch[name] for name in ("text_embeds", "time_ids") if name in batch}
        conditions: dict[str, Any] = {"added_cond_kwargs": added} if added else {}
        (predicted,) = model(mixed, timesteps, batch["text"], **conditions, return_dict=False)
        return F.mse_loss(predicted.to(noise.dtype), noise)


def training_of(
    config: UNetConfig, batch: int, size: int, *, seed: int, device: str, dtype: torch.dtype
) -> base.Training:
    """The noise loss over latents drawn in each step."""

    def draw(index: int) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed((seed << 20) + index)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        squares = normal(batch, config.in_channels, min(SQUARES, size), min(SQUARES, size))
        drawn = {
            "latents": F.interpolate(squares, size=(size, size)),
            "noise": normal(batch, config.out_channels, size, size),
            "timesteps": torch.randint(_STEPS, (batch,), generator=generator, device=device),
            "text": normal(batch, unet_arms.TOKENS, config.cross_attention_dim),
        }
        if config.addition_embed_type is not None:
            pooled, drawn["time_ids"] = unet_arms.added_conditions(config, batch, size, device)
            drawn["text_embeds"] = normal(batch, pooled)
        return drawn

    return base.Training(
        loss=NoiseLoss(device),
        batch=draw,
        learning_rate=_RATE_TIMES_WIDTH / config.block_out_channels[0],
        autocast=base.autocast_of(dtype),
    )


def _for_training(
    case: Case, prepared: base.Prepared, config: UNetConfig, weights: base.SeededWeights, batch: int, size: int
) -> base.Prepared:
    itemsize, parameters = base.dtype_of(case).itemsize, unet_arms.parameters(config)
    training = training_of(config, batch, size, seed=weights.seed, device=case.device, dtype=base.dtype_of(case))
    precision = unet_arms.reference_dtype(config, _COPIES)

    def reference() -> Tensor:
        theirs = unet_arms.build(config, weights).requires_grad_(True)
        # Saves only each block's inputs.
        theirs.enable_gradient_checkpointing()
        with unet_arms.in_full_float32():
            return reference_losses(theirs, training, precision)

    given = batch * (config.in_channels * size**2 + unet_arms.TOKENS * config.cross_attention_dim)
    return prepared.for_training(
        reference=reference,
        reference_dtype=str(precision).removeprefix("torch."),
        bytes=3 * unet_arms.bytes_moved(config, batch, size, itemsize) - given * itemsize + 32 * parameters,
        bytes_formula=base.TRAINING_BYTES_FORMULA,
        data="generated, squares and noise",
        count=batch,
        unit="images",
        training=training,
    )


WORKLOAD = UNetWorkload()
