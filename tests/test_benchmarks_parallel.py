"""Arms of the harness in two processes of torchrun, on the CPU with a light backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cli import UsageError
from benchmarks.record import Store
from benchmarks.run import main
from tests.runs import LIGHT

ROOT = Path(__file__).parents[1]
ALL = ["zoo eager", "zoo regional", "upstream regional"]
LLM = {"family": "llm", "model": ["llm-debug"], "device": "cpu"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "torchrun --nproc-per-node 2 -m benchmarks.run --family llm --model llm-debug --input 2x16"),
        ({"parallel": "fsdp2"}, "'fsdp2' is not known; did you mean 'fsdp'"),
        ({"impl": ["zoo"]}, "arms are chosen by --arm"),
        ({"arm": ["zoo full"]}, "no arm matches 'zoo full'"),
        ({"workload": "inference", "input": ["decode-1x64"]}, "fsdp is for --workload train"),
    ],
)
def test_wrong_usage_says_what_to_do(options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "arm" in options or "workload" in options:
        monkeypatch.setenv("RANK", "0")
    else:
        monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match=words):
        main(**{**LLM, "input": ["2x16"], "workload": "train", "parallel": "fsdp", **options})


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
         "benchmarks.run", "--device", "cpu", "--rounds", "2", *words],
        cwd=ROOT, env={**os.environ, **LIGHT, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "words", "arms"),
    [
        ("fsdp", "--family llm --model llm-debug --input 2x16 --workload train", ALL),
        ("ddp", "--family gnn --model graphsage --input karate-sampled --workload train", ALL),
        ("tp", "--family llm --model llm-debug --input decode-1x64", ALL[:2]),
    ],
)
def test_rows_of_two_processes(parallel: str, words: str, arms: list[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = torchrun(*words.split(), "--parallel", parallel, "--out", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    assert max(map(len, done.stdout.splitlines())) <= 80 and "scaling is over one process" in " ".join(
        done.stdout.split()
    )
    environment, *rows = Store(out).rows()
    assert environment["commit"] and environment["collectives"] == "gloo"
    assert [f"{row['case']['impl']} {row['case']['strategy']}" for row in rows] == arms
    for row in rows:
        assert (row["status"], row["ranks"], row["environment"]) == ("ok", 2, environment["id"])
        assert row["alone"]["steady"]["wall_ms"] and len(row["of_ranks"]) == 2
        graphs = [each["graphs"] for each in row["of_ranks"]]
        assert graphs[0] == graphs[1] and bool(graphs[0]) == (row["case"]["strategy"] == "regional")
        assert row["case"]["impl"] != "zoo" or (row["alone"]["graphs"], row["of_ranks"][0]["breaks"]) == (graphs[0], [])
        if parallel == "tp":
            assert row["error"] < 1e-5
        else:
            assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-3)
            each = [of_rank["losses"] for of_rank in row["of_ranks"]]
            assert (each[0] == each[1]) == row["command"].endswith(
                ("'zoo eager'", "'zoo regional'")
            )  # the zoo's are means


@pytest.mark.slow
def test_an_arm_that_fails_is_a_row(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["--family", "gnn", "--model", "gcn", "--input", "karate", "--workload", "train", "--parallel", "tp"]
    done = torchrun(*words, "--arm", "zoo regional", "--out", str(out))
    assert done.returncode == 1
    (row,) = [row for row in Store(out).rows() if row["kind"] == "parallel"]
    assert row["status"] == "failed" and "no tensor-parallel plan for GCN" in row["reason"]
