"""examples/chat.py on a tiny model: prompts, conversations, figures and errors."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from examples import chat
from zoo.llm import LLM, load, save

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


def words(ids: list[int]) -> str:
    return " ".join(f"w{index}" if index < 255 else "?" for index in ids) + "\n"


def answer(folder: Path, prompt: list[int], **settings: Any) -> list[int]:
    tokens: list[int] = load(folder).generate([prompt], **settings)[0].tolist()
    return tokens


def test_a_prompt_is_continued(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = [str(folder), "--prompt", "w5 w6", "--device", "cpu", "--no-compile"]
    chat.main([*call, "--max-new-tokens", "40"])
    out, err = capsys.readouterr()
    expected = answer(folder, [5, 6], max_new_tokens=40)
    assert len(set(expected)) > 5 and out == words(expected)
    found = FIGURES.search(err)
    assert found is not None and int(found[1]) == 40, err
    chat.main(
        [*call, "--max-new-tokens", "9", "--temperature", "0.9", "--top-k", "40", "--top-p", "0.9", "--seed", "4"]
    )
    settings = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 4}
    assert capsys.readouterr().out == words(answer(folder, [5, 6], max_new_tokens=9, **settings))
    chat.main([*call, "--max-new-tokens", "1"])
    captured = capsys.readouterr()
    assert captured.out == words(expected[:1])
    assert "1 tokens; first token after" in captured.err and "tokens/s" not in captured.err


def test_the_generation_config_says_what_ends_an_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = answer(folder, [5, 6], max_new_tokens=12)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [free[4], 255]}))
    chat.main([str(folder), "--prompt", "w5 w6", "--device", "cpu", "--no-compile", "--max-new-tokens", "12"])
    assert capsys.readouterr().out == words(free[: free.index(free[4]) + 1])


def test_a_conversation_goes_through_the_chat_template(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for message in messages %}{{ 'w1 ' + message.content + ' w2 ' }}{% endfor %}w3"
    (folder / "chat_template.jinja").write_text(template)
    models: list[LLM] = []

    def compiled(model: LLM) -> torch.nn.Module:
        models.append(model)
        return zoo.compile_regions(model, backend="aot_eager")

    monkeypatch.setattr(chat, "compile_regions", compiled)
    monkeypatch.setattr(sys, "stdin", io.StringIO("w7 w8\nw9\n\n"))
    chat.main([str(folder), "--device", "cpu", "--max-new-tokens", "4", "--slots", "64", "--dtype", "bfloat16"])
    assert models[0].embed_tokens.weight.dtype is torch.bfloat16
    plain = load(folder, dtype=torch.bfloat16)
    first = plain.generate([[1, 7, 8, 2, 3]], max_new_tokens=4)[0].tolist()
    second = plain.generate([[1, 7, 8, 2, 1, *first, 2, 1, 9, 2, 3]], max_new_tokens=4)[0].tolist()
    assert capsys.readouterr().out == words(first) + words(second)


@pytest.mark.slow
def test_as_a_command(folder: Path) -> None:
    root = Path(__file__).parent.parent
    call = [sys.executable, "examples/chat.py", str(folder), "--prompt", "w5", "--device", "cpu", "--no-compile"]
    done = subprocess.run(
        [*call, "--max-new-tokens", "5"], capture_output=True, text=True, cwd=root, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == words(answer(folder, [5], max_new_tokens=5))


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chat.main(["no/where/at/all"])
    assert "no such file or folder" in capsys.readouterr().err
