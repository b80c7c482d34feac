"""Weights from files and from torchvision by name (with a stand-in for the network), and their preprocessing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import models

import zoo
import zoo.resnet
from zoo.resnet.convert import find_weights

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
        ("ResNet50_Weights.V9", "weights is 'ResNet50_Weights.V9'; resnet50 has IMAGENET1K_V1"),
        ("No_Weights.IMAGENET1K_V1", "weights is 'No_Weights.IMAGENET1K_V1'"),
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
    with pytest.raises(ValueError, match="folding is on, and these weights have batch norms"):
        zoo.create("resnet-debug", weights=tmp_path / "theirs.pth", folding=zoo.resnet.Folding())


@pytest.mark.parametrize(
    ("weights", "size"),
    [(models.ResNet50_Weights.IMAGENET1K_V1, 224), ("ResNet50_Weights.IMAGENET1K_V2", 224), ("wide_resnet50_2", 224)],
    ids=str,
)
def test_transforms_are_torchvisions(weights: Any, size: int) -> None:
    images = torch.randint(256, (2, 3, 300, 260), dtype=torch.uint8)
    ready = zoo.resnet.transforms(weights)(images)
    assert ready.shape == (2, 3, size, size) and ready.dtype == torch.float32
    expected = {
        "wide_resnet50_2": models.Wide_ResNet50_2_Weights.DEFAULT,
        "ResNet50_Weights.IMAGENET1K_V2": models.ResNet50_Weights.IMAGENET1K_V2,
    }.get(weights, weights)
    assert torch.equal(ready, expected.transforms()(images))


@pytest.mark.parametrize("weights", ["IMAGENET1K_V2", "resnet-debug", "ResNet50_Weights.V9", 3])
def test_transforms_of_nothing_are_refused(weights: Any) -> None:
    with pytest.raises(ValueError, match="pass an enum of torchvision's"):
        zoo.resnet.transforms(weights)
