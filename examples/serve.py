"""Serve embeddings of token ids: a process that starts again loads what an earlier one compiled.

echo 5 6 7 | python examples/serve.py bert-debug --compiled runs/compiled
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import zoo

LENGTHS = (16, 32, 64)  # prompts are padded to the next of these


def padded(tokens: list[int], device: str) -> dict[str, Tensor]:
    """The arguments of one call: ids and mask [1, T]; ValueError if there are too many tokens."""
    length = next((each for each in LENGTHS if len(tokens) <= each), None)
    if length is None:
        raise ValueError(f"{len(tokens)} tokens, at most {LENGTHS[-1]} are served")
    ids, mask = torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, length, dtype=torch.int64)
    ids[0, : len(tokens)], mask[0, : len(tokens)] = torch.tensor(tokens), 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def ready(model: nn.Module, folder: Path, device: str) -> nn.Module:
    """The model with its compiled regions, from the folder if it is there, and every length captured."""
    # A batch without padding runs another graph, which needs no mask.
    examples = [padded([1] * tokens, device) for length in LENGTHS for tokens in (length, length - 1)]
    if folder.exists():
        zoo.load_compiled(model, folder)
    else:
        zoo.compile_regions(model)
        zoo.warm_up(model, *(lambda given=given: model(**given) for given in examples))
        print(zoo.save_compiled(model, folder), file=sys.stderr)
    zoo.cuda_graph(model)
    for given in examples:
        model(**given)  # runs
        model(**given)  # is captured
    return model


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Answer lines of token ids with the mean of their last hidden states."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a BERT of zoo.list_models()")
    parser.add_argument("--compiled", type=Path, required=True, metavar="FOLDER", help="of compiled regions")
    options = parser.parse_args(arguments)

    started, device = time.perf_counter(), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = ready(zoo.create(options.model, device=device).eval(), options.compiled, device)
    print(f"ready in {time.perf_counter() - started:.2f} s", file=sys.stderr)
    for line in sys.stdin:
        tokens = list(map(int, line.split()))
        hidden = model(**padded(tokens, device)).last_hidden_state[0, : len(tokens)]
        print(" ".join(f"{value:.4f}" for value in hidden.float().mean(0)[:4].tolist()), flush=True)


if __name__ == "__main__":
    main()
