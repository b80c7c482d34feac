"""Text to image: diffusers' pipeline with the zoo's UNet, compiled by regions and replayed as one CUDA graph a step.

    python examples/text_to_image.py "a lighthouse at dusk" --model PATH_OR_ID --out lighthouse.png --dtype bfloat16

The pipeline loads its folder or hub id, encodes the prompt, runs its scheduler and decodes the latents; one line gives
it another UNet. A safety checker that the folder names is loaded and run as diffusers does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import zoo
from zoo.files import upstream

WARM_UP_STEPS = 2  # the first compiles, the second is captured


def main(arguments: Sequence[str] | None = None) -> None:
    """Load, compile, sample; file names go to the output, figures to the error stream."""
    options = _parser().parse_args(arguments)
    out = Path(options.out)
    if not out.parent.is_dir():
        raise SystemExit(f"--out is {options.out}, but there is no folder {out.parent}")
    pipe = load_pipeline(options.model, getattr(torch, options.dtype), options.device, options.scheduler)
    pipe.unet = zoo.from_upstream(pipe.unet)
    if not options.no_compile:
        pipe.unet = zoo.cuda_graph(zoo.compile_regions(pipe.unet))
    call: dict[str, Any] = {
        "prompt": options.prompt,
        "negative_prompt": options.negative,
        "guidance_scale": options.guidance,
        "height": options.height,
        "width": options.width,
        "num_images_per_prompt": options.batch,
    }
    seed = torch.seed() % 2**32 if options.seed is None else options.seed

    started = time.perf_counter()
    pipe(**call, num_inference_steps=WARM_UP_STEPS, output_type="latent")
    ready = time.perf_counter()
    # The noise comes from the host, so that a seed gives the same image on every device.
    generator = torch.Generator("cpu").manual_seed(seed)
    images = pipe(**call, num_inference_steps=options.steps, generator=generator).images
    seconds = time.perf_counter() - ready

    for number, image in enumerate(images):
        path = out if len(images) == 1 else out.with_stem(f"{out.stem}-{number}")
        image.save(path)
        print(path)
    print(f"ready in {ready - started:.2f} s; {seconds / len(images):.2f} s an image; seed {seed}", file=sys.stderr)


def load_pipeline(source: str, dtype: torch.dtype, device: str, scheduler: str | None) -> Any:
    """The pipeline of a folder or hub id, with another of diffusers' schedulers if one is named."""
    diffusers = upstream("diffusers")
    if scheduler is not None and not hasattr(diffusers, scheduler):
        raise SystemExit(f"--scheduler is {scheduler}, which is no class of diffusers, as EulerDiscreteScheduler is")
    pipe = diffusers.DiffusionPipeline.from_pretrained(source).to(device, dtype)
    if scheduler is not None:
        pipe.scheduler = getattr(diffusers, scheduler).from_config(pipe.scheduler.config)
    return pipe


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Make images of a prompt.")
    parser.add_argument("prompt")
    parser.add_argument("--model", required=True, help="folder or hub id of a Stable Diffusion 1.5, 2.1 or XL pipeline")
    parser.add_argument("--out", default="out.png", help="image file; out-0.png and so on for several (%(default)s)")
    parser.add_argument("--negative", help="what the images should not show")
    parser.add_argument("--steps", type=int, default=30, help="(%(default)s)")
    parser.add_argument("--guidance", type=float, default=7.5, help="weight of the prompt, 1 for none (%(default)s)")
    parser.add_argument("--seed", type=int, help="drawn and printed by default")
    parser.add_argument("--height", type=int, help="in pixels; the size the model was trained on by default")
    parser.add_argument("--width", type=int)
    parser.add_argument("--batch", type=int, default=1, help="number of images (%(default)s)")
    parser.add_argument("--scheduler", help="a scheduler class of diffusers, such as EulerDiscreteScheduler")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="run the regions eagerly")
    return parser


if __name__ == "__main__":
    main()
