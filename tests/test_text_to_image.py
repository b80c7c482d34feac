"""examples/text_to_image.py on a tiny random pipeline: the images are those of diffusers' own UNet."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_unet_pipelines import pipeline

import zoo
from zoo.engine.compile import plan_of

pytestmark = pytest.mark.usefixtures("one_thread")

PATH = Path(__file__).parent.parent / "examples" / "text_to_image.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("text_to_image", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pipeline of each kind, on disk."""
    made = {}
    for kind in ("sd", "xl"):
        made[kind] = tmp_path_factory.mktemp(kind)
        pipeline(kind, tmp_path_factory.mktemp("words"), "EulerDiscreteScheduler").save_pretrained(made[kind])
    return made


def run(example: Any, folder: Path, out: Path, *options: str) -> np.ndarray:
    before = set(out.parent.iterdir())
    call = ["a cat", "--model", str(folder), "--out", str(out), "--device", "cpu", "--seed", "5", "--steps", "3"]
    example.main([*call, "--height", "24", "--width", "16", *options])
    written = sorted(set(out.parent.iterdir()) - before)
    return np.stack([np.asarray(Image.open(path)) for path in written]).astype(int)


@pytest.mark.parametrize("kind", ["sd", "xl"])
def test_the_images_are_diffusers(
    kind: str, example: Any, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--no-compile", "--negative", "fog", "--batch", "2", "--scheduler", "DDIMScheduler", "--guidance", "5")
    found = run(example, folders[kind], tmp_path / "cat.png", *options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat-0.png", "cat-1.png"]
    out, err = capsys.readouterr()
    assert out.split() == [str(tmp_path / "cat-0.png"), str(tmp_path / "cat-1.png")]
    assert re.search(r"ready in [\d.]+ s; [\d.]+ s an image; seed 5\n", err)
    pipe = example.load_pipeline(str(folders[kind]), torch.float32, "cpu", "DDIMScheduler")
    expected = pipe(
        "a cat", negative_prompt="fog", num_images_per_prompt=2, guidance_scale=5.0, num_inference_steps=3, height=24,
        width=16, generator=torch.Generator().manual_seed(5), output_type="np",
    ).images  # fmt: skip
    assert expected.std() > 0.02 and np.abs(found[0] - found[1]).max() > 5
    # A pixel at the edge of two values may fall to either.
    assert np.abs(found - np.round(expected * 255)).max() <= 1


@pytest.mark.slow
def test_the_model_is_compiled_and_captured(
    example: Any, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[torch.nn.Module] = []

    def compiled(model: torch.nn.Module) -> torch.nn.Module:
        models.append(model)
        return zoo.compile_regions(model, backend="aot_eager")

    monkeypatch.setattr(example, "zoo", type("", (), {**vars(zoo), "compile_regions": staticmethod(compiled)}))
    found = run(example, folders["sd"], tmp_path / "compiled.png")
    assert plan_of(models[0]) is not None and zoo.captures(models[0]).replays == 4  # of 2 + 3 steps all but the first
    assert np.abs(found - run(example, folders["sd"], tmp_path / "eager.png", "--no-compile")).max() <= 1


def test_a_folder_that_is_not_there_is_named_before_anything_is_loaded(example: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no folder"):
        example.main(["a cat", "--model", "none", "--out", str(tmp_path / "no" / "out.png")])
