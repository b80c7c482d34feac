"""What only ResNets meet in conversion: torchvision's pretrained weights by name, changed models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models
from torchvision.models.quantization import resnet18 as quantizable
from torchvision.models.resnet import BasicBlock, ResNet

import zoo
import zoo.resnet
from zoo.resnet import PRESETS
from zoo.resnet.convert import config_of, find_weights


def build() -> ResNet:
    return ResNet(BasicBlock, [1, 2, 1, 1])


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.endswith("-debug")])
def test_presets_match_torchvision(name: str) -> None:
    with torch.device("meta"):
        theirs = getattr(models, name)()
    assert config_of(theirs) == PRESETS[name]
    ours = zoo.create(name, device="meta")
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def cumulative(module: ResNet) -> None:
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.momentum = None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("", "fc", nn.Sequential(nn.Dropout(), nn.Linear(512, 3))), "fc=Sequential"),
        (("", "conv1", nn.Conv2d(3, 64, 3, bias=False)), r"conv1=Conv2d.*kernel_size=\(3, 3\).*kernel_size=\(7, 7\)"),
        (("", "maxpool", nn.Identity()), "maxpool=Identity"),
        (("layer3.0", "bn2", nn.BatchNorm2d(256, eps=1e-3)), r"layer3\.0\.bn2=BatchNorm2d.*eps=0\.001"),
        (("layer3.0", "bn1", nn.BatchNorm2d(256, affine=False)), r"layer3\.0\.bn1=BatchNorm2d.*affine=False"),
        (("layer2.0", "relu", nn.GELU()), r"layer2\.0\.relu=GELU"),
        (("", "bn1", nn.GroupNorm(4, 64)), r"bn1=GroupNorm.*expected BatchNorm2d"),
        (lambda module: module.train().layer1[0].bn1.eval(), r"layer1\.0\.bn1\.training=False"),
        (lambda module: module.layer4.register_forward_hook(print), "layer4=a module with a hook"),
        (cumulative, "norm_momentum is None"),
    ],
)
def test_what_is_not_supported_is_named(change: Any, words: str) -> None:
    module = build()
    if callable(change):
        change(module)
    else:
        place, name, other = change
        setattr(module.get_submodule(place), name, other)
    with pytest.raises(ValueError, match=words):
        zoo.from_upstream(module)


def test_other_classes_of_the_library_are_refused() -> None:
    with pytest.raises(ValueError, match="QuantizableResNet is a subclass"):
        zoo.from_upstream(quantizable())
    with pytest.raises(ValueError, match="bn1=SyncBatchNorm"):
        zoo.from_upstream(ResNet(BasicBlock, [1, 1, 1, 1], norm_layer=nn.SyncBatchNorm))


def test_a_model_without_memory_converts() -> None:
    model = zoo.from_upstream(build().to("meta"))
    assert all(tensor.is_meta for tensor in model.state_dict().values())


# --- pretrained weights ---


NAMES = [
    "IMAGENET1K_V1",
    "DEFAULT",
    "ResNet18_Weights.IMAGENET1K_V1",
    "ResNet18_Weights.DEFAULT",
    models.ResNet18_Weights.IMAGENET1K_V1,
]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str | None]]:
    """Answers downloads into an empty cache with the weights of a new model, and notes what was asked for."""
    asked: list[tuple[str, str | None]] = []

    def download(url: str, file: str, digest: str | None = None, progress: bool = True) -> None:
        asked.append((url, digest))
        name = url.rpartition("/")[2].partition("-")[0]
        torch.manual_seed(7)
        torch.save(getattr(models, name)().state_dict(), file)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    return asked


@pytest.mark.parametrize("weights", NAMES, ids=str)
def test_torchvisions_weights_by_name(server: list[tuple[str, str | None]], weights: Any) -> None:
    model = zoo.create("resnet18", weights=weights)
    torch.manual_seed(7)
    theirs = models.resnet18().eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(images), theirs(images), rtol=1e-4, atol=1e-4)
    url = models.ResNet18_Weights.IMAGENET1K_V1.url
    assert server == [(url, url.rpartition("-")[2].removesuffix(".pth"))]
    zoo.create("resnet18", weights=weights)
    assert len(server) == 1  # from the cache


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("IMAGENET1K_V3", r"weights is 'IMAGENET1K_V3'; resnet50 has IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT"),
        ("ResNet18_Weights.IMAGENET1K_V1", r"weights is .ResNet18_Weights\.IMAGENET1K_V1.; resnet50 has"),
        (models.ViT_B_16_Weights.DEFAULT, "; resnet50 has"),
        (3, "weights is 3"),
    ],
    ids=str,
)
def test_names_that_do_not_exist_or_fit(server: list[Any], weights: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        zoo.create("resnet50", weights=weights)
    assert not server


def test_a_preset_that_torchvision_does_not_know_has_none(server: list[Any]) -> None:
    with pytest.raises(ValueError, match="resnet-debug has none that torchvision knows"):
        zoo.create("resnet-debug", weights="IMAGENET1K_V1")


@pytest.mark.parametrize("weights", ["owner/name", "here/resnet50.pth", "resnet50.pth", "./DEFAULT", Path("DEFAULT")])
def test_paths_and_hub_ids_are_no_names(weights: str | Path) -> None:
    assert find_weights("resnet50", weights) is None


def test_a_file_that_is_there_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "DEFAULT").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_weights("resnet50", "DEFAULT") is None


def test_another_number_of_classes_is_named(server: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"fc\.\w+ has shape \(1000.*expected \(10"):
        zoo.create("resnet18", weights="DEFAULT", num_classes=10)


def test_checkpoints_of_training_scripts(tmp_path: Path) -> None:
    model = zoo.create("resnet-debug")
    # As old releases wrote them, without counters.
    state = zoo.to_upstream(model).state_dict()
    old = {key: tensor for key, tensor in state.items() if not key.endswith("num_batches_tracked")}
    torch.save({"state_dict": old}, tmp_path / "checkpoint.pth")
    loaded = zoo.create("resnet-debug", weights=tmp_path / "checkpoint.pth")
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_weights_with_norms_do_not_go_into_a_folded_model(tmp_path: Path) -> None:
    torch.save(zoo.to_upstream(zoo.create("resnet-debug")).state_dict(), tmp_path / "theirs.pth")
    with pytest.raises(ValueError, match="folded into the convolutions: .* load a model with norms"):
        zoo.create("resnet-debug", weights=tmp_path / "theirs.pth", folding=zoo.resnet.Folding())
