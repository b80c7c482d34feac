"""The examples on tiny models: chat answers as generate does, images are those of diffusers' own UNet."""

import functools
import importlib.util
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch._dynamo.utils import counters

import zoo
from examples import chat, own_model, serve, train
from tests.test_unet_sampler import pipeline
from zoo.engine.compile import plan_of
from zoo.llm import load, save

ROOT = Path(__file__).parent.parent
FIGURES = re.compile(r"(\d+) tokens; first token after [\d.]+ ms; [\d.]+ tokens/s, [\d.e+-]+ GB/s of weights")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Vectors far apart and a head of its own: the text is more than one token over and over.
    model = zoo.create("llm-debug", tie_word_embeddings=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    save(model, tmp_path)
    words = {**{f"w{index}": index for index in range(255)}, "?": 255}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    return tmp_path


def noting() -> tuple[list[Any], Callable[[Any], Any]]:
    """Models that are compiled, and what compiles them by a light backend."""
    models: list[Any] = []
    return models, lambda model: (models.append(model), zoo.compile_regions(model, backend="aot_eager"))[1]


def words(ids: list[int]) -> str:
    return " ".join(f"w{index}" if index < 255 else "?" for index in ids) + "\n"


def answer(folder: Path, prompt: list[int], **settings: Any) -> list[int]:
    return load(folder).generate([prompt], **settings)[0].tolist()


@pytest.mark.parametrize(
    ("example", "library", "extra", "arguments"),
    [
        ("chat", "transformers", "hf", ["folder"]),
        ("text_to_image", "diffusers", "diffusers", ["a prompt", "--model", "folder"]),
    ],
)
def test_help_needs_no_library_and_a_run_names_the_extra(example, library, extra, arguments):
    run = (
        f"import runpy, sys; sys.modules[{library!r}] = None; runpy.run_module('examples.{example}', {{}}, '__main__')"
    )
    call = [sys.executable, "-c", run]
    shown = subprocess.run([*call, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0 and "usage:" in shown.stdout, shown.stderr
    refused = subprocess.run([*call, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode and f'pip install "regional-zoo[{extra}]"' in refused.stderr


def test_a_prompt_is_continued(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = [str(folder), "--prompt", "w5 w6", "--device", "cpu", "--no-compile"]
    chat.main([*call, "--max-new-tokens", "40"])
    out, err = capsys.readouterr()
    expected = answer(folder, [5, 6], max_new_tokens=40)
    assert len(set(expected)) > 5 and out == words(expected)
    found = FIGURES.search(err)
    assert found is not None and int(found[1]) == 40, err
    drawing = "--max-new-tokens 9 --temperature 0.9 --top-k 40 --top-p 0.9 --seed 4"
    chat.main([*call, *drawing.split()])
    settings = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 4}
    assert capsys.readouterr().out == words(answer(folder, [5, 6], max_new_tokens=9, **settings))
    chat.main([*call, "--max-new-tokens", "1"])
    captured = capsys.readouterr()
    assert captured.out == words(expected[:1])
    assert "1 tokens; first token after" in captured.err and "tokens/s" not in captured.err
    # Its generation config says what ends an answer.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [expected[4], 255]}))
    chat.main([*call, "--max-new-tokens", "12"])
    assert capsys.readouterr().out == words(expected[: expected.index(expected[4]) + 1])


def test_a_conversation_goes_through_the_chat_template(folder, capsys, monkeypatch):
    template = "{% for message in messages %}{{ 'w1 ' + message.content + ' w2 ' }}{% endfor %}w3"
    (folder / "chat_template.jinja").write_text(template)
    models, compiled = noting()
    monkeypatch.setattr(chat, "compile_regions", compiled)
    monkeypatch.setattr(sys, "stdin", io.StringIO("w7 w8\nw9\n\n"))
    chat.main([str(folder), "--device", "cpu", "--max-new-tokens", "4", "--slots", "64", "--dtype", "bfloat16"])
    assert models[0].embed_tokens.weight.dtype is torch.bfloat16
    plain = load(folder, dtype=torch.bfloat16)
    first = plain.generate([[1, 7, 8, 2, 3]], max_new_tokens=4)[0].tolist()
    second = plain.generate([[1, 7, 8, 2, 1, *first, 2, 1, 9, 2, 3]], max_new_tokens=4)[0].tolist()
    assert capsys.readouterr().out == words(first) + words(second)


@pytest.mark.slow
def test_a_model_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    own_model.main()
    out = capsys.readouterr().out
    assert "Block: 24 module(s), 1 graph(s)" in out and "1 graph(s) in" in out and "replays; " in out


def test_training_goes_on_from_what_was_saved(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(zoo, "compile_regions", functools.partial(zoo.compile_regions, backend="aot_eager"))
    call = ["resnet-debug", "--folder", str(tmp_path), "--rows", "4", "--pixels", "8", "--steps"]
    train.main([*call, "6"])
    train.main([*call, "4"])
    assert re.fullmatch(r"step 10: loss \d+\.\d{4}\n", capsys.readouterr().out)


@pytest.mark.slow
def test_a_server_that_starts_again_compiles_nothing(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(serve, "LENGTHS", (8,))
    answers = []
    for _ in range(2):
        torch.compiler.reset()
        monkeypatch.setattr(sys, "stdin", io.StringIO("5 6 7\n8 9\n"))
        serve.main(["bert-debug", "--compiled", str(tmp_path / "compiled")])
        answers.append(capsys.readouterr().out.splitlines())
        traced, counters["stats"]["unique_graphs"] = counters["stats"]["unique_graphs"], 0
    assert len(answers[0]) == 2 and answers[0] == answers[1] and traced == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 " * 9))
    with pytest.raises(ValueError, match="9 tokens, at most 8 are served"):
        serve.main(["bert-debug", "--compiled", str(tmp_path / "compiled")])


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("text_to_image", ROOT / "examples" / "text_to_image.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
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
def test_the_images_are_diffusers(kind, example, folders, tmp_path, capsys):
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
def test_the_model_is_compiled_and_captured(example, folders, tmp_path, monkeypatch):
    models, compiled = noting()
    monkeypatch.setattr(example, "zoo", type("", (), {**vars(zoo), "compile_regions": staticmethod(compiled)}))
    found = run(example, folders["sd"], tmp_path / "compiled.png")
    assert plan_of(models[0]) is not None and zoo.captures(models[0]).replays == 4  # of 2 + 3 steps all but the first
    assert np.abs(found - run(example, folders["sd"], tmp_path / "eager.png", "--no-compile")).max() <= 1


def test_a_folder_that_is_not_there_is_named_before_anything_is_loaded(example, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit, match="there is no folder"):
        example.main(["a cat", "--model", "none", "--out", str(tmp_path / "no" / "out.png")])
    with pytest.raises(SystemExit):
        chat.main(["no/where/at/all"])
    assert "no such file or folder" in capsys.readouterr().err
