"""One call for a whole training step: forward, loss, backward, clipping, optimizer.

It is captured as a CUDA graph where that is possible. The device checks that losses are finite.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from zoo import validate
from zoo.engine.captured import check_leaves, describe, is_captured, shapes_of
from zoo.engine.graphed_step import CaptureError, GraphedStep, synchronisations
from zoo.ops.common import is_sharded
from zoo.ops.training import judge_step
from zoo.training import state
from zoo.training.checkpointing import restores_random_state
from zoo.training.fused import AdamW
from zoo.training.parallel import clip_gradients, collective_obstacles, groups_of, mean_over

Loss = Callable[[nn.Module, Any], Tensor]


class TrainingWarning(UserWarning):
    """A training step runs without a CUDA graph, or some parameters will not change."""


class NonFiniteError(RuntimeError):
    """A loss (or a gradient norm) was not finite in step number ``step``, counted from 1. It was not trained on.

    ``went_on``: later steps were trained on all the same, as with float16. Else weights and optimizer are as they were
    before that step.
    """

    def __init__(self, step: int, loss: float, went_on: bool = False) -> None:
        self.step, self.loss = step, loss
        what = f"a gradient is not finite (the loss is {loss:.4g})" if math.isfinite(loss) else f"the loss is {loss}"
        missing = "this update was left out" if went_on else "no update was made from this step on"
        remedy = "Look at its batch, lower the learning rate, or clip gradients"
        super().__init__(f"step {step}: {what}; {missing}. {remedy}{', or train in bfloat16' if went_on else ''}")


class TrainingStep:
    """A training step: ``loss = step(batch)``.

    Where it can be captured the step runs under one outer CUDA graph: the first ``warmup`` calls of each shape are
    real steps that run without it, the next one is captured, and all later ones replay. Several batches are one update
    of their mean loss (gradient accumulation).

    A loss that is not finite is never trained on: no update is made from that step on, and :class:`NonFiniteError`
    names it, at the latest ``report_every`` steps later. (With float16 only the bad steps themselves are left out.)
    Gradients are judged where their norm is known, with ``clip_norm``, and with float16.

    A model may be spread over processes (``zoo.training.parallelize``), all of which call the step: the loss and the
    norm are those of all batches.

    Args:
        model: In training mode, on its device.
        loss: Called as ``loss(model, batch)``, returns a scalar. All work on the GPU belongs in here.
        optimizer: Of ``torch.optim``, any whose ``step()`` asks for no closure. For the CUDA graph: fused,
            ``capturable=True`` where it has that option, and the learning rate a tensor on the device.
        autocast: ``torch.bfloat16``, or ``torch.float16`` with dynamic loss scaling; None for the weights' own dtype.
        clip_norm: Largest norm of the gradients of all the optimizer's parameters; larger ones are scaled down to it.
        cuda_graph: None captures where possible, and warns with the obstacles otherwise, also for single shapes of
            batches; True raises instead; False never captures. On a CPU True copies in and out as a capture would.
        warmup: Calls of each shape before it is captured, at least 2: one to compile, one to watch.
        report_every: Every so many steps, wait for the device and check for a loss that was not finite.
        most_graphs: Most shapes to capture; further ones run without a CUDA graph, with one warning for each.

    Raises:
        TypeError, ValueError: If the model, the optimizer or an option does not fit, or ``cuda_graph=True`` and there
            is an obstacle.

    Warns:
        TrainingWarning: If the optimizer lacks parameters that learn.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, optimizer: Optimizer, *, autocast: torch.dtype | None = None,
        clip_norm: float | None = None, cuda_graph: bool | None = None, warmup: int = 3, report_every: int = 50,
        most_graphs: int = 8,
    ) -> None:  # fmt: skip
        _check_options(model, optimizer, autocast, clip_norm)
        _warn_of_unchanged(model, loss, optimizer)
        if not callable(loss) or isinstance(loss, _Loss):
            raise TypeError(f"loss is a {type(loss).__name__}, expected a function loss(model, batch) of a scalar loss")
        validate.count("warmup", warmup, 2)
        validate.count("report_every", report_every)
        validate.count("most_graphs", most_graphs)
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self._parameters = list(model.parameters())
        self.device = self._parameters[0].device
        self.steps = 0
        self.scaler = torch.amp.GradScaler(self.device.type) if autocast is torch.float16 else None
        self._autocast, self._clip_norm = autocast, clip_norm
        self._warmup, self._report_every, self._most_graphs = warmup, report_every, most_graphs
        self._watch = FiniteWatch(self.device, goes_on=self.scaler is not None)
        self._norm = torch.zeros((), device=self.device)
        # If the optimizer cannot skip by a flag on the device, the host waits for the loss and decides.
        self._skips = _can_skip(optimizer)
        self._groups = groups_of(model)
        self._updated = False
        self._side: torch.cuda.Stream | None = None
        # Keyed by the structure and shapes of batches.
        self._graphed: dict[Any, GraphedStep] = {}
        self._options: FrozenOptions | None = None
        self._seen: dict[Any, int] = {}
        self._uncaptured: set[Any] = set()
        self._captures = cuda_graph is True or (cuda_graph is None and self.device.type != "cpu")
        self._must_capture = cuda_graph is True
        if self._captures and (obstacles := self._obstacles()):
            if cuda_graph:
                raise ValueError(f"the step cannot be captured: {obstacles}")
            self._captures = False
            self._note_uncaptured(obstacles)
        # The optimizer may outlive this step, and its captured memory with it.
        begin_anew = weakref.WeakMethod(self._begin_anew)
        hook = optimizer.register_load_state_dict_post_hook(lambda _: (found := begin_anew()) and found())
        weakref.finalize(self, hook.remove)

    def _obstacles(self) -> str:
        # On a CPU nothing is baked in.
        return "" if self.device.type == "cpu" else "; ".join(capture_obstacles(self.model, self.optimizer))

    @property
    def captured(self) -> list[str]:
        """The shapes that replay as a CUDA graph, in words."""
        return [shape for graphed in self._graphed.values() for shape in graphed.shapes]

    @property
    def grad_norm(self) -> Tensor:
        """Norm of all gradients before clipping in the last step, on the device; 0 without ``clip_norm``."""
        return self._norm.clone()

    def __call__(self, *batches: Any) -> Tensor:
        """One update on batches as ``loss`` takes them: the loss, a float32 scalar on the device without history.

        Raises:
            NonFiniteError: If this or an earlier loss was not finite.
            CaptureError: With ``cuda_graph=True``, if the step waits for the device, a batch holds what cannot be
                copied in, or the capture fails.
            ValueError: If there is no batch, two are tensors of unlike kinds, the model is not in training mode, or the
                loss is no scalar.
            RuntimeError: If the capture is outdated: an option of the optimizer changed, a weight was moved, frozen or
                unfrozen.
        """
        if not batches:
            raise ValueError("a step needs at least one batch")
        if len({(each.dtype, each.dim()) for each in batches if isinstance(each, Tensor)}) > 1:
            given = ", ".join(map(_described, batches))
            raise ValueError(f"the batches differ in kind, {given}: step((x, y)) is one batch of two tensors")
        _check_training(self.model)
        loss = self._replay(batches) if self._captures else self._run(*batches)
        self.steps += 1
        if self.steps % self._report_every == 0:
            self._watch.check()
        return loss

    def check(self) -> None:
        """Wait for the device and raise NonFiniteError, once, if a loss since the last look was not finite."""
        self._watch.check()

    def release(self) -> None:
        """Free captured CUDA graphs; a shape is captured again when it comes up."""
        self._options = None
        for captured in (self._graphed, self._seen, self._uncaptured):
            captured.clear()

    def save(self, folder: str | Path, **others: Any) -> None:
        """Write weights, optimizer, random and other states to ``model.safetensors`` and ``training.pt`` in a folder.

        ``others`` are objects with a ``state_dict()``: a scheduler, a sampler, a loss with weights. NonFiniteError if a
        loss was not finite; ValueError if something has no state, or one that :meth:`load` could not read, if the
        optimizer has parameters of neither the model nor ``others``, or the model is spread over several processes.
        """
        _refuse_several_processes(self._groups)
        self._watch.check()
        state.save(self, Path(folder), others)

    def load(self, folder: str | Path, **others: Any) -> None:
        """Continue from what :meth:`save` wrote: the losses that follow are those of an uninterrupted run.

        FileNotFoundError if a file is missing; ValueError if what was saved is of another model, optimizer or
        precision, is cut off, or has other names than ``others``. Nothing is changed then.
        """
        _refuse_several_processes(self._groups)
        state.load(self, Path(folder), others)
        self.release()

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and count of steps for ``torch.distributed.checkpoint``, on any number of processes.

        ``dcp.save({"step": step}, checkpoint_id=folder)`` on all processes, ``dcp.load`` likewise, also from a file of
        more or fewer processes or of another kind of parallelism. Random state is not in it.
        """
        return state.distributed_state(self)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave; all processes call it."""
        state.load_distributed_state(self, saved)
        self.release()

    def _begin_anew(self) -> None:
        """The optimizer's state was replaced, and may be empty now."""
        self._updated = False
        self.release()

    def _replay(self, batches: tuple[Any, ...]) -> Tensor:
        leaves, structure = pytree.tree_flatten(batches)
        try:
            check_leaves(leaves)
        except (TypeError, ValueError) as error:
            bad = f"{str(error).partition(';')[0]}; make batches of dense tensors without history and plain values"
            self._refuse_if_forced(bad)
            self._note_uncaptured(bad)
            return self._run(*batches)
        kind = structure, shapes_of(leaves)
        if kind in self._graphed:
            assert self._options is not None
            self._options.check()
            return self._graphed[kind](*batches)
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        if seen <= self._warmup or not self._updated:
            # The host looks at a first update, which a capture cannot hold.
            return self._rehearse(batches, last=seen >= self._warmup and self._updated)
        if kind not in self._uncaptured and (why := self._capture(batches, kind)) is not None:
            self._note_uncaptured(f"{describe(leaves)}: {why}", kind)
        return self._graphed.get(kind, self._run)(*batches)

    def _capture(self, batches: tuple[Any, ...], kind: Any) -> str | None:
        """Capture a shape, or return why that is impossible."""
        # A state that was loaded since the last check may have brought another learning rate.
        if self._options is None and (obstacles := self._obstacles()):
            self._refuse_if_forced(obstacles)
            return obstacles
        if len(self._graphed) >= self._most_graphs:
            return f"{self._most_graphs} shapes are captured already (most_graphs); pad batches to fewer shapes"
        pool = next((graphed.pool for graphed in self._graphed.values()), None)
        try:
            self._graphed[kind] = GraphedStep(self._run, [(batches, {})], warmup=0, pool=pool)
        except CaptureError as error:
            if self._must_capture:
                raise
            return str(error)
        self._options = self._options or FrozenOptions(self.optimizer)
        return None

    def _rehearse(self, batches: tuple[Any, ...], last: bool) -> Tensor:
        """Run on a side stream, as a capture does; the last run before it must not wait for the device."""
        if self.device.type == "cpu":
            return self._run(*batches)
        # Always the same stream: the allocator keeps memory for each.
        side = self._side = self._side or torch.cuda.Stream(self.device)
        current = torch.cuda.current_stream(self.device)
        side.wait_stream(current)
        watching: AbstractContextManager[list[str]] = synchronisations() if last else nullcontext([])
        with torch.cuda.stream(side), watching as found:
            loss = self._run(*batches)
        current.wait_stream(side)
        loss.record_stream(current)
        if found:
            why = f"it waits for the device ({found[0]}); move that out of the loss"
            self._refuse_if_forced(why)
            self._captures = False
            self.release()
            self._note_uncaptured(why)
        return loss

    def _refuse_if_forced(self, why: str) -> None:
        if self._must_capture:
            raise CaptureError(f"the step cannot be captured: {why}")

    def _note_uncaptured(self, why: str, kind: Any = None) -> None:
        """Warn once of a reason, or of a kind of batch."""
        if (kind or why) not in self._uncaptured:
            self._uncaptured.add(kind or why)
            validate.warn(f"the step runs without a CUDA graph: {why}", TrainingWarning)

    def _run(self, *batches: Any) -> Tensor:
        self._clear_gradients()
        try:
            total: Any = None
            for batch in batches:
                with torch.autocast(self.device.type, self._autocast) if self._autocast else nullcontext():
                    loss = self.loss(self.model, batch)
                _check_loss(loss)
                part = loss.float().reshape(())
                if len(batches) > 1:
                    part = part / len(batches)
                # A copy, since a CUDA graph of the compiler overwrites this loss with the next one.
                total = part.detach().clone() if total is None else total + part.detach()
                if self.scaler is not None:
                    # The scaler judges gradients, and those of an infinite loss may be finite: make them NaN.
                    part = self.scaler.scale(part * (part.detach() * 0 + 1))
                part.backward()  # type: ignore[no-untyped-call]
            norm = self._clip()
            total = mean_over(self._groups, total)
            self._watch.see(total, None if self.scaler is not None else norm)
            self._update()
        finally:
            self._clear_gradients()
            if self.scaler is not None:
                # An error may have ended the last step before its update: let the next one unscale again.
                self.scaler._per_optimizer_states.clear()
        return total

    def _clip(self) -> Tensor | None:
        if self._clip_norm is None:
            return None
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        clip = clip_gradients if self._groups else nn.utils.clip_grad_norm_
        norm = clip(state.parameters_of(self.optimizer), self._clip_norm)
        self._norm.copy_(norm)
        return norm

    def _update(self) -> None:
        """Let the optimizer step, unless the loss was not finite."""
        if not self._skips or not self._updated:
            # Also at the first update, where compiling hides the wait.
            self._watch.check()
        if self.scaler is not None:
            first = not (is_captured(self.device) or self._updated or self.optimizer.state)
            before = self.scaler.get_scale() if first else 0.0
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if first and self.scaler.get_scale() < before:
                self.optimizer.state.clear()  # the update was skipped, and may have left a momentum without values
                return
        elif self._skips:
            self.optimizer.grad_scale, self.optimizer.found_inf = None, self._watch.skip  # type: ignore[attr-defined]
            try:
                self.optimizer.step()
            finally:
                del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
        else:
            self.optimizer.step()
        self._updated = True

    def _clear_gradients(self) -> None:
        """Free gradients: between steps they would take memory, and those of a capture hold old values."""
        # A model's zero_grad() walks its modules again, and an optimizer's reports to the profiler.
        for param in (*self._parameters, *state.parameters_of(self.optimizer)):
            param.grad = None


def _check_options(model: nn.Module, optimizer: Optimizer, autocast: torch.dtype | None, clip: float | None) -> None:
    form = "TrainingStep(model, loss, optimizer)"
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected an nn.Module: {form}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}, expected one torch.optim.Optimizer: {form}")
    _check_training(model)
    own, cls, name = set(model.parameters()), type(model).__name__, type(optimizer).__name__
    given = state.parameters_of(optimizer)
    if own.isdisjoint(given):
        raise ValueError(f"{name} has none of the {len(own)} parameters of this {cls}: make it of model.parameters()")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(f"{name}.step() needs a closure, which runs the model more than once: take another optimizer")
    spread = given if groups_of(model) else []
    if stale := sum(param not in own for param in spread):
        raise ValueError(f"{stale} of {name}'s parameters are not of this {cls}: make it after parallelize")
    kinds = {getattr(param, "device_mesh", None) for param in spread}
    one_by_one = all(not group.get("fused") and group.get("foreach") is False for group in optimizer.param_groups)
    if len(kinds) > 1 and not (one_by_one or isinstance(optimizer, AdamW)):
        raise ValueError(
            f"{name} updates many parameters at once, and these are spread in {len(kinds)} ways: take "
            "zoo.training.AdamW, or foreach=False"
        )
    if autocast is torch.float16 and any(is_sharded(param) for param in spread):
        raise ValueError("autocast is torch.float16, whose loss scale would differ by process: take torch.bfloat16")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"autocast is {autocast}; it is torch.bfloat16, torch.float16 or None")
    if clip is not None and not (isinstance(clip, int | float) and 0 < clip < math.inf):
        raise ValueError(f"clip_norm is {clip!r}; it is a positive number, or None")


def _warn_of_unchanged(model: nn.Module, loss: Any, optimizer: Optimizer) -> None:
    """Warn of parameters that learn and that the optimizer does not have: they get gradients and never change."""
    given = set(state.parameters_of(optimizer))
    parts = {"": model} | ({"loss": loss} if isinstance(loss, nn.Module) else {})
    named = [pair for prefix, part in parts.items() for pair in part.named_parameters(prefix)]
    if names := [name for name, param in named if param.requires_grad and param not in given]:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        what = f"{len(names)} parameters that learn are not in {type(optimizer).__name__} and will not change ({shown})"
        validate.warn(f"{what}: add them to it, or freeze them by requires_grad_(False)", TrainingWarning)


def _refuse_several_processes(groups: Sequence[Any]) -> None:
    if groups:
        call = "torch.distributed.checkpoint.save({'step': step}, checkpoint_id=folder)"
        raise ValueError(f"the model is spread over several processes: {call}, and load, on all of them")


def _check_training(model: nn.Module) -> None:
    if not model.training:
        raise ValueError(f"{type(model).__name__} is in eval mode: call model.train() first")


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"the loss function returned {_described(loss)}, expected a floating-point scalar: loss.mean()?"
        )
    if not loss.requires_grad:
        why = "it was detached, depends on no parameter that learns, or was computed under torch.no_grad()"
        raise ValueError(f"the loss has no gradient: {why}")


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _can_skip(optimizer: Optimizer) -> bool:
    """Whether the optimizer skips an update by a flag on the device, as torch's fused optimizers do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def capture_obstacles(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Why a step of this model and optimizer cannot be captured, each with its remedy; empty if it can.

    The loss is not examined: a step that waits for the device is noticed when it runs.
    """
    obstacles: list[str] = []
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        found = ", ".join(sorted(map(str, devices))) or "no device"
        obstacles.append(f"the parameters are on {found}; a CUDA graph needs one GPU: model.to('cuda')")
    name = type(optimizer).__name__
    if not _can_skip(optimizer):
        can_be_fused = "fused" in inspect.signature(type(optimizer)).parameters
        remedy = f"{name}(..., fused=True)" if can_be_fused else "torch.optim has AdamW and SGD with fused=True"
        obstacles.append(f"{name} is not fused, and could not skip a bad step without waiting: {remedy}")
    if any(group.get("capturable") is False for group in optimizer.param_groups):
        obstacles.append(f"{name} keeps its step count on the host: {name}(..., capturable=True)")
    for index, group in enumerate(optimizer.param_groups):
        rate = group["lr"]
        if not isinstance(rate, torch.Tensor) or rate.device.type == "cpu":
            obstacles.append(
                f"the learning rate {float(rate)} of parameter group {index} is on the CPU and would be baked in: "
                f"lr=torch.tensor({float(rate)}, device='cuda'), into which schedulers of torch.optim write"
            )
    obstacles += collective_obstacles(model)
    if restores_random_state(model):
        obstacles.append(
            "checkpointed regions restore the random state for their second run, which cannot be captured: "
            "checkpoint_regions(..., preserve_rng_state=False) where nothing in them is random"
        )
    return obstacles


class FiniteWatch:
    """Counts steps and remembers, on the device, the first one that was not finite.

    From that step on ``skip`` is 1, for which a fused optimizer skips its updates, until ``check`` is called.
    """

    def __init__(self, device: torch.device, *, goes_on: bool = False) -> None:
        self._goes_on = goes_on
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # steps seen
        # Number and loss of the first bad step, or of the last step if none was bad.
        self._step = torch.zeros_like(self.count)
        self._loss = torch.zeros((), device=device)
        self.skip = torch.zeros((), device=device)

    def see(self, loss: Tensor, norm: Tensor | None) -> None:
        """Count a step and check its loss, float32, and its gradients' norm, if given. The host never waits."""
        judge_step(loss, norm, self.count, self._step, self._loss, self.skip)

    def check(self) -> None:
        """Wait for the device and raise NonFiniteError for the first bad step, once: later steps then train again."""
        if self.skip:
            self.skip.zero_()
            raise NonFiniteError(int(self._step), float(self._loss), self._goes_on)

    def begin_at(self, count: int) -> None:
        """Continue after so many steps; none of them is reported."""
        self.count.fill_(count)
        self.skip.zero_()


class FrozenOptions:
    """An optimizer's options at the capture: the CUDA graph would not notice a change."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._seen, self._learning = self._options(), self._which_learn()

    def check(self) -> None:
        """RuntimeError if a number changed, a tensor (the learning rate) was replaced, or other parameters learn."""
        if self._which_learn() != self._learning:
            raise RuntimeError("other parameters learn than when the step was captured: call step.release()")
        options = self._options()
        for place, value in (self._seen | options).items():
            was, value = self._seen.get(place), options.get(place)
            if value is not was and (isinstance(value, Tensor) or value != was):
                raise RuntimeError(
                    f"{place[1]} of parameter group {place[0]} was {was} when the step was captured and is {value} "
                    "now: write into a tensor (group['lr'].fill_(...)), give a schedule cycle_momentum=False, or call "
                    "step.release() to capture again"
                )

    def _which_learn(self) -> list[bool]:
        return [param.requires_grad for param in state.parameters_of(self._optimizer)]

    def _options(self) -> dict[tuple[int, str], object]:
        groups, ignored = enumerate(self._optimizer.param_groups), ("params", "initial_lr", "param_names")
        return {(at, name): value for at, group in groups for name, value in group.items() if name not in ignored}
