"""List the models, measure which way to run one pays off, write compiled regions to a folder, say what is in one."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import zoo
from zoo import advise
from zoo.engine.artifacts import check_target, read_index
from zoo.registry import families


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; 2 if it refuses, with the reason on standard error."""
    given = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: temporary folders are removed
    try:
        return given.command(given) or 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has ended, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ImportError, ValueError, TypeError, OSError, zoo.ArtifactError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zoo", description=__doc__)
    parser.add_argument("--version", action="version", version=f"zoo {zoo.__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    lists = commands.add_parser("list", help="the models of the zoo, by family")
    lists.set_defaults(command=_list)
    advise.add_arguments(commands.add_parser("advise", help="measure which way to run a model pays off for N calls"))
    compiles = commands.add_parser("compile", help="compile a model's regions and write them to a folder")
    compiles.add_argument("name", help="a preset of zoo list")
    compiles.add_argument(
        "--input", action="append", default=[], metavar="SIZES",
        help="sizes of zoo.example_inputs, as batch=8,tokens=512; repeat it for each shape; decode-1x1024 is one token "
        "for each row over a cache",
    )  # fmt: skip
    dtypes = ("float32", "bfloat16", "float16")
    compiles.add_argument("--dtype", choices=dtypes, default="float32", help="of the weights (default: float32)")
    compiles.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    compiles.add_argument("--train", action="store_true", help="a step with gradients, in place of inference_mode")
    compiles.add_argument(
        "--matmul-precision", choices=("highest", "high", "medium"), default="highest",
        help="torch.set_float32_matmul_precision of the program that will load (default: highest, which is torch's)",
    )  # fmt: skip
    compiles.add_argument("--out", required=True, metavar="DIR", help="a new folder, or one to overwrite")
    compiles.set_defaults(command=_compile)
    info = commands.add_parser("info", help="what is in a folder, and for which machine")
    info.add_argument("folder", metavar="DIR")
    info.set_defaults(command=_info)
    return parser


def _list(given: argparse.Namespace) -> None:
    for family in families():
        names = f"{family.name}: {', '.join(family.presets)}"
        print(textwrap.fill(names, 80, subsequent_indent="  ", break_on_hyphens=False))


def _compile(given: argparse.Namespace) -> None:
    check_target(Path(given.out))
    if ":" in given.name:
        raise ValueError(
            f"{given.name!r} is no preset of zoo list; zoo.save_compiled(model, folder) saves your own model"
        )
    torch.set_float32_matmul_precision(given.matmul_precision)
    device = advise.device_of(given.device)
    model = zoo.create(given.name, device=device, dtype=getattr(torch, given.dtype)).train(given.train)
    zoo.compile_regions(model)
    for text in given.input or [""]:
        inputs = _inputs(model, text)  # outside inference mode, whose tensors need other graphs
        with torch.inference_mode(not given.train):
            print(zoo.warm_up(model, **inputs))
    print(zoo.save_compiled(model, given.out))


def _inputs(model: Any, text: str) -> dict[str, Any]:
    if not text.startswith("decode-"):
        sizes: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, equals, size = part.partition("=")
            if not equals:
                raise ValueError(f"--input {text}: {part!r} is not NAME=SIZE")
            if name in sizes:
                raise ValueError(f"--input {text} gives a size twice; repeat --input for each shape")
            sizes[name] = int(size) if size.isdecimal() else size
        return zoo.example_inputs(model, **sizes)
    if not hasattr(model, "make_cache"):
        raise ValueError(f"{text} is for language models, not for a {type(model).__name__}")
    if (found := re.fullmatch(r"decode-([1-9]\d*)x([1-9]\d*)", text)) is None:
        raise ValueError(f"--input {text}: expected rows and slots of the cache, as decode-1x1024")
    batch, slots = map(int, found.groups())
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device=next(model.parameters()).device)
    return {"input_ids": tokens, "position_ids": tokens + slots // 2, "cache": model.make_cache(batch, slots)}


def _info(given: argparse.Namespace) -> None:
    index = read_index(given.folder)
    for name, value in index["fingerprint"].items():
        told = ", ".join(f"{key}={each}" for key, each in value.items()) if isinstance(value, dict) else value
        advise.say(f"{name}: {told}")
    print(f"signed: {'yes' if 'hmac' in index else 'no'}")
    for entry in index["entries"]:
        shapes = "; ".join(
            ", ".join("-" if x is None else "x".join(map(str, x)) for x in call) for call in entry["shapes"]
        )
        size = f"{entry['kind']}, {entry['bytes']} bytes"
        advise.say(f"{entry['file']}: {entry['region']}, {entry['mode']}, {shapes}, {size}")
    for name, written in index["files"].items():
        print(f"{name}: {written['bytes']} bytes")
    for name, reason in index["skipped"].items():
        advise.say(f"not saved, {name}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
