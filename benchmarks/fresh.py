"""One start of a model, from a new process to its first result, by phases: ``benchmarks.deploy`` runs it and reads it.

Nothing heavy is imported before its clock runs. The harness' own imports are a phase that the total leaves out.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import statistics
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS = 5


def prepare(asked: dict[str, Any]) -> dict[str, Any]:
    """Write the model and its inputs to a file, which all processes of the implementation read; facts of the device."""
    import torch

    from benchmarks import families, machine
    from benchmarks.plan import Case

    case = Case(**asked["case"])
    torch.manual_seed(0)
    prepared = families.load(asked["workload"]).prepare(case, data_root=None, seed=0)
    torch.save((prepared.model, prepared.inputs, prepared.static, prepared.dynamic), asked["model"])
    return machine.device_facts(case.device)


def start(asked: dict[str, Any]) -> dict[str, Any]:
    """Start as asked, and tell seconds by phase, what was compiled, a steady call and a hash of the outputs."""
    seconds = {"python": time.time() - asked["at"]}
    device, artifacts, load, save = asked["case"]["device"], asked["artifacts"], asked["load"], asked["save"]

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if name not in ("torch", "library", "harness"):
            timing.synchronise(device)
        seconds[name] = time.perf_counter() - began

    with phase("torch"):
        import torch
    with phase("library"):
        importlib.import_module(asked["library"])
        if asked["library"] == "zoo" and device != "cpu":
            importlib.import_module("triton")  # which its kernels need, and the harness would bring in for free
    with phase("harness"):
        import zoo
        from benchmarks import families, strategies, timing
        from benchmarks.families.base import Prepared
        from benchmarks.machine import cache_contents
        from benchmarks.plan import Case
        from benchmarks.worker import _flat

        case = Case(**asked["case"])
        families.load(asked["workload"])
    if device != "cpu":
        torch.set_float32_matmul_precision("high")
    with phase("context"):
        torch.zeros(1, device=device)
    with phase("model"):
        model, inputs, static, dynamic = torch.load(asked["model"], map_location=device, mmap=True, weights_only=False)
    files = cache_contents()
    with strategies.execution_mode(case):
        ours, call = case.impl == "zoo", model
        if load:
            with phase("load"):
                if ours:
                    zoo.load_compiled(model, artifacts, strict=True)
                else:
                    torch.compiler.load_cache_artifacts(Path(artifacts).read_bytes())
            files = cache_contents()
        with phase("first call"):
            if not (load and ours):
                prepared = Prepared(
                    model=model, inputs=inputs, dynamic=dynamic, reference=torch.Tensor, bytes=0, bytes_formula="",
                    data="",
                )  # fmt: skip
                call = strategies.apply(case, prepared)
            step = partial(call, **inputs)
            step()
        if case.cuda_graph:
            with phase("capture"):
                step = partial(zoo.cuda_graph(call, kwargs=inputs, static=static, clone_outputs=False), **inputs)
                step()
        compiled = {"files": len(cache_contents() - files), **_traced()}
        calls = timing.calibrate(step, device)
        rounds = [timing.back_to_back(step, device, calls) for _ in range(ROUNDS)]
        host_ms = timing.host(step, device)
        if hasattr(model, "reset"):
            model.reset()
        output = _flat(step()).cpu().contiguous()
    saved = None
    if save and ours:
        written = zoo.save_compiled(model, artifacts)
        size = sum(path.stat().st_size for path in written.path.iterdir())
        saved = {"bytes": size, "kinds": [each["kind"] for each in written.entries],
                 "skipped": list(written.skipped.values())}  # fmt: skip
    elif save:
        found = torch.compiler.save_cache_artifacts()
        if found is None:
            raise RuntimeError("torch.compiler.save_cache_artifacts found nothing to save")
        saved = {"bytes": Path(artifacts).write_bytes(found[0]), "kinds": [], "skipped": []}
    return {
        "seconds": seconds,
        "compiled": compiled,
        "call_ms": statistics.median(each.milliseconds for each in rounds),
        "host_ms": host_ms,
        "output": hashlib.sha256(output.view(torch.uint8).numpy().tobytes()).hexdigest(),
        "saved": saved,
    }


def _traced() -> dict[str, int]:
    """What Dynamo and Inductor did, if they were imported at all."""
    if "torch._dynamo" not in sys.modules:
        return {"graphs": 0, "misses": 0}
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    # A kernel that is found counts as a miss and as a hit.
    misses = sum(count for name, count in inductor.items() if name.endswith("_miss"))
    misses -= inductor["async_compile_cache_hit"]
    return {"graphs": counters["stats"]["unique_graphs"], "misses": misses}


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the model prints is no reply
    given = json.loads(sys.argv[1])
    print(json.dumps(start(given) if "at" in given else prepare(given)), file=replies, flush=True)
