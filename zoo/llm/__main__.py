"""Continue a prompt on the command line: ``python -m zoo.llm "Once upon a time" --model PATH_OR_ID``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from zoo.engine.compile import compile_regions
from zoo.llm.bandwidth import bytes_per_token, read_bandwidth
from zoo.llm.convert import load
from zoo.llm.generate import Session, fitting_slots
from zoo.llm.model import LLM
from zoo.llm.text import TextStream, encode, read_end_tokens, read_tokenizer
from zoo.weights import locate

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, load, compile, generate; the text goes to the output, figures to the error stream."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zoo.llm", description="Continue a prompt.")
    parser.add_argument("prompt", help="text; token ids where there is no tokenizer beside the weights")
    parser.add_argument("--model", required=True, help="folder in transformers' format, or a hub id")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token (the default)")
    parser.add_argument("--top-k", type=int, help="draw from the most likely so many only")
    parser.add_argument("--top-p", type=float, help="draw from the fewest tokens that have this probability")
    parser.add_argument("--seed", type=int, help="the same seed draws the same text")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights; as they are stored when left out")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--no-compile", action="store_true", help="run the regions eagerly")
    return parser


def _run(options: argparse.Namespace) -> None:
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    folder = locate(options.model)
    tokenizer = read_tokenizer(folder)
    prompt = encode(options.prompt, tokenizer)
    model = load(folder, device=device, dtype=_DTYPES.get(options.dtype))
    limit = model.config.max_position_embeddings
    longest = len(prompt) + options.max_new_tokens
    session = Session(model, 1, fitting_slots(longest, limit), conversation=False)
    settings = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "seed": options.seed,
        "eos": read_end_tokens(folder, tokenizer, model.config.eos_token_id),
    }
    # Asked for before anything is compiled: a bad option should not cost a compilation.
    session.stream([prompt], max_new_tokens=options.max_new_tokens, **settings)
    if not options.no_compile:
        compile_regions(model)
    started = time.perf_counter()
    # Compiles and captures, which the figures below are not about.
    session.generate([prompt], max_new_tokens=min(2, options.max_new_tokens), **{**settings, "eos": ()})
    session.reset()
    ready = time.perf_counter() - started
    bandwidth = read_bandwidth(device)
    text, count = TextStream(tokenizer), 0
    started = first = time.perf_counter()
    for chunk in session.stream([prompt], max_new_tokens=options.max_new_tokens, **settings):
        if not count:
            first = time.perf_counter()
        count += chunk.shape[1]
        print(text.push(chunk[0].tolist()), end="", flush=True)
    finished = time.perf_counter()
    print(text.push([], last=True), flush=True)
    figures = _figures(model, session, len(prompt), count, first - started, finished - first, bandwidth)
    print(f"ready in {ready:.2f} s; {figures}", file=sys.stderr)


def _figures(
    model: LLM, session: Session, prompt: int, count: int, to_first: float, rest: float, bandwidth: float
) -> str:
    """Time to the first token, tokens a second after it, and the share of the device's bandwidth that they are."""
    words = [f"{count} tokens", f"first token after {to_first * 1000:.1f} ms"]
    if count > 1:
        rate = (count - 1) / rest
        read = bytes_per_token(model, session.cache.nbytes, session.cache.slots, prompt + count / 2)
        words.append(
            f"{rate:.1f} tokens/s, {rate * read / bandwidth:.0%} of memory bandwidth "
            f"({read / 1e9:.3g} GB a token, {bandwidth / 1e9:.4g} GB/s read)"
        )
    return "; ".join(words)


if __name__ == "__main__":
    main()
