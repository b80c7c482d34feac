"""The interface between a family's workload file and the harness."""

from __future__ import annotations

import inspect
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.plan import Case, refusal
from benchmarks.timing import synchronise
from zoo.engine.compat import compile_limit_kwargs

# Estimated memory of a process itself: its CUDA context, the libraries' work space, the compiler's buffers.
PROCESS_BYTES = 1 << 30
# Why a family trains in bfloat16 and not in float16.
UNSCALED = "training in float16 needs the loss scaled; it runs in bfloat16 or float32"

Races = tuple[tuple[str, str], ...]


@dataclass(kw_only=True)
class Training:
    """The parts of a case's training step. The optimizer is fused AdamW: the zoo's in its arms, else torch's."""

    loss: Callable[[Any, Any], torch.Tensor]  # called with the case's model, compiled or not, and a batch: a scalar
    batch: Callable[[int], Any]  # draws the i-th batch on the device, the same at each call
    learning_rate: float  # small enough that the first steps lower the loss
    # Number of losses, from the same initial weights and each on another batch, that are compared with the reference. A
    # wrong gradient shows from the second on.
    checked: int = 6
    autocast: torch.dtype | None = None  # over float32 weights; None if the weights have the case's dtype
    loss_module: nn.Module | None = None  # a module in ``loss`` with its own regions, compiled with the model's
    after_compile: Callable[[nn.Module], Any] | None = None  # for zoo models by regions: activation checkpointing
    # One batch per shape that the arm declares, the largest first. The first call and a capture run all of them. Empty
    # if all batches have one shape, or if shapes are not declared.
    shapes: tuple[Any, ...] = ()
    # An epoch's batches in order, on the device, with different shapes. Timed steps read it epoch after epoch, and wait
    # for it. None: timed steps cycle through batches kept on the device.
    loader: Callable[[], Iterable[Any]] | None = None
    # Timed steps of a round with a loader: equal in every arm, so that all arms see the same batches. A loader that
    # works ahead needs a whole epoch, so that it is idle while other arms work.
    round: int | None = None


@dataclass(kw_only=True)
class Prepared:
    """A case made ready in its worker process; nothing in it is compiled yet."""

    model: nn.Module  # of ``case.impl`` in eval mode on the device, weights equal across implementations
    inputs: dict[str, Any]  # keyword arguments of one call, which returns one tensor, or a tuple of them
    static: tuple[str, ...] = ()  # inputs that never change between calls: the outer CUDA graph does not copy them in
    # Implements ``regional``, if possible by the library's own helper: takes the model and the keyword arguments of
    # ``torch.compile`` (backend, mode, dynamic) and returns the callable, or None if it compiled in place. None for a
    # model of the zoo: the harness calls ``zoo.compile_regions``.
    compile_regions: Callable[..., nn.Module | None] | None = None
    # Implements ``full`` if a call is a run of many steps and the model only part of each step: takes the model and the
    # keyword arguments of ``torch.compile`` and compiles in place. None: the whole call.
    compile_full: Callable[..., None] | None = None
    # If a call is a run of many steps, makes the next call capture a step as an outer CUDA graph, which is replayed
    # from then on. None: one graph around the whole call.
    capture: Callable[[], None] | None = None
    dynamic: bool | None = None  # of upstream as shipped; None for the default
    tuned_dynamic: bool = False  # of upstream at its documented best; True if sizes differ from call to call
    # Restores the state (a position, a cache) that calls change, in place, so that the next call gives the output of
    # ``reference``. None if every call gives the same output.
    reset: Callable[[], None] | None = None
    # The output in float64 (or float32 if float64 would not fit), computed eagerly by the upstream library on the same
    # weights and inputs.
    reference: Callable[[], torch.Tensor]
    reference_dtype: str = "float64"
    bytes: int  # the minimum that one call must move through device memory
    bytes_formula: str  # how they are counted
    flops: int | None = None  # of one call; None: the harness counts them on eager
    data: str  # source of the input: ``real``, ``bundled``, or ``generated, uniform`` and the like
    # Seconds of one-time preparation (CSR, folding, packing), not part of other figures.
    preparation_seconds: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)  # of the input, for the reader: nodes, edges, batch
    count: int | None = None  # of ``unit``, which one call processes; None without a meaningful unit
    unit: str | None = None  # ``images``, ``tokens``, ``nodes``
    # For ``case.workload == "train"``: ``inputs`` is empty then, and ``reference`` gives the losses of
    # ``benchmarks.strategies.reference_losses``.
    training: Training | None = None

    def for_training(self, **changes: Any) -> Prepared:
        """A copy of a prepared inference case for training, with these fields changed."""
        return replace(self, model=self.model.requires_grad_(True).train(), inputs={}, static=(), **changes)


# Bytes formula of convolutions in training: counted traffic in addition to ``given``, and omitted traffic.
TRAINING_BYTES_FORMULA = (
    "Activations three times as in inference: forward, gradients by inputs and gradients by weights are a call each, "
    "which reads two of input, output and weights and writes the third; what is given needs no gradient. And 32 bytes "
    "a weight: its gradient is written, and the optimizer reads weight, gradient and two moments and writes three. "
    "Left out, so that it is a lower bound: statistics of norms, which need a pass of their own."
)


class Workload:
    """Base class of a family's workload. Each family's file makes one instance, ``WORKLOAD``.

    A subclass sets the class attributes and defines :meth:`build` and :meth:`estimate`, and :meth:`cannot` where some
    combinations of model, input and arm do not exist.
    """

    family: str
    models: tuple[str, ...]
    inputs: tuple[str, ...]
    workloads: tuple[str, ...] = ("inference",)
    # Supported dtypes of each kind of device, the default first.
    gpu_dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    cpu_dtypes: tuple[str, ...] = ("float32", "bfloat16")
    # (model, input) pairs of a plain run: one pair on a CPU; on a GPU all pairs, or with --quick these. Training uses
    # the same pairs as inference by default.
    cpu_race: tuple[str, str]
    gpu_races: Races
    quick_races: Races | None = None
    cpu_training: tuple[str, str] | None = None
    gpu_training: Races | None = None
    # Whether training keeps float32 weights under autocast. In float16 this would need a loss scale.
    autocasts: bool = True

    def build(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        """Build the model and the inputs of an accepted case, on its device.

        ``data_root`` is a folder of real data sets. ``seed`` is for weights and inputs, equal in all arms of a race.
        """
        raise NotImplementedError

    def estimate(self, case: Case, *, reference: bool) -> int:
        """Estimated device memory of the case in bytes, without the memory of the process itself.

        ``reference`` says whether this arm also computes the reference: one arm of a race does while the others wait.
        """
        raise NotImplementedError

    def cannot(self, case: Case) -> str | None:
        """The reason why the family lacks this combination, or None. All names in the case are known."""
        return None

    def default_races(self, device: str, quick: bool, workload: str = "inference") -> list[tuple[str, str]]:
        """(model, input) pairs of a plain run: full size on a GPU, one small pair on a CPU."""
        training = workload == "train"
        if device == "cpu":
            return [(training and self.cpu_training) or self.cpu_race]
        return list((training and self.gpu_training) or (quick and self.quick_races) or self.gpu_races)

    def dtypes(self, device: str) -> tuple[str, ...]:
        return self.cpu_dtypes if device == "cpu" else self.gpu_dtypes

    def refuses(self, case: Case) -> str | None:
        """The reason why this combination does not exist and gets no row, or None."""
        if case.workload not in self.workloads:
            return f"workload {case.workload!r} is not one of {', '.join(self.workloads)}"
        unscaled = case.workload == "train" and case.dtype == "float16" and self.autocasts
        return refusal(case) or self.cannot(case) or (UNSCALED if unscaled else None)

    def memory_bytes(self, case: Case, *, reference: bool) -> int:
        """Estimated peak device memory of the case's process in bytes, before anything is allocated."""
        return self.estimate(case, reference=reference) + PROCESS_BYTES

    def prepare(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        """Call :meth:`build` in the worker process; ValueError for a case that :meth:`refuses` rejects."""
        if reason := self.refuses(case):
            raise ValueError(f"{case.arm}: {reason}")
        return self.build(case, data_root=data_root, seed=seed)


@contextmanager
def timed(what: str, seconds: dict[str, float], device: str) -> Iterator[None]:
    """Record under ``what`` the seconds of the block, including work on the device."""
    synchronise(device)
    began = time.perf_counter()
    yield
    synchronise(device)
    seconds[what] = time.perf_counter() - began


def flop_counter() -> FlopCounterMode:
    """A counter that includes all attention: torch 2.11 omits grouped heads, and up to 2.14 attention on a CPU."""
    kinds = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    attention = [getattr(torch.ops.aten, f"_scaled_dot_product_{kind}") for kind in kinds]
    return FlopCounterMode(display=False, custom_mapping=dict.fromkeys(attention, _attention_flops))


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def count_flops(model: nn.Module, *args: Any, backward: bool = False, **inputs: Any) -> int:
    """FLOPs of the products and convolutions of a call, optionally with its backward; a multiply-add counts as two."""
    with torch.set_grad_enabled(backward), flop_counter() as counter:
        output = model(*args, **inputs)
        if backward:
            torch.stack([leaf.sum() for leaf in tree_leaves(output)]).sum().backward()
    return int(counter.get_total_flops())


def count_parameters(model: nn.Module) -> int:
    """Number of elements of all weights; shared weights count once."""
    return sum(parameter.numel() for parameter in model.parameters())


_PARAMETERS: dict[tuple[Callable[[Any], nn.Module], str], int] = {}


def parameters_of(build: Callable[[Any], nn.Module], config: Any) -> int:
    """:func:`count_parameters` of ``build(config)``, without allocating the model."""
    key = (build, repr(config))
    if key not in _PARAMETERS:
        with torch.device("meta"):
            _PARAMETERS[key] = count_parameters(build(config))
    return _PARAMETERS[key]


def encoder_sizes(build: Callable[[Any], nn.Module], config: Any) -> dict[str, int]:
    """Sizes of a model of equal layers, for the reader."""
    layers, width = config.num_hidden_layers, config.hidden_size
    return {"layers": layers, "width": width, "parameters": parameters_of(build, config)}


def upstream_regions(case: Case, compile: Callable[..., Any]) -> Callable[..., Any] | None:
    """``Prepared.compile_regions`` of a library's model by ``compile``; None for the zoo's.

    Tuned arms may compile more than eight graphs of a layer, after which a layer would silently stay eager.
    """
    if case.impl == "zoo":
        return None
    return lambda model, **options: compile(
        model, **options, **(compile_limit_kwargs() if case.impl == "upstream-tuned" else {})
    )


def accelerated(model: nn.Module, **options: Any) -> nn.Module:
    """Regional compilation by transformers' usual helper, accelerate's ``compile_regions``.

    Layers share a graph, unless each reads its own index of a cache. Modules before and after the layers are compiled
    too, one by one.
    """
    from accelerate.utils import compile_regions

    compiled: nn.Module = compile_regions(model, **options)
    return compiled


def accelerated_inside(step: Any, **options: Any) -> None:
    step.model = accelerated(step.model, **options)


def cache_argument(model: nn.Module) -> str:
    """Name of the cache argument of transformers' models and layers: ``cache`` from 5.24, else ``past_key_values``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def converted(inputs: dict[str, Any], device: torch.device | str, dtype: torch.dtype) -> dict[str, Any]:
    """Move inputs to the device, and cast floating-point ones to the dtype."""
    moved: dict[str, Any] = tree_map_only(
        Tensor, lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None), inputs
    )
    return moved


def dtype_of(case: Case) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, case.dtype)
    return dtype


def weights_dtype(case: Case) -> torch.dtype:
    """The dtype of weights if training uses autocast over float32."""
    return torch.float32 if case.workload == "train" else dtype_of(case)


def autocast_of(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of autocast over float32 weights for a case's dtype: None for float32."""
    return None if dtype is torch.float32 else dtype


# Weights from a seed, none of them held twice -------------------------------------------------------------------------


def draw(shape: tuple[int, ...], name: str, *, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers, drawn on the device from a random stream specific to this name."""
    # 32 bits, since the CPU's generator uses only the lower half of a longer seed.
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)


class SeededWeights(Mapping[str, Tensor]):
    """Weights of ``model`` under its names, each drawn on access; tied weights are drawn once.

    Products preserve the scale of activations. Norm weights differ from one, so that a forgotten norm shows. Equal
    seeds give equal weights on one kind of device.
    """

    def __init__(self, model: nn.Module, *, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.seed, self.dtype, self.device = seed, dtype, device

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        drawn = draw(shape, name, seed=self.seed, dtype=self.dtype, device=self.device)
        if len(shape) == 1:
            return drawn.mul_(0.1).add_(0.0 if name.endswith("bias") else 1.0)
        return drawn.mul_(shape[-1] ** -0.5)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def zoo_model(build: Callable[[Any], nn.Module], config: Any, weights: SeededWeights, placements: Any) -> Any:
    """``build(config)``, filled with these weights by ``zoo.weights.fill`` according to ``placements``."""
    from zoo.weights import fill

    with torch.device("meta"):
        model = build(config)
    fill(model, weights, placements, device=weights.device, dtype=None, source="drawn weights")
    return model.requires_grad_(False)
