"""python -m zoo.unet: the images of diffusers' pipelines, written as PNG; and its errors, before anything runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_unet_pipelines import pipeline

import zoo
from zoo.engine.compile import plan_of
from zoo.unet import UNet
from zoo.unet import __main__ as cli
from zoo.unet.images import decode, load_vae
from zoo.unet.pipeline import read_pipeline
from zoo.unet.text import encode

# numpy's word to schedulers that take square roots of tensors.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]

FIGURES = re.compile(
    r"ready in [\d.]+ s; (\d+) steps of [\d.]+ ms; [\d.]+ s an image, [\d.]+ s of it to decode and write; seed (\d+)"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pipeline of each kind, on disk: nothing in these tests writes to them."""
    made = {}
    for kind in ("sd", "xl"):
        words = tmp_path_factory.mktemp(f"{kind}-words")
        pipe = pipeline(kind, words, "EulerDiscreteScheduler")
        made[kind] = tmp_path_factory.mktemp(kind)
        pipe.save_pretrained(made[kind])
    return made


def make(folder: Path, out: Path, *options: str, prompt: str = "a cat") -> list[np.ndarray]:
    """Run the command; the images that it wrote."""
    before = set(out.parent.iterdir())
    call = [prompt, "--model", str(folder), "--out", str(out), "--device", "cpu", "--no-compile"]
    cli.main([*call, "--steps", "3", "--height", "24", "--width", "16", *options])
    written = sorted(set(out.parent.iterdir()) - before) or [out]
    images = []
    for path in written:
        with Image.open(path) as image:
            assert (image.format, image.mode, image.size) == ("PNG", "RGB", (16, 24))
            images.append(np.asarray(image))
    return images


def theirs(kind: str, folder: Path, tmp_path: Path, **options: Any) -> np.ndarray:
    pipe = pipeline(kind, tmp_path, "EulerDiscreteScheduler")
    pipe = type(pipe).from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    call = {"prompt": "a cat", "num_inference_steps": 3, "guidance_scale": 7.5, "height": 24, "width": 16, **options}
    result: np.ndarray = pipe(**call, generator=torch.Generator().manual_seed(5), output_type="np").images
    return np.round(result * 255).astype(np.uint8)


@pytest.mark.parametrize("kind", ["sd", "xl"])
@pytest.mark.parametrize("negative", [None, "", "fog"])
def test_the_images_of_diffusers_pipelines(
    kind: str, negative: str | None, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [] if negative is None else ["--negative", negative]
    (found,) = make(folders[kind], tmp_path / "out.png", "--seed", "5", *options)
    (expected,) = theirs(kind, folders[kind], tmp_path, negative_prompt=negative)
    assert expected.std() > 5
    # A pixel at the edge of two values may fall to either.
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'out.png'}\n"
    figures = FIGURES.search(err)
    assert figures is not None and figures.groups() == ("3", "5") and "sampling: 100%" in err


def test_several_images_are_numbered_and_differ(folders: dict[str, Path], tmp_path: Path) -> None:
    images = make(folders["sd"], tmp_path / "cats.png", "--batch", "2", "--seed", "5", "--guidance", "4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cats-0.png", "cats-1.png"]
    assert np.abs(images[0].astype(int) - images[1]).max() > 5
    words = tmp_path / "words"
    words.mkdir()
    expected = theirs("sd", folders["sd"], words, num_images_per_prompt=2, guidance_scale=4.0)
    assert np.abs(np.stack(images).astype(int) - expected.astype(int)).max() <= 1


def test_seeds_and_options_decide_the_image(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = folders["sd"], tmp_path / "out.png"
    (first,) = make(folder, out)
    told = FIGURES.search(capsys.readouterr().err)
    assert told is not None
    again = make(folder, out, "--seed", told[2])[0]
    np.testing.assert_array_equal(again, first)
    for options in (["--seed", "8"], ["--guidance", "1"], ["--scheduler", "dpm++"], ["--negative", "rain"]):
        other = make(folder, out, "--seed", told[2], *options)[0]
        assert np.abs(other.astype(int) - first).max() > 1, options
    assert np.abs(make(folder, out, "--seed", told[2], prompt="a dog")[0].astype(int) - first).max() > 1


def test_the_model_is_compiled_before_the_clock_starts(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[UNet] = []

    def compiled(model: UNet) -> torch.nn.Module:
        models.append(model)
        return zoo.compile_regions(model, backend="aot_eager")

    (expected,) = make(folders["xl"], tmp_path / "eager.png", "--seed", "5")
    monkeypatch.setattr(cli, "compile_regions", compiled)
    call = ["a cat", "--model", str(folders["xl"]), "--device", "cpu", "--steps", "3", "--seed", "5"]
    cli.main([*call, "--height", "24", "--width", "16", "--out", str(tmp_path / "compiled.png")])
    assert plan_of(models[0]) is not None
    with Image.open(tmp_path / "compiled.png") as image:
        assert np.abs(np.asarray(image).astype(int) - expected).max() <= 1
    # At the size that it was trained on.
    cli.main([*call, "--dtype", "bfloat16", "--out", str(tmp_path / "half.png")])
    assert models[1].dtype is torch.bfloat16
    with Image.open(tmp_path / "half.png") as image:
        assert image.size == (32, 32)


def test_as_a_command(folders: dict[str, Path], tmp_path: Path) -> None:
    call = [sys.executable, "-m", "zoo.unet", "a cat", "--model", str(folders["sd"]), "--device", "cpu", "--no-compile"]
    call += ["--height", "24", "--width", "16", "--steps", "2", "--out", str(tmp_path / "out.png")]
    done = subprocess.run(call, capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=200)
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "out.png") as image:
        assert image.size == (16, 24)


def test_long_prompts_are_cut_and_said_to_be(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(folders["sd"], tmp_path / "out.png", "--seed", "5", prompt="abcdefghijklmnopqrst")
    # 20 letters between two ends, and there is room for 16.
    assert "the last 6 tokens of a prompt are too many" in capsys.readouterr().err


def test_a_vae_with_means_and_deviations_of_its_own(folders: dict[str, Path]) -> None:
    folder = read_pipeline(folders["sd"])
    vae = load_vae(folder, device=torch.device("cpu"), dtype=torch.float16)
    assert vae.dtype is torch.float32 and not vae.training  # float16 would overflow
    latents = torch.randn(2, 4, 8, 8)
    plain = decode(vae, latents)
    assert plain.shape == (2, 16, 16, 3) and plain.dtype == torch.uint8
    vae.register_to_config(latents_mean=[0.5, 0.0, -0.5, 1.0], latents_std=[1.0, 2.0, 3.0, 4.0])
    mean, deviation = (torch.tensor(vae.config[key]).view(1, 4, 1, 1) for key in ("latents_mean", "latents_std"))
    same = (latents / vae.config.scaling_factor - mean) / deviation * vae.config.scaling_factor
    assert (decode(vae, same).int() - plain.int()).abs().max() <= 1
    assert (decode(vae, latents).int() - plain.int()).abs().max() > 1


def test_prompts_are_encoded_in_the_dtype_asked_for(folders: dict[str, Path]) -> None:
    for kind, width in (("sd", 12), ("xl", 24)):
        text, away = encode(
            read_pipeline(folders[kind]), "a cat", None, device=torch.device("cpu"), dtype=torch.bfloat16
        )
        assert text.text.shape == away.text.shape == (1, 16, width) and text.text.dtype is torch.bfloat16
        assert (text.pooled is not None) == (kind == "xl")
        # Two encoders: nothing at all in place of an empty text.
        assert bool((away.text == 0).all()) == (kind == "xl")


# --- errors ---


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(arguments))
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "no/where/at/all"], "'no/where/at/all': no such folder, and not a hub id"),
        (["--height", "30"], "height is 30, expected a multiple of 4; 32 is one"),
        (["--width", "0"], "width is 0, expected a multiple of 4; 4 is one"),
        (["--batch", "0"], "batch is 0, expected a positive number of images"),
        (["--steps", "0"], "steps is 0, expected an integer from 1 to 1000"),
        (["--guidance", "-1"], "guidance_scale is -1"),
        (["--out", "out.jpg"], "out is 'out.jpg', expected the name of a .png file"),
        (["--out", "no/folder/out.png"], "out is 'no/folder/out.png', but there is no folder 'no/folder'"),
        (["--out", "folder.png"], "'folder.png' is a folder"),
        (["--device", "gpu"], "device is 'gpu'"),
        (["--device", "cuda:99"], "device is 'cuda:99', and torch sees"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str],
    words: str,
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("something was loaded although an option was wrong")

    for name in ("encode", "load", "load_vae", "compile_regions"):
        monkeypatch.setattr(cli, name, never)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    assert words in refused(capsys, "a cat", "--model", str(folders["sd"]), "--device", "cpu", *options)


def test_a_folder_that_may_not_be_written_is_named(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The owner of everything may write everywhere: what the system says of others is put in its mouth.
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    words = refused(capsys, "a cat", "--model", str(folders["sd"]), "--out", str(tmp_path / "out.png"))
    assert "nothing may be written to" in words


def edited(folder: Path, tmp_path: Path, file: str, **options: Any) -> Path:
    """A folder of links to another, with a file of options of its own."""
    copy = tmp_path / "copy"
    for path in folder.rglob("*"):
        if path.is_file():
            (copy / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(folder)).symlink_to(path)
    changed = {**json.loads((folder / file).read_text()), **options}
    (copy / file).unlink()
    (copy / file).write_text(json.dumps(changed))
    return copy


@pytest.mark.parametrize(
    ("file", "options", "words"),
    [
        (
            "model_index.json",
            {"_class_name": "FluxPipeline"},
            "is a FluxPipeline, expected a StableDiffusionPipeline or",
        ),
        ("model_index.json", {"text_encoder": ["x", "T5EncoderModel"]}, "text_encoder is a T5EncoderModel"),
        ("model_index.json", {"text_encoder": None}, "text_encoder is a None"),
        ("vae/config.json", {"_class_name": "AutoencoderTiny"}, "vae is a AutoencoderTiny, expected an AutoencoderKL"),
        ("unet/config.json", {"class_embed_type": "timestep"}, "class_embed_type='timestep' is not supported"),
        ("scheduler/scheduler_config.json", {"use_beta_sigmas": True}, "use_beta_sigmas=True is not supported"),
        ("scheduler/scheduler_config.json", {"_class_name": "LCMScheduler"}, "LCMScheduler is not supported"),
    ],
)
def test_folders_of_another_kind_are_refused(
    file: str,
    options: dict[str, Any],
    words: str,
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = edited(folders["sd"], tmp_path, file, **options)
    assert words in refused(capsys, "a cat", "--model", str(folder), "--out", str(tmp_path / "out.png"))


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (["unet/config.json", "unet/diffusion_pytorch_model.safetensors"], "has no unet: a part of the pipeline"),
        (["vae/diffusion_pytorch_model.safetensors"], "vae has no weights, in .safetensors or .bin"),
        (["scheduler/scheduler_config.json"], "has no scheduler: a part of the pipeline is missing"),
        (["text_encoder/config.json"], "text_encoder has no config.json"),
        (["model_index.json"], "has no model_index.json: expected the folder of a whole pipeline"),
    ],
)
def test_missing_parts_are_named(
    missing: list[str], words: str, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edited(folders["sd"], tmp_path, "model_index.json")
    for name in missing:
        (folder / name).unlink()
        if not any((folder / name).parent.iterdir()):
            (folder / name).parent.rmdir()
    assert words in refused(capsys, "a cat", "--model", str(folder), "--out", str(tmp_path / "out.png"))
    (tmp_path / "text.txt").touch()
    assert "text.txt is a file" in refused(
        capsys, "a cat", "--model", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out.png")
    )


def test_files_that_are_no_json_are_named(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edited(folders["sd"], tmp_path, "vae/config.json")
    (folder / "vae/config.json").write_text("{")
    words = refused(capsys, "a cat", "--model", str(folder), "--out", str(tmp_path / "out.png"))
    assert "vae/config.json is not JSON" in words


def test_of_the_hub_only_what_is_used_is_fetched(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fnmatch

    import huggingface_hub

    fetched: list[str] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        assert name == "owner/name"
        fetched.extend(allow_patterns)
        return str(folders["xl"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    assert read_pipeline("owner/name") == read_pipeline(folders["xl"])

    def wanted(file: str) -> bool:
        return any(fnmatch.fnmatch(file, pattern) for pattern in fetched)

    files = [path.relative_to(folders["xl"]).as_posix() for path in folders["xl"].rglob("*") if path.is_file()]
    assert all(map(wanted, files)), [file for file in files if not wanted(file)]
    assert not wanted("sd_xl_base_1.0.safetensors")
    assert not wanted("unet/diffusion_pytorch_model.fp16.safetensors") and not wanted("unet/model.onnx")
    assert wanted("unet/diffusion_pytorch_model.safetensors.index.json")
    assert wanted("unet/diffusion_pytorch_model-00001-of-00002.safetensors")
