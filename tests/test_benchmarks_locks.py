"""Runs on one GPU wait for each other."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import gpu_alone


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def gets_in(uuid: str | None, notes: list[str] | None = None) -> bool:
    """Whether another run gets the lock now; one that has to wait does so in a thread."""
    entered = threading.Event()

    def enter() -> None:
        with gpu_alone(uuid, ([] if notes is None else notes).append):
            entered.set()

    threading.Thread(target=enter, daemon=True).start()
    return entered.wait(0.5)


def test_one_run_has_a_gpu_and_others_wait() -> None:
    notes: list[str] = []
    with gpu_alone("GPU-1", notes.append), gpu_alone(None, print):
        assert not gets_in("GPU-1", notes) and gets_in("GPU-2") and gets_in(None)  # of a CPU
    assert gets_in("GPU-1") and notes == ["waiting for another run on this GPU"]


def test_without_a_place_for_locks_runs_go_on_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    notes: list[str] = []
    with gpu_alone("GPU-1", notes.append):
        assert len(notes) == 1 and "does not wait" in notes[0]


def test_what_another_user_holds_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def as_another_user(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_RDWR and "regional-zoo" in str(path):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest)

    with gpu_alone("GPU-1", print):
        monkeypatch.setattr(os, "open", as_another_user)
        assert not gets_in("GPU-1")


def test_a_killed_run_leaves_no_lock_behind(tmp_path: Path) -> None:
    code = (
        "import tempfile, time; from benchmarks.measure import gpu_alone\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "with gpu_alone('GPU-1', print):\n    print('in', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    assert process.stdout is not None and process.stdout.readline() == b"in\n"
    assert not gets_in("GPU-1")
    process.kill()
    process.wait()
    process.stdout.close()
    assert gets_in("GPU-1")
