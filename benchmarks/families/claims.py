"""Models that claims about ``torch.compile`` speak of; not a family of the zoo, which has no models of these.

What each claim looks at, and in which range it should lie, is in ``benchmarks/claims``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families import claims_llama, claims_ppo, claims_small
from benchmarks.families.base import Prepared, Training, autocast_of, dtype_of, refuses_unknown
from benchmarks.families.claims_subject import Inputs, Made, Size, Subject, converted, tensors
from benchmarks.plan import Case
from benchmarks.training import READY_BATCHES, reference_losses

SUBJECTS: dict[str, Subject] = {**claims_small.SUBJECTS, **claims_ppo.SUBJECTS}
LEARNING_RATE = 1e-3
BYTES_FORMULA = (
    "Every weight is read once (of an embedding the rows of the ids), inputs are read, the output is written."
)
TRAINING_BYTES_FORMULA = (
    "Every weight is read in the forward and again for gradients by inputs, its gradient is written, and the optimizer "
    "reads weight, gradient and two moments and writes three. Left out, so that it is a lower bound: activations."
)
# Where a call's CUDA context, its libraries' work space and the compiler's buffers go.
_PROCESS_BYTES = 1 << 30


class ClaimsWorkload:
    """Models with random weights, each with a property that a claim speaks of.

    ``upstream`` is plain PyTorch as people write it. ``upstream-tuned`` is the same written as the claim says, and
    ``regional`` compiles a part of it alone, where a claim is about that. There is nothing of the zoo to race.
    """

    family = "claims"
    models: tuple[str, ...] = (*SUBJECTS, *claims_llama.CONFIGS)
    inputs: tuple[str, ...] = tuple(
        dict.fromkeys([*(name for subject in SUBJECTS.values() for name in subject.sizes), *claims_llama.INPUTS])
    )

    def default_races(self, device: str, quick: bool, workload: str = "inference") -> list[tuple[str, str]]:
        """(model, input) pairs of a plain run."""
        if device == "cpu":
            return [("recommender", "small")]
        races = [
            (model, name)
            for model, subject in SUBJECTS.items()
            for name in subject.sizes
            if name != "small" and (subject.infers if workload == "inference" else subject.loss is not None)
        ]
        return races[:1] if quick else races + claims_llama.default_races(workload)

    def dtypes(self, device: str) -> tuple[str, ...]:
        """Supported dtypes, the default first."""
        return ("float32", "bfloat16") if device == "cpu" else ("bfloat16", "float32")

    def refuses(self, case: Case) -> str | None:
        """Why this combination does not exist, or None."""
        if reason := refuses_unknown(self, case, ("inference", "train")):
            return reason
        if case.impl == "zoo":
            return "claims are about PyTorch's own means; there is no model of the zoo for them"
        if case.model in claims_llama.CONFIGS:
            return claims_llama.refuses(case)
        subject = SUBJECTS[case.model]
        if case.input not in subject.sizes:
            return f"{case.model} has the inputs {', '.join(subject.sizes)}"
        if case.impl == "upstream-tuned" and subject.tuned is None:
            return f"no claim speaks of another way to write {case.model}"
        if case.strategy == "regional" and subject.part is None:
            return f"no claim speaks of a part of {case.model}"
        if case.workload == "train" and subject.loss is None:
            return f"{case.model} is for inference"
        if case.workload == "inference" and not subject.infers:
            return f"{case.model} is for training"
        return None

    def memory_bytes(self, case: Case) -> int:
        """Estimated peak device memory in bytes, the float64 reference included, which any arm may compute."""
        if case.model in claims_llama.CONFIGS:
            return claims_llama.memory_bytes(case)
        race = _Race.of(case, seed=0)
        training = case.workload == "train"
        with torch.device("meta"):
            model = race.build()
        given = converted(race.draw(0), "meta", torch.float32)
        with Made() as made, torch.enable_grad():
            race.loss(model, given) if training else model(**given)
        weights = sum(parameter.numel() for parameter in model.parameters())
        inputs = sum(tensor.numel() for tensor in tensors(given)) * (READY_BATCHES if training else 1)
        # In the reference everything takes eight bytes. Training adds a gradient and two moments to every weight.
        kept = inputs + (4 if training else 1) * weights
        return kept * (dtype_of(case).itemsize + 8) + 8 * made.values + _PROCESS_BYTES

    def prepare(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        """Build model and inputs on the device.

        Args:
            case: What to build.
            data_root: Not used: there is no data set.
            seed: Of the weights and the inputs.

        Raises:
            ValueError: If the case is one that :meth:`refuses` names.
        """
        if reason := self.refuses(case):
            raise ValueError(f"{case.arm}: {reason}")
        if case.model in claims_llama.CONFIGS:
            return claims_llama.prepare(case, seed=seed)
        race = _Race.of(case, seed=seed)
        return _trained(case, race) if case.workload == "train" else _inferred(case, race)


@dataclass(frozen=True, kw_only=True)
class _Race:
    """What arms of one race share, and how this arm writes it."""

    subject: Subject
    size: Size
    tuned: bool
    training: bool
    seed: int

    @classmethod
    def of(cls, case: Case, *, seed: int) -> _Race:
        subject = SUBJECTS[case.model]
        tuned, training = case.impl == "upstream-tuned", case.workload == "train"
        return cls(subject=subject, size=subject.sizes[case.input], tuned=tuned, training=training, seed=seed)

    def build(self) -> nn.Module:
        make = self.subject.tuned if self.tuned else self.subject.build
        assert make is not None
        torch.manual_seed(self.seed)
        return make(**self.size.model)

    def draw(self, index: int) -> Inputs:
        draw = self.subject.draw_training if self.training else None
        generator = torch.Generator().manual_seed((self.seed << 20) + index)
        return (draw or self.subject.draw)(generator, **self.size.inputs)

    def loss(self, model: Any, batch: Inputs) -> Tensor:
        loss = (self.tuned and self.subject.tuned_loss) or self.subject.loss
        assert loss is not None
        return loss(model, batch)

    def compile_part(self, model: nn.Module, **options: Any) -> None:
        assert self.subject.part is not None
        self.subject.part(model).compile(**options)


def _inferred(case: Case, race: _Race) -> Prepared:
    device, dtype = torch.device(case.device), dtype_of(case)
    model = race.build().eval().requires_grad_(False).to(device, dtype)
    inputs = converted(race.draw(0), device, dtype)
    with torch.inference_mode():
        written = sum(tensor.nbytes for tensor in tensors(model(**inputs)))

    def reference() -> Tensor:
        # Made anew, so that an arm holds nothing that it does not run on: its memory is measured.
        exact = race.build().eval().to(device, dtype).double()
        outputs = tensors(exact(**converted(inputs, device, torch.float64)))
        return torch.cat([output.reshape(-1) for output in outputs])

    return Prepared(
        model=model,
        inputs=inputs,
        compile_regions=race.compile_part,
        reference=reference,
        bytes=_weights_read(model, inputs) + sum(tensor.nbytes for tensor in tensors(inputs)) + written,
        bytes_formula=BYTES_FORMULA,
        data="generated (normal)",
        sizes=_sizes(race, model),
    )


def _trained(case: Case, race: _Race) -> Prepared:
    device, dtype = torch.device(case.device), dtype_of(case)
    model = race.build().to(device)

    def batch(index: int) -> Inputs:
        return converted(race.draw(index), device, torch.float32)

    training = Training(
        loss=race.loss,
        batch=batch,
        learning_rate=LEARNING_RATE,
        autocast=autocast_of(dtype),
    )
    weights = sum(parameter.numel() for parameter in model.parameters())
    return Prepared(
        model=model.train(),
        inputs={},
        compile_regions=race.compile_part,
        reference=lambda: reference_losses(race.build().to(device), training),
        bytes=weights * (2 * dtype.itemsize + 4 + 28),
        bytes_formula=TRAINING_BYTES_FORMULA,
        data="generated (normal)",
        sizes=_sizes(race, model),
        training=training,
    )


def _weights_read(model: nn.Module, inputs: Inputs) -> int:
    """Bytes of weights that a call must read."""
    ids = inputs.get("ids")
    read = 0
    for module in model.modules():
        own = sum(parameter.nbytes for parameter in module.parameters(recurse=False))
        if isinstance(module, nn.EmbeddingBag) and ids is not None:
            own = min(own, ids[0].numel() * module.weight[0].nbytes)
        read += own
    return read


def _sizes(race: _Race, model: nn.Module) -> dict[str, int]:
    given = {**race.size.model, **race.size.inputs}
    whole = {name: value for name, value in given.items() if isinstance(value, int)}
    return {**whole, "parameters": sum(parameter.numel() for parameter in model.parameters())}


WORKLOAD = ClaimsWorkload()
