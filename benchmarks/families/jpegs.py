"""Images as they lie on a disk, and the loader that most training loops read them with.

Legend: N images, C channels, H × W pixels.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.machine import cores

CLASSES = 10
QUALITY = 90
# Of ImageNet, on the scale of [0, 1].
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MOST_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class Files:
    """So many JPEG files in a folder a class, of so many pixels; ``seed`` draws what is on them."""

    count: int
    width: int
    height: int
    seed: int

    def folder(self) -> Path:
        """Where they are; written if they are not there.

        The harness names a folder of its own, which goes with the run; all processes of a run share the files.
        """
        root = Path(os.environ.get("BENCHMARKS_SCRATCH") or tempfile.gettempdir())
        folder = root / f"jpegs-{self.count}-{self.width}x{self.height}-{self.seed}"
        if not folder.exists():
            # Written aside and renamed, so that nobody reads half of them; another process may come first.
            aside = Path(tempfile.mkdtemp(prefix="jpegs-", dir=root))
            self._write(aside)
            try:
                aside.rename(folder)
            except OSError:
                shutil.rmtree(aside, ignore_errors=True)
        return folder

    def _write(self, folder: Path) -> None:
        from PIL import Image

        for index in range(self.count):
            generator = torch.Generator().manual_seed((self.seed << 20) + index)
            path = folder / f"class-{index % CLASSES}" / f"{index}.jpg"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(self._draw(index, generator).numpy()).save(path, quality=QUALITY)

    def _draw(self, index: int, generator: torch.Generator) -> Tensor:
        """Colours of the class that run into each other, something of its own, and grain: [H, W, C] uint8."""
        size = (self.height, self.width)
        of_class = torch.randn(1, 3, 2, 2, generator=torch.Generator().manual_seed(index % CLASSES))
        own = torch.randn(1, 3, 12, 16, generator=generator)
        grain = torch.randn(1, 3, *size, generator=generator)
        image = 128 + 40 * F.interpolate(of_class, size, mode="bicubic")
        image = image + 25 * F.interpolate(own, size, mode="bicubic") + 16 * grain
        return image.clamp(0, 255).byte()[0].permute(1, 2, 0).contiguous()


@dataclass(kw_only=True)
class Loader:
    """Epochs of batches from files, by torchvision's folder and transforms and torch's loader, with processes.

    Made at the first epoch; the processes stay. They are started afresh and not forked, since a GPU is in use by then.

    Args:
        files: What is read.
        batch: N.
        size: H and W that images are cropped to.
        batches: Of an epoch; images are drawn with replacement.
        device: Where batches go.
    """

    files: Files
    batch: int
    size: int
    batches: int
    device: str
    _loader: DataLoader[Any] | None = None

    def __call__(self) -> Iterator[dict[str, Tensor]]:
        """An epoch: images [N, C, H, W] float32 in channels_last and labels [N]."""
        self._loader = self._loader or self._make()
        mean, deviation = (torch.tensor(v, device=self.device)[:, None, None] for v in (MEAN, DEVIATION))
        for images, labels in self._loader:
            images = images.to(self.device, memory_format=torch.channels_last, non_blocking=True)
            images = (images / 255 - mean) / deviation
            yield {"images": images, "labels": labels.to(self.device, non_blocking=True)}

    def _make(self) -> DataLoader[Any]:
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        # Pixels stay bytes until they are on the device: a quarter of what is handed from process to process.
        transform = v2.Compose([v2.RandomResizedCrop(self.size), v2.RandomHorizontalFlip(), v2.PILToTensor()])
        data = ImageFolder(self.files.folder(), transform)
        generator = torch.Generator().manual_seed(self.files.seed)
        drawn = RandomSampler(data, replacement=True, num_samples=self.batch * self.batches, generator=generator)
        return DataLoader(
            data,
            batch_size=self.batch,
            sampler=drawn,
            num_workers=workers(),
            persistent_workers=True,
            pin_memory=self.device != "cpu",
            multiprocessing_context="spawn",
            generator=generator,
        )


def workers() -> int:
    """Processes that decode: half of the cores, at most eight."""
    return max(1, min(cores() // 2, MOST_WORKERS))
