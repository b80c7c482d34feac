"""Outputs, gradients and running statistics against torchvision's own models, both ways, and what is refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models.quantization import resnet18 as quantizable
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops import FrozenBatchNorm2d

import zoo
from zoo.resnet import PRESETS
from zoo.resnet.convert import WEIGHTS, config_of

BUILT: dict[str, tuple[type[nn.Module], list[int], dict[str, Any]]] = {
    "basic": (BasicBlock, [1, 2, 1, 1], {}),
    "bottleneck": (Bottleneck, [2, 1, 1, 1], {"num_classes": 7}),
    "groups": (Bottleneck, [1, 1, 2, 1], {"groups": 4, "width_per_group": 8}),
    "wide": (Bottleneck, [1, 1, 1, 1], {"width_per_group": 96}),
    "dilated": (Bottleneck, [1, 2, 2, 2], {"replace_stride_with_dilation": [False, True, True]}),
    "dilated early": (Bottleneck, [1, 1, 2, 1], {"replace_stride_with_dilation": [True, False, True]}),
    "dilated basic": (BasicBlock, [1, 1, 1, 1], {"replace_stride_with_dilation": [False, False, True]}),
    "zero": (BasicBlock, [1, 1, 1, 1], {"zero_init_residual": True}),
    "norm options": (BasicBlock, [1, 1, 1, 1], {"norm_layer": partial(nn.BatchNorm2d, eps=1e-3, momentum=0.3)}),
    "no statistics": (BasicBlock, [1, 1, 1, 1], {"norm_layer": partial(nn.BatchNorm2d, track_running_stats=False)}),
    "frozen": (Bottleneck, [1, 1, 1, 1], {"norm_layer": FrozenBatchNorm2d}),
    "frozen, other eps": (BasicBlock, [1, 1, 1, 1], {"norm_layer": partial(FrozenBatchNorm2d, eps=0.1)}),
}


def build(name: str) -> ResNet:
    block, layers, options = BUILT[name]
    module = ResNet(block, layers, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        # Norms start as if there were none, where a forgotten one would not show.
        for child in module.modules():
            if isinstance(child, (nn.BatchNorm2d, FrozenBatchNorm2d)):
                for key, tensor in child.state_dict().items():
                    if tensor.is_floating_point() and not (key == "weight" and tensor.abs().sum() == 0):
                        low, high = (0.5, 1.5) if key in ("weight", "running_var") else (-0.2, 0.2)
                        tensor.uniform_(low, high)
    return module


def error(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", BUILT)
def test_outputs_and_statistics_are_torchvisions(name: str, training: bool) -> None:
    theirs = build(name).train(training)
    ours = zoo.from_upstream(theirs)
    assert ours.training is training
    x = torch.randn(3, 3, 48, 40)
    with torch.no_grad():
        assert error(ours(x), theirs(x)) < 1e-5
    statistics = WEIGHTS.convert_state_dict(theirs.state_dict(), ours.config)
    for key, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, statistics[key], rtol=1e-5, atol=1e-5, msg=key)
        if "num_batches" in key:
            assert buffer == training


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", BUILT)
def test_gradients_are_torchvisions(name: str, training: bool) -> None:
    # In float32 both are as far from the truth as from each other: activations at zero fall to either side.
    theirs = build(name).double().train(training)
    ours = zoo.from_upstream(theirs)
    x, direction = torch.randn(3, 3, 48, 40).double(), torch.randn(3, theirs.fc.out_features).double()
    images = [x.clone().requires_grad_() for _ in range(2)]
    for model, image in zip((ours, theirs), images, strict=True):
        (model(image) * direction).sum().backward()
    assert error(images[0].grad, images[1].grad) < 1e-9  # type: ignore[arg-type]
    gradients = {key: p.grad for key, p in theirs.named_parameters()}
    expected = WEIGHTS.convert_state_dict({**theirs.state_dict(), **gradients}, ours.config)  # type: ignore[dict-item]
    assert len(list(ours.parameters())) == len(gradients)
    for key, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-8, atol=1e-8, msg=key)


@pytest.mark.parametrize("name", BUILT)
def test_there_and_back_is_the_same_model(name: str) -> None:
    theirs = build(name).eval()
    back = zoo.to_upstream(zoo.from_upstream(theirs))
    assert type(back) is ResNet and not back.training
    assert list(back.state_dict()) == list(theirs.state_dict())
    for (key, ours), expected in zip(back.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(ours, expected), key
    assert config_of(back) == config_of(theirs)
    with torch.no_grad():
        x = torch.randn(2, 3, 40, 40)
        assert error(back(x), theirs(x)) < 1e-5


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.endswith("-debug")])
def test_presets_are_torchvisions_models(name: str) -> None:
    with torch.device("meta"):
        theirs = getattr(models, name)()
    assert config_of(theirs) == PRESETS[name]
    ours = zoo.create(name, device="meta")
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def test_other_channels_of_images() -> None:
    theirs = build("basic").eval()
    theirs.conv1 = nn.Conv2d(4, 64, 7, stride=2, padding=3, bias=False)
    ours = zoo.from_upstream(theirs)
    assert ours.config.in_channels == 4
    with torch.no_grad():
        x = torch.randn(2, 4, 40, 40)
        assert error(ours(x), theirs(x)) < 1e-5
        assert error(zoo.to_upstream(ours)(x), theirs(x)) < 1e-5


def test_dtypes_pass_through() -> None:
    theirs = build("bottleneck").to(torch.bfloat16).eval()
    ours = zoo.from_upstream(theirs)
    x = torch.randn(2, 3, 40, 40, dtype=torch.bfloat16)
    with torch.no_grad():
        got = ours(x)
        assert got.dtype == torch.bfloat16 and error(got.float(), theirs(x).float()) < 3e-2
    double = build("bottleneck").double().eval()
    with torch.no_grad():
        assert error(zoo.from_upstream(double)(x.double()), double(x.double())) < 1e-13


def other_head(module: ResNet) -> None:
    module.fc = nn.Sequential(nn.Dropout(), nn.Linear(512, 3))  # type: ignore[assignment]


def other_stem(module: ResNet) -> None:
    module.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)


def no_pool(module: ResNet) -> None:
    module.maxpool = nn.Identity()  # type: ignore[assignment]


def one_other_norm(module: ResNet) -> None:
    module.layer3[0].bn2 = nn.BatchNorm2d(256, eps=1e-3)


def one_other_activation(module: ResNet) -> None:
    module.layer2[0].relu = nn.GELU()


def one_norm_in_eval(module: ResNet) -> None:
    module.train().layer1[0].bn1.eval()


def hooked(module: ResNet) -> None:
    module.layer4.register_forward_hook(lambda *_: None)


def group_norm(module: ResNet) -> None:
    module.bn1 = nn.GroupNorm(4, 64)  # type: ignore[assignment]


def no_affine(module: ResNet) -> None:
    module.layer3[0].bn1 = nn.BatchNorm2d(256, affine=False)


def cumulative(module: ResNet) -> None:
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.momentum = None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_head, "fc=Sequential"),
        (other_stem, r"conv1=Conv2d.*kernel_size=\(3, 3\).*kernel_size=\(7, 7\)"),
        (no_pool, "maxpool=Identity"),
        (one_other_norm, r"layer3\.0\.bn2=BatchNorm2d.*eps=0\.001"),
        (one_other_activation, r"layer2\.0\.relu=GELU"),
        (one_norm_in_eval, r"layer1\.0\.bn1=a module in eval mode"),
        (hooked, "layer4=a module with a hook"),
        (group_norm, "norm_layer=GroupNorm .*BatchNorm2d and FrozenBatchNorm2d"),
        (cumulative, "momentum=None"),
        (no_affine, r"layer3\.0\.bn1=BatchNorm2d.*affine=False"),
    ],
)
def test_what_is_not_supported_is_named(change: Any, words: str) -> None:
    module = build("basic")
    change(module)
    with pytest.raises(ValueError, match=words):
        zoo.from_upstream(module)


def test_other_classes_of_the_library_are_refused() -> None:
    with pytest.raises(ValueError, match="QuantizableResNet is a subclass"):
        zoo.from_upstream(quantizable())
    with pytest.raises(TypeError, match="no family converts"):
        zoo.from_upstream(models.squeezenet1_1())
    with pytest.raises(ValueError, match="norm_layer=SyncBatchNorm"):
        zoo.from_upstream(ResNet(BasicBlock, [1, 1, 1, 1], norm_layer=nn.SyncBatchNorm))


def test_a_model_without_memory_converts() -> None:
    model = zoo.from_upstream(build("basic").to("meta"))
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_state_dicts_are_strict_but_for_counters() -> None:
    theirs = build("basic")
    config, state = config_of(theirs), theirs.state_dict()
    for key in [key for key in state if key.endswith("num_batches_tracked")]:
        del state[key]
    assert WEIGHTS.convert_state_dict(state, config)["stem.norm.num_batches_tracked"] == 0
    short = copy.copy(state)
    del short["layer1.0.conv1.weight"]
    with pytest.raises(ValueError, match=r"missing tensors \['layer1\.0\.conv1\.weight'\]"):
        WEIGHTS.convert_state_dict(short, config)
    with pytest.raises(ValueError, match=r"unexpected tensors \['extra'\]"):
        WEIGHTS.convert_state_dict({**state, "extra": torch.zeros(1)}, config)
