"""Train a classifier of images with one CUDA graph a step, save, and go on from what was saved.

python examples/train.py resnet-debug --folder runs/resnet
python examples/train.py resnet-debug --folder runs/resnet    # continues
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import zoo
from zoo.training import AdamW, TrainingStep

CLASSES = 4


def batches(rows: int, pixels: int, device: str) -> Iterator[dict[str, Tensor]]:
    """Images whose brightness says the class: put a DataLoader with ``drop_last=True`` in this place."""
    while True:
        labels = torch.randint(CLASSES, (rows,))
        images = torch.randn(rows, 3, pixels, pixels) + labels.view(-1, 1, 1, 1)
        yield {"images": images.to(device), "labels": labels.to(device)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy of images [N, 3, H, W] and labels [N]."""
    return nn.functional.cross_entropy(model(batch["images"]).float(), batch["labels"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a ResNet of zoo.list_models()")
    parser.add_argument("--folder", type=Path, required=True, help="to save to, and to continue from")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=16, help="images of a batch")
    parser.add_argument("--pixels", type=int, default=32, help="height and width of an image")
    options = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = zoo.compile_regions(zoo.create(options.model, num_classes=CLASSES, device=device).train())
    # A CUDA graph reads the learning rate where it lies: on the device.
    rate = torch.tensor(1e-3, device=device)
    optimizer = AdamW(model.parameters(), lr=rate, capturable=device == "cuda")
    schedule = CosineAnnealingLR(optimizer, T_max=1000)
    step = TrainingStep(model, loss, optimizer, autocast=torch.bfloat16 if device == "cuda" else None, clip_norm=1.0)
    if (options.folder / "training.pt").exists():
        step.load(options.folder, schedule=schedule)
    for _, batch in zip(range(options.steps), batches(options.rows, options.pixels, device), strict=False):
        value = step(batch)  # stays on the device
        schedule.step()
        if step.steps % 10 == 0:
            print(f"step {step.steps}: loss {value.item():.4f}")
    step.save(options.folder, schedule=schedule)


if __name__ == "__main__":
    main()
