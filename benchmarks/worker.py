"""The requests that an arm's process answers. ``benchmarks.process`` carries the messages."""

from __future__ import annotations

import functools
import gc
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import zoo
from benchmarks import families, machine, strategies, timing
from benchmarks.families.base import count_flops, flop_counter, tensors
from benchmarks.plan import CUDA_GRAPH_MODES, Case
from benchmarks.strategies import Trainer, execution_mode
from benchmarks.timing import once, synchronise

# Imported on first use: they import parts of the compiler, whose import time belongs to a first result.
if TYPE_CHECKING:
    from benchmarks.compiler import Recorder
    from benchmarks.families import Prepared, Workload

Reply = dict[str, Any]

PROFILED_CALLS = 3


class Handler:
    """Answers an arm's messages: each public method answers the message of its name."""

    step: Callable[[], Any]
    trainer: Trainer | None = None

    def __init__(self) -> None:
        self._eager_output: torch.Tensor | None = None
        self._recorder: Recorder | None = None
        self._recorded: Reply = {}  # memory peaks of recording a mode's own CUDA graphs

    # Before the race ----------------------------------------------------------------------------------------------

    def facts(self, *, device: str) -> Reply:
        return {"device": machine.device_facts(device)}

    def peaks(self, *, device: str, dtypes: list[str], quick: bool, start_up: str | None) -> Reply:
        """Peak rates of the device and the compiler's start-up time, measured alone; arms may then start together."""
        from benchmarks import compiler

        torch.zeros(1, device=device)
        seconds = None
        if start_up is not None:
            seconds = compiler.start_up(Path(start_up), device, getattr(torch, dtypes[0]), strategies.backend())
        return {"peaks": timing.measure_peaks(device, dtypes, quick=quick), "start_up": seconds}

    def load(self, *, workload: str) -> Reply:
        """Import the case's modules ahead, so that imports of several workers overlap and are in no figure."""
        self.workload: Workload = families.load(workload)
        return {}

    def prepare(self, *, case: Mapping[str, Any], data_root: str | None, seed: int) -> Reply:
        self.case = Case(**case)
        self.device = self.case.device
        if not self.case.kernels:
            from zoo.ops import common as operators

            operators.ENABLED = False
        if self.device != "cpu":
            # The only switch for TF32, equal in every arm.
            torch.set_float32_matmul_precision("high")
        torch.manual_seed(seed)
        self.prepared: Prepared = self.workload.prepare(self.case, data_root=data_root, seed=seed)
        self.model = self.prepared.model
        if self.case.workload == "train":
            self.trainer = Trainer(self.case, self.prepared)
        storages = {each.data_ptr(): each.nbytes for each in (*self.model.parameters(), *self.model.buffers())}
        return {
            **{name: getattr(self.prepared, name) for name in ("bytes_formula", "data", "count", "unit")},
            "bytes": int(self.prepared.bytes),
            "sizes": {name: int(size) for name, size in self.prepared.sizes.items()},
            "preparation": dict(self.prepared.preparation_seconds),
            "model_bytes": sum(storages.values()),
        }

    def start_up(self, *, folder: str | None) -> Reply:
        """Make an eager call at the case's shapes, count FLOPs on another, start the compiler; all in ``folder``."""
        from benchmarks import compiler

        self._recorder = compiler.Recorder(self.model) if folder is not None else None
        with nullcontext() if folder is None else compiler.other_cache(Path(folder) / "eager"):
            with execution_mode(self.case):
                self._reset()
                try:
                    with nullcontext() if self._recorder is None else self._recorder.watching_signatures():
                        if self.trainer is None:
                            output = self.model(**self.prepared.inputs)
                        else:
                            step = self.trainer.eager()
                            for _ in range(self.trainer.shapes):
                                step()  # a step of each shape, so that all signatures are recorded
                            output = self.trainer.losses(step)
                    self._eager_output = _flat(output).cpu().clone()  # off the device, since its memory is measured
                except torch.OutOfMemoryError:
                    # A case too large for eager may fit compiled; then there is no eager error to compare with.
                    if self.case.strategy == "eager":
                        raise
                    torch.cuda.empty_cache()
            flops = self._count_flops() if self.prepared.flops is None else int(self.prepared.flops)
            synchronise(self.device)
        seconds = None
        if folder is not None:
            dtype, trains = getattr(torch, self.case.dtype), self.trainer is not None
            seconds = compiler.start_up(Path(folder), self.device, dtype, strategies.backend(), training=trains)
        return {"flops": flops, "seconds": seconds}

    def _count_flops(self) -> int:
        if self.trainer is None:  # outside inference mode, in which composite operators hide their parts
            return count_flops(self.model, **self.prepared.inputs)
        with torch.enable_grad(), flop_counter() as counter:
            self.trainer.eager()()
        return int(counter.get_total_flops())

    # Compilation --------------------------------------------------------------------------------------------------

    def first_call(self) -> Reply:
        """Compile: the time from the first call to its result, minus one steady call. Eager arms compile nothing."""
        from benchmarks.compiler import Recorder

        if self.case.strategy == "eager":
            self._use(self.model)
            return {"seconds": None}
        files = len(machine.cache_contents())
        recorder = self._recorder or Recorder(self.model)
        recorder.restart()
        # Collect the garbage of imports and preparation now; otherwise some arm's compilation would include it.
        gc.collect()
        synchronise(self.device)
        with execution_mode(self.case):
            began = time.perf_counter()
            self._use(strategies.apply(self.case, self.prepared))
            self._steps()
            synchronise(self.device)
            first = time.perf_counter() - began
            # In modes with CUDA graphs the second call warms up and the third records.
            records = self.case.mode in CUDA_GRAPH_MODES
            recording = []
            if records:
                # Memory of a CUDA graph counts as allocated during the recording, but not during replays.
                self._reset_peak()
                recording = [once(self._steps, self.device) for _ in range(2)]
                self._recorded = self._peaks()
            later = [once(self._steps, self.device)]
            while len(later) < 5 and sum(later) < 2.0:
                later.append(once(self._steps, self.device))
        steady = sorted(later)[len(later) // 2]
        facts = recorder.facts(whole=self.case.strategy == "full")
        self._recorder = recorder
        recorder.restart()
        return {
            **asdict(facts),
            "seconds": max(0.0, first - steady),
            "recording": max(0.0, sum(recording) - steady * len(recording)) if records else None,
            "later_calls": recording + later,
            "files_at_start": files,
        }

    def capture(self) -> Reply:
        """Capture the outer CUDA graph of the step: seconds including warm-up, and memory after the capture."""
        self._reset_peak()
        with execution_mode(self.case):
            began = time.perf_counter()
            self._capture()
            synchronise(self.device)
            seconds = time.perf_counter() - began
            self.step()
        return {"seconds": seconds, "recompiles": self._late(), **self._peaks()}

    def first_result(self) -> Reply:
        """Time to the first result in a process that had compiled nothing, including the outer CUDA graph."""
        synchronise(self.device)
        with execution_mode(self.case):
            began = time.perf_counter()
            self._use(strategies.apply(self.case, self.prepared))
            if self.case.cuda_graph:
                self._capture()
            self.step()
            synchronise(self.device)
            return {"seconds": time.perf_counter() - began}

    def _use(self, call: Callable[..., Any]) -> None:
        self.call = call
        if self.trainer is not None:
            eager = self.case.strategy == "eager"
            self.step = strategies.marked(self.case, self.trainer.eager() if eager else self.trainer.compiled(call))
        else:
            self.step = functools.partial(strategies.marked(self.case, call), **self.prepared.inputs)

    def _capture(self) -> None:
        if self.trainer is not None:
            self.step = self.trainer.captured(self.call)
            return
        if self.prepared.capture is not None:
            self.prepared.capture()
            self.step()
            return
        # Outputs stay in the graph's own buffers, as in reduce-overhead.
        inputs, static = self.prepared.inputs, self.prepared.static
        self._use(zoo.cuda_graph(self.call, kwargs=inputs, static=static, clone_outputs=False))

    def _steps(self) -> None:
        """Make a call; in training one of each shape that the arm declares."""
        for _ in range(1 if self.trainer is None else self.trainer.shapes):
            self.step()

    def _late(self) -> list[str]:
        if self._recorder is None:
            return []
        late = self._recorder.late()
        self._recorder.restart()
        return late

    # Checks and memory --------------------------------------------------------------------------------------------

    def check(self, *, reference: str) -> Reply:
        """Relative errors of this arm and of its own eager call. The race's first arm computes the reference."""
        path = Path(reference)
        if not path.exists():
            self._save_reference(path)
        saved = torch.load(path, weights_only=True)
        with execution_mode(self.case):
            self._reset()
            output = _flat(self.step() if self.trainer is None else self.trainer.losses(self.step)).clone()
        eager, self._eager_output = self._eager_output, None
        error = _relative_error(output, saved["output"], "the output")
        eager_error = None
        if eager is not None:
            eager_error = _relative_error(eager.to(output.device), saved["output"], "eager's output")
        return {"error": error, "eager_error": eager_error, "reference_dtype": saved["dtype"]}

    def _save_reference(self, path: Path) -> None:
        with torch.no_grad():
            precision = torch.get_float32_matmul_precision()
            # Set only if it differs: setting it, even to the same value, changes a state that Dynamo guards on.
            if precision != "highest":
                torch.set_float32_matmul_precision("highest")
            try:
                expected = _flat(self.prepared.reference()).cpu()
            finally:
                if precision != "highest":
                    torch.set_float32_matmul_precision(precision)
        own = path.with_suffix(f".{os.getpid()}")  # another arm may write its file at the same time
        torch.save({"output": expected, "dtype": self.prepared.reference_dtype}, own)
        own.replace(path)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the other arms need the memory

    def _reset(self) -> None:
        if self.prepared.reset is not None:
            self.prepared.reset()

    def memory(self) -> Reply:
        """Peaks of one steady call, or of recording its CUDA graph; None on a CPU."""
        self._reset_peak()
        with execution_mode(self.case):
            self._steps()
        peaks = self._peaks()
        return {name: max(filter(None, (peak, self._recorded.get(name))), default=None) for name, peak in peaks.items()}

    def _reset_peak(self) -> None:
        if self.device != "cpu":
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _peaks(self) -> Reply:
        if self.device == "cpu":
            return {"allocated": None, "reserved": None}
        torch.cuda.synchronize()
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}

    # The race -----------------------------------------------------------------------------------------------------

    def calibrate(self, *, milliseconds: float | None = None) -> Reply:
        """Number of calls in a turn of the race, of ``timing.ROUND_MS`` by default."""
        if self.trainer is not None and self.trainer.training.round is not None:
            self.trainer.open_loader()
            return {"calls": self.trainer.training.round}
        with execution_mode(self.case):
            return {"calls": timing.calibrate(self.step, self.device, milliseconds or timing.ROUND_MS)}

    def round(self, *, calls: int, core: int | None = None) -> Reply:
        """Time back-to-back calls, after synchronised calls that give the host's time; on one core or any."""
        # A loader's threads and processes run on other cores, concurrently with the step.
        if core is not None and (self.trainer is None or self.trainer.training.loader is None):
            machine.stay_on(core)
        with execution_mode(self.case):
            host_ms = timing.host(self.step, self.device)
            with nullcontext() if self.trainer is None else self.trainer.timed():
                return {"host_ms": host_ms, **asdict(timing.back_to_back(self.step, self.device, calls))}

    # After the race -----------------------------------------------------------------------------------------------

    def curve(self, *, steps: int) -> Reply:
        """Losses of ``steps`` training steps from the initial weights, each on another batch."""
        if self.trainer is None:
            raise ValueError("there is no curve of inference; ask for --workload train")
        with execution_mode(self.case):
            losses = self.trainer.losses(self.step, steps).tolist()
        for number, loss in enumerate(losses, start=1):
            if not math.isfinite(loss):  # a row's JSON cannot hold it
                raise ValueError(f"the loss of step {number} of {steps} is {loss}")
        return {"losses": losses}

    def kernels(self) -> Reply:
        """Number of kernels of one call, and the longest of them, by the profiler (None on a CPU)."""
        recompiles = self._late()
        if self.device == "cpu":
            return {"kernels": None, "longest": None, "others": None, "recompiles": recompiles}
        ran = timing.gpu_kernels(self._profile(calls=PROFILED_CALLS).events() or [])
        longest, others = timing.longest_kernels(ran, PROFILED_CALLS)
        return {
            "kernels": round(len(ran) / PROFILED_CALLS),
            "longest": [asdict(kernel) for kernel in longest],
            "others": others and asdict(others),
            "recompiles": recompiles,
        }

    def _profile(self, *, calls: int) -> Any:
        from torch.profiler import ProfilerActivity, profile

        with execution_mode(self.case):
            self.step()
            synchronise(self.device)
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:  # host events are millions
                for _ in range(calls):
                    self.step()
                synchronise(self.device)
        return profiler


def _flat(output: Any) -> torch.Tensor:
    """All tensors of the output, concatenated to one vector."""
    found = [tensor.reshape(-1) for tensor in tensors(output)]
    if not found:
        raise ValueError(f"the output is a {type(output).__name__} without a tensor in it")
    return torch.cat(found)


def _relative_error(output: torch.Tensor, expected: torch.Tensor, what: str) -> float:
    """Norm of the difference over the norm of the reference, in float64 or its complex pair."""
    if output.shape != expected.shape:
        raise ValueError(f"{what} has {output.numel()} values, the reference {expected.numel()}")
    wide = torch.promote_types(torch.promote_types(output.dtype, expected.dtype), torch.float64)
    got, wanted = output.to(wide), expected.to(output.device, wide)
    error = float(torch.linalg.vector_norm(got - wanted) / torch.linalg.vector_norm(wanted).clamp_min(1e-300))
    if error != error or error == float("inf"):
        raise ValueError(f"{what} has {int((~got.isfinite()).sum())} values that are not finite, the reference "
                         f"{int((~wanted.isfinite()).sum())}")  # fmt: skip
    return error
