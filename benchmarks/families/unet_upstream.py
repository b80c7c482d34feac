"""diffusers' arms: as its users would run it, at its documented best, and as the reference for correctness."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.families.llm_weights import SeededWeights
from zoo.engine.compat import compile_limit_kwargs
from zoo.unet import UNetConfig

# Ends of residual branches, which add a little to what goes by, as trained ones do.
_BRANCH_ENDS = ("conv2.weight", "to_out.0.weight", "ff.net.2.weight", "proj_out.weight")
_BRANCH_SCALE = 0.3


class Weights(SeededWeights):
    """A checkpoint that nobody stored, under diffusers' names; activations stay in the range of half precision.

    Norms are not ones, and no bias is zero, so that a forgotten one shows.
    """

    def __getitem__(self, name: str) -> Tensor:
        if len(self.shapes[name]) == 1:
            return super().__getitem__(name)
        # What the base class makes of a matrix is scaled by its last dimension, of a convolution the kernel's.
        drawn = super().__getitem__(name).mul_(math.sqrt(self.shapes[name][-1] / math.prod(self.shapes[name][1:])))
        return drawn.mul_(_BRANCH_SCALE) if name.endswith(_BRANCH_ENDS) else drawn


def skeleton(config: UNetConfig) -> Any:
    """``UNet2DConditionModel`` in eval mode, without memory for its weights."""
    from diffusers import UNet2DConditionModel

    from zoo.unet.convert import upstream_config

    with torch.device("meta"):
        return UNet2DConditionModel(**upstream_config(config)).eval()


def shapes(config: UNetConfig) -> dict[str, tuple[int, ...]]:
    """Of all weights under diffusers' names."""
    return {name: tuple(parameter.shape) for name, parameter in skeleton(config).named_parameters()}


def seeded(config: UNetConfig, *, seed: int, dtype: torch.dtype, device: torch.device) -> Weights:
    """Weights of diffusers' model that are drawn when they are asked for."""
    return Weights(shapes(config), seed=seed, dtype=dtype, device=device)


def build(config: UNetConfig, weights: Mapping[str, Tensor]) -> Any:
    """The library's model with these weights, which become its own, in channels_last.

    Its documentation on faster inference asks for that layout before it compiles, so that arms as shipped have it too.
    """
    model = skeleton(config)
    model.load_state_dict(dict(weights), strict=True, assign=True)
    return model.to(memory_format=torch.channels_last).requires_grad_(False)


def fuse_projections(model: Any) -> None:
    """One product for queries, keys and values of self-attention and one for keys and values of the text, in place.

    By the library's own switch, from its documentation's steps to fast inference.
    """
    # It draws weights for the new products before it copies them in.
    with torch.random.fork_rng(devices=[]):
        model.fuse_qkv_projections()
    model.requires_grad_(False)


def compile_blocks(model: Any, *, raised_limit: bool, **options: Any) -> None:
    """Regional compilation by the library's own helper: transformer blocks, each in place, resnet blocks not.

    Args:
        model: A model of :func:`build`.
        raised_limit: Allow more graphs of a block than the eight after which it is an error.
        options: What ``torch.compile`` takes; ``fullgraph`` is on, as its documentation has it.
    """
    if raised_limit:
        options |= compile_limit_kwargs()
    model.compile_repeated_blocks(fullgraph=True, **options)


def reference_model(config: UNetConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """The library's model with these weights in another precision."""
    model = skeleton(config)
    model.load_state_dict({name: weights[name].to(dtype) for name in weights}, strict=True, assign=True)
    return model.requires_grad_(False)


@torch.no_grad()
def reference_output(
    config: UNetConfig, weights: Mapping[str, Tensor], inputs: Mapping[str, Any], dtype: torch.dtype
) -> Tensor:
    """Eager upstream in another precision on these weights, a row at a time: [B, C_out, H, W]."""
    model = reference_model(config, weights, dtype)

    def row(value: Any, index: int) -> Any:
        if isinstance(value, Mapping):
            return {name: row(inner, index) for name, inner in value.items()}
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        part = value[index : index + 1]
        return part.to(dtype) if part.is_floating_point() else part

    with in_full_float32():
        rows = range(inputs["sample"].shape[0])
        return torch.cat([model(**{name: row(value, i) for name, value in inputs.items()})[0] for i in rows])


@contextmanager
def in_full_float32() -> Iterator[None]:
    """Convolutions without TF32, which the harness' switch for products says nothing about."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
