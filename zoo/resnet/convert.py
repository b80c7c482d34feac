"""To and from torchvision's ``ResNet``, its pretrained weights by name, and batch norms folded into convolutions.

torchvision is imported when a model is converted or weights are requested by name.
"""

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.files import locate, upstream
from zoo.resnet.model import STEM_WIDTH, Join, ResNet, ResNetConfig, Unit
from zoo.weights import Table, WeightMap, check_class, refuse_changed

# A member of torchvision's weight enums, with or without the class.
_NAME = re.compile(r"(\w+_Weights\.)?[A-Za-z_]\w*")


def table(config: ResNetConfig) -> Table:
    """{torchvision's name: the zoo's name}; ValueError for a folded model, whose norms are in its convolutions."""
    if config.folded:
        raise ValueError(
            "batch norms are folded into the convolutions: convert or load a model with norms, then fold it"
        )
    names = {"conv1": "stem.conv", "bn1": "stem.norm", "fc": "head.fc"}
    units = ("conv1", "conv2", "join") if config.block == "bottleneck" else ("conv1", "join")
    for stage in range(4):
        theirs, ours = f"layer{stage + 1}.{{}}", f"stages.{stage}.blocks.{{}}"
        for number, unit in enumerate(units, start=1):
            names |= {f"{theirs}.conv{number}": f"{ours}.{unit}.conv", f"{theirs}.bn{number}": f"{ours}.{unit}.norm"}
        names[f"{theirs}.downsample.0"] = f"{ours}.join.shortcut"
        names[f"{theirs}.downsample.1"] = f"{ours}.join.shortcut_norm"
    return names


def config_of(module: Any) -> ResNetConfig:
    """The configuration of a torchvision model. NotImplementedError if not a ``ResNet``, ValueError if changed."""
    check_class(module, "torchvision.models", "ResNet")
    bottleneck = upstream("torchvision.models.resnet").Bottleneck
    stages: list[Any] = [module.layer1, module.layer2, module.layer3, module.layer4]
    layers: Any = tuple(len(stage) for stage in stages)
    dilated: Any = tuple(stage[0].stride == 1 for stage in stages[1:])
    norm = module.bn1
    # If a modified module is misread here, the comparison with the skeleton detects the difference.
    config = ResNetConfig(
        block="bottleneck" if type(stages[0][0]) is bottleneck else "basic", layers=layers,
        num_classes=getattr(module.fc, "out_features", 1), in_channels=getattr(module.conv1, "in_channels", 3),
        groups=module.groups, width_per_group=module.base_width, replace_stride_with_dilation=dilated,
        norm="frozen" if type(norm) is _norms()["frozen"] else "batch", norm_eps=norm.eps,
        norm_momentum=getattr(norm, "momentum", 0.1), track_running_stats=getattr(norm, "track_running_stats", True),
    )  # fmt: skip
    refuse_changed(dict(module.named_modules()), skeleton(config), "torchvision's ResNet")
    return config


def skeleton(config: ResNetConfig) -> nn.Module:
    """Torchvision's model on the meta device."""
    torchvision = upstream("torchvision.models.resnet")
    options: dict[str, Any] = {"eps": config.norm_eps}
    if config.norm == "batch":
        options |= {"momentum": config.norm_momentum, "track_running_stats": config.track_running_stats}
    with torch.device("meta"):
        module: Any = torchvision.ResNet(
            torchvision.Bottleneck if config.block == "bottleneck" else torchvision.BasicBlock, list(config.layers),
            num_classes=config.num_classes, groups=config.groups, width_per_group=config.width_per_group,
            replace_stride_with_dilation=list(config.replace_stride_with_dilation),
            norm_layer=partial(_norms()[config.norm], **options),
        )  # fmt: skip
        if config.in_channels != 3:
            # torchvision has no option for in_channels; its users replace the convolution.
            module.conv1 = nn.Conv2d(config.in_channels, STEM_WIDTH, 7, stride=2, padding=3, bias=False)
    return module


def _norms() -> dict[str, type[nn.Module]]:
    return {"batch": nn.BatchNorm2d, "frozen": upstream("torchvision.ops").FrozenBatchNorm2d}


def find_weights(name: str, weights: Any) -> Path:
    """The file or folder of weights; pretrained weights of a preset by name are in torch hub's cache, or fetched there.

    ``weights`` is one of torchvision's weight enums, or its name, with or without the class: ``"IMAGENET1K_V2"``.
    """
    if isinstance(weights, Path):
        return locate(weights)
    if isinstance(weights, str) and (not _NAME.fullmatch(weights) or Path(weights).exists()):
        return locate(weights)
    try:
        enum = upstream("torchvision.models").get_model_weights(name)
        known = dict(enum.__members__)
        found = weights if isinstance(weights, enum) else known.get(str(weights).removeprefix(f"{enum.__name__}."))
    except ValueError:  # torchvision does not know the preset
        known, found = {}, None
    if found is None:
        raise ValueError(f"weights is {weights!r}; {name} has {', '.join(known) or 'none that torchvision knows'}")
    # Downloads into the cache and checks the hash in the file name; the meta device reads no tensors.
    torch.hub.load_state_dict_from_url(found.url, map_location="meta", check_hash=True, weights_only=True)
    return Path(torch.hub.get_dir()) / "checkpoints" / found.url.rpartition("/")[2]


@torch.no_grad()
def fold_batch_norm(model: ResNet) -> ResNet:
    """A new inference model without norms, equivalent to this model in eval mode.

    A norm's scale is folded into the weights of the preceding convolution and its shift into the bias; a shortcut's
    shift is folded into the bias of the last convolution. Computed in float64 and rounded once to the weights' dtype.
    The result is in eval mode, without gradients, with ``config.folded``. TypeError or ValueError if the model is not a
    ResNet of the zoo, is already folded, or its norms have no running statistics.
    """
    if not isinstance(model, ResNet):
        raise TypeError(f"{type(model).__name__} is not a ResNet of the zoo; zoo.from_upstream(module) makes one")
    if model.config.folded:
        raise ValueError("the batch norms of this model are folded already; fold the one it came from")
    if not model.config.track_running_stats:
        raise ValueError("track_running_stats is False: norms that use each batch cannot be folded")
    with torch.device("meta"):
        folded = ResNet(dataclasses.replace(model.config, folded=True))
    state = {f"head.{key}": tensor.clone() for key, tensor in model.head.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, Unit):
            weight, bias = _folded(module.conv, module.norm)
            if isinstance(module, Join) and module.shortcut is not None and module.shortcut_norm is not None:
                state[f"{name}.shortcut.weight"], shift = _folded(module.shortcut, module.shortcut_norm)
                bias = bias + shift
            state[f"{name}.conv.weight"], state[f"{name}.conv.bias"] = weight, bias
    like = model.head.fc.weight
    folded.load_state_dict({key: tensor.to(like.dtype) for key, tensor in state.items()}, strict=True, assign=True)
    return folded.requires_grad_(False).eval()


def _folded(conv: nn.Conv2d, norm: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias in float64 of a convolution equivalent to this convolution and its norm in eval mode."""
    scale = (norm.running_var.double() + norm.eps).rsqrt() * norm.weight.double()
    shift = norm.bias.double() - norm.running_mean.double() * scale
    return conv.weight.double() * scale[:, None, None, None], shift


WEIGHTS = WeightMap(
    name="resnet", noun="a ResNet", classes=(ResNet,), table=table, config_of=config_of, skeleton=skeleton,
    locate=find_weights,
)  # fmt: skip
