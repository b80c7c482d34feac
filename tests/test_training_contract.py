"""A training step of every family: within the budget, captured, and with the losses of the plain eager loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zoo
from zoo.training import TrainingStep

DEBUG = [name for name in zoo.list_models() if name.endswith("-debug")]


class Squares:
    """A loss whose batches are the floating-point inputs; the others, a graph or tokens, are the same in each step."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.rest = {name: value for name, value in inputs.items() if not _moves(value)}

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs = pytree.tree_leaves(model(**batch, **self.rest))
        return torch.stack([leaf.float().square().mean() for leaf in outputs if isinstance(leaf, Tensor)]).mean()


def _moves(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def make(name: str, **options: Any) -> TrainingStep:
    torch.manual_seed(0)
    model = zoo.create(name).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return TrainingStep(model, Squares(zoo.example_inputs(model)), optimizer, **options)


# Autocast without a scaler and a second UNet under autocast would compile what the others do.
CASES = [
    *((name, None) for name in DEBUG),
    *((name, torch.float16) for name in DEBUG if name != "unet-debug"),
    ("llm-debug", torch.bfloat16),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "autocast"), CASES, ids=str)
def test_compiled_and_captured_steps_train_like_eager_ones(name: str, autocast: torch.dtype | None):
    eager = make(name, autocast=autocast)
    drawn = [zoo.example_inputs(eager.model, seed=seed) for seed in range(5)]
    batches = [{key: value for key, value in inputs.items() if _moves(value)} for inputs in drawn]
    expected = [eager(batch).item() for batch in batches]
    step = make(name, autocast=autocast, cuda_graph=True)
    zoo.compile_regions(step.model, backend="aot_eager")
    with zoo.enforce_budget(step.model):
        losses = [step(batch).item() for batch in batches]
    assert step.captured
    assert losses == pytest.approx(expected, rel=1e-4 if autocast is None else 2e-2)
    if autocast is None:
        torch.testing.assert_close(step.model.state_dict(), eager.model.state_dict(), rtol=1e-3, atol=1e-4)
