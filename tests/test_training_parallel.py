"""Several processes on the CPU: each group is started once and runs all of its checks (``parallel_process.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from parallel_process import build, checks, resume

HERE = Path(__file__).parent


def run(kind: str, processes: int, folder: Path, within: int) -> dict[str, list[str]]:
    """What each process found wrong, by check."""
    path = os.pathsep.join([str(HERE.parent), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "parallel_process.py")]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(processes), kind, str(folder)],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=within)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    found: dict[str, list[str]] = {}
    for rank, error in enumerate(errors):
        written = folder / f"{kind}-{rank}.json"
        assert written.exists(), f"rank {rank} ended early: {error[-2000:]}"
        for name, wrong in json.loads(written.read_text()).items():
            found.setdefault(name, []).append(wrong)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, list[str]]:
    return run("quick", 2, folder, within=200)


@pytest.mark.parametrize("name", checks("quick", Path()))
def test_two_processes(two: dict[str, list[str]], name: str) -> None:
    # The second one ends in the last check.
    assert len(two[name]) == (1 if name == "one dies" else 2)
    assert not any(two[name]), "\n".join(two[name])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("name", "kind"), [("llm-debug", "dp_shard"), ("llm-debug", "tp"), ("gcn-debug", "dp_replicate")]
)
def test_one_process_goes_on_from_a_checkpoint_of_two(
    two: dict[str, list[str]], folder: Path, name: str, kind: str
) -> None:
    assert two
    resume(folder, name, kind, build(name))


@pytest.mark.slow
def test_all_families_on_two_processes(folder: Path) -> None:
    found = run("families", 2, folder, within=280)
    assert found.keys() == checks("families", folder).keys()
    assert not any(map(any, found.values())), "\n".join(each for wrong in found.values() for each in wrong)


@pytest.mark.slow
def test_four_processes(two: dict[str, list[str]], folder: Path) -> None:
    assert two
    found = run("four", 4, folder, within=280)
    assert found.keys() == checks("four", folder).keys()
    assert not any(map(any, found.values())), "\n".join(each for wrong in found.values() for each in wrong)


@pytest.mark.slow
@pytest.mark.parametrize("dimension", ["dp_shard", "dp_replicate", "tp"])
def test_the_example_trains_on_two_processes(dimension: str) -> None:
    command = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "examples/train_parallel.py",
        "llm-debug",
    ]
    done = subprocess.run(
        [sys.executable, "-m", *command, "--dimension", dimension, "--steps", "3"],
        cwd=HERE.parent, env={**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2]
