"""Starts of whole processes: rows of real ones, and the table that rows give."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import deploy
from benchmarks.cli import run_command
from benchmarks.plan import Case
from benchmarks.record import ARTIFACTS, EMPTY, Process, Rows, Saved, Start, load
from benchmarks.report.docs import Spec, make_table
from tests.rows import ENVIRONMENTS
from tests.runs import FAKE, LIGHT

CASE = Case(family="bert", model="bert-base", input="32x128", strategy="regional", device="cuda")


def process(first_call: float, output: str = "same", **compiled: int) -> Process:
    seconds = {"python": 0.1, "torch": 2.0, "library": 0.4, "harness": 9.0, "model": 0.5, "first call": first_call}
    return Process(
        seconds=seconds, compiled={"files": 0, "graphs": 0, **compiled}, call_ms=1.5, host_ms=0.25, output=output
    )


def rows(*loaded: Process) -> Rows:
    saved = Saved(bytes=3 << 20, kinds=["direct", "inductor", "direct"], skipped=[])
    starts = [
        Start(case=CASE, source=EMPTY, processes=[process(12.0, graphs=3)], saved=saved),
        Start(case=CASE, source=ARTIFACTS, processes=list(loaded)),
        Start(case=replace(CASE, impl="upstream"), source=EMPTY, reason="no memory"),
    ]
    return Rows([], ENVIRONMENTS, starts=[replace(each, command="do it", environment="e1") for each in starts])


def test_the_table_shows_medians_their_spread_and_what_artifacts_are_worth() -> None:
    text = make_table(Spec.parse("startup family=bert"), rows(process(0.5), process(0.1), process(0.2)))
    cells = "2.50 s | – | 0.50 s | – | 0.20 s | – | 3.20 s (3.10 to 3.50) | 1.50 ms | 0.250 ms"
    assert f"| zoo regional, artifacts | {cells} |" in text.splitlines()
    assert "3.00 MiB: 2 direct, 1 inductor." in text and "upstream regional, empty caches: no memory." in text
    assert "traced and compiled nothing. Their outputs are bit-equal" in text and "```sh\ndo it\n```" in text


def test_the_table_hides_neither_what_was_compiled_nor_other_outputs() -> None:
    text = make_table(Spec.parse("startup model=bert-base gpu='NVIDIA H200'"), rows(process(1.0, "other", graphs=2)))
    assert "compiled: 2 graphs. Their outputs are not bit-equal" in text
    text = make_table(Spec.parse("startup model=bert-large family=bert"), rows())
    assert "No rows measured yet; run `python -m benchmarks.deploy --family bert --model bert-large`" in text


@pytest.mark.slow
def test_new_processes_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**LIGHT, "BENCHMARKS_BACKEND": "inductor"}.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "starts.jsonl"
    words = f"--family {FAKE} --model upstream-crash --input small --device cpu --processes 1 --out {out}".split()
    words += ["--arm", "zoo regional*, artifacts", "--arm", "upstream eager*"]
    assert run_command(deploy.main, "deploy", words) == 1
    saving, loaded, captured, upstream = load(out).starts
    assert saving.arm == "zoo regional, empty caches" and len(saving.processes) == 1
    assert saving.saved is not None and saving.saved.kinds == ["inductor"] and saving.saved.bytes > 0
    assert saving.processes[0].compiled["graphs"] == 1 and saving.processes[0].compiled["files"] > 0
    assert "capture" in captured.processes[0].seconds
    for each in (*loaded.processes, *captured.processes):
        assert not any(each.compiled.values()) and each.output == saving.processes[0].output
        assert {"torch", "library", "model", "load", "first call"} < each.seconds.keys() and each.call_ms > 0
        assert each.total < saving.total
    assert upstream.reason and not upstream.processes
    assert "bit-equal" in make_table(Spec.parse("startup family=fake"), load(out))
