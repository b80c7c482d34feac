"""Talk to a language model on the command line, or continue one prompt.

python examples/chat.py meta-llama/Llama-3.2-1B-Instruct
python examples/chat.py meta-llama/Llama-3.2-1B --prompt "Once upon a time" --dtype bfloat16
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zoo import compile_regions
from zoo.files import upstream
from zoo.llm import GenerationOptions, Session, load


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse and run: answers go to the output, figures to the error stream."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder in transformers' format, or a hub id")
    parser.add_argument("--prompt", help="a text to continue; without it, lines are read and answered")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    parser.add_argument("--top-k", type=int, help="draw from the k most likely tokens")
    parser.add_argument("--top-p", type=float, help="draw from the fewest tokens that have this probability")
    parser.add_argument("--seed", type=int, help="the same seed draws the same text")
    parser.add_argument("--slots", type=int, default=4096, help="tokens of the whole conversation")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as stored")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="run the regions eagerly")
    options = parser.parse_args(arguments)
    try:
        run(options)
    except (ImportError, OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def run(options: argparse.Namespace) -> None:
    """Load, compile, and answer prompts."""
    transformers = upstream("transformers")
    settings = {key: getattr(options, key) for key in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")}
    GenerationOptions(**settings)  # a bad option should not cost a compilation
    model = load(options.model, device=options.device, dtype=getattr(torch, options.dtype or "", None))
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    try:
        settings["eos"] = transformers.GenerationConfig.from_pretrained(options.model).eos_token_id
    except OSError:  # there is no generation_config.json
        settings["eos"] = model.config.eos_token_id or tokenizer.eos_token_id
    session = Session(model, 1, min(options.slots, model.config.max_position_embeddings), conversation=False)
    if not options.no_compile:
        compile_regions(model)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    messages: list[dict[str, str]] = []
    for prompt in [options.prompt] if options.prompt is not None else lines():
        text = prompt
        if options.prompt is None and tokenizer.chat_template:
            messages.append({"role": "user", "content": prompt})
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=text is prompt)["input_ids"]
        answer = speak(session, ids, settings, transformers.TextStreamer(tokenizer, skip_special_tokens=True), weights)
        messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})


def lines() -> Iterator[str]:
    """Lines of the input, until it ends or one is empty."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def speak(session: Session, ids: list[int], settings: dict[str, Any], streamer: Any, weights: int) -> list[int]:
    """Print the answer to a prompt as it comes, then its figures; return its tokens."""
    session.reset()
    session.generate([ids], **{**settings, "max_new_tokens": min(2, settings["max_new_tokens"]), "eos": ()})
    session.reset()
    times, answer = [time.perf_counter()], list[int]()
    for chunk in session.stream([ids], **settings):
        times.append(time.perf_counter())
        answer += chunk[0].tolist()
        streamer.put(chunk[0])
    streamer.end()
    figures = f"{len(answer)} tokens; first token after {(times[1] - times[0]) * 1000:.1f} ms"
    if len(times) > 2:
        rate = (len(answer) - 1) / (times[-1] - times[1])
        figures += f"; {rate:.1f} tokens/s, {rate * weights / 1e9:.4g} GB/s of weights"
    print(figures, file=sys.stderr)
    return answer


if __name__ == "__main__":
    main()
