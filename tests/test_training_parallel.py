"""Several processes on the CPU: each group is started once and runs all of its checks (``parallel_process.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from parallel_process import PROCESSES, checks

HERE = Path(__file__).parent


def run(group: str, folder: Path) -> dict[str, list[str]]:
    """What each process of a group found wrong, by check."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]), "OMP_NUM_THREADS": "1"}
    environment |= {"TRITON_INTERPRET": str(int(group == "interpreter"))}
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "parallel_process.py"), str(rank), group, str(folder)],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(PROCESSES[group])
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=280)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    found: dict[str, list[str]] = {}
    for rank, error in enumerate(errors):
        written = folder / f"{group}-{rank}.json"
        assert written.exists(), f"rank {rank} ended early: {error[-2000:]}"
        for name, wrong in json.loads(written.read_text()).items():
            found.setdefault(name, []).append(wrong)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def quick(folder: Path) -> dict[str, list[str]]:
    return run("quick", folder)


SLOW = [pytest.param(group, marks=pytest.mark.slow) for group in ("families", "artifacts", "four")]


@pytest.mark.parametrize("group", ["quick", "one", "interpreter", *SLOW])
def test_several_processes(request: pytest.FixtureRequest, folder: Path, group: str) -> None:
    quick = request.getfixturevalue("quick") if group in ("quick", "one", "four") else {}
    found = quick if group == "quick" else run(group, folder)
    assert found.keys() == checks(group, folder).keys()
    assert not any(map(any, found.values())), "\n".join(each for wrong in found.values() for each in wrong)
    # The second one ends in the check of that.
    assert {name for name, wrong in found.items() if len(wrong) < PROCESSES[group]} <= {"one dies"}


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
    assert done.returncode == 0, done.stderr[-6000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2]
