"""Conditional UNets over latents: both libraries' arms from one set of weights, in channels_last."""

from __future__ import annotations

import functools
import re
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families import unet_loop, unet_train, unet_upstream, unet_work
from benchmarks.families.base import Prepared, dtype_of, refuses_unknown
from benchmarks.families.cuts import CUTS, MARK, cut
from benchmarks.families.llm_weights import draw
from benchmarks.families.unet_work import TOKENS
from benchmarks.plan import Case
from benchmarks.timing import synchronise
from benchmarks.training import READY_BATCHES
from zoo.unet import UNet, UNetConfig
from zoo.unet.config import PRESETS
from zoo.unet.convert import placements
from zoo.weights import fill

_INPUT = re.compile(r"(?P<run>loop-|pipeline-)?(?P<count>\d+)x(?P<size>\d+)x(?P=size)")
# In the middle of a run.
_TIMESTEP = 601


class UNetWorkload:
    """Inference with random weights: one call predicts the noise of a batch of square latents, for a text of 77 tokens.

    ``BxHxW``: the rows of the batch, twice the images where there is guidance, and their pixels. ``-cut-<name>`` models
    race the zoo's cut into other regions (``cuts``); diffusers' arms are the same in all of them.

    ``loop-NxHxW``, ``pipeline-NxHxW``: one call is all N steps of one image with guidance, from noise to latents. In a
    loop the zoo's sampler runs our model; in a pipeline diffusers' own ``StableDiffusionPipeline`` does.

    Training is of the noise in latents, over float32 weights; the dtype is that of autocast.
    """

    family = "unet"
    models: tuple[str, ...] = tuple(
        f"{preset}{cut}" for preset in PRESETS for cut in ("", *(MARK + name for name in CUTS["unet"]))
    )
    inputs: tuple[str, ...] = (
        *("2x64x64", "2x96x96", "2x128x128", "4x64x64", "8x64x64", "2x8x8"),
        *("loop-30x64x64", "loop-30x96x96", "loop-30x128x128", "loop-3x8x8"),
        *("pipeline-30x64x64", "pipeline-30x128x128", "pipeline-3x8x8"),
    )

    def default_races(self, device: str, quick: bool, workload: str = "inference") -> list[tuple[str, str]]:
        """(model, input) pairs of a plain run."""
        if device == "cpu":
            return [("unet-debug", "2x8x8")]
        return [("sd15", "4x64x64" if workload == "train" else "2x64x64")]

    def dtypes(self, device: str) -> tuple[str, ...]:
        """Supported dtypes, the default first."""
        return ("float32", "bfloat16") if device == "cpu" else ("bfloat16", "float16", "float32")

    def refuses(self, case: Case) -> str | None:
        """Why this combination does not exist, or None."""
        if reason := refuses_unknown(self, case, ("inference", "train")):
            return reason
        if _is_run(case) and (reason := unet_loop.refuses(case)):
            return reason
        return unet_train.refuses(case) if case.workload == "train" else None

    def memory_bytes(self, case: Case) -> int:
        """Estimated peak device memory of the case in bytes, the reference included, which any arm may compute."""
        return self._bytes(case, reference=True)

    def running_bytes(self, case: Case) -> int:
        """The same without the reference of training."""
        return self._bytes(case, reference=False)

    def _bytes(self, case: Case, *, reference: bool) -> int:
        batch, size = sizes(case.input)
        if _is_run(case):
            batch = unet_loop.ROWS
        if case.workload == "train":
            itemsize = dtype_of(case).itemsize
            return unet_train.memory_bytes(
                _config(case), batch, size, itemsize, ready=READY_BATCHES, reference=reference
            )
        fused = case.impl == "upstream-tuned"
        return unet_work.memory(_config(case), batch, size, dtype_of(case).itemsize, fused=fused)

    def prepare(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        """Build model and inputs on the device.

        Args:
            case: What to build.
            data_root: Not used: there is no data set.
            seed: Of the weights, the latents and the text.

        Raises:
            ValueError: If the case is one that :meth:`refuses` names.
        """
        if reason := self.refuses(case):
            raise ValueError(f"{case.arm}: {reason}")
        config, (batch, size) = _config(case), sizes(case.input)
        device, dtype = torch.device(case.device), dtype_of(case)
        if case.workload == "train":
            dtype = torch.float32
        weights = unet_upstream.seeded(config, seed=seed, dtype=dtype, device=device)
        model, preparation = _implementation(case, config, weights)
        if _is_run(case):
            return unet_loop.prepare(case, model.eval(), config, weights, batch, size, preparation=preparation)
        inputs = draw_inputs(config, batch, size, seed=seed, dtype=dtype, device=device)
        precision = unet_work.reference_dtype(config)
        compile_blocks = functools.partial(unet_upstream.compile_blocks, raised_limit=case.impl == "upstream-tuned")
        prepared = Prepared(
            model=model.eval(),
            inputs=inputs,
            compile_regions=None if case.impl == "zoo" else compile_blocks,
            reference=lambda: unet_upstream.reference_output(config, weights, inputs, precision),
            reference_dtype=str(precision).removeprefix("torch."),
            bytes=unet_work.bytes_moved(config, batch, size, dtype.itemsize),
            bytes_formula=unet_work.BYTES_FORMULA,
            flops=unet_work.flops(config, batch, size),
            data="generated, normal",
            preparation_seconds=preparation,
            sizes={
                "batch": batch,
                "pixels": size,
                "tokens": TOKENS,
                "blocks": len(config.blocks()),
                "parameters": unet_work.parameters(config),
            },
        )
        if case.workload == "train":
            return unet_train.for_training(case, prepared, config, batch, size, seed=seed)
        return prepared


def sizes(input: str) -> tuple[int, int]:
    """Rows, or steps of a run, and pixels a side.

    Raises:
        ValueError: If the name is not ``BxHxW``, ``loop-NxHxW`` or ``pipeline-NxHxW`` of a square.
    """
    found = _INPUT.fullmatch(input)
    if found is None or int(found["count"]) < 1 or int(found["size"]) < 1:
        raise ValueError(f"input {input!r} is not ROWSxPIXELSxPIXELS, or loop- or pipeline-STEPSxPIXELSxPIXELS")
    return int(found["count"]), int(found["size"])


def draw_inputs(
    config: UNetConfig, batch: int, size: int, *, seed: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """What a pipeline hands over in a step, drawn on the device.

    Returns:
        ``sample`` [B, C_in, H, W], contiguous as pipelines hold latents, ``timestep`` [] on the device,
        ``encoder_hidden_states`` [B, L, D], ``return_dict``, and ``added_cond_kwargs`` where the model takes them.
    """

    def normal(name: str, *shape: int) -> Tensor:
        return draw(shape, name, seed=seed, dtype=dtype, device=device)

    inputs: dict[str, Any] = {
        "sample": normal("sample", batch, config.in_channels, size, size),
        "timestep": torch.tensor(_TIMESTEP, device=device),
        "encoder_hidden_states": normal("text", batch, TOKENS, config.cross_attention_dim),
        "return_dict": False,
    }
    if config.addition_embed_type is not None:
        pooled, time_ids = unet_work.added_conditions(config, batch, size, device)
        inputs["added_cond_kwargs"] = {
            "text_embeds": normal("pooled text", batch, pooled),
            "time_ids": time_ids.to(dtype),
        }
    return inputs


def _implementation(
    case: Case, config: UNetConfig, weights: unet_upstream.Weights
) -> tuple[nn.Module, dict[str, float]]:
    """The case's model, and the seconds of what was prepared once."""
    if case.impl == "zoo":
        with torch.device("meta"):
            model = UNet(config)
        fill(model, weights, placements(config), device=weights.device, dtype=None, source="drawn weights")
        if name := case.model.partition(MARK)[2]:
            cut(model, "unet", name)
        return model.requires_grad_(False), {}
    theirs = unet_upstream.build(config, weights)
    if case.impl == "upstream":
        return theirs, {}
    synchronise(weights.device.type)
    began = time.perf_counter()
    unet_upstream.fuse_projections(theirs)
    synchronise(weights.device.type)
    return theirs, {"fused projections": time.perf_counter() - began}


def _is_run(case: Case) -> bool:
    return case.input.startswith(("loop-", "pipeline-"))


def _config(case: Case) -> UNetConfig:
    return PRESETS[case.model.partition(MARK)[0]]


WORKLOAD = UNetWorkload()
