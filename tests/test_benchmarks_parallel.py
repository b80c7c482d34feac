"""Training in the harness; arms in two processes, and starts of new ones, on the CPU with a light backend."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import deploy, families
from benchmarks.cli import UsageError, run_command
from benchmarks.families.base import Prepared
from benchmarks.plan import Case
from benchmarks.record import ARTIFACTS, EMPTY, FILLED, Process, Rows, Saved, Start, Store, load
from benchmarks.report.docs import Spec, make_table
from benchmarks.run import main
from benchmarks.strategies import Trainer
from tests import runs
from tests.rows import ENVIRONMENTS
from tests.runs import FAKE, LIGHT, handler

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
        ("zero2", "--family llm --model llm-debug --input 2x16 --workload train --arm *regional", ALL[1:]),
        ("ddp", "--family gnn --model graphsage --input karate-sampled --workload train", ALL),
        ("tp", "--family llm --model llm-debug --input decode-1x64", ALL[:2]),
    ],
)
def test_rows_of_two_processes(parallel: str, words: str, arms: list[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = torchrun(*words.split(), "--parallel", parallel, "--out", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "scaling is over one process" in " ".join(done.stdout.split())
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
            means = row["command"].endswith(("'zoo eager'", "'zoo regional'"))  # the zoo's are
            assert (each[0] == each[1]) == means


@pytest.mark.slow
def test_an_arm_that_fails_is_a_row(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["--family", "gnn", "--model", "gcn", "--input", "karate", "--workload", "train", "--parallel", "tp"]
    done = torchrun(*words, "--arm", "zoo regional", "--out", str(out))
    assert done.returncode == 1
    (row,) = [row for row in Store(out).rows() if row["kind"] == "parallel"]
    assert row["status"] == "failed" and "no tensor-parallel plan for GCN" in row["reason"]


MEASURED = Case(family="bert", model="bert-base", input="32x128", strategy="regional", device="cuda")


def process(first_call: float, output: str = "same", **compiled: int) -> Process:
    seconds = {"python": 0.1, "torch": 2.0, "library": 0.4, "harness": 9.0, "model": 0.5, "first call": first_call}
    counts = {"files": 0, "graphs": 0, **compiled}
    return Process(seconds=seconds, compiled=counts, call_ms=1.5, host_ms=0.25, output=output)


def rows(*loaded: Process) -> Rows:
    saved = Saved(bytes=3 << 20, kinds=["direct", "inductor", "direct"], skipped=[])
    starts = [
        Start(case=MEASURED, source=EMPTY, processes=[process(12.0, graphs=3)], saved=saved),
        Start(case=MEASURED, source=ARTIFACTS, processes=list(loaded)),
        Start(case=replace(MEASURED, strategy="eager"), source=FILLED, processes=[process(0.5), process(0.5, "other")]),
        Start(case=replace(MEASURED, impl="upstream"), source=EMPTY, reason="no memory"),
    ]
    return Rows([], ENVIRONMENTS, starts=[replace(each, command="do it", environment="e1") for each in starts])


def test_the_table_shows_medians_their_spread_what_was_compiled_and_whether_outputs_are_equal() -> None:
    text = make_table(Spec.parse("startup family=bert"), rows(process(0.5), process(0.1), process(0.2)))
    cells = "3.20 (3.10 to 3.50) | 2.50 | – | 0.50 | – | 0.20 | – | 1.50 | 0.250"
    assert f"| zoo regional, artifacts | {cells} |" in text.splitlines()
    assert "3.00 MiB: 2 direct, 1 inductor." in text and "upstream regional, empty caches: no memory." in text
    assert "traced and compiled nothing. Their outputs are bit-equal to those of the process that saved. NV" in text
    assert "```sh\ndo it\n```" in text
    text = make_table(Spec.parse("startup model=bert-base gpu='NVIDIA H200'"), rows(process(1.0, "other", graphs=2)))
    assert "compiled: 2 graphs. Their outputs are not bit-equal" in text and "uncompiled processes differ as" in text
    text = make_table(Spec.parse("startup model=bert-large family=bert"), rows())
    assert "No rows measured yet; run `python -m benchmarks.deploy --family bert --model bert-large`" in text


def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, *arms: str, workload: str = "inference"
) -> tuple[int, Rows]:
    """What ``benchmarks.deploy`` exits with and writes of a model's arms, compiled by Inductor."""
    for name, value in {**LIGHT, "BENCHMARKS_BACKEND": "inductor"}.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "starts.jsonl"
    words = f"--family {FAKE} --model {model} --input small --device cpu --processes 1 --out {out}".split()
    words += ["--workload", workload]
    code = run_command(deploy.main, "deploy", words + [word for arm in arms for word in ("--arm", arm)])
    return code, load(out)


@pytest.mark.slow
def test_new_processes_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = started(tmp_path, monkeypatch, "upstream-crash", "zoo regional*, artifacts", "upstream eager*")
    assert code == 1
    saving, loaded, captured, upstream = found.starts
    assert saving.arm == "zoo regional, empty caches" and len(saving.processes) == 1
    assert saving.saved is not None and saving.saved.kinds == ["inductor"] and saving.saved.bytes > 0
    assert saving.processes[0].compiled["graphs"] == 1 and saving.processes[0].compiled["files"] > 0
    assert "capture" in captured.processes[0].seconds
    for each in (*loaded.processes, *captured.processes):
        assert not any(each.compiled.values()) and each.output == saving.processes[0].output
        assert {"torch", "library", "model", "load", "first call"} < each.seconds.keys() and each.call_ms > 0
        assert each.total < saving.total
    assert upstream.reason and not upstream.processes
    assert "bit-equal" in make_table(Spec.parse("startup family=fake"), found)


@pytest.mark.slow
def test_a_training_step_starts_from_saved_regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = started(tmp_path, monkeypatch, "good", "zoo regional, artifacts", workload="train")
    assert code == 0
    saving, loaded = found.starts
    assert saving.saved is not None and saving.saved.kinds and not saving.saved.skipped
    (process,) = loaded.processes
    assert not any(process.compiled.values()) and process.output == saving.processes[0].output  # the first losses
    assert "**good, small, training, float32**" in make_table(Spec.parse("startup family=fake"), found)


@pytest.mark.slow
def test_torchs_cache_artifacts_and_filled_caches_spare_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found = started(tmp_path, monkeypatch, "good", "upstream full*")
    assert code == 0
    _, cold, cached, filled = found.starts
    assert cold.saved is not None and cold.saved.bytes > 0 and cold.processes[0].compiled["misses"] > 0
    for process in (*cached.processes, *filled.processes):
        assert process.compiled["graphs"] == 1 and not process.compiled["misses"]
        assert ("load" in process.seconds) == (process in cached.processes)
        assert process.output == cold.processes[0].output
    assert "Torch's cache artifacts have" in make_table(Spec.parse("startup family=fake"), found)


CASE = replace(runs.CASE, workload="train")


@pytest.fixture(autouse=True)
def _light_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHMARKS_BACKEND", "aot_eager")


def prepare(**changes: Any) -> Prepared:
    return families.load(FAKE).prepare(replace(CASE, **changes), data_root=None, seed=0)


@pytest.mark.gpu
def test_a_captured_arm_takes_the_same_steps():
    case = replace(CASE, device="cuda", cuda_graph=True)
    prepared = prepare(device="cuda", cuda_graph=True)
    expected = prepared.reference().cpu()
    prepared.model.cuda()
    draw = prepared.training.batch
    prepared.training.batch = lambda index: draw(index).cuda()
    arm = Trainer(case, prepared)
    losses = arm.losses(arm.captured(prepared.model))
    torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=0)


def noted(prepared: Prepared) -> list[torch.Tensor]:
    """The batches that the loss is given from now on."""
    seen: list[torch.Tensor] = []
    squares = prepared.training.loss

    def noting(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch)
        return squares(model, batch)

    prepared.training.loss = noting
    return seen


def test_timed_steps_take_the_loader_s_batches_in_order_and_no_others_do():
    arm = handler(replace(CASE, impl="upstream", strategy="eager"))
    epochs = 0

    def loader() -> Iterator[torch.Tensor]:
        nonlocal epochs
        epochs += 1
        yield from (torch.full((16, 8), float(index)) for index in range(3))

    training, seen = arm.prepared.training, noted(arm.prepared)
    training.loader, training.round = loader, 5
    arm.first_call()
    arm.memory()
    assert epochs == 0
    seen.clear()
    assert arm.calibrate(milliseconds=1.0) == {"calls": 5}
    assert epochs == 1 and not seen  # started, and no step made
    taken = []
    for _ in range(2):
        assert arm.round(calls=5)["calls"] == 5
        assert not torch.equal(seen[0], seen[0][0, 0].expand(16, 8))  # what settles the clocks lies ready
        taken += [int(batch[0, 0]) for batch in seen[-5:]]
        seen.clear()
    assert taken == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    arm.curve(steps=3)
    arm.kernels()
    assert not any(torch.equal(batch, batch[0, 0].expand(16, 8)) for batch in seen)


def test_a_curve_that_no_row_could_hold_is_a_failure_that_names_its_step():
    arm = handler(replace(CASE, strategy="eager"))
    arm.first_call()
    arm.trainer._optimizer.param_groups[0]["lr"] = 1e30
    with pytest.raises(ValueError, match="the loss of step [23] of 9 is (nan|inf)"):
        arm.curve(steps=9)


@pytest.mark.slow
def test_declared_shapes_are_compiled_by_the_first_call_and_are_no_recompiles(tmp_path: Path):
    arm = handler(replace(CASE, strategy="full"))
    training, seen = arm.prepared.training, noted(arm.prepared)
    training.shapes = tuple(torch.randn(rows, 8) for rows in (48, 32, 16))
    arm.trainer = Trainer(arm.case, arm.prepared)
    arm.start_up(folder=str(tmp_path))
    assert [len(batch) for batch in seen[:3]] == [48, 32, 16]
    seen.clear()
    first = arm.first_call()
    assert (first["graphs"], first["recompiles"]) == (3, [])
    assert {len(batch) for batch in seen[:3]} == {48, 32, 16} and len(seen) % 3 == 0
    training.loader, training.round = (lambda: list(reversed(training.shapes))), 3
    arm.round(calls=3)
    assert arm.kernels()["recompiles"] == []


def test_every_declared_shape_is_captured():
    prepared = prepare()
    prepared.training.shapes = tuple(torch.randn(rows, 8) for rows in range(20, 9, -1))
    trainer = Trainer(CASE, prepared)
    seen = noted(prepared)
    step = trainer.captured(prepared.model)  # on the CPU it is as if
    assert [len(batch) for batch in seen] == [*range(20, 9, -1)] * 3  # two warm-ups, and as if captured
    for _ in range(11):  # and warns of none
        step()
