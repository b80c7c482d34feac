"""Random training runs by TrainingStep against a hand-written loop; see fuzzing.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from fuzzing import fuzz, one_of
from hypothesis import given
from hypothesis import strategies as st
from training_models import build, draw, loss_of, optimizer_of, plain_losses

from zoo.training import TrainingStep

pytestmark = pytest.mark.usefixtures("one_thread")


@fuzz
@given(
    kind=one_of("adamw", "sgd", "plain"), counts=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    rows=st.lists(st.integers(1, 7), min_size=18, max_size=18), clip_norm=one_of(None, 1e-3, 0.5, 100.0),
    captured=st.booleans(), warmup=st.integers(2, 4), rate=one_of(0.0, 1e-3, 1e-1),
    dtype=one_of(torch.float32, torch.float64), seed=st.integers(0, 1000),
)  # fmt: skip
def test_updates(
    kind: str, counts: list[int], rows: list[int], clip_norm: float | None, captured: bool, warmup: int, rate: float,
    dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    batches = iter([(x.to(dtype), y) for n, size in enumerate(rows) for x, y in draw(1, size, seed=seed + n)])
    updates = [list(itertools.islice(batches, count)) for count in counts]
    expected_model, model = build().to(dtype), build().to(dtype)
    expected = plain_losses(expected_model, optimizer_of(expected_model, kind, rate), updates, clip_norm)
    optimizer = optimizer_of(model, kind, rate)
    step = TrainingStep(
        model, loss_of, optimizer, clip_norm=clip_norm, cuda_graph=captured, warmup=warmup, most_graphs=20
    )
    losses = [step(*update).item() for update in updates]
    assert losses == pytest.approx(expected, rel=1e-4)
    for parameter, wanted in zip(model.parameters(), expected_model.parameters(), strict=True):
        # Adam divides gradients by their own size: one that is nearly zero moves a weight by its rounding.
        torch.testing.assert_close(parameter, wanted, rtol=1e-4, atol=1e-5 + 1e-3 * rate)
    assert all(parameter.grad is None for parameter in model.parameters())
