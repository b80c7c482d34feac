"""Models of other libraries cost the graphs that the page on conformance says, and each loss has a reason."""

import re
from pathlib import Path

import pytest

from benchmarks.conformance import OURS, losses, row, rows_of
from benchmarks.foreign import MODELS

PAGE = rows_of((Path(__file__).resolve().parents[1] / "docs/conformance.md").read_text(encoding="utf-8"))
MEASURED = [
    "transformers Albert", "transformers ModernBert", "transformers OPT", "transformers Llama, static cache",
    "transformers Wav2Vec2", "transformers CLIP", "diffusers UNet2DConditionModel", "diffusers AutoencoderKL",
    "diffusers FluxTransformer2DModel", "torchvision VisionTransformer", "torchvision SwinTransformer",
    "torch_geometric GIN",
]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_each_loss_on_the_page_has_its_reason_and_each_reason_a_loss(name: str) -> None:
    assert PAGE[name].split(" | ")[-1] == f"{MODELS[name].why} |"
    assert bool(losses(PAGE[name])) == bool(MODELS[name].why), losses(PAGE[name])


def graphs(line: str) -> list[str]:
    """Regions, their share, predictions and our graphs; operations differ from release to release."""
    cells = line.split(" | ")
    return [*cells[:4], *(re.sub(r" \(.*", "", cell) for cell in cells[4:8])]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MEASURED)
def test_the_page_is_what_is_counted(name: str) -> None:
    assert graphs(row(name, [OURS])) == graphs(PAGE[name])
