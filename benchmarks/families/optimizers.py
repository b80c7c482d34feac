"""One step of AdamW and nothing else, on parameters shaped as a model's: what stands behind the zoo's own.

Shapes: M numbers of all parameters together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from benchmarks.families.base import Prepared, Workload, dtype_of
from benchmarks.plan import Case
from zoo.training import AdamW

BYTES_FORMULA = "Weights, gradients, averages and averages of squares are read once, and all but the gradients written."
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
# A step moves a number by about as much as its size, so that the error shows a step that was forgotten or wrong.
LEARNING_RATE = 1e-2
# Made before the step that is checked. The corrections of the averages still show then, while their rounding, which
# grows with the power that torch takes in float32 wherever it counts on the device, does not.
EARLIER_STEPS = 5000.0
# Of more numbers only every so many-th is checked: float64 copies of all would need more memory than the step itself.
_ALL_CHECKED, _CHECKED_STRIDE = 1 << 28, 31
# Numbers of the float64 reference that are updated at once.
_AT_ONCE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Whose shapes the parameters have.

    Args:
        preset: A model of the zoo, or None for ``few``.
        dtypes: What its weights are trained in.
        few: Shapes given here.
    """

    preset: str | None
    dtypes: tuple[str, ...]
    few: tuple[tuple[int, ...], ...] = ()

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of every parameter; one that two modules share is there once."""
        return self.few if self.preset is None else _shapes_of(self.preset)


@functools.cache
def _shapes_of(preset: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(each.shape) for each in zoo.create(preset, device="meta").parameters())


PARAMETERS = {
    "resnet50": Parameters(preset="resnet50", dtypes=("float32",)),
    "bert-base": Parameters(preset="bert-base", dtypes=("float32",)),
    "llama-3.2-1b": Parameters(preset="llama-3.2-1b", dtypes=("bfloat16",)),
    "small": Parameters(preset=None, dtypes=("float32", "bfloat16"), few=((17, 8), (17,), (4, 3, 3, 3), (1000, 7))),
}


class Step(nn.Module):
    """A step on gradients that lie there, with its parameters, of which every ``stride``-th number is returned."""

    update: Callable[[], Any]

    def __init__(self, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, stride: int) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)
        self.update = lambda: optimizer.step()
        self.seen = tuple(_seen(parameter, stride) for parameter in parameters)

    def compile_update(self, **options: Any) -> None:
        """As torch documents it: a function that calls the optimizer's step."""
        self.update = torch.compile(self.update, **options)

    def forward(self) -> tuple[Tensor, ...]:
        """Views of the parameters after the step."""
        self.update()
        return self.seen


class OptimizersWorkload(Workload):
    """A step of AdamW on random gradients; a call is one step.

    ``zoo`` is ``zoo.training.AdamW``. ``upstream`` is ``torch.optim.AdamW`` as its users make it, which on a GPU goes
    through lists of tensors (``foreach``) and on a CPU from one to the next; ``full`` compiles a function that calls
    its step. ``upstream-tuned`` is ``torch.optim.AdamW(fused=True)``. Under the outer CUDA graph all count their steps
    on the device (``capturable``). Gradients are not cleared between steps.
    """

    family = "optimizers"
    models = ("adamw",)
    inputs = tuple(PARAMETERS)
    gpu_dtypes = ("float32", "bfloat16")
    cpu_race = ("adamw", "small")
    gpu_races = tuple(("adamw", name) for name in PARAMETERS if name != "small")

    def cannot(self, case: Case) -> str | None:
        known = PARAMETERS[case.input].dtypes
        if case.dtype not in known:
            return f"weights of {case.input} are trained in {', '.join(known)}"
        if case.strategy in ("regional", "hierarchical"):
            return "a step of an optimizer has no regions"
        if case.strategy == "full" and case.impl != "upstream":
            return "a fused step is one of kernels that are written already, and leaves a compiler nothing to join"
        return None

    def estimate(self, case: Case, *, reference: bool) -> int:
        """Estimated peak device memory of the case in bytes, the float64 reference and the check included."""
        sizes = [torch.Size(shape).numel() for shape in PARAMETERS[case.input].shapes()]
        numbers, itemsize = sum(sizes), dtype_of(case).itemsize
        # Lists of tensors leave a result or two of each parameter behind until the step ends.
        between = 2 * numbers * itemsize if case.impl == "upstream" else 0
        checked = numbers // _stride(numbers)
        # The reference has one parameter at a time, and in float64 its weights and pieces of the rest.
        exact = max(sizes) * (4 * itemsize + 8) + min(max(sizes), _AT_ONCE) * 8 * 8
        checking = checked * (itemsize + 4 * 8) + (exact if reference else 0)
        return 4 * numbers * itemsize + max(between, checking)

    def build(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        device, dtype = torch.device(case.device), dtype_of(case)
        shapes = PARAMETERS[case.input].shapes()
        numbers = sum(torch.Size(shape).numel() for shape in shapes)
        stride = _stride(numbers)
        parameters = [nn.Parameter(torch.zeros(shape, device=device, dtype=dtype)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = make_optimizer(case, parameters)
        # It makes the state, which must not be of inference mode: the version of such a tensor cannot be counted.
        optimizer.step()

        @torch.inference_mode()
        def reset() -> None:
            drawn = _drawn(device, seed)
            for parameter in parameters:
                state = optimizer.state[parameter]
                assert parameter.grad is not None
                drawn(parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                state["step"].fill_(EARLIER_STEPS)

        reset()
        model = Step(parameters, optimizer, stride)
        return Prepared(
            model=model.eval(),
            inputs={},
            compile_full=lambda model, **options: model.compile_update(**options),
            reset=reset,
            reference=lambda: torch.cat([_seen(exact, stride) for exact in _stepped(shapes, device, dtype, seed)]),
            bytes=7 * numbers * dtype.itemsize,
            bytes_formula=BYTES_FORMULA,
            data="generated (normal)",
            sizes={"tensors": len(shapes), "parameters": numbers, "checked": sum(map(len, model.seen))},
        )


def make_optimizer(case: Case, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The AdamW of the case's implementation; for a CUDA graph with its counter and its learning rate on the device."""
    options: dict[str, Any] = {"lr": LEARNING_RATE, **OPTIONS}
    if case.cuda_graph:
        options |= {"lr": torch.tensor(LEARNING_RATE, device=case.device), "capturable": True}
    if case.impl == "zoo":
        return AdamW(parameters, **options)
    return torch.optim.AdamW(parameters, **options, fused=True if case.impl == "upstream-tuned" else None)


def _stride(numbers: int) -> int:
    return 1 if numbers <= _ALL_CHECKED else _CHECKED_STRIDE


def _seen(parameter: Tensor, stride: int) -> Tensor:
    """A view of every so many-th number."""
    return parameter.detach().view(-1)[::stride]


def _drawn(device: torch.device, seed: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """Called with weights, gradient, average and average of squares of each parameter in turn, it draws them in place.

    No copy of them is held for that: it would be as large as what is measured.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(weights: Tensor, gradient: Tensor, average: Tensor, square: Tensor) -> None:
        weights.normal_(0.0, 2e-2, generator=generator)
        gradient.normal_(0.0, 1e-3, generator=generator)
        average.normal_(0.0, 1e-3, generator=generator)
        square.uniform_(0.5e-6, 1.5e-6, generator=generator)

    return draw


def _stepped(
    shapes: tuple[tuple[int, ...], ...], device: torch.device, dtype: torch.dtype, seed: int
) -> Iterator[Tensor]:
    """The parameters after the same step in float64, by torch's plainest loop, one by one."""
    drawn = _drawn(device, seed)
    for shape in shapes:
        held = [torch.empty(shape, device=device, dtype=dtype) for _ in range(4)]
        drawn(*held)
        weights = held[0].double()
        # Each number is for itself, so that pieces need less memory and change nothing.
        flat = (weights, *held[1:])
        for piece, *others in zip(*(each.view(-1).split(_AT_ONCE) for each in flat), strict=True):
            piece.grad, average, square = (each.double() for each in others)
            optimizer = torch.optim.AdamW([piece], lr=LEARNING_RATE, **OPTIONS, foreach=False)
            optimizer.state[piece] = {"step": torch.tensor(EARLIER_STEPS), "exp_avg": average, "exp_avg_sq": square}
            optimizer.step()
        yield weights


WORKLOAD = OptimizersWorkload()
