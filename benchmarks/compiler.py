"""Records of the compiler: start-up, caches, graphs, breaks and recompiles with reasons, seconds by phase."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo.external_utils import wrap_inline
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.machine import CACHE_VARIABLES, cache_environment, cut
from benchmarks.record import Compile

REASON_LENGTH = 400


@contextmanager
def other_cache(folder: Path) -> Iterator[None]:
    """Compile into another folder inside the block.

    Inductor and Triton read the variables at every compilation and pass them to running compile workers. Their caches
    in memory are dropped on entry and on exit.
    """
    before = {name: os.environ[name] for name in CACHE_VARIABLES if name in os.environ}
    os.environ.update(cache_environment(folder))
    _forget()
    try:
        yield
    finally:
        _forget()
        for name in CACHE_VARIABLES:
            del os.environ[name]
        os.environ.update(before)


def _forget() -> None:
    """Drop what Inductor and Triton hold in memory, the kernels of hand-written operators among it."""
    from torch._inductor.utils import clear_caches

    clear_caches()
    if (jit := sys.modules.get("triton.runtime.jit")) is None:
        return
    for kernel in gc.get_objects():
        if issubclass(type(kernel), jit.JITFunction):  # isinstance would load lazy objects
            kernel.device_caches.clear()


def _warm_up_graph(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    attended = scaled_dot_product_attention(x, x, x)
    return torch.softmax((attended @ weight).relu(), -1).sum(-1)


def start_up(folder: Path, device: str, dtype: torch.dtype, backend: str, *, training: bool = False) -> float:
    """Start the compiler: compile a small graph into ``folder`` and wait for Inductor's workers. Returns seconds.

    Otherwise the first compilation in a process pays for the compiler's imports, toolchain probes and worker pool. With
    ``training`` it also compiles the graph's backward.
    """
    began = time.perf_counter()
    import torch._dynamo.utils as dynamo
    from torch._inductor.async_compile import AsyncCompile

    dynamo.set_compilation_metrics_limit(4096)
    x, weight = torch.randn(1, 2, 16, 16, device=device, dtype=dtype), torch.randn(16, 16, device=device, dtype=dtype)
    mode = torch.enable_grad() if training else torch.inference_mode()
    with other_cache(folder), mode:
        result = torch.compile(_warm_up_graph, dynamic=False, backend=backend)(x, weight.requires_grad_(training))
        if training:
            result.sum().backward()
        if backend == "inductor":
            AsyncCompile.wait_pool_ready()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


class Recorder:
    """Counts the compilations of Dynamo and Inductor since it was created or restarted.

    A frame may be compiled once for each signature of ``model``'s layers; only further compilations are recompiles.
    """

    def __init__(self, model: nn.Module) -> None:
        import torch._dynamo.utils as dynamo

        dynamo.set_compilation_metrics_limit(4096)
        self._dynamo = dynamo
        self._signatures: dict[tuple[str, int, int], set[Any]] = defaultdict(set)
        self._model = model
        self.restart()

    def restart(self) -> None:
        self._seen = len(self._dynamo.get_compilation_metrics())
        self._counters = self._snapshot()

    def _snapshot(self) -> dict[str, Counter[str]]:
        return {name: Counter(values) for name, values in self._dynamo.counters.items()}

    @contextmanager
    def watching_signatures(self) -> Iterator[None]:
        """Record, during eager calls, the signatures of weights and inputs of each layer's code."""
        handles = [m.register_forward_pre_hook(self._note, with_kwargs=True) for m in self._model.modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        weights = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
        inputs = tuple(
            (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)
            for value in (*args, *kwargs.values())
        )
        for span in _spans(type(module)):
            self._signatures[span].add((type(module), weights, inputs, module.training))

    def facts(self, *, whole: bool = False) -> Compile:
        """Everything since the recorder was made or restarted."""
        records = self._dynamo.get_compilation_metrics()[self._seen :]
        now = self._snapshot()

        def grown(group: str) -> Counter[str]:
            return now.get(group, Counter()) - self._counters.get(group, Counter())

        inductor, autograd = grown("inductor"), grown("aot_autograd")
        return Compile(
            phases=_phases(records),
            graphs=grown("stats")["unique_graphs"],
            breaks=_breaks(grown("graph_break"), records, whole=whole),
            recompiles=self._recompiles(records),
            # Depending on the version, a hit in the outer cache skips the lookup in the inner one.
            cache_hits=max(inductor["fxgraph_cache_hit"], autograd["autograd_cache_hit"]),
            cache_misses=max(inductor["fxgraph_cache_miss"], autograd["autograd_cache_miss"]),
            cache_bypasses=max(inductor["fxgraph_cache_bypass"], autograd["autograd_cache_bypass"]),
        )

    def late(self) -> list[str]:
        """Reasons of unexpected compilations since the recorder was restarted."""
        records = self._dynamo.get_compilation_metrics()[self._seen :]
        return [
            _short(f"{record.co_name}: {record.recompile_reason or 'compiled anew'}")
            for record in records
            if not getattr(record, "is_runtime", False) and record.co_name is not None
        ]

    def _recompiles(self, records: list[Any]) -> list[str]:
        """Reasons of compilations beyond one for each signature of the layer that a frame belongs to.

        Dynamo calls the second width of a class a recompile, though that graph is needed. A frame that is not a layer's
        method has one signature.
        """
        frames: dict[tuple[str, int, str], list[Any]] = defaultdict(list)
        for record in records:
            if getattr(record, "is_runtime", False) or record.co_filename is None:
                continue
            frames[(record.co_filename, record.co_firstlineno or 0, record.co_name or "")].append(record)
        reasons = []
        for (filename, line, name), compiled in frames.items():
            needed = max(
                (len(kinds) for (file, first, last), kinds in self._signatures.items()
                 if file == filename and first <= line <= last),
                default=1,
            )  # fmt: skip
            for record in compiled[needed:]:
                if record.recompile_reason:
                    reasons.append(_short(f"{name}: {record.recompile_reason}"))
        return reasons


def _spans(cls: type[nn.Module]) -> set[tuple[str, int, int]]:
    """File, first and last line of every method of a class; for torch's layers, of Dynamo's frame around them."""
    spans = set()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins", "typing"):
            continue
        for function in vars(base).values():
            if isinstance(function, FunctionType):
                spans.add(_span(function.__code__))
    return spans or {_span(wrap_inline.__code__)}


def _span(code: CodeType) -> tuple[str, int, int]:
    lines = [line for *_, line in code.co_lines() if line is not None]
    return code.co_filename, code.co_firstlineno, max(lines, default=code.co_firstlineno)


def _breaks(counted: Counter[str], records: list[Any], *, whole: bool = False) -> list[str]:
    """A reason for each graph break.

    Dynamo's counter misses branches on tensors and frames that Dynamo skips. The frame after a branch reveals the
    former. If the whole call was compiled, any further frame reveals the latter.
    """
    reasons = [_short(reason) for reason, count in counted.items() for _ in range(count)]
    named = [record for record in records if record.co_name is not None]  # a backward has no frame
    frames = list(dict.fromkeys(str(r.co_name) for r in named if not getattr(r, "is_runtime", False)))
    resumed = [name for name in frames if name.startswith("torch_dynamo_resume_in_")]
    if whole and not (reasons or resumed):
        return [f"{name}: compiled by itself, so {frames[0]} ended before it" for name in frames[1:]]
    untold = max(0, len(resumed) - len(reasons))
    return reasons + [
        f"{name}: the compiler counts no reason; a branch on a tensor's value?" for name in resumed[:untold]
    ]


def _phases(records: list[Any]) -> dict[str, float]:
    """Seconds by phase, without double counting: differences of Dynamo's nested figures."""

    def total(name: str) -> float:
        return sum(getattr(record, f"{name}_us", None) or 0 for record in records) / 1e6

    dynamo, aot = total("dynamo_cumulative_compile_time"), total("aot_autograd_cumulative_compile_time")
    inductor, codegen = total("inductor_cumulative_compile_time"), total("inductor_code_gen_cumulative_compile_time")
    kernels = total("triton_compile_time")
    phases = {
        "dynamo": dynamo - aot,
        "aot": aot - inductor,
        "inductor": inductor - codegen,
        "codegen": codegen - kernels,
        "kernels": kernels,
    }
    return {name: round(max(0.0, seconds), 6) for name, seconds in phases.items()}


def _short(reason: str) -> str:
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("Hint:", "For more details", "Developer debug"))]
    return cut("; ".join(kept or lines), REASON_LENGTH)
