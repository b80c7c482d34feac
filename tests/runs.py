"""Races of the fake workload, and a worker's loop in this process."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import run_race
from benchmarks.machine import Monitor
from benchmarks.plan import Case
from benchmarks.process import serve
from benchmarks.record import Result
from benchmarks.startup import ArmRun, Settings
from benchmarks.worker import Handler

FAKE = "tests.fake_workload"
LIGHT = {"BENCHMARKS_BACKEND": "eager", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
CASE = Case(family="fake", model="good", input="small", strategy="regional")
EAGER = Case(family="fake", model="good", input="small", strategy="eager")
PEAKS = {"copy_bandwidth": 2.0, "read_bandwidth": 3.0, "matmul_flops": {"float32": 5.0}}


class Notes:
    def __init__(self) -> None:
        self.begun, self.notes = [], []

    def begin(self, what: str, kind: str, seconds: float, more: float = 0.0) -> None:
        assert kind and seconds > 0
        self.begun.append(what)

    def note(self, text: str) -> None:
        self.notes.append(text)


def settings_in(folder: Path, **changes: Any) -> Settings:
    given = {"workload": FAKE, "scratch": folder, "monitor": Monitor(), "timeout": 200.0, "rounds": 6, "ahead": 2}
    return Settings(**{**given, **changes})


def arms_of(settings: Settings, *cases: Case) -> list[ArmRun]:
    return [ArmRun(case=case, folder=settings.scratch / str(index)) for index, case in enumerate(cases)]


def rows_of(
    settings: Settings, *cases: Case, notes: Any = None, rows: dict[str, Result] | None = None,
    memory_bytes: Callable[..., int] = lambda case, reference: 1,
) -> dict[str, Result]:  # fmt: skip
    """The rows of one race by arm; also in ``rows``, for races that do not end."""
    found: dict[str, Result] = {} if rows is None else rows
    run_race(
        cases, settings, notes or Notes(), lambda result: found.update({result.case.arm: result}),
        memory_bytes=memory_bytes, peaks=PEAKS,
    )  # fmt: skip
    return found


def handler(case: Case) -> Handler:
    arm = Handler()
    arm.load(workload=FAKE)
    arm.prepare(case=case.to_json(), data_root=None, seed=0)
    return arm


def talk(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    replies = io.StringIO()
    serve(io.StringIO("".join(json.dumps(message) + "\n" for message in messages)), replies)
    return [json.loads(line) for line in replies.getvalue().splitlines()]


def preparation(case: Case) -> list[dict[str, Any]]:
    return [{"op": "load", "workload": FAKE}, {"op": "prepare", "case": case.to_json(), "data_root": None, "seed": 0}]


def told(case: Case, *messages: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The replies by operation to these messages about a case; all must be good."""
    replies = talk(*preparation(case), *messages)
    assert all(reply["ok"] for reply in replies), replies
    return {reply["op"]: reply for reply in replies}
