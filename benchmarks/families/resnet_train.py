"""Training of ResNets: float32 weights in channels_last, autocast, cross entropy on labels that can be learnt.

Legend: N images, C channels, H × W pixels, K classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families import resnet_upstream, resnet_work
from benchmarks.families.base import Prepared, Training, autocast_of
from benchmarks.families.jpegs import Files, Loader
from benchmarks.plan import Case
from benchmarks.training import checkpointed, reference_losses
from zoo.resnet import ResNetConfig

LEARNING_RATE = 1e-4
# Labels are of so many classes, whatever the model's head has: with a thousand a curve would fall too late to be seen.
CLASSES = 10
# Images are squares of this many a side with noise on them; labels follow from the squares' colours.
SQUARES = 4

BYTES_FORMULA = (
    "Activations three times as in inference: forward, gradients by inputs and gradients by weights are a call each, "
    "which reads two of input, output and weights and writes the third; the images need no gradient. And 32 bytes a "
    "weight: its gradient is written, and the optimizer reads weight, gradient and two moments and writes three. Left "
    "out, so that it is a lower bound: statistics of the batch, which need a pass of their own."
)


def training_of(config: ResNetConfig, batch: int, size: int, *, seed: int, device: str, dtype: torch.dtype) -> Training:
    """Cross entropy over images that are drawn anew in each step, with labels of a random linear map of their means.

    Args:
        config: The model's.
        batch: N.
        size: H and W.
        seed: Of images and labels.
        device: Where images are drawn; the same seed gives the same ones on the same kind of device.
        dtype: Of autocast; float32 for none.
    """
    classes = min(CLASSES, config.num_classes)
    teacher = torch.randn(config.in_channels * SQUARES**2, classes, generator=torch.Generator().manual_seed(seed))
    teacher = teacher.double().to(device)

    def draw(index: int) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed((seed << 20) + index)
        squares = torch.randn(batch, config.in_channels, SQUARES, SQUARES, generator=generator, device=device)
        noise = torch.randn(batch, config.in_channels, size, size, generator=generator, device=device)
        images = (F.interpolate(squares, size=(size, size)) + noise).contiguous(memory_format=torch.channels_last)
        # In float64, where no arm's precision of products can turn one label into another.
        means = F.adaptive_avg_pool2d(images, SQUARES).flatten(1).double()
        return {"images": images, "labels": (means @ teacher).argmax(1)}

    return Training(
        loss=cross_entropy,
        batch=draw,
        learning_rate=LEARNING_RATE,
        autocast=autocast_of(dtype),
    )


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of the model's logits; a scalar."""
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def for_training(case: Case, prepared: Prepared, config: ResNetConfig, batch: int, size: int, *, seed: int) -> Prepared:
    """What inference prepares in float32, made ready for training.

    Args:
        case: The arm; its dtype is that of autocast, float32 for none.
        prepared: Of inference.
        config: The model's.
        batch: N.
        size: H and W.
        seed: Of weights, images and labels.
    """
    dtype: torch.dtype = getattr(torch, case.dtype)
    training = training_of(config, batch, size, seed=seed, device=case.device, dtype=dtype)
    data = "generated, squares and noise"
    if case.input.startswith("jpeg-"):
        loader = loader_of(batch, size, seed=seed, device=case.device)
        training = replace(training, loader=loader, round=loader.batches)
        data = f"generated, {loader.files.count} JPEG files of {loader.files.width} x {loader.files.height}"

    def reference() -> Tensor:
        shipped: Any = resnet_upstream.build(config, seed=seed).to(case.device)
        checkpointed(block for stage in range(1, 5) for block in getattr(shipped, f"layer{stage}"))
        return reference_losses(shipped, training)

    return replace(
        prepared,
        model=prepared.model.requires_grad_(True).train(),
        inputs={},
        reference=reference,
        bytes=bytes_moved(config, batch, size, dtype.itemsize),
        bytes_formula=BYTES_FORMULA,
        flops=flops(config, batch, size),
        data=data,
        count=batch,
        unit="images",
        training=training,
    )


def loader_of(batch: int, size: int, *, seed: int, device: str) -> Loader:
    """Files of about ImageNet's size, a few batches of them; of small images small ones."""
    if size >= 128:
        files, batches = Files(count=512, width=500, height=375, seed=seed), 16
    else:
        files, batches = Files(count=20, width=size + 8, height=size, seed=seed), 3
    return Loader(files=files, batch=batch, size=size, batches=batches, device=device)


def flops(config: ResNetConfig, batch: int, size: int) -> int:
    """Gradients by inputs and by weights each take what the forward does; the images need none."""
    first = resnet_work.stem(config, size)
    return 3 * resnet_work.flops(config, batch, size) - 2 * batch * first.values_out * first.taps


def bytes_moved(config: ResNetConfig, batch: int, size: int, itemsize: int) -> int:
    """Fewest bytes that one step moves through device memory, as :data:`BYTES_FORMULA` says."""
    images = resnet_work.stem(config, size).values_in * batch * itemsize
    return 3 * resnet_work.bytes_moved(config, batch, size, itemsize) - images + 32 * resnet_work.parameters(config)


def memory_bytes(config: ResNetConfig, batch: int, size: int, itemsize: int, *, ready: int) -> int:
    """Peak memory of an arm or of the reference, whichever takes more.

    The reference runs blocks twice: it keeps what goes into each, and the inside of one. Each weight has a gradient,
    two moments, and, under autocast, a narrow copy.

    Args:
        config: The model's.
        batch: N.
        size: H and W.
        itemsize: Bytes of an activation.
        ready: Batches that lie ready on the device.
    """
    parameters = resnet_work.parameters(config)
    first, blocks = resnet_work.stem(config, size), list(resnet_work.blocks(config, size))
    running = batch * kept(config, size) * itemsize + parameters * itemsize
    passing = sum(block.convs[0].values_in for block in blocks)
    reference = batch * (_STEM * first.values_out + passing + 2 * max(map(_inside, blocks))) * 8 + 4 * 8 * parameters
    held = 16 * parameters + 4 * ready * batch * first.values_in
    return held + max(running, reference) + resnet_work.PROCESS_BYTES


# The stem keeps input and output of its norm, and a quarter of it, pooled, with its indices of twice the width.
_STEM = 3


def kept(config: ResNetConfig, size: int) -> int:
    """Values that an image leaves behind for the backward: input and output of every norm."""
    first = resnet_work.stem(config, size)
    return _STEM * first.values_out + sum(map(_inside, resnet_work.blocks(config, size)))


def _inside(block: resnet_work.Block) -> int:
    convs = block.convs if block.shortcut is None else (*block.convs, block.shortcut)
    return 2 * sum(conv.values_out for conv in convs)
