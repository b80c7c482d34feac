"""python -m zoo.llm: text in and out, figures, token ids where there is no tokenizer, and its errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from zoo.engine.compile import plan_of
from zoo.llm import LLM, generate, load, save
from zoo.llm import __main__ as cli
from zoo.llm.bandwidth import bytes_per_token, read_bandwidth
from zoo.llm.text import TextStream, encode, read_end_tokens, read_tokenizer

FIGURES = re.compile(
    r"ready in [\d.]+ s; (\d+) tokens; first token after [\d.]+ ms; [\d.]+ tokens/s, \d+% of memory bandwidth "
    r"\([\d.e+-]+ GB a token, [\d.e+-]+ GB/s read\)"
)


def make_tokenizer(folder: Path) -> Any:
    """Every byte is a token: more than the letters, so that characters come in halves."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(folder)
    return fast


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Vectors far apart and a head of its own: the text is more than one token over and over.
    model = zoo.create("llm-debug", tie_word_embeddings=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    save(model, tmp_path)
    return tmp_path


def said(folder: Path, prompt: list[int], **settings: Any) -> list[int]:
    answer: list[int] = generate(load(folder), [prompt], **settings)[0].tolist()
    return answer


def test_text_goes_in_and_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_tokenizer(folder)
    cli.main(["Grüße", "--model", str(folder), "--max-new-tokens", "40", "--device", "cpu", "--no-compile"])
    out, err = capsys.readouterr()
    expected = said(folder, tokenizer("Grüße")["input_ids"], max_new_tokens=40)
    assert len(set(expected)) > 5
    assert out == tokenizer.decode(expected) + "\n"
    found = FIGURES.search(err)
    assert found is not None and int(found[1]) == 40, err


def test_without_a_tokenizer_tokens_are_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["5, 6 7", "--model", str(folder), "--device", "cpu", "--no-compile", "--max-new-tokens"]
    cli.main([*call, "9", "--temperature", "0.9", "--top-k", "40", "--top-p", "0.9", "--seed", "4"])
    settings = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 4}
    out = [int(word) for word in capsys.readouterr().out.split()]
    assert out == said(folder, [5, 6, 7], max_new_tokens=9, **settings)
    cli.main([*call, "1"])
    captured = capsys.readouterr()
    assert [int(word) for word in captured.out.split()] == said(folder, [5, 6, 7], max_new_tokens=1)
    assert "1 tokens; first token after" in captured.err and "tokens/s" not in captured.err


def test_the_model_is_compiled_before_the_clock_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[LLM] = []

    def compiled(model: LLM) -> torch.nn.Module:
        models.append(model)
        return zoo.compile_regions(model, backend="aot_eager")

    monkeypatch.setattr(cli, "compile_regions", compiled)
    cli.main(["5 6 7", "--model", str(folder), "--device", "cpu", "--max-new-tokens", "9", "--dtype", "bfloat16"])
    assert plan_of(models[0]) is not None and models[0].embed_tokens.weight.dtype is torch.bfloat16
    assert FIGURES.search(capsys.readouterr().err)


def test_as_a_command(folder: Path) -> None:
    call = [sys.executable, "-m", "zoo.llm", "5 6 7", "--model", str(folder), "--device", "cpu", "--no-compile"]
    done = subprocess.run(
        [*call, "--max-new-tokens", "5"], capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [int(word) for word in done.stdout.split()] == said(folder, [5, 6, 7], max_new_tokens=5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["hello"], "there is no tokenizer beside the weights"),
        ([" "], "has no tokens"),
        (["300"], "holds 300, but the vocabulary has 256"),
        (["1 2", "--temperature", "-1"], "temperature is -1"),
        (["1 2", "--top-p", "2"], "top_p is 2"),
        (["1 2", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["1 2", "--max-new-tokens", "600"], "row 0 has 2 tokens and max_new_tokens is 600, but the cache has 512"),
        (["1 2", "--model", "no/where/at/all"], "no such file or folder"),
    ],
)
def test_errors_are_one_line(
    folder: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(model: LLM) -> LLM:
        raise AssertionError("compiled although an option was wrong")

    monkeypatch.setattr(cli, "compile_regions", never)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--model", str(folder), "--device", "cpu", *options])
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_end_tokens_are_looked_for_beside_the_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_end_tokens(folder, None, ()) == () and read_end_tokens(folder, None, (3,)) == (3,)
    free = said(folder, [5, 6, 7], max_new_tokens=12)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [free[4], 255]}))
    assert read_end_tokens(folder, None, (3,)) == (free[4], 255)
    cli.main(["5 6 7", "--model", str(folder), "--device", "cpu", "--no-compile", "--max-new-tokens", "12"])
    out = [int(word) for word in capsys.readouterr().out.split()]
    assert out == free[: free.index(free[4]) + 1]


def test_halves_of_characters_wait_for_the_rest(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    assert read_tokenizer(tmp_path / "nowhere") is None
    read = read_tokenizer(tmp_path)
    ids = encode("aé€b", read)
    assert ids == tokenizer("aé€b")["input_ids"] and len(ids) == 7
    stream = TextStream(read)
    assert [stream.push([token]) for token in ids] == ["a", "", "é", "", "", "€", "b"]
    half = TextStream(read)
    assert half.push(ids[:2]) == "" and half.push([], last=True) == "a\N{REPLACEMENT CHARACTER}"


def test_the_floor_counts_what_a_step_reads() -> None:
    tied, own = zoo.create("llm-debug"), zoo.create("llm-debug", tie_word_embeddings=False, sliding_window=4)
    weights = sum(parameter.nbytes for parameter in tied.parameters())
    slot = 3 * 2 * 2 * 16 * 4
    assert tied.make_cache(1, 32).nbytes == 32 * slot
    assert bytes_per_token(tied, 32 * slot, 32, 10) == weights + 10 * slot
    # The same weights are read, once as an embedding and once as a head; the window hides what lies before.
    assert bytes_per_token(own, 32 * slot, 32, 10) == weights + 4 * slot
    assert 1e8 < read_bandwidth(torch.device("cpu"), repeats=2) < 1e13
