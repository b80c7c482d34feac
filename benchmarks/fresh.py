"""One start of a model by phases, from a new process to its first result. ``benchmarks.deploy`` runs this module.

Nothing heavy is imported before the clock starts. The harness' own imports are a phase outside the total.
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS = 5


def prepare(asked: dict[str, Any]) -> dict[str, Any]:
    """Write model and inputs to a file, which all processes of the implementation read; returns device facts."""
    import torch

    from benchmarks import families, machine
    from benchmarks.plan import Case
    from benchmarks.strategies import READY_BATCHES

    case = Case(**asked["case"])
    torch.manual_seed(0)
    prepared = families.load(asked["workload"]).prepare(case, data_root=None, seed=0)
    if (training := prepared.training) is not None:
        batches = [training.batch(index) for index in range(READY_BATCHES)]
        training = replace(training, batch=batches.__getitem__)
    torch.save((prepared.model, prepared.inputs, prepared.static, prepared.dynamic, training), asked["model"])
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
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

    with phase("torch"):
        import torch
    with phase("library"):
        importlib.import_module(asked["library"])
        if asked["library"] == "zoo" and device != "cpu":
            importlib.import_module("triton")  # timed here: the kernels need it, and the harness imports it later
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
        kept = torch.load(asked["model"], map_location=device, mmap=True, weights_only=False)
    model, inputs, static, dynamic, training = kept
    prepared = Prepared(
        model=model, inputs=inputs, dynamic=dynamic, reference=torch.Tensor, bytes=0, bytes_formula="", data="",
        training=training,
    )  # fmt: skip
    ours, loss = case.impl == "zoo", None if training is None else training.loss_module
    compiled_parts = {artifacts: model} if loss is None else {artifacts: model, f"{artifacts}-loss": loss}
    # The saving process captures nothing. All processes use the optimizer of a captured step, to save its kernels.
    trains = replace(case, cuda_graph=ours and device != "cpu")
    trainer = None
    if training is not None:
        with phase("optimizer"):  # imports torch's compiler
            optimizer = strategies.make_optimizer(model, training, capturable=trains.cuda_graph, ours=ours)
        with phase("harness"):
            trainer = strategies.Trainer(trains, prepared, optimizer)
    files = cache_contents()
    with strategies.execution_mode(case):
        call = model
        if load:
            with phase("load"):
                if ours:
                    for folder, part in compiled_parts.items():
                        zoo.load_compiled(part, folder, strict=True)
                else:
                    torch.compiler.load_cache_artifacts(Path(artifacts).read_bytes())
            files = cache_contents()
        with phase("first call"):
            if not (load and ours):
                call = strategies.apply(case, prepared)
            step = partial(call, **inputs) if trainer is None else trainer.compiled(call)
            step()
        if case.cuda_graph:
            with phase("capture"):
                if trainer is None:
                    step = partial(zoo.cuda_graph(call, kwargs=inputs, static=static, clone_outputs=False), **inputs)
                else:
                    step = trainer.captured(call)
                step()
        compiled = {"files": len(cache_contents() - files), **_traced()}
        calls = timing.calibrate(step, device)
        rounds = [timing.back_to_back(step, device, calls) for _ in range(ROUNDS)]
        host_ms = timing.host(step, device)
        if hasattr(model, "reset"):
            model.reset()
        output = (_flat(step()) if trainer is None else trainer.losses(step)).cpu().contiguous()
    saved = None
    if save and ours:
        written = [zoo.save_compiled(part, folder) for folder, part in compiled_parts.items()]
        saved = {
            "bytes": sum(path.stat().st_size for each in written for path in each.path.iterdir()),
            "kinds": [entry["kind"] for each in written for entry in each.entries],
            "skipped": [why for each in written for why in each.skipped.values()],
        }
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
    """Counters of Dynamo and Inductor, if they were imported."""
    if "torch._dynamo" not in sys.modules:
        return {"graphs": 0, "misses": 0}
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    # Inductor counts a kernel that is found as a miss and as a hit.
    misses = sum(count for name, count in inductor.items() if name.endswith("_miss"))
    misses -= inductor["async_compile_cache_hit"]
    return {"graphs": counters["stats"]["unique_graphs"], "misses": misses}


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps prints of the model out of the reply
    given = json.loads(sys.argv[1])
    print(json.dumps(start(given) if "at" in given else prepare(given)), file=replies, flush=True)
