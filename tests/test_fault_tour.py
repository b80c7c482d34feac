"""What goes wrong on real machines: each fault has a clear message, no finished row is lost, and --resume goes on.

The disks, kills and missing compilers here are real where that needs no GPU. Tests run as root, too, whom no permission
stops: a folder that cannot be written is one below a regular file.
"""

import errno
import io
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console

from benchmarks import measure, run
from benchmarks.cli import Progress, UsageError, run_command
from benchmarks.measure import INTERRUPTED, UNWRITABLE, Run, gpu_alone, locked
from benchmarks.plan import Case
from benchmarks.process import ROOT, Worker, WorkerFailure, failure_of
from benchmarks.record import Result, Store
from benchmarks.report.cells import race_notes
from benchmarks.startup import COLD, RACE, ArmRun, Job, Settings, bring_up, failures_of, prepare_race, processes
from tests.fake_workload import WORKLOAD
from tests.rows import ENVIRONMENT, row, shown
from tests.runs import CASE, EAGER, FAKE, LIGHT, Notes, rows_of, settings_in
from zoo.engine.compat import refuse_old_torch

pytestmark = pytest.mark.usefixtures("no_worker_stays")
BUSY = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (scratch := tmp_path / "scratch").mkdir()
    return settings_in(scratch, quick=True)


def parent_of(pid: int) -> int | None:
    """The process that started it, or took it over; None once it has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def children_of(pid: int) -> list[int]:
    running = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [each for each in running if parent_of(each) == pid]


def wait_for(what: Callable[[], Any], seconds: float = 150.0) -> Any:
    """The first true value of ``what()``; fails when there is none in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if value := what():
            return value
        time.sleep(0.05)
    pytest.fail(f"waited {seconds:g} s in vain")


@pytest.mark.slow
def test_a_run_outlives_its_worker_refuses_a_second_run_and_is_resumed_after_a_kill(tmp_path: Path) -> None:
    out, hangs = tmp_path / "run", tmp_path / "hangs"
    command = [sys.executable, "-m", "benchmarks.run", "--family", FAKE, "--device", "cpu", "--impl", "zoo"]
    command += ["--model", "hang,good,hang-too", "--strategy", "eager", "--quick", "--rounds", "6", "--out", str(out)]
    resume = [*command, "--resume"]
    store = Store(out / "fake-inference-float32.jsonl")
    environment = os.environ | LIGHT | {"FAKE_HANGS": str(hangs)}
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(hangs.exists)
        (worker,) = children_of(run.pid)
        os.kill(worker, signal.SIGKILL)
        hangs.unlink()
        wait_for(hangs.exists)  # the run went on, through the next race into the last
        second = subprocess.run(resume, cwd=ROOT, env=environment, capture_output=True, text=True)
        (orphan,) = children_of(run.pid)
    finally:
        run.kill()
        run.wait()
    # It would sleep for a minute.
    wait_for(lambda: parent_of(orphan) is None, seconds=20.0)
    assert second.returncode == 2 and second.stderr.count("\n") == 1
    assert f"another run is writing to {out}; wait until it has ended, or name another place" in second.stderr

    crashed, good = store.results()
    assert (crashed.case.model, crashed.status, good.case.model, good.status) == ("hang", "crashed", "good", "ok")
    assert "killed by SIGKILL (on Linux often because memory ran out) during start_up" in (crashed.reason or "")

    before = store.path.read_bytes()
    resumed = subprocess.run(resume, cwd=ROOT, env=os.environ | LIGHT, capture_output=True, text=True)
    assert resumed.returncode == 0 and "2 races, 2 arms, 1 done before" in resumed.stdout, resumed
    assert store.path.read_bytes().startswith(before), "no row is lost"
    assert {r.case.model: r.status for r in store.results()} == {"hang": "ok", "good": "ok", "hang-too": "ok"}
    written = [each["case"]["model"] for each in store.rows() if each["kind"] == "result"]
    assert written == ["hang", "good", "hang", "hang-too"]


def attempt(
    out: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, cases: list[Case], *, resume: bool = False,
    after: Callable[[], Any] = lambda: None,
) -> tuple[int, str, list[Result]]:  # fmt: skip
    """A run whose arms are rows at once: its exit code, what it says without line ends, and the rows in its file."""

    def measured(cases: Any, settings: Any, report: Any, emit: Callable[[Result], None], **_: Any) -> None:
        for case in cases:
            emit(replace(row(1.0), case=case))
        after()

    monkeypatch.setattr(measure, "run_race", measured)
    monkeypatch.setattr(measure, "_environment", lambda plan, settings, *_: ({**ENVIRONMENT, "peaks": {}}, settings))
    console = Console(file=io.StringIO(), width=80)
    plan = Run(WORKLOAD, "cpu", cases, {}, out)
    plan.skip_done(resume=resume)
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = measure.measure(plan, settings, console)
    finally:
        signal.signal(signal.SIGTERM, before)
    return code, console.file.getvalue().replace("\n", ""), plan.stores()[0].results()


def test_a_run_that_is_told_to_end_keeps_what_is_done_and_says_how_to_go_on(tmp_path, settings, monkeypatch):
    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # which is taken as Ctrl-C
        time.sleep(10)  # the signal comes before

    code, said, rows = attempt(tmp_path / "run", settings, monkeypatch, [CASE], after=end)
    assert code == INTERRUPTED and f"--resume --out {tmp_path / 'run'}" in said
    assert [result.status for result in rows] == ["ok"]


def test_a_folder_is_held_by_one_run_and_let_go(tmp_path: Path) -> None:
    for out in (tmp_path / "new" / "folder", tmp_path / "rows.jsonl"):
        with locked(out), pytest.raises(UsageError, match=f"another run is writing to {out}"), locked(out):
            pass
        with locked(out):
            pass
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_what_a_killed_run_left_is_swept_and_what_a_living_one_needs_stays(tmp_path: Path, own_folder: None) -> None:
    for name in ("regional-zoo-run-killed", "regional-zoo-run-new", "somebody-elses"):
        (tmp_path / name / "caches").mkdir(parents=True)
    left = {"regional-zoo-run-new", "somebody-elses"}  # the first is perhaps of a run that is about to hold it
    with measure.settings_of(FAKE) as living:
        for folder in (tmp_path / "regional-zoo-run-killed", tmp_path / "somebody-elses", living.scratch):
            os.utime(folder, (0, 0))
        with measure.settings_of(FAKE) as second:
            assert {path.name for path in tmp_path.iterdir()} == {*left, living.scratch.name, second.scratch.name}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_a_full_disk_keeps_whole_rows(tmp_path: Path) -> None:
    store, (soft, hard) = Store(tmp_path / "rows.jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)
    store.append(ENVIRONMENT)
    # The kernel's own limit, which refuses writes as a full disk does, in the middle of a row.
    resource.setrlimit(resource.RLIMIT_FSIZE, (40 * 1024, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            for number in range(20):
                store.append(row(1.0 + number, model=f"m{number}").to_json())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert 0 < len(store.results()) < 20
    assert store.path.read_bytes().endswith(b"\n"), "the row that did not fit is gone to its last byte"


def test_a_full_disk_stops_the_run_with_its_own_code_and_resume_goes_on(tmp_path, own_folder, settings, monkeypatch):
    room, whole = 2, Store.append  # for the environment and one row

    def append(store: Store, row: Any) -> None:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(store.path))
        room -= 1
        whole(store, row)

    monkeypatch.setattr(Store, "append", append)
    out = tmp_path / "run"
    cases = [replace(EAGER, model=model) for model in ("good", "raise", "oom")]
    code, said, rows = attempt(out, settings, monkeypatch, cases)
    assert code == UNWRITABLE and code not in (0, 1, 2, INTERRUPTED)
    assert os.strerror(errno.ENOSPC) in said and f"Continue with --resume --out {out}" in said
    assert [result.case.model for result in rows] == ["good"]
    room = 100
    code, said, rows = attempt(out, settings, monkeypatch, cases, resume=True)
    assert code == 0 and "1 done before" in said
    assert [result.case.model for result in rows] == ["good", "raise", "oom"]


def _below_a_file(tmp_path: Path) -> Path:
    """A folder that nobody can make, root included."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "folder"


def test_without_a_place_for_rows_or_the_gpu_that_was_asked_for_nothing_is_measured(tmp_path, capsys, monkeypatch):
    out = str(_below_a_file(tmp_path))
    arguments = ["--family", FAKE, "--device", "cpu", "--strategy", "eager", "--impl", "zoo", "--out", out]
    assert run_command(run.main, "run", arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"--out: {out} cannot be written (Not a directory); name another place" in error
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_command(run.main, "run", ("--family", FAKE, "--device", "cuda")) == 2
    captured = capsys.readouterr()
    assert "--device cuda: torch finds no usable GPU here; use --device cpu" in captured.err
    assert captured.out == "" and captured.err.count("\n") == 1


def test_a_cache_folder_that_cannot_be_made_is_a_row_an_arm_and_none_at_all_a_line(tmp_path, settings, monkeypatch):
    folder = _below_a_file(tmp_path)
    rows = rows_of(replace(settings, scratch=folder), EAGER, CASE)
    assert {result.status for result in rows.values()} == {"failed"} and len(rows) == 2
    for said in ("its cache folder cannot be made", str(folder), "set TMPDIR to a folder on another"):
        assert all(said in (result.reason or "") for result in rows.values())
    monkeypatch.setattr("tempfile.tempdir", str(_below_a_file(tmp_path)))
    with pytest.raises(UsageError, match="the compiler's caches have no folder .*; set TMPDIR to one"), \
            measure.settings_of(FAKE):  # fmt: skip
        pass


@pytest.mark.parametrize(
    ("model", "status", "remedy"),
    [
        ("full", "failed", f"{os.strerror(errno.ENOSPC)}.*make room, or set TMPDIR"),
        ("busy", "device-busy", "another process holds the GPU: wait for it, or name another in CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_full_disk_or_a_busy_gpu_under_a_worker_is_a_row_that_says_what_to_do(settings, model, status, remedy):
    (result,) = rows_of(settings, replace(EAGER, model=model)).values()
    assert result.status == status and (result.status in measure.BROKEN) == (model == "full")
    assert re.search(remedy, result.reason or "")
    assert Result.from_json(result.to_json()) == result


def begin(out: Path, settings: Settings) -> None:
    plan = Run(WORKLOAD, "cpu", [CASE], {}, out)
    measure._environment(plan, settings, Progress(Console(file=io.StringIO()), []), ExitStack())


@pytest.mark.slow
def test_no_cpp_compiler_is_said_before_anything_is_measured(tmp_path, settings, monkeypatch):
    monkeypatch.setenv("BENCHMARKS_BACKEND", "inductor")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UsageError, match=r"no C\+\+ compiler works here: install g\+\+ or clang\+\+, or name one"):
        begin(tmp_path / "run", settings)


@pytest.mark.slow
def test_a_broken_cache_entry_is_compiled_anew_or_a_row_that_says_so(settings, monkeypatch):
    monkeypatch.setenv("BENCHMARKS_BACKEND", "inductor")
    arm = ArmRun(case=CASE, folder=settings.scratch / "arm")
    for _, worker in processes([Job(arm, COLD)], settings, Notes()):
        arm.result.cold = bring_up(arm, worker, settings)
        worker.stop()
    assert arm.ok and arm.result.cold.cache_misses == 1, arm.result.reason

    def start_warm(broken: Callable[[Path], bool]) -> None:
        for file in (arm.folder / "cache").rglob("*"):
            if file.is_file() and broken(file):
                file.write_bytes(b"garbage")
        prepare_race([arm], settings, Notes(), settings.scratch / "reference.pt")

    start_warm(lambda file: "fxgraph" in file.parts or "aotautograd" in file.parts)
    assert arm.ok, arm.result.reason
    assert (arm.result.warm.cache_hits, arm.result.warm.cache_misses) == (0, 1)
    assert arm.result.check.error is not None and arm.result.check.error < 1e-6
    arm.worker.kill()
    arm.worker = None

    start_warm(lambda file: True)
    assert arm.result.status == "failed"
    assert "an entry of the compiler's caches may be broken: measure again" in (arm.result.reason or "")


def test_a_warm_start_that_fails_where_the_cold_one_worked_blames_the_caches_and_a_miss_is_noted(settings):
    def after(phase: str, operation: str, *, cold: bool) -> str:
        arm = ArmRun(case=CASE, folder=settings.scratch)
        arm.result.cold = row(1.0, strategy="full").cold if cold else None
        with failures_of(arm, phase):
            raise WorkerFailure("failed", "NameError: name 'garbage' is not defined", operation)
        return arm.result.reason or ""

    assert "may be broken: measure again" in after(RACE, "first_call", cold=True)
    for phase, operation, cold in ((RACE, "first_call", False), (RACE, "check", True), (COLD, "first_call", True)):
        assert "broken" not in after(phase, operation, cold=cold)
    results = [row(1.0), row(0.5, strategy="full", cold=2.0, warm=1.9, graphs=3)]
    assert not any("missed a cache" in note for note in race_notes(shown(results)))
    results[1].warm.cache_misses = 2
    said = "The warm start of these missed a cache and compiled something anew: zoo full."
    assert said in race_notes(shown(results))


def behind_the_compilers(cause: Exception) -> Exception:
    error = RuntimeError(f"backend='inductor' raised:\n{type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (BUSY, "device-busy", "CUDA_VISIBLE_DEVICES"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "out-of-memory", "out of memory"),
        (MemoryError(), "out-of-memory", "MemoryError"),
        (torch.OutOfMemoryError("7 GiB"), "out-of-memory", "OutOfMemoryError: 7 GiB"),
        (behind_the_compilers(torch.OutOfMemoryError("7 GiB")), "out-of-memory", "7 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out-of-memory", "RuntimeError"),
        (ValueError("no"), "failed", "ValueError: no"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "out-of-memory", "CUBLAS"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "failed", "a disk is full"),
        # The remedy, which a long message does not push out.
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x" * 1500), "failed", "the compiler's caches go there"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), "failed", "a disk is full"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "/x"), "failed", "the disk cannot be written"),
        (PermissionError(errno.EACCES, "Permission denied", "/data/of/the/user"), "failed", "/data/of/the/user"),
    ],
)
def test_errors_of_devices_and_disks_are_typed_with_a_remedy(error: Exception, status: str, said: str) -> None:
    reply = failure_of(error)
    assert reply["status"] == status and said in reply["reason"] and "\n" not in reply["reason"]
    assert len(reply["reason"]) < 600


def test_a_users_own_file_is_not_called_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/caches")
    assert "TMPDIR" not in failure_of(PermissionError(errno.EACCES, "Permission denied", "/data/x"))["reason"]
    assert "TMPDIR" in failure_of(PermissionError(errno.EACCES, "Permission denied", "/caches/x"))["reason"]


def test_a_busy_gpu_is_one_line_before_anything_is_measured(tmp_path, settings, monkeypatch):
    reply = failure_of(BUSY)
    monkeypatch.setattr(Worker, "ask", Mock(side_effect=WorkerFailure(reply["status"], reply["reason"])))
    with pytest.raises(UsageError, match="could not be measured .*another process holds the GPU") as caught:
        begin(tmp_path / "run", settings)
    assert "\n" not in str(caught.value)


NEEDS = "zoo needs torch 2.11 or newer, this is torch"


@pytest.mark.parametrize("version", ["2.10.0", "2.9.1+cu128", "1.13.1", "2.1.0a0+git123"])
def test_an_old_torch_is_refused_in_one_line(version: str) -> None:
    said = f"{NEEDS} {version}; pip install --upgrade torch"
    with pytest.raises(ImportError, match=f"^{re.escape(said)}$"):
        refuse_old_torch(version)
    for new in ("2.11.0", "2.11.0a0+nightly", "2.15.0+cu132", "3.0.0", torch.__version__):
        refuse_old_torch(new)


def test_with_an_old_torch_every_way_in_says_so() -> None:
    # One process, which imports torch once; it prints what each way in exits with and writes.
    program = """
import contextlib, io, runpy, sys, torch
torch.__version__ = torch.torch_version.TorchVersion("2.9.1")
for module, *arguments in (["zoo"], ["benchmarks.run", "--family", "gnn", "--device", "cpu"]):
    sys.argv = [module, *arguments]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            __import__("zoo") if module == "zoo" else runpy.run_module(module, run_name="__main__")
    except ImportError as error:
        print(module, 1, error)
    except SystemExit as error:
        print(module, error.code, said.getvalue().strip())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    ways = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert [way[:2] for way in ways] == [["zoo", "1"], ["benchmarks.run", "2"]], done
    assert all(f"{NEEDS} 2.9.1; pip install --upgrade torch" in way[2] for way in ways)


def gets_in(uuid: str | None, notes: list[str] | None = None) -> bool:
    """Whether another run gets the lock now; one that has to wait does so in a thread."""
    entered = threading.Event()

    def enter() -> None:
        with gpu_alone(uuid, ([] if notes is None else notes).append):
            entered.set()

    threading.Thread(target=enter, daemon=True).start()
    return entered.wait(0.5)


def test_one_run_has_a_gpu_and_others_wait_where_there_is_a_place_for_locks(own_folder, monkeypatch):
    notes: list[str] = []
    with gpu_alone("GPU-1", notes.append), gpu_alone(None, print):
        assert not gets_in("GPU-1", notes) and gets_in("GPU-2") and gets_in(None)  # of a CPU
    assert gets_in("GPU-1") and notes == ["waiting for another run on this GPU"]
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    notes: list[str] = []
    with gpu_alone("GPU-1", notes.append):
        assert len(notes) == 1 and "does not wait" in notes[0]


def test_what_another_user_holds_is_waited_for(own_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def as_another_user(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_RDWR and "regional-zoo" in str(path):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest)

    with gpu_alone("GPU-1", print):
        monkeypatch.setattr(os, "open", as_another_user)
        assert not gets_in("GPU-1")
