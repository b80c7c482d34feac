"""How a case is compiled, and the steps of its training."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import zoo
from benchmarks.families.base import Prepared, Training
from benchmarks.plan import CUDA_GRAPH_MODES, STRATEGIES, Case
from zoo.engine.discover import declared_regions
from zoo.training import AdamW, TrainingStep

Call = Callable[..., Any]
# Batches kept on the device for the timed steps.
READY_BATCHES = 8
Step = Callable[[], Tensor]


def backend() -> str:
    """``inductor``, unless the harness' own tests ask for a lighter one."""
    return os.environ.get("BENCHMARKS_BACKEND", "inductor")


def apply(case: Case, prepared: Prepared) -> Call:
    """Compile ``prepared.model`` as the case says, lazily as ``torch.compile`` does; returns what to call.

    Shapes are static for the zoo's models, and for upstream at its documented best unless they change from call to
    call. Upstream as shipped keeps the default of ``torch.compile``, like its users: the second shape of a frame turns
    symbolic.
    """
    model = prepared.model
    if case.strategy != "eager" and prepared.training is not None and prepared.training.loss_module is not None:
        zoo.compile_regions(prepared.training.loss_module, backend=backend())
    own = {"upstream": prepared.dynamic, "upstream-tuned": prepared.tuned_dynamic}
    dynamic = True if case.dynamic else own.get(case.impl, False)
    mode = None if case.mode == "default" else case.mode
    match case.strategy:
        case "eager":
            return model
        case "full" if prepared.compile_full is not None:
            prepared.compile_full(model, mode=mode, dynamic=dynamic, backend=backend())
            return model
        case "full":
            return torch.compile(model, mode=mode, dynamic=dynamic, backend=backend())
        case "regional":
            if prepared.compile_regions is not None:
                compiled = prepared.compile_regions(model, mode=mode, dynamic=dynamic, backend=backend())
                return model if compiled is None else compiled
            if case.impl != "zoo":
                raise ValueError(f"{case.impl} has no way to compile its regions: Prepared.compile_regions is None")
            zoo.compile_regions(model, mode=mode, dynamic=bool(dynamic), backend=backend())
            if prepared.training is not None and prepared.training.after_compile is not None:
                prepared.training.after_compile(model)
            return model
        case "stages":
            regions = [zoo.Region(cls) for cls in stages(model)]
            return zoo.compile_regions(model, regions=regions, mode=mode, dynamic=bool(dynamic), backend=backend())
        case "hierarchical":
            mark_nested_regions(model)
            return torch.compile(model, mode=mode, dynamic=dynamic, backend=backend())
    raise ValueError(f"strategy {case.strategy!r} is none of {', '.join(STRATEGIES)}")


def stages(model: nn.Module) -> set[type[nn.Module]]:
    """Regions one level coarser: classes that call declared regions. Regions called by the model stay regions."""
    declared = {region.cls for region in declared_regions(model)}
    classes: dict[str, type[nn.Module]] = {}
    for name, module in model.named_modules():
        if type(module) in declared and not any(name.startswith(f"{outer}.") for outer in classes):
            owner = name.rpartition(".")[0]
            while isinstance(model.get_submodule(owner), nn.ModuleList):
                owner = owner.rpartition(".")[0]
            owner = owner or name
            classes[owner] = type(model.get_submodule(owner))
    if set(classes.values()) <= declared:
        raise ValueError(f"{type(model).__name__} calls its regions itself: it has no stages")
    return set(classes.values())


def mark_nested_regions(model: nn.Module) -> None:
    """Make every region of a zoo model a nested compile region, so that a full trace has one body per signature."""
    nested = {
        cls: type(cls.__name__, (cls,), {"forward": torch.compiler.nested_compile_region(cls.forward)})
        for cls in {region.cls for region in declared_regions(model)}
    }
    found = [module for module in model.modules() if type(module) in nested]
    if not found:
        raise ValueError(f"{type(model).__name__} has no declared regions; hierarchical needs them")
    for module in found:
        module.__class__ = nested[type(module)]


def marked(case: Case, call: Call) -> Call:
    """For modes with CUDA graphs, mark before each call that the outputs of the last call are no longer needed."""
    if case.mode not in CUDA_GRAPH_MODES:
        return call

    def step(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return call(*args, **kwargs)

    return step


@contextmanager
def execution_mode(case: Case) -> Iterator[None]:
    """The grad mode of every call of the case, including the first."""
    with torch.inference_mode() if case.workload == "inference" else torch.enable_grad():
        yield


# Training: the plain loop of upstream's users, or ours, behind one interface ------------------------------------------


class Trainer:
    """The steps of one arm, with its optimizer and its batches. The model of ``prepared`` has its initial weights."""

    def __init__(self, case: Case, prepared: Prepared, optimizer: torch.optim.Optimizer | None = None) -> None:
        assert prepared.training is not None, "the workload prepared no training"
        self._case = case
        self.training: Training = prepared.training
        self._model = prepared.model.train()
        self._first = {name: tensor.to("cpu", copy=True) for name, tensor in self._model.state_dict().items()}
        self._optimizer = optimizer or make_optimizer(
            self._model, self.training, capturable=case.cuda_graph, ours=case.impl == "zoo"
        )
        self._lying = self.training.shapes or tuple(map(self.training.batch, range(READY_BATCHES)))
        self._ready: Iterator[Any] = itertools.cycle(self._lying)
        self._batches: Iterator[Any] = self._ready
        self._loaded: Iterator[Any] | None = None

    @property
    def shapes(self) -> int:
        return max(1, len(self.training.shapes))

    def eager(self) -> Step:
        """A step of the uncompiled model, as the arm would do it without a compiler."""
        return self._step(self._model)

    def compiled(self, call: Callable[..., Any]) -> Step:
        """A step of ``call``, the result of ``strategies.apply``."""
        return self._step(call)

    def captured(self, call: Callable[..., Any]) -> Step:
        """The same step under the outer CUDA graph, already captured."""
        step = our_step(call, self.training, self._optimizer, cuda_graph=True)
        for batch in itertools.cycle(self._lying):
            step(batch)
            if len(step.captured) == self.shapes:
                break
        return lambda: step(next(self._batches))

    def open_loader(self) -> None:
        """Draw an epoch and drop it, so that the loader's processes have started and are idle."""
        if self._loaded is None and (loader := self.training.loader) is not None:
            for _ in loader():
                pass
            self._loaded = itertools.chain.from_iterable(loader() for _ in itertools.count())

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Steps inside the block take the loader's batches, if there is a loader."""
        self.open_loader()
        self._batches = self._loaded or self._ready
        try:
            yield
        finally:
            self._batches = self._ready

    def losses(self, step: Step, count: int | None = None) -> Tensor:
        """Losses of steps from the initial weights, each on another batch: [count], on the CPU."""
        count = self.training.checked if count is None else count
        self._restart()
        self._batches = map(self.training.batch, range(count))
        try:
            return torch.stack([step().detach().float().cpu() for _ in range(count)])
        finally:
            self._batches = self._ready

    @torch.no_grad()
    def _restart(self) -> None:
        """Restore the initial weights and clear the optimizer's state, in place, since a CUDA graph reads them."""
        for name, tensor in self._model.state_dict().items():
            tensor.copy_(self._first[name])
        for values in self._optimizer.state.values():
            for value in values.values():
                if isinstance(value, Tensor):
                    value.zero_()

    def _step(self, call: Callable[..., Any]) -> Step:
        if self._case.impl == "zoo":
            step = our_step(call, self.training, self._optimizer, cuda_graph=False)
            return lambda: step(next(self._batches))
        return lambda: library_step(call, self.training, self._optimizer, next(self._batches))


def our_step(
    call: Callable[..., Any], training: Training, optimizer: torch.optim.Optimizer, *, cuda_graph: bool
) -> TrainingStep:
    """The zoo's step, which holds a CUDA graph for each declared shape."""
    assert isinstance(call, nn.Module)
    graphs: dict[str, Any] = {"cuda_graph": cuda_graph, "warmup": 2, "most_graphs": max(1, len(training.shapes))}
    return TrainingStep(call, training.loss, optimizer, autocast=training.autocast, **graphs)


def library_step(call: Callable[..., Any], training: Training, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    """A step as the libraries' documentation shows it."""
    optimizer.zero_grad(set_to_none=True)
    device = next(p for group in optimizer.param_groups for p in group["params"]).device.type
    with nullcontext() if training.autocast is None else torch.autocast(device, training.autocast):
        loss = training.loss(call, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def make_optimizer(
    model: nn.Module, training: Training, *, capturable: bool = False, ours: bool = False
) -> torch.optim.Optimizer:
    """Fused AdamW, torch's or the zoo's; for a CUDA graph with step count and learning rate on the device."""
    parameters = list(model.parameters())
    kind = AdamW if ours else torch.optim.AdamW
    if not capturable:
        return kind(parameters, lr=training.learning_rate, fused=True)
    rate = torch.tensor(training.learning_rate, device=parameters[0].device)
    return kind(parameters, lr=rate, fused=True, capturable=True)


def reference_losses(model: nn.Module, training: Training, dtype: torch.dtype = torch.float64) -> Tensor:
    """The expected losses of :meth:`Trainer.losses`: [checked], computed eagerly in another precision.

    ``model`` is upstream's with the initial weights. It is converted in place, to float32 if float64 would not fit.
    """

    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    model, exact = model.to(dtype).train(), replace(training, autocast=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate)
    losses = []
    with torch.enable_grad():
        for index in range(training.checked):
            losses.append(library_step(model, exact, optimizer, pytree.tree_map(convert, training.batch(index))))
    return torch.stack(losses)


def checkpointed(blocks: Iterable[nn.Module]) -> None:
    """Checkpoint these blocks in place, for a reference: the backward reruns them from their inputs."""
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
