"""Residual networks over images: both libraries' arms from one set of weights, in channels_last.

Legend: N images, C channels, H × W pixels, K classes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import zoo
from benchmarks.families import base
from benchmarks.plan import Case
from benchmarks.strategies import READY_BATCHES, checkpointed, reference_losses
from zoo.resnet import ResNet, ResNetConfig, fold_batch_norm
from zoo.resnet.model import PRESETS

BYTES_FORMULA = (
    "Convolutions are calls of their own: each reads its input and its weights and writes its output. Norm, activation "
    "and residual happen on the way, a block's residual is read once more, the shortcut's output is written and read; "
    "pooling reads and writes; the head reads the last stage and writes the logits. Activations are counted at any "
    "size, though those of a small batch may stay in the caches of the chip."
)
LEARNING_RATE = 1e-4
# Maximum number of classes in labels, for any width of the head: with a thousand the loss would fall too late.
CLASSES = 10
# Training images are a grid of this many squares per side, plus noise; labels depend on the squares' colours.
SQUARES = 4
# Images that the float64 reference takes at a time.
REFERENCE_IMAGES = 16

_STEM = 64  # channels
_FOLDED = "-folded"


class ResNetWorkload(base.Workload):
    """Inference with random weights over a batch of square images; one call returns the logits.

    In ``-folded`` models the zoo's batch norms are folded into convolutions (``zoo.resnet.fold_batch_norm``).
    torchvision's arms are the same in both: as shipped with norms, tuned with folded norms. ``<batch>x<size>`` is the
    number of images and their pixels per side.

    Training uses models with norms and float32 weights; the dtype is that of autocast.
    """

    family = "resnet"
    models = (
        *(f"{preset}{folded}" for preset in ("resnet18", "resnet50", "resnet-debug") for folded in ("", _FOLDED)),
        *("resnet101", "resnext50_32x4d"),
    )
    inputs = ("64x224", "1x224", "128x224", "256x224", "2x32", "4x32")
    workloads = ("inference", "train")
    cpu_race, cpu_training = ("resnet-debug", "2x32"), ("resnet-debug", "4x32")
    gpu_races, gpu_training = (("resnet50", "64x224"), ("resnet50", "1x224")), (("resnet50", "128x224"),)
    quick_races = (("resnet50", "64x224"),)

    def cannot(self, case: Case) -> str | None:
        if case.workload != "train":
            return None
        if case.model.endswith(_FOLDED):
            return f"{case.model}: folded models are for inference"
        if case.impl == "upstream-tuned":
            return "tuned is folded, which is for inference; to train, torchvision's users have no better way"
        return None

    def estimate(self, case: Case, *, reference: bool) -> int:
        """Estimated device memory: weights, and activations that are live at once or saved for the backward."""
        config, (batch, size) = _config(case), sizes(case.input)
        itemsize, parameters = base.dtype_of(case).itemsize, base.parameters_of(ResNet, config)
        stem, *blocks = conv_outputs(config, size)
        image = config.in_channels * size**2
        if case.workload == "train":
            # The stem saves input and output of its norm, and the pooled quarter with indices of twice the width.
            kept = 3 * sum(stem) + 2 * sum(map(sum, blocks))
            running = batch * kept * itemsize + parameters * itemsize
            # The reference saves each block's input and the inside of one block, and has three values per weight.
            inside = sum(block[-1] for block in blocks) + 4 * max(map(sum, blocks))
            exact = 8 * (batch * (3 * sum(stem) + inside) + 4 * parameters)
            held = 16 * parameters + 4 * READY_BATCHES * batch * image
            return held + (max(running, exact) if reference else running)
        # Four tensors of the largest size are live at once. Weights exist twice: upstream's and the zoo's.
        alive = 4 * max(map(max, (stem, *blocks)))
        running = (batch * (alive + image) + 2 * parameters) * itemsize
        exact = (min(batch, REFERENCE_IMAGES) * alive + parameters) * 8 + (batch * image + 2 * parameters) * itemsize
        return max(running, exact) if reference else running

    def build(self, case: Case, *, data_root: str | None, seed: int) -> base.Prepared:
        config, (batch, size) = _config(case), sizes(case.input)
        device, dtype = torch.device(case.device), base.weights_dtype(case)
        training = case.workload == "train"

        def shipped() -> nn.Module:
            return build(config, seed=seed).to(device, dtype)

        # Normally distributed, as after preprocessing.
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(batch, config.in_channels, size, size, generator=generator)
        images = images.contiguous(memory_format=torch.channels_last).to(device, dtype)
        preparation: dict[str, float] = {}
        model = _implementation(case, shipped(), preparation)
        if case.impl == "upstream-tuned" and case.strategy == "full" and case.device == "cpu":
            import torch._inductor.config as inductor

            # On a CPU Inductor packs frozen weights for oneDNN and fuses activation and residual into the convolution.
            # As an option of one torch.compile call it has no effect, and the compiler's cache stores no frozen graph.
            # It is only for whole models: with frozen weights blocks cannot share a graph.
            inductor.freezing = True
        prepared = base.Prepared(
            model=model.eval().requires_grad_(False),
            inputs={"images" if case.impl == "zoo" else "x": images},
            compile_regions=base.upstream_regions(case, compile_blocks),
            # Rebuilt for the reference, so that an arm's measured memory includes only its own model.
            reference=lambda: reference_output(shipped(), images),
            bytes=bytes_moved(config, batch, size, dtype.itemsize),
            bytes_formula=BYTES_FORMULA,
            flops=flops(config, batch, size, training=training),
            data="generated, normal",
            preparation_seconds=preparation,
            sizes={
                "batch": batch,
                "pixels": size,
                "blocks": sum(config.layers),
                "classes": config.num_classes,
                "parameters": base.parameters_of(ResNet, config),
            },
            count=batch,
            unit="images",
        )
        return _for_training(case, prepared, config, batch, size, seed=seed) if training else prepared


def sizes(input: str) -> tuple[int, int]:
    batch, _, size = input.partition("x")
    return int(batch), int(size)


def _config(case: Case) -> ResNetConfig:
    return PRESETS[case.model.removesuffix(_FOLDED)]


def _implementation(case: Case, shipped: nn.Module, preparation: dict[str, float]) -> nn.Module:
    """The case's model; ``preparation`` gets the seconds of one-time preparation."""
    if case.impl == "upstream":
        return shipped
    model: Any = shipped if case.impl == "upstream-tuned" else zoo.from_upstream(shipped)
    if case.impl == "zoo" and not case.model.endswith(_FOLDED):
        return model
    with base.timed("batch norm folding", preparation, case.device):
        if case.impl == "upstream-tuned":
            return fold(model)
        return fold_batch_norm(model)


# --- torchvision's arms: as its users would run it, at its documented best, and as the reference ---


def build(config: ResNetConfig, *, seed: int) -> nn.Module:
    """The library's model in eval mode and channels_last, float32 on the CPU, with seeded weights and statistics.

    Norms are drawn too: with the initial ones and zeros a forgotten norm would not show. Blocks add little to their
    input, like trained ones, so that activations stay in the range of half precision.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _shipped(config)
        last = "bn2" if config.block == "basic" else "bn3"
        with torch.no_grad():
            for name, module in model.named_modules():
                if isinstance(module, nn.BatchNorm2d):
                    assert module.running_mean is not None and module.running_var is not None
                    module.running_mean.normal_(std=0.1)
                    module.running_var.uniform_(0.5, 1.5)
                    module.weight.uniform_(0.5, 1.5).mul_(0.3 if name.endswith(last) else 1.0)
                    module.bias.normal_(std=0.1)
    return model.eval().to(memory_format=torch.channels_last)


def _shipped(config: ResNetConfig) -> Any:
    import torchvision.models.resnet as library

    block = library.BasicBlock if config.block == "basic" else library.Bottleneck
    widths = {name: getattr(config, name) for name in ("num_classes", "groups", "width_per_group")}
    dilation = list(config.replace_stride_with_dilation)
    return library.ResNet(block, list(config.layers), replace_stride_with_dilation=dilation, **widths)


def fold(model: nn.Module) -> nn.Module:
    """Fold batch norms into convolutions by torch's public function, module by module; in place.

    ``torch.fx.experimental.optimization.fuse`` does the same and leaves no blocks to compile.
    """
    for parent in list(model.modules()):
        for norm_name, norm in list(parent.named_children()):
            if isinstance(norm, nn.BatchNorm2d):
                # bn1 follows conv1; in a shortcut 1 follows 0.
                conv_name = norm_name.replace("bn", "conv") if norm_name.startswith("bn") else "0"
                conv = getattr(parent, conv_name)
                setattr(parent, conv_name, fuse_conv_bn_eval(conv, norm))
                setattr(parent, norm_name, nn.Identity())
    return model.to(memory_format=torch.channels_last)


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Regional compilation like a user of the library: each residual block in place."""
    for block in blocks_of(model):
        block.compile(**options)


def blocks_of(model: Any) -> list[nn.Module]:
    return [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]


@torch.no_grad()
def reference_output(model: nn.Module, images: Tensor) -> Tensor:
    """Eager upstream in float64 on these weights and images, some images at a time: [N, K]."""
    double = copy.deepcopy(model).double()
    return torch.cat([double(part.double()) for part in images.split(REFERENCE_IMAGES)])


# --- training ---


def training_of(
    config: ResNetConfig, batch: int, size: int, *, seed: int, device: str, dtype: torch.dtype
) -> base.Training:
    """Cross entropy over images drawn in each step, with labels from a random linear map of their means."""
    classes = min(CLASSES, config.num_classes)
    teacher = torch.randn(config.in_channels * SQUARES**2, classes, generator=torch.Generator().manual_seed(seed))
    teacher = teacher.double().to(device)

    def draw(index: int) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed((seed << 20) + index)
        squares = torch.randn(batch, config.in_channels, SQUARES, SQUARES, generator=generator, device=device)
        noise = torch.randn(batch, config.in_channels, size, size, generator=generator, device=device)
        images = (F.interpolate(squares, size=(size, size)) + noise).contiguous(memory_format=torch.channels_last)
        # In float64, so that no arm's precision changes a label.
        means = F.adaptive_avg_pool2d(images, SQUARES).flatten(1).double()
        return {"images": images, "labels": (means @ teacher).argmax(1)}

    return base.Training(
        loss=lambda model, batch: F.cross_entropy(model(batch["images"]), batch["labels"]),
        batch=draw,
        learning_rate=LEARNING_RATE,
        autocast=base.autocast_of(dtype),
    )


def _for_training(
    case: Case, prepared: base.Prepared, config: ResNetConfig, batch: int, size: int, *, seed: int
) -> base.Prepared:
    itemsize = base.dtype_of(case).itemsize
    training = training_of(config, batch, size, seed=seed, device=case.device, dtype=base.dtype_of(case))

    def reference() -> Tensor:
        shipped = build(config, seed=seed).to(case.device)
        checkpointed(blocks_of(shipped))
        return reference_losses(shipped, training)

    images = batch * config.in_channels * size**2 * itemsize
    return prepared.for_training(
        reference=reference,
        bytes=3 * bytes_moved(config, batch, size, itemsize) - images + 32 * base.parameters_of(ResNet, config),
        bytes_formula=base.TRAINING_BYTES_FORMULA,
        data="generated, squares and noise",
        training=training,
    )


# --- what a ResNet must do and hold ---


def flops(config: ResNetConfig, batch: int, size: int, *, training: bool = False) -> int:
    """Counted on torchvision's model; element-wise work is left out."""
    with torch.device("meta"):
        return base.count_flops(_shipped(config), torch.empty(batch, config.in_channels, size, size), backward=training)


def bytes_moved(config: ResNetConfig, batch: int, size: int, itemsize: int) -> int:
    import torchvision.models.resnet as library

    values = 0

    def note(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        nonlocal values
        if not isinstance(module, (library.BasicBlock, library.Bottleneck, nn.Linear)):
            values += inputs[0].numel()
        # The output of a block is the next block's residual, which is read once more.
        values += 0 if isinstance(module, nn.AdaptiveAvgPool2d) else output.numel()

    noted = (nn.Conv2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.Linear, library.BasicBlock, library.Bottleneck)
    with torch.no_grad(), torch.device("meta"):
        model = _shipped(config).eval()
        for module in model.modules():
            if isinstance(module, noted):
                module.register_forward_hook(note)
        model(torch.empty(batch, config.in_channels, size, size))
    return (values + base.parameters_of(ResNet, config)) * itemsize


def conv_outputs(config: ResNetConfig, size: int) -> list[list[int]]:
    """Values per image that convolutions write: those of the stem, then of each block, with its output last."""
    after = _half(size)
    found = [[_STEM * after**2]]
    size = _half(after)
    for shape in (shape for stage in config.stages() for shape in stage):
        after = size if shape.stride == 1 else _half(size)
        widths = [shape.inner * (after if config.block == "basic" else size) ** 2]
        widths += [] if config.block == "basic" else [shape.inner * after**2]
        found.append([*widths, *[shape.outputs * after**2] * (2 if shape.projects else 1)])
        size = after
    return found


def _half(size: int) -> int:
    return (size + 1) // 2


WORKLOAD = ResNetWorkload()
