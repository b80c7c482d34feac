"""Rows that look like measured ones, for tests of everything that reads rows. Made by a seeded generator."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plan import Case
from benchmarks.record import Check, Compile, Memory, Result, Steady, Store, Work
from benchmarks.report.model import MeasuredRace, races

ENVIRONMENT: dict[str, Any] = {
    "kind": "environment", "id": "e1", "gpu": "NVIDIA H200", "driver": "580.65", "torch": "2.11.0+cu130",
    "cpu": "Xeon Platinum 8480C", "cpu_count": 16, "libraries": {"torch-geometric": "2.8.0", "triton": "3.6.0"},
    "time": "2026-03-01T12:00:00Z", "commit": "0123456789abcdef", "dirty": False,
}  # fmt: skip

ENVIRONMENTS = {"e1": ENVIRONMENT}

# What GCN on Cora may look like on an H200: milliseconds a call, cold and warm compile seconds, graphs, kernels.
ARMS: tuple[tuple[dict[str, Any], float, float, float, int, int], ...] = (
    ({"impl": "upstream", "strategy": "eager"}, 0.68, 0.0, 0.0, 0, 61),
    ({"impl": "upstream", "strategy": "full"}, 0.682, 4.2, 2.11, 5, 38),
    ({"impl": "upstream", "strategy": "full", "mode": "reduce-overhead"}, 0.41, 5.3, 2.7, 5, 38),
    ({"impl": "upstream", "strategy": "regional"}, 0.61, 3.1, 1.9, 4, 38),
    ({"impl": "upstream-tuned", "strategy": "full", "cuda_graph": True}, 0.052, 3.6, 1.8, 1, 14),
    ({"impl": "zoo", "strategy": "eager"}, 0.42, 0.0, 0.0, 0, 22),
    ({"impl": "zoo", "strategy": "full"}, 0.197, 2.9, 1.31, 1, 9),
    ({"impl": "zoo", "strategy": "regional"}, 0.23, 1.4, 0.71, 2, 9),
    ({"impl": "zoo", "strategy": "regional", "cuda_graph": True}, 0.048, 1.42, 0.72, 2, 9),
    ({"impl": "zoo", "strategy": "eager", "control": True}, 0.4205, 0.0, 0.0, 0, 22),
)


def row(
    milliseconds: float = 1.0, *, cold: float = 0.0, warm: float = 0.0, graphs: int = 0, kernels: int = 10,
    breaks: int = 0, seed: int = 0, rounds: int = 30, noise: float = 0.004, environment: str | None = "e1", **case: Any,
) -> Result:  # fmt: skip
    case = {"family": "gnn", "model": "gcn", "input": "cora", "device": "cuda", **case}
    random = np.random.RandomState(seed)
    drift = np.random.RandomState(99).uniform(1, 1.05, size=rounds)  # all arms share it: the clock of each round
    times = [float(value) for value in milliseconds * drift * random.lognormal(0, noise, size=rounds)]
    compiled = case.get("strategy", "eager") != "eager"
    captured = case.get("cuda_graph", False)

    def _compile(seconds: float, hits: int, misses: int) -> Compile:
        return Compile(
            start_up=2.3, seconds=seconds if compiled else None, capture=0.031 if captured else None,
            time_to_first_result=seconds + 2.4 if compiled else 0.4, graphs=graphs if compiled else None,
            breaks=[f"Unsupported: self-loop op {index}" for index in range(breaks)],
            cache_empty_at_start=hits == 0, cache_hits=hits, cache_misses=misses, cache_bypasses=0,
        )  # fmt: skip

    made, wall = Case(**case), [1.01 * t for t in times]
    return Result(
        case=made,
        cold=_compile(cold, 0, graphs),
        warm=_compile(warm, graphs, 0),
        steady=Steady(device_ms=times, wall_ms=wall, rounds=list(range(rounds)), calls_per_round=50),
        memory=Memory(allocated=21_400_000, reserved=44_040_192, model=372_764),
        check=Check(error=2.1e-7 if compiled else 1.9e-7, eager_error=1.9e-7, reference_dtype="float64"),
        work=Work(flops=520_000_000, bytes=22_000_000, kernels=kernels, peak_flops=51e12, peak_bandwidth=4.3e12),
        data="generated, power-law",
        sizes={"nodes": 2708, "edges": 10556, "features": 1433},
        command=command(made),
        environment=environment,
    )


def command(case: Case) -> str:
    return (
        f"python -m benchmarks.run --family {case.family} --model {case.model} --input {case.input} "
        f"--workload {case.workload} --dtype {case.dtype} --device {case.device} "
        f"--impl {case.impl} --strategy {case.strategy_name} --mode {case.mode} --rounds 30"
    )


def failure(status: str, reason: str, **case: Any) -> Result:
    made = Case(**{"family": "gnn", "model": "gcn", "input": "cora", "device": "cuda", **case})
    return Result(case=made, status=status, reason=reason, command=command(made), environment="e1")


def race(scale: Mapping[str, float] | None = None, **case: Any) -> list[Result]:
    """All arms of one race. ``scale`` multiplies an arm's time, by the arm's name."""
    rows = []
    for seed, (arm, milliseconds, cold, warm, graphs, kernels) in enumerate(ARMS):
        name = Case(family="", model="", input="", **arm).arm
        factor = (scale or {}).get(name, 1.0)
        breaks = 4 if arm["impl"] == "upstream" and arm["strategy"] != "eager" else 0
        figures = {"cold": cold, "warm": warm, "graphs": graphs, "kernels": kernels, "breaks": breaks, "seed": seed}
        rows.append(row(milliseconds * factor, **figures, **arm, **case))
    return rows


def write(path: Path, results: list[Result], environment: Mapping[str, Any] = ENVIRONMENT) -> Path:
    store = Store(path)
    store.append(environment)
    for result in results:
        store.append(result.to_json())
    return path


def shown(results: list[Result]) -> MeasuredRace:
    """The one race that these rows are."""
    (race,) = races(results, ENVIRONMENTS)
    return race


def uncompiled(results: list[Result]) -> list[Result]:
    """The same rows without compile figures, as of a run that measured the steady state alone."""
    for result in results:
        result.cold = result.warm = None
    return results
