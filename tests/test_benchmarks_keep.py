"""A run's rows among the committed ones: which make way for which, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.keep import keep, main
from benchmarks.result import Result, Rows, Store, load
from tests.rows import ENVIRONMENT, row

FOLDER = "nvidia-h200-torch2.11.0"


def written(results: Path, name: str = "gnn-inference-float32.jsonl") -> dict[str, float]:
    """Times by model, input and arm, as they stand in the file."""
    rows = load(results / FOLDER / name)
    return {
        f"{r.case.model} {r.case.input} {r.case.arm}": r.steady.device_ms[0] if r.steady else 0.0 for r in rows.results
    }


def rows(*results: Result, **environment: object) -> Rows:
    name = str(environment.get("id", "e1"))
    for result in results:
        result.environment = name
    return Rows(list(results), {name: {**ENVIRONMENT, **environment}})


def test_a_race_replaces_the_one_before_and_no_other(tmp_path: Path) -> None:
    keep(rows(row(1.0, impl="zoo"), row(2.0, impl="upstream"), row(3.0, impl="zoo", input="arxiv")), tmp_path)
    before = written(tmp_path)
    races = keep(rows(row(0.5, impl="zoo"), id="e2"), tmp_path)
    after = written(tmp_path)
    assert set(after) == {"gcn arxiv zoo eager", "gcn cora zoo eager"}, "an arm of the old race would be of another day"
    assert after["gcn arxiv zoo eager"] == before["gcn arxiv zoo eager"]
    assert after["gcn cora zoo eager"] < before["gcn cora zoo eager"]
    assert [race[1:3] for each in races.values() for race in each] == [("gcn", "cora")]
    file = tmp_path / FOLDER / "gnn-inference-float32.jsonl"
    assert set(Store(file).environments()) == {"e1", "e2"}
    keep(rows(row(0.5, input="arxiv"), id="e2"), tmp_path)
    assert set(Store(file).environments()) == {"e2"}, "nothing names the first any more"


def test_files_are_of_a_family_a_workload_and_a_dtype(tmp_path: Path) -> None:
    keep(rows(row(workload="train"), row(dtype="bfloat16"), row(family="bert", model="bert-base")), tmp_path)
    names = {"gnn-train-float32.jsonl", "gnn-inference-bfloat16.jsonl", "bert-inference-float32.jsonl"}
    assert {file.name for file in (tmp_path / FOLDER).iterdir()} == names


@pytest.mark.parametrize("environment", [{"dirty": True}, {"dirty": None}, {"commit": None}])
def test_rows_of_code_that_nobody_has_are_refused(tmp_path: Path, environment: dict[str, object]) -> None:
    run = tmp_path / "run.jsonl"
    Store(run).append({**ENVIRONMENT, **environment})
    Store(run).append(row().to_json())
    assert main([str(run), "--results", str(tmp_path / "results")]) == 2
    assert not (tmp_path / "results").exists()


def test_a_stopped_race_is_refused_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.jsonl"
    stopped = row(impl="upstream")
    stopped.status, stopped.reason, stopped.steady = "interrupted", "stopped", None
    Store(run).append(ENVIRONMENT)
    for result in (row(impl="zoo"), stopped):
        Store(run).append(result.to_json())
    assert main([str(run), "--results", str(tmp_path / "results")]) == 2
    assert "--resume" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_the_command_takes_some_races_and_names_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.jsonl"
    Store(run).append(ENVIRONMENT)
    for result in (row(input="cora"), row(input="arxiv"), row(model="gat", input="arxiv")):
        Store(run).append(result.to_json())
    arguments = [str(run), "--results", str(tmp_path / "results")]
    assert main([*arguments, "--model", "gcn", "--input", "arxiv"]) == 0
    assert "gcn · arxiv" in capsys.readouterr().out
    assert set(written(tmp_path / "results")) == {"gcn arxiv zoo eager"}
    assert main([*arguments, "--model", "gnc"]) == 2
    assert "did you mean 'gcn'" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2
