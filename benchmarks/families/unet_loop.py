"""A whole run from noise to latents as one call: diffusers' pipeline or the zoo's sampler, with the same scheduler.

``loop-`` races the zoo's sampler against the pipeline, ``pipeline-`` the zoo's model in diffusers' pipeline against its
own there. One image with guidance, so two rows in each step. Neither side encodes the text or decodes the latents.

Shape legend: L tokens of the text, D its width, X that of the pooled text, C channels, H × W pixels of the latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from benchmarks.families import unet_arms
from benchmarks.families.base import Prepared, SeededWeights, draw
from benchmarks.plan import Case
from zoo.unet import Sampler, UNet, UNetConfig, make_schedule

# Diffusers' Euler with Stable Diffusion's noise. It keeps its tables on the host, and waits for the device once a run.
SCHEDULER: dict[str, Any] = {
    "_class_name": "EulerDiscreteScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "timestep_spacing": "leading",
    "steps_offset": 1,
}
GUIDANCE = 7.5
# Rows of a step: without the text and with it.
ROWS = 2
# Pixels of the image for one of the latents.
_SCALE = 8

BYTES_FORMULA = f"All steps, but keys and values of the text once. Of a step: {unet_arms.BYTES_FORMULA}"


class ZooLoop(nn.Module):
    """The zoo's sampler around a UNet."""

    def __init__(self, unet: UNet, steps: int, size: int) -> None:
        super().__init__()
        self.unet, self.steps, self.size = unet, steps, size
        self.sampler = self._make(cuda_graph=False)

    def forward(
        self,
        prompt_embeds: Tensor,
        negative_prompt_embeds: Tensor,
        latents: Tensor,
        pooled_prompt_embeds: Tensor | None = None,
        negative_pooled_prompt_embeds: Tensor | None = None,
    ) -> Tensor:
        """Text and what guidance leads away from [1, L, D], noise [1, C, H, W] -> latents [1, C, H, W] float32.

        Models that take them are given the pooled texts [1, X] as well, and are told an image of the run's own size.
        """
        text, negative = prompt_embeds, negative_prompt_embeds
        if pooled_prompt_embeds is None:
            return self.sampler(text, negative, latents=latents)
        assert negative_pooled_prompt_embeds is not None
        _, time_ids = unet_arms.added_conditions(self.unet.config, 1, self.size, text.device)
        sizes = time_ids.to(text.dtype)
        return self.sampler(
            text,
            negative,
            latents=latents,
            added={"text_embeds": pooled_prompt_embeds, "time_ids": sizes},
            negative_added={"text_embeds": negative_pooled_prompt_embeds, "time_ids": sizes},
        )

    def capture(self) -> None:
        """Let the sampler capture a step in the next call."""
        self.sampler = self._make(cuda_graph=True)

    def _make(self, *, cuda_graph: bool) -> Sampler:
        shape = (1, self.unet.config.in_channels, self.size, self.size)
        schedule = make_schedule(SCHEDULER, self.steps)
        return Sampler(self.unet, schedule, shape=shape, guidance_scale=GUIDANCE, cuda_graph=cuda_graph)


class PipelineLoop(nn.Module):
    """diffusers' pipeline around a UNet of either library, from encoded text to latents, as a ``ZooLoop``."""

    def __init__(self, unet: Any, steps: int, size: int) -> None:
        super().__init__()
        from diffusers import EulerDiscreteScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline

        self.unet, self.steps, self.size = unet, steps, size
        scheduler = EulerDiscreteScheduler(**{key: value for key, value in SCHEDULER.items() if key[0] != "_"})
        self.pipeline: Any
        if unet.config.addition_embed_type is not None:
            parts = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
            self.pipeline = StableDiffusionXLPipeline(
                **dict.fromkeys(parts), unet=unet, scheduler=scheduler, add_watermarker=False
            )
        else:
            parts = ("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor")
            self.pipeline = StableDiffusionPipeline(
                **dict.fromkeys(parts), unet=unet, scheduler=scheduler, requires_safety_checker=False
            )
        self.pipeline.set_progress_bar_config(disable=True)

    def forward(self, **inputs: Tensor) -> Tensor:
        """As ``ZooLoop``'s, in the dtype of the model."""
        found: Tensor = self.pipeline(
            **inputs,
            num_inference_steps=self.steps,
            guidance_scale=GUIDANCE,
            height=self.size * _SCALE,
            width=self.size * _SCALE,
            output_type="latent",
            return_dict=False,
        )[0]
        return found

    def capture(self) -> None:
        """Have the UNet's calls captured; scheduler and guidance stay outside, as the pipeline has them."""
        self.pipeline.unet = zoo.cuda_graph(self.unet)


def prepare(
    case: Case,
    model: nn.Module,
    config: UNetConfig,
    weights: SeededWeights,
    steps: int,
    size: int,
    *,
    preparation: Mapping[str, float],
) -> Prepared:
    """Build the run around a model."""
    device, dtype = weights.device, weights.dtype
    text = (1, unet_arms.TOKENS, config.cross_attention_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "prompt_embeds": text,
        "negative_prompt_embeds": text,
        "latents": (1, config.in_channels, size, size),
    }
    if config.addition_embed_type is not None:
        width, _ = unet_arms.added_conditions(config, 1, size, device)
        shapes |= {"pooled_prompt_embeds": (1, width), "negative_pooled_prompt_embeds": (1, width)}
    inputs = {name: draw(shape, name, seed=weights.seed, dtype=dtype, device=device) for name, shape in shapes.items()}
    kind = ZooLoop if isinstance(model, UNet) and case.input.startswith("loop-") else PipelineLoop
    # The loop declares the regions of its model, so that every strategy finds them.
    loop: Any = type(kind.__name__, (kind,), {"regions": getattr(type(model), "regions", ())})(model, steps, size)
    tuned, precision = case.impl == "upstream-tuned", unet_arms.reference_dtype(config)

    def compile_full(loop: Any, **options: Any) -> None:
        # diffusers' documentation compiles the pipeline's UNet with fullgraph; ours has no break either.
        loop.unet.compile(fullgraph=True, **options)

    def compile_blocks(loop: Any, **options: Any) -> None:
        unet_arms.compile_blocks(loop.unet, raised_limit=tuned, **options)

    @torch.no_grad()
    def reference() -> Tensor:
        theirs = unet_arms.reference_model(config, weights, precision)
        with unet_arms.in_full_float32():
            found: Tensor = PipelineLoop(theirs, steps, size)(
                **{name: tensor.to(precision) for name, tensor in inputs.items()}
            )
        return found

    return Prepared(
        model=loop.eval(),
        inputs=inputs,
        compile_regions=None if case.impl == "zoo" else compile_blocks,
        compile_full=compile_full,
        capture=loop.capture,
        reference=reference,
        reference_dtype=str(precision).removeprefix("torch."),
        bytes=bytes_moved(config, steps, size, dtype.itemsize),
        bytes_formula=BYTES_FORMULA,
        flops=steps * unet_arms.flops(config, ROWS, size),
        data="generated, normal",
        preparation_seconds=preparation,
        sizes={
            "images": 1,
            "steps": steps,
            "pixels": size,
            "tokens": unet_arms.TOKENS,
            "parameters": unet_arms.parameters(config),
        },
        count=1,
        unit="images",
    )


def bytes_moved(config: UNetConfig, steps: int, size: int, itemsize: int) -> int:
    """Fewest bytes that a run moves through device memory, as :data:`BYTES_FORMULA` says."""
    weights, values = unet_arms.text_projections(config)
    known = (weights + ROWS * values) * itemsize
    return steps * unet_arms.bytes_moved(config, ROWS, size, itemsize) - (steps - 1) * known
