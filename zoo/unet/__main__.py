"""Make images on the command line: ``python -m zoo.unet "a lighthouse at dusk" --model PATH_OR_ID --out out.png``."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from zoo.engine.compile import compile_regions
from zoo.unet.checkpoint import load
from zoo.unet.images import decode, image_paths, load_vae, save_images
from zoo.unet.pipeline import PipelineFolder, read_pipeline
from zoo.unet.sampler import Sampler
from zoo.unet.sampler_inputs import checked_guidance
from zoo.unet.scheduler_options import SOLVERS
from zoo.unet.schedulers import make_schedule
from zoo.unet.text import Encoded, encode

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, load, compile, sample, decode; names of files go to the output, figures to the error stream."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except torch.OutOfMemoryError:
        parser.exit(2, f"{parser.prog}: out of memory; take a smaller --batch or size, or --dtype bfloat16\n")
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {' '.join(str(error).split())}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zoo.unet", description="Make images of a prompt.")
    parser.add_argument("prompt", help="what is to be seen")
    parser.add_argument("--model", required=True, help="folder of a pipeline in diffusers' format, or a hub id")
    parser.add_argument("--out", default="out.png", help="where to; out-0.png and so on for several (out.png)")
    parser.add_argument("--negative", help="what is not to be seen")
    parser.add_argument("--steps", type=int, default=30, help="(30)")
    parser.add_argument("--guidance", type=float, default=7.5, help="how much the prompt weighs; up to 1 none (7.5)")
    parser.add_argument("--seed", type=int, help="the same seed makes the same images; drawn and told when left out")
    parser.add_argument("--height", type=int, help="in pixels; what the model was trained on when left out")
    parser.add_argument("--width", type=int, help="the same")
    parser.add_argument("--batch", type=int, default=1, help="how many images (1)")
    parser.add_argument("--scheduler", choices=SOLVERS, help="the folder's own when left out")
    parser.add_argument("--dtype", choices=_DTYPES, help="of all models; as they are stored when left out")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--no-compile", action="store_true", help="run the regions eagerly")
    return parser


def _run(options: argparse.Namespace) -> None:
    device, dtype = _device(options.device), _DTYPES.get(options.dtype)
    paths = image_paths(options.out, options.batch)
    folder = read_pipeline(options.model)
    shape = folder.shape(options.batch, options.height, options.width)
    schedule, first = (make_schedule(folder.scheduler, steps, solver=options.scheduler) for steps in (options.steps, 1))
    guidance = checked_guidance(options.guidance)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    sides = encode(folder, options.prompt, options.negative, device=device, dtype=dtype)
    for side in sides:
        if side.cut:
            print(f"the last {side.cut} tokens of a prompt are too many, and left out", file=sys.stderr)
    model = load(folder.path, device=device, dtype=dtype)
    sampler = Sampler(model, schedule, shape=shape, guidance_scale=guidance)
    given = _given(folder, sides, shape, model.dtype)
    vae = load_vae(folder, device=device, dtype=dtype)
    if not options.no_compile:
        compile_regions(model)
    started = time.perf_counter()
    # Compiles and captures, which the figures below are not about.
    sampler(**given, schedule=first)
    _finish(device)
    ready = time.perf_counter()
    latents = sampler(**given, seed=seed, progress=True)
    _finish(device)
    sampled = time.perf_counter()
    save_images(decode(vae, latents), paths)
    finished = time.perf_counter()
    print(*paths, sep="\n")
    print(
        f"ready in {ready - started:.2f} s; {schedule.steps} steps of {(sampled - ready) / schedule.steps * 1000:.1f} "
        f"ms; {(finished - ready) / options.batch:.2f} s an image, {(finished - sampled) / options.batch:.2f} s of it "
        f"to decode and write; seed {seed}",
        file=sys.stderr,
    )


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}: {error}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r}, and torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _given(
    folder: PipelineFolder, sides: tuple[Encoded, Encoded], shape: tuple[int, int, int, int], dtype: torch.dtype
) -> dict[str, Any]:
    """A prompt, and what guidance leads away from, as arguments of the sampler."""
    text, away = sides
    given: dict[str, Any] = {"text": text.text.to(dtype), "negative": away.text.to(dtype)}
    if folder.pooled:
        height, width = (size * folder.reduction for size in shape[2:])
        # The size before and after cropping, and where: an image that was neither made smaller nor cropped.
        sizes = torch.tensor([[height, width, 0, 0, height, width]], dtype=torch.float32, device=text.text.device)
        for name, side in (("added", text), ("negative_added", away)):
            given[name] = {"text_embeds": side.pooled, "time_ids": sizes}
    return given


if __name__ == "__main__":
    main()
