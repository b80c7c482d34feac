"""Cases of the benchmark's workloads: prepared, called, and held against their reference."""

from typing import Any

import torch

from benchmarks.families import Prepared, load
from benchmarks.families.base import Training, tensors
from benchmarks.plan import Case
from benchmarks.strategies import Trainer, execution_mode


def prepare(case: Case, seed: int = 0) -> Prepared:
    return load(case.family).prepare(case, data_root=None, seed=seed)


def training_of(case: Case, seed: int = 0) -> Training:
    return prepare(case, seed).training


class Arms:
    """Cases of one family: its small one, with changes."""

    def __init__(self, **small: Any) -> None:
        self._small = small

    def case(self, **changes: Any) -> Case:
        return Case(**{**self._small, **changes})

    def prepare(self, seed: int = 0, **changes: Any) -> Prepared:
        return prepare(self.case(**changes), seed)

    def training(self, **changes: Any) -> Training:
        return training_of(self.case(workload="train", **changes))


def flat(output: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors(output)])


def call(prepared: Prepared, **inputs: Any) -> torch.Tensor:
    """One call in inference, with these inputs instead of the prepared ones of the same name."""
    with torch.inference_mode():
        return flat(prepared.model(**{**prepared.inputs, **inputs})).clone()


def first_call(prepared: Prepared) -> torch.Tensor:
    """The same from the state that the reference starts in."""
    if prepared.reset is not None:
        prepared.reset()
    return call(prepared)


def output_of(case: Case, prepared: Prepared, step: Any = None, calls: int = 1) -> torch.Tensor:
    """What the first calls give, or the losses of the first steps, as one vector."""
    if prepared.training is not None:
        trainer = Trainer(case, prepared)
        return trainer.losses(trainer.eager() if step is None else trainer.compiled(step))
    if prepared.reset is not None:
        prepared.reset()
    with execution_mode(case):
        run = prepared.model if step is None else step
        return torch.cat([flat(run(**prepared.inputs)).clone() for _ in range(calls)])


def error(output: Any, reference: Any) -> float:
    found, wanted = flat(output).double(), flat(reference).double()
    assert found.numel() == wanted.numel()
    return float((found - wanted).norm() / wanted.norm())
