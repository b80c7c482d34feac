"""To and from torchvision's ``ResNet``. With ``pretrained.py`` what imports the library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops import FrozenBatchNorm2d

from zoo.resnet.config import NORMS, ResNetConfig
from zoo.resnet.model import ResNet as ZooResNet

_BLOCKS = {"basic": BasicBlock, "bottleneck": Bottleneck}
_NORMS: dict[str, type[nn.Module]] = {"batch": nn.BatchNorm2d, "frozen": FrozenBatchNorm2d}
_COUNTER = "num_batches_tracked"

# {theirs: ours} of convolutions and norms inside a block; {} is the convolution's number.
_INNER = {"conv{}": "conv{}.conv", "bn{}": "conv{}.norm"}
_LAST = {
    "conv{}": "join.conv",
    "bn{}": "join.norm",
    "downsample.0": "join.shortcut",
    "downsample.1": "join.shortcut_norm",
}
_ENDS = {"conv1": "stem.conv", "bn1": "stem.norm", "fc": "head.fc"}


def from_upstream(module: nn.Module) -> nn.Module:
    """The zoo's model with the weights of a torchvision ``ResNet``, copied.

    Raises:
        NotImplementedError: If it is another class.
        ValueError: If it is a subclass or was changed in a way that the zoo does not support; the message names it.
    """
    config = config_of(module)
    state = {key: tensor.detach().clone() for key, tensor in module.state_dict().items()}
    with torch.device("meta"):
        model = ZooResNet(config)
    model.load_state_dict(convert_state_dict(state, config), strict=True, assign=True)
    theirs, ours = dict(module.named_parameters()), dict(model.named_parameters())
    for their_name, our_name in _names(config).items():
        if their_name in theirs:
            ours[our_name].requires_grad_(theirs[their_name].requires_grad)
    # Of all modules only norms do something else in training.
    norms = ((name, child) for name, child in module.named_modules() if isinstance(child, nn.BatchNorm2d))
    odd = [name for name, child in norms if child.training != module.training]
    if odd:
        mode = "eval" if module.training else "training"
        _refuse(odd[0], f"a module in {mode} mode", "the model around it is not; put all of it in one mode first")
    return model


def to_upstream(model: nn.Module) -> nn.Module:
    """The torchvision model with a zoo model's weights, copied, in channels_last.

    Raises:
        TypeError: If the model is not of this family.
        ValueError: If its norms are folded: they cannot be told from the convolutions any more.
    """
    if not isinstance(model, ZooResNet):
        raise TypeError(f"{type(model).__name__} is not a ResNet of the zoo")
    if model.config.folding is not None:
        raise ValueError("the batch norms of this model are folded into its convolutions; convert the one it came from")
    with torch.device("meta"):
        module = _skeleton(model.config)
    ours = model.state_dict()
    state = {theirs: ours[name].detach().clone() for theirs, name in _names(model.config).items() if name in ours}
    module.load_state_dict(state, strict=True, assign=True)
    parameters = dict(model.named_parameters())
    for their_name, parameter in module.named_parameters():
        parameter.requires_grad_(parameters[_names(model.config)[their_name]].requires_grad)
    return module.train(model.training)


def convert_state_dict(state_dict: Mapping[str, Tensor], config: ResNetConfig) -> dict[str, Tensor]:
    """Their keys to ours, strictly: every key that the config needs, and no other.

    Counters of batches may be missing, as torch itself allows: files from before they existed are still around.

    Raises:
        ValueError: If a key is missing or left over, or the model's norms are folded.
    """
    if config.folding is not None:
        raise ValueError(
            "these are weights of a model with batch norms, and folding is on: create the model without it and call "
            "zoo.resnet.fold_batch_norm(model)"
        )
    names = _names(config)
    state_dict = dict(state_dict)
    for key in names:
        if key.endswith(_COUNTER) and key not in state_dict:
            state_dict[key] = torch.zeros((), dtype=torch.int64)
    missing, extra = sorted(names.keys() - state_dict.keys()), sorted(state_dict.keys() - names.keys())
    if missing or extra:
        raise ValueError(f"the state dict does not fit the config: missing {missing[:8]}, unexpected {extra[:8]}")
    return {our_name: state_dict[their_name] for their_name, our_name in names.items()}


def config_of(module: nn.Module) -> ResNetConfig:
    """The configuration of a torchvision model.

    Raises:
        NotImplementedError: If it is no ``ResNet``.
        ValueError: If it is a subclass or was changed in a way that the zoo does not support; the message names it.
    """
    if not isinstance(module, ResNet):
        raise NotImplementedError(f"{type(module).__name__} is not a torchvision ResNet")
    if type(module) is not ResNet:
        raise ValueError(f"{type(module).__name__} is a subclass of torchvision's ResNet, whose forward may differ")
    stages: list[Any] = [module.layer1, module.layer2, module.layer3, module.layer4]
    first = stages[0][0]
    kinds = {cls: name for name, cls in _BLOCKS.items()}
    if type(first) not in kinds:
        _refuse("layer1.0", type(first).__name__, f"supported are {', '.join(cls.__name__ for cls in kinds)}")
    if type(module.conv1) is not nn.Conv2d:
        _refuse("conv1", module.conv1, "expected a Conv2d")
    if type(module.fc) is not nn.Linear or module.fc.bias is None:
        _refuse("fc", module.fc, "expected a Linear with a bias; put other heads behind model.features")
    norm, options = _norm(module.bn1)
    layers = tuple(len(stage) for stage in stages)
    if 0 in layers:
        _refuse("layers", layers, "every stage needs a block")
    config = ResNetConfig(
        block=kinds[type(first)],
        layers=layers,  # type: ignore[arg-type]
        num_classes=module.fc.out_features,
        in_channels=module.conv1.in_channels,
        groups=module.groups,
        width_per_group=module.base_width,
        replace_stride_with_dilation=tuple(stage[0].stride == 1 for stage in stages[1:]),  # type: ignore[arg-type]
        norm=norm,
        norm_kwargs=options,
    )
    with torch.device("meta"):
        expected = _skeleton(config)
    _compare(module, expected)
    return config


def _skeleton(config: ResNetConfig) -> nn.Module:
    module: Any = ResNet(
        _BLOCKS[config.block],
        list(config.layers),
        num_classes=config.num_classes,
        groups=config.groups,
        width_per_group=config.width_per_group,
        replace_stride_with_dilation=list(config.replace_stride_with_dilation),
        norm_layer=partial(_NORMS[config.norm], **config.norm_kwargs),
    )
    if config.in_channels != 3:
        # torchvision has no option for it; its users put another convolution there.
        module.conv1 = nn.Conv2d(config.in_channels, 64, 7, stride=2, padding=3, bias=False)
    return module


def _norm(norm: nn.Module) -> tuple[str, dict[str, Any]]:
    kinds = {cls: name for name, cls in _NORMS.items()}
    if type(norm) not in kinds:
        _refuse("norm_layer", type(norm).__name__, "supported are BatchNorm2d and FrozenBatchNorm2d")
    kind = kinds[type(norm)]
    options = {key: getattr(norm, key) for key in NORMS[kind]}
    if options.get("momentum", 0.1) is None:
        _refuse("momentum", None, "a cumulative average reads the device at each step")
    return kind, {key: value for key, value in options.items() if value != NORMS[kind][key]}


def _compare(module: nn.Module, expected: nn.Module) -> None:
    """Refuse a model that was changed after it was built: every submodule is what the configuration says."""
    theirs, ours = dict(module.named_modules()), dict(expected.named_modules())
    for name in {**theirs, **ours}:
        if name not in theirs or name not in ours:
            _refuse(name, "missing" if name in ours else theirs[name], "the configuration says otherwise")
        found, wanted = theirs[name], ours[name]
        # What a module without children does follows from its class and options, and its text holds both.
        leaf = not list(wanted.children())
        if type(found) is not type(wanted) or (leaf and not isinstance(found, nn.ReLU) and repr(found) != repr(wanted)):
            _refuse(name, found, f"expected {wanted if leaf else type(wanted).__name__} as in the rest of the model")
        if found._forward_hooks or found._forward_pre_hooks:
            _refuse(name, "a module with a hook", "the hook would be lost; remove it")


def _names(config: ResNetConfig) -> dict[str, str]:
    """{theirs: ours} of all tensors."""
    return dict(_pairs(config))


def _pairs(config: ResNetConfig) -> Iterator[tuple[str, str]]:
    modules = list(_ENDS.items())
    count = 3 if config.block == "bottleneck" else 2
    for stage, shapes in enumerate(config.stages()):
        for index, shape in enumerate(shapes):
            theirs, ours = f"layer{stage + 1}.{index}.", f"stages.{stage}.blocks.{index}."
            for number in range(1, count + 1):
                table = _INNER if number < count else _LAST
                modules += [
                    (theirs + name.format(number), ours + own.format(number))
                    for name, own in table.items()
                    if shape.projects or not name.startswith("downsample")
                ]
    options = config.norm_options
    kinds = ["weight", "bias"]
    if options.get("track_running_stats", True):
        kinds += ["running_mean", "running_var"] + ([_COUNTER] if config.norm == "batch" else [])
    for their_name, our_name in modules:
        if our_name.endswith("norm"):
            yield from ((f"{their_name}.{kind}", f"{our_name}.{kind}") for kind in kinds)
        else:
            yield f"{their_name}.weight", f"{our_name}.weight"
    yield "fc.bias", "head.fc.bias"


def _refuse(option: str, value: Any, why: str) -> None:
    raise ValueError(f"torchvision's ResNet with {option}={value} is not supported: {why}")
