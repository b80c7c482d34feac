"""Random ResNets and images against torchvision's; see fuzzing.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from fuzzing import Results, backward, compare, convert, dtypes, fuzz, one_of, randomize, rarely, round_trips, seeds
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops import FrozenBatchNorm2d

pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def models(draw: Any) -> dict[str, Any]:
    bottleneck = draw(st.booleans())
    options: dict[str, Any] = {
        "block": Bottleneck if bottleneck else BasicBlock,
        "layers": draw(st.lists(one_of(1, 1, 2), min_size=4, max_size=4)),
        "num_classes": draw(st.integers(1, 5)),
    }
    if bottleneck:
        options |= {"groups": draw(one_of(1, 2, 4)), "width_per_group": draw(one_of(1, 4, 6))}
        options["replace_stride_with_dilation"] = draw(st.lists(st.booleans(), min_size=3, max_size=3))
    kind = nn.GroupNorm if draw(rarely) else draw(one_of(nn.BatchNorm2d, FrozenBatchNorm2d))
    own: dict[str, Any] = {"num_groups": 2} if kind is nn.GroupNorm else {"eps": draw(one_of(1e-5, 1e-2))}
    if kind is nn.BatchNorm2d:
        own |= {"momentum": draw(one_of(0.1, 0.5)), "track_running_stats": draw(st.booleans())}
    if kind is nn.GroupNorm:
        options["norm_layer"] = lambda channels: nn.GroupNorm(1, channels)
    else:
        options["norm_layer"] = partial(kind, **own)
    return options


@pytest.mark.slow
@fuzz
@given(
    options=models(), dtype=dtypes, rows=st.integers(1, 3), sides=st.tuples(*[st.integers(1, 40)] * 2),
    channels=one_of(3, 3, 1), last=st.booleans(), training=st.booleans(), seed=seeds,
)  # fmt: skip
def test_models(
    options: dict[str, Any], dtype: torch.dtype, rows: int, sides: tuple[int, int], channels: int, last: bool,
    training: bool, seed: int,
) -> None:  # fmt: skip
    # Not drawn twice: it is most of the time.
    with torch.device("meta"):
        module = ResNet(**options)
        if channels != 3:
            module.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    theirs = randomize(module.to_empty(device="cpu"), seed).train(training)
    if convert(theirs, options) is None:
        return
    images = torch.randn(rows, channels, *sides, generator=torch.Generator().manual_seed(seed))
    if last:
        images = images.contiguous(memory_format=torch.channels_last)

    # On a CPU torch's bfloat16 convolutions read memory that nobody wrote in their backward, for images of one pixel.
    differentiable = dtype != torch.bfloat16

    def run(model: nn.Module, dtype: torch.dtype) -> Results:
        x = images.to(dtype, copy=True).requires_grad_(differentiable)
        with torch.set_grad_enabled(differentiable):
            return backward({"logits": model(x)}, x)

    try:
        ours = compare(theirs, run, dtype)
    except ValueError:
        # Batch norm of one value a channel in training: both refuse.
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            run(theirs, dtype)
        return

    round_trips(theirs, ours, "resnet-debug")
