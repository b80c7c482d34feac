"""What the compiler sees of every region on a GPU: a graph each way, in which the zoo's kernels are launches."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zoo
from tests import fake_gpu
from zoo.engine.direct import has_nothing_to_fuse

pytest.importorskip("triton", reason="torch came without Triton, which GPUs only need")
# Of each region of a model, in its extreme shapes: launches without gradients, forward and backward.
LAUNCHES: dict[str, dict[str, set[tuple[int, int, int]]]] = {
    "bert-debug": {"BertLayer": {(3, 3, 6)}},
    "llm-debug": {"LLMLayer": {(3, 3, 5)}, "LLMHead": {(1, 1, 2)}},
    # No gradient reaches an edge of the first layer, which sums before its product.
    "gcn-debug": {"GNNLayer": {(1, 1, 0), (1, 1, 1)}},
    "gat-debug": {"GNNLayer": {(1, 1, 4)}},
    "graphsage-debug": {"GNNLayer": {(1, 1, 0), (1, 1, 1)}},
    "resnet-debug": {"Stem": {(3, 5, 4)}, "Bottleneck": {(3, 9, 9), (3, 11, 9)}, "ResNetHead": {(0, 0, 0)}},
    "unet-debug": {
        # A norm of which a group lies in the skip connection too has a launch more.
        "ResnetBlock": {(3, 3, 8), (4, 4, 8)}, "TransformerBlock": {(6, 5, 11), (7, 5, 11)},
        "TextProjections": {(0, 0, 0)},
    },
    "unet-xl-debug": {
        "ResnetBlock": {(3, 3, 8), (4, 4, 8)}, "TransformerBlock": {(6, 4, 8)}, "TextProjections": {(0, 0, 0)},
    },
}  # fmt: skip
# Regions, in inference and in training, that hold more than products and kernels: Inductor compiles them.
FUSED = {"llm-debug": [1, 1], "gat-debug": [0, 2]}
SLOW = ("resnet-debug", "unet-debug", "unet-xl-debug")


def regions_of(model: nn.Module, inputs: dict[str, Any]) -> list[tuple[nn.Module, Any, Any]]:
    """Regions of each class, with what they are called with: the smallest and the largest of those alike.

    Regions are alike if they are made of the same modules and are given the same kinds of arguments.
    """
    found: dict[Any, dict[int, tuple[nn.Module, Any, Any]]] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        given, structure = pytree.tree_flatten((args, kwargs))
        kind = re.sub(r"\d+", "", repr(module)), structure, tuple(type(each) for each in given)
        size = next(each.numel() for each in given if isinstance(each, Tensor))
        found.setdefault(kind, {}).setdefault(size, (module, args, kwargs))

    classes = tuple(region.cls for region in type(model).regions)
    handles = [
        each.register_forward_pre_hook(note, with_kwargs=True) for each in model.modules() if type(each) in classes
    ]
    model(**inputs)
    for handle in handles:
        handle.remove()
    return [alike[size] for alike in found.values() for size in {min(alike), max(alike)}]


def apart(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LAUNCHES]
)
def test_regions_are_a_graph_each_way_with_kernels_in_it(name, gpu, monkeypatch):
    found: list[list[tuple[str, list[int]]]] = [[], []]
    fused: list[list[bool]] = [[], []]
    for training in (False, True):

        def look(graph: torch.fx.GraphModule, found: list[bool] = fused[training]) -> None:
            found.append(not has_nothing_to_fuse(graph))

        model = zoo.create(name, dtype=torch.bfloat16).train(training)
        inputs = zoo.example_inputs(model)
        with torch.set_grad_enabled(training):
            with monkeypatch.context() as without:
                without.setattr("zoo.ops.common.triton_runs_on", lambda device: False)
                regions = regions_of(model, inputs)
            for module, args, kwargs in regions:
                args, kwargs = pytree.tree_map(apart, (args, kwargs))
                graphs = fake_gpu.traced(
                    monkeypatch, lambda *given, m=module, k=kwargs: m(*given, **k), *args, look=look
                )
                assert len(graphs) == 1 + training, type(module)
                assert not any("zoo" in node or "copy_" in node for graph in graphs for node in graph)
                found[training].append((type(module).__name__, [graph.count(fake_gpu.LAUNCH) for graph in graphs]))
    launches: dict[str, set[tuple[int, ...]]] = {}
    for (region, inference), (_, learning) in zip(*found, strict=True):
        launches.setdefault(region, set()).add((*inference, *learning))
    assert launches == LAUNCHES[name] and list(map(sum, fused)) == FUSED.get(name, [0, 0])
