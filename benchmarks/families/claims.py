"""Models that claims about ``torch.compile`` speak of; not a family of the zoo, which has no models of these.

What each claim looks at, and in which range it should lie, is in ``benchmarks/claims``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.families import llm, llm_train
from benchmarks.families.base import (
    Prepared,
    Training,
    Workload,
    autocast_of,
    converted,
    count_parameters,
    dtype_of,
    tensors,
)
from benchmarks.families.claims_models import SUBJECTS, Inputs, Size, Subject
from benchmarks.families.llm_steps import task_of
from benchmarks.plan import Case
from benchmarks.training import READY_BATCHES, reference_losses
from zoo.llm import LLMConfig
from zoo.llm.config import PRESETS

# A decoder of the widths of seven billion weights, with eight of its thirty-two layers: in full its weights, gradients
# and moments would leave no room for the reference. The output product weighs four times as much beside the layers.
LLAMAS = {
    "llama-7b-8": LLMConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
    "llama-small": PRESETS["llm-debug"],
}
LLAMA_INFERENCE, LLAMA_TRAINING = ("prefill-1x2048", "decode-1x1024"), ("2x2048",)
LLAMA_INPUTS = (*LLAMA_INFERENCE, *LLAMA_TRAINING, "prefill-1x32", "decode-1x64", "2x16")
LEARNING_RATE = 1e-3
BYTES_FORMULA = (
    "Every weight is read once (of an embedding the rows of the ids), inputs are read, the output is written."
)
TRAINING_BYTES_FORMULA = (
    "Every weight is read in the forward and again for gradients by inputs, its gradient is written, and the optimizer "
    "reads weight, gradient and two moments and writes three. Left out, so that it is a lower bound: activations."
)


class ClaimsWorkload(Workload):
    """Models with random weights, each with a property that a claim speaks of.

    ``upstream`` is plain PyTorch as people write it. ``upstream-tuned`` is the same written as the claim says, and
    ``regional`` compiles a part of it alone, where a claim is about that. There is nothing of the zoo to race.
    """

    family = "claims"
    models = (*SUBJECTS, *LLAMAS)
    inputs = tuple(dict.fromkeys([*(name for subject in SUBJECTS.values() for name in subject.sizes), *LLAMA_INPUTS]))
    workloads = ("inference", "train")
    gpu_dtypes = ("bfloat16", "float32")
    cpu_race = ("recommender", "small")

    def default_races(self, device: str, quick: bool, workload: str = "inference") -> list[tuple[str, str]]:
        """All races of what is done with each model; with ``quick`` the first."""
        if device == "cpu":
            return [self.cpu_race]
        races = [
            (model, name)
            for model, subject in SUBJECTS.items()
            for name in subject.sizes
            if name != "small" and (subject.infers if workload == "inference" else subject.loss is not None)
        ]
        llama = LLAMA_INFERENCE if workload == "inference" else LLAMA_TRAINING
        return races[:1] if quick else [*races, *(("llama-7b-8", name) for name in llama)]

    def cannot(self, case: Case) -> str | None:
        if case.impl == "zoo":
            return "claims are about PyTorch's own means; there is no model of the zoo for them"
        known = LLAMA_INPUTS if case.model in LLAMAS else tuple(SUBJECTS[case.model].sizes)
        if case.input not in known:
            return f"{case.model} has the inputs {', '.join(known)}"
        if case.model in LLAMAS:
            return _llama_cannot(case, LLAMAS[case.model])
        subject = SUBJECTS[case.model]
        if case.impl == "upstream-tuned" and subject.tuned is None:
            return f"no claim speaks of another way to write {case.model}"
        if case.strategy == "regional" and subject.part is None:
            return f"no claim speaks of a part of {case.model}"
        if case.workload == "train" and subject.loss is None:
            return f"{case.model} is for inference"
        if case.workload == "inference" and not subject.infers:
            return f"{case.model} is for training"
        return None

    def estimate(self, case: Case, *, reference: bool) -> int:
        training = case.workload == "train"
        if case.model in LLAMAS:
            return (llm_train.memory if training else llm.memory)(case, LLAMAS[case.model], reference=reference)
        race = _Race.of(case, seed=0)
        with torch.device("meta"):
            model = race.build()
        given = converted(race.draw(0), "meta", torch.float32)
        with Made() as made, torch.enable_grad():
            race.loss(model, given) if training else model(**given)
        inputs = sum(tensor.numel() for tensor in tensors(given)) * (READY_BATCHES if training else 1)
        # In the reference everything takes eight bytes. Training adds a gradient and two moments to every weight.
        kept = inputs + (4 if training else 1) * count_parameters(model)
        return kept * (dtype_of(case).itemsize + 8 * reference) + 8 * made.values

    def build(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        training = case.workload == "train"
        if case.model in LLAMAS:
            return (llm_train.prepare if training else llm.prepare)(case, LLAMAS[case.model], seed=seed)
        race = _Race.of(case, seed=seed)
        return _trained(case, race) if training else _inferred(case, race)


def _llama_cannot(case: Case, config: LLMConfig) -> str | None:
    if case.workload == "train":
        return llm_train.cannot(case, config)
    if llm_train.rows_of(case.input) is not None:
        return f"{case.input} is an input of training; inference takes decode-BxS or prefill-BxT"
    slots, limit = task_of(case.input).slots, config.max_position_embeddings
    return f"{case.input} needs {slots} positions, and {case.model} has {limit}" if slots > limit else None


class Made(TorchDispatchMode):
    """Counts the values that operators make while gradients are on: a call keeps no more for its backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        views = any(returned.alias_info is not None for returned in function._schema.returns)
        if torch.is_grad_enabled() and not views:
            self.values += sum(tensor.numel() for tensor in tensors(result))
        return result


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

    training = Training(loss=race.loss, batch=batch, learning_rate=LEARNING_RATE, autocast=autocast_of(dtype))
    return Prepared(
        model=model.train(),
        inputs={},
        compile_regions=race.compile_part,
        reference=lambda: reference_losses(race.build().to(device), training),
        bytes=count_parameters(model) * (2 * dtype.itemsize + 4 + 28),
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
    return {**whole, "parameters": count_parameters(model)}


WORKLOAD = ClaimsWorkload()
