"""Runs on one GPU: any number gets ready together, one measures alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import benchmarks.startup
from benchmarks import locks
from benchmarks.locks import GpuLock
from tests.runs import EAGER, Notes, rows_of, settings_in


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def gets_in(hold: Callable[[], AbstractContextManager[None]]) -> bool:
    """Whether another run gets the lock now; one that has to wait does so in a thread."""
    entered = threading.Event()

    def enter() -> None:
        with hold():
            entered.set()

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    return entered.wait(0.5)


def test_some_get_ready_together_and_one_measures_alone() -> None:
    notes: list[str] = []
    one, other = GpuLock("GPU-1"), GpuLock("GPU-1", notes.append)
    with one.shared():
        assert gets_in(other.shared) and not notes
        assert not gets_in(other.alone)
    with one.alone():
        assert not gets_in(other.shared)
        assert gets_in(GpuLock("GPU-2").alone), "another device"
    assert gets_in(other.alone)
    assert set(notes) == {"waiting for other runs on this GPU"}


def test_a_cpu_is_nobodys() -> None:
    with GpuLock(None).alone():
        assert gets_in(GpuLock(None).alone)


def test_without_a_place_for_locks_runs_go_on_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    notes: list[str] = []
    with GpuLock("GPU-1", notes.append).alone():
        assert GpuLock("GPU-1").measured_once({}, lambda: {"a": 1}) == {"a": 1}
    assert len(notes) == 1 and "does not wait" in notes[0]


def test_what_another_user_holds_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def as_another_user(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_RDWR and "regional-zoo" in str(path):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest)

    with GpuLock("GPU-1").alone():
        monkeypatch.setattr(os, "open", as_another_user)
        assert not gets_in(GpuLock("GPU-1").shared)


def test_a_killed_run_leaves_no_lock_behind(tmp_path: Path) -> None:
    code = (
        "import tempfile, time; from benchmarks.locks import GpuLock\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "with GpuLock('GPU-1').alone():\n    print('in', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    assert process.stdout.readline() == b"in\n"
    assert not gets_in(GpuLock("GPU-1").shared)
    process.kill()
    process.wait()
    process.stdout.close()
    assert gets_in(GpuLock("GPU-1").alone)


def test_what_one_run_found_holds_for_those_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def find() -> dict[str, Any]:
        found.append(len(found))
        return {"peak": found[-1]}

    assert GpuLock("GPU-1").measured_once({"dtype": "float32"}, find) == {"peak": 0}
    assert GpuLock("GPU-1").measured_once({"dtype": "float32"}, find) == {"peak": 0}
    assert GpuLock("GPU-1").measured_once({"dtype": "bfloat16"}, find) == {"peak": 1}
    assert GpuLock("GPU-2").measured_once({"dtype": "bfloat16"}, find) == {"peak": 2}
    monkeypatch.setattr(locks, "FRESH_SECONDS", 0.0)
    assert GpuLock("GPU-2").measured_once({"dtype": "bfloat16"}, find) == {"peak": 3}


@pytest.mark.slow
@pytest.mark.parametrize(("steady_only", "curve"), [(True, 0), (False, 0), (False, 3)])
def test_a_race_is_ready_together_and_timed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steady_only: bool, curve: int
) -> None:
    log: list[str] = []

    class Noted(GpuLock):
        @contextmanager
        def shared(self) -> Iterator[None]:
            log.append("shared")
            yield
            log.append("apart")

        @contextmanager
        def alone(self) -> Iterator[None]:
            log.append("alone")
            yield
            log.append("over")

    original = benchmarks.startup.ArmRun.ask

    def noted(arm: Any, operation: str, **payload: Any) -> Any:
        log.append(operation)
        return original(arm, operation, **payload)

    monkeypatch.setattr(benchmarks.startup.ArmRun, "ask", noted)
    real = benchmarks.startup.bring_up

    def bring_up(*args: Any) -> Any:
        log.append("compile")
        return real(*args)

    monkeypatch.setattr(benchmarks.startup, "bring_up", bring_up)
    settings = settings_in(tmp_path, rounds=1, gpu_lock=Noted(None), quick=True, steady_only=steady_only, curve=curve)
    (row,) = rows_of(settings, replace(EAGER, workload="train" if curve else "inference"), notes=_Rounds(log)).values()
    assert row.status == "ok", row.reason
    before = ["shared", "compile", "apart"] if steady_only else ["shared", "apart", "alone", "compile", "over"]
    timed = ["alone", "calibrate", "host", "round", "round 1.0", "over"]
    profiled = ["alone", "kernels", "over"]
    drawn = ["shared", "curve", "apart"] if curve else []
    assert log == [*before, *timed, *profiled, *drawn]
    assert len(row.curve or []) == curve


class _Rounds(Notes):
    """A reporter that writes down how far a race is."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def partway(self, share: float, seconds: float) -> None:
        super().partway(share, seconds)
        self.log.append(f"round {share}")
