"""Models that the zoo did not write: what falls short is said, and costs what the page on conformance says."""

import enum
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from blocks import Block, IndexedBlock, Sequence, graphs_of
from diffusers import FirstBlockCacheConfig
from torch import Tensor, nn

import zoo
from benchmarks.conformance import MODELS, OURS, losses, row, rows_of
from zoo.engine.graph_log import GRAPH_LOG

# Regions of each model, and the graphs of each.
REGIONS = {
    "transformers Bert": {"BertLayer": 1},
    "transformers Llama": {"LlamaDecoderLayer": 1},
    "torchvision resnet50": {"Bottleneck": 8},
    "diffusers UNet2DConditionModel": {"ResnetBlock2D": 8, "Transformer2DModel": 2},
}


def foreign(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A small model in eval, and inputs of it."""
    found = MODELS[name]
    return found.make().eval(), found.inputs(found.sizes[0])


def first_tensor(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


@pytest.mark.parametrize("name", REGIONS)
def test_graphs_are_as_many_as_were_predicted_and_outputs_are_the_same(name: str) -> None:
    model, inputs = foreign(name)
    with torch.no_grad():
        expected = first_tensor(model(**inputs))
        for report in (zoo.find_regions(model), zoo.find_regions(model, kwargs=inputs)):
            assert {found.name: found.graphs_needed for found in report.regions} == REGIONS[name], str(report)
            assert not report.declared and not report.obstacles, str(report)
        zoo.compile_regions(model, backend="eager")
        first = len(GRAPH_LOG.entries)
        torch.testing.assert_close(first_tensor(model(**inputs)), expected)
        assert sum(entry.graphs for entry in GRAPH_LOG.entries[first:]) == report.graphs_needed


class Holding(nn.Module):
    """Reads something that it holds."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held = held(self) if callable(held) else held

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if callable(self.held):
            return self.held(x)
        return x * (self.held["scale"] if isinstance(self.held, dict) else self.held.scale)


def scaling(scale: float) -> Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]:
    return lambda _: lambda x: x * scale


@pytest.mark.parametrize(
    ("held", "said", "needed"),
    [
        pytest.param(lambda _: scaling(2.0), "1", 1, id="lambdas"),
        pytest.param(lambda index: scaling(float(index)), "3", 3, id="lambdas that close over a value of their own"),
        pytest.param(lambda _: lambda block: block.double, "1", 1, id="bound methods"),
        pytest.param(lambda _: {"scale": 2.0}, "1", 1, id="dicts"),
        pytest.param(lambda index: {"scale": float(index)}, "at least 1", 3, id="dicts that differ"),
        pytest.param(lambda _: SimpleNamespace(scale=2.0), "1", 1, id="objects"),
        pytest.param(lambda index: SimpleNamespace(scale=float(index)), "at least 1", 3, id="objects that differ"),
        pytest.param(lambda _: lambda _: partial(torch.mul, other=2.0), "1", 1, id="partial functions"),
    ],
)
def test_predictions_are_the_compilers_count_or_say_that_they_are_a_lower_bound(held, said, needed):
    model, x = Sequence(*(Holding(held(index)) for index in range(3))).eval(), torch.randn(2, 4)
    assert zoo.find_regions(model, [Holding]).graphs == said
    assert zoo.find_regions(model, [Holding], kwargs={"x": x}).graphs == said
    zoo.compile_regions(model, regions=[Holding], backend="eager")
    first = len(GRAPH_LOG.entries)
    with torch.no_grad():
        model(x)
    assert sum(entry.graphs for entry in GRAPH_LOG.entries[first:]) == needed


class Computing(Block):
    """Computes something from its index."""

    def __init__(self, index: int, compute: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__(4)
        self.index = index
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(super().forward(x), self.index)


@pytest.mark.parametrize(
    ("compute", "said", "needed"),
    [
        pytest.param(lambda x, index: x * index + index // 2, "1", 1, id="ints"),
        pytest.param(lambda x, index: nn.functional.dropout(x, index / 10), "at least 1", 4, id="a rate"),
        pytest.param(lambda x, index: x * (0.5 * index), "at least 1", 1, id="a scale"),
        pytest.param(lambda x, index: x.neg() if index < 2 else x, "at least 1", 2, id="a branch"),
    ],
)
def test_a_prediction_is_a_lower_bound_where_floats_or_branches_come_of_an_index(compute, said, needed):
    model, x = Sequence(*(Computing(index, compute) for index in range(4))).eval(), torch.randn(2, 4)
    assert zoo.find_regions(model, args=(x,)).graphs == said
    zoo.compile_regions(model, backend="eager")
    with torch.no_grad():
        model(x)
    assert sum(graphs_of(model).values()) == needed


@pytest.mark.parametrize("kind", [np.float64, np.int64])
def test_numbers_of_numpy_are_one_graph_and_no_prediction_says_more(kind: type) -> None:
    model, x = Sequence(*(IndexedBlock(4, kind(index)) for index in range(4))).eval(), torch.randn(2, 4)
    assert zoo.find_regions(model, args=(x,)).graphs_needed == 1
    zoo.compile_regions(model, backend="eager")
    with torch.no_grad():
        model(x)
    assert graphs_of(model) == {"IndexedBlock": 1}


def test_predictions_in_training_know_what_requires_a_gradient() -> None:
    model, x = Sequence(*(Block(4) for _ in range(4))), torch.randn(2, 4)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    report = zoo.find_regions(model, [Block], kwargs={"x": x})
    zoo.compile_regions(model, regions=[Block], backend="eager")
    first = len(GRAPH_LOG.entries)
    model(x).sum().backward()
    # Frozen blocks, the first that is trained, and those whose input requires a gradient.
    assert report.graphs_needed == sum(entry.graphs for entry in GRAPH_LOG.entries[first:]) == 3


class Place(enum.IntEnum):
    FIRST = 1
    SECOND = 2


def test_a_block_with_a_hook_is_compiled_apart() -> None:
    model, x = nn.Sequential(*(Core() for _ in range(4))).eval(), torch.randn(2, 8)
    model[2].register_forward_hook(lambda module, given, out: out * 1.5)
    assert zoo.find_regions(model).graphs == "2"
    expected = model(x)
    zoo.compile_regions(model, backend="eager")
    with torch.no_grad(), zoo.enforce_budget(model):
        torch.testing.assert_close(model(x), expected)


class Refining(nn.Module):
    """Four blocks, and one that is called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.core = Core()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        for _ in range(5):
            x = self.core(x)
        return x


class Core(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def test_a_report_says_that_a_call_told_its_regions() -> None:
    model, x = Refining().eval(), torch.randn(2, 8)
    said = "give zoo.compile_regions the same args= and kwargs="
    assert said not in str(zoo.find_regions(model)) and said in str(zoo.find_regions(model, args=(x,)))
    assert said not in str(zoo.find_regions(model, [Core], args=(x,)))


def test_a_value_that_is_no_symbol_is_warned_of_when_it_has_cost_a_graph_or_when_a_call_shows_it() -> None:
    model, x = Sequence(*(IndexedBlock(4, place) for place in Place)), torch.randn(2, 4)
    zoo.compile_regions(model, backend="eager")
    with (
        torch.no_grad(),
        pytest.warns(zoo.RegionWarning, match=r"2 graphs compiled for .* where one would do: .*index"),
    ):
        model(x)
    zoo.uncompile(model)
    (obstacle,) = zoo.find_regions(model, [IndexedBlock]).obstacles
    assert "forward reads index" in str(obstacle) and "Place.SECOND" in str(obstacle)
    with pytest.warns(zoo.RegionWarning, match="forward reads index, which differs in every layer"):
        zoo.compile_regions(model, kwargs={"x": x}, backend="eager")


class Coder(nn.Module):
    """Two stacks and a way into each."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.Sequential(*(Block(4) for _ in range(2))) for _ in range(2))

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.decoder(z)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encoder(x))


def test_budgets_hold_for_any_entry_point() -> None:
    model = zoo.compile_regions(Coder().eval(), backend="eager", dynamic=False)
    with torch.no_grad(), zoo.enforce_budget(model):
        for batch in (2, 3, 4):
            model.decode(torch.randn(batch, 4))
    with torch.no_grad(), pytest.raises(zoo.BudgetError, match="decoder"), zoo.enforce_budget(model):
        model.encoder(torch.randn(2, 4))
        model.decoder[0].forward(model.decoder[1](torch.randn(2, 4)))


def offloaded(model: Any) -> None:
    add_hook_to_module(model.transformer_blocks[1].attn, AlignDevicesHook(io_same_device=True))


def cast_by_layer(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)


def cached(model: Any) -> None:
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))


@pytest.mark.parametrize(("hook", "hooked"), [(offloaded, 1), (cast_by_layer, 2), (cached, 2)])
def test_hooks_of_the_library_are_obstacles(hook: Callable[[Any], None], hooked: int) -> None:
    model, _ = foreign("diffusers FluxTransformer2DModel")
    assert not zoo.find_regions(model).obstacles
    hook(model)
    found = zoo.find_regions(model).obstacles
    assert len(found) == hooked and all(
        "have hooks of accelerate or diffusers" in obstacle.message for obstacle in found
    )


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
