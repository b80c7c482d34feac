"""A run's rows among the committed ones: which make way for which, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.promote import main, promote
from benchmarks.record import Result, Rows, Store, load
from tests.rows import ENVIRONMENT, row, write

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
    promote(rows(row(1.0, impl="zoo"), row(2.0, impl="upstream"), row(3.0, impl="zoo", input="arxiv")), tmp_path)
    before = written(tmp_path)
    races = promote(rows(row(0.5, impl="zoo"), id="e2"), tmp_path)
    after = written(tmp_path)
    assert set(after) == {"gcn arxiv zoo eager", "gcn cora zoo eager"}, "an arm of the old race would be of another day"
    assert after["gcn arxiv zoo eager"] == before["gcn arxiv zoo eager"]
    assert after["gcn cora zoo eager"] < before["gcn cora zoo eager"]
    assert [race[1:3] for each in races.values() for race in each] == [("gcn", "cora")]
    file = tmp_path / FOLDER / "gnn-inference-float32.jsonl"
    assert set(Store(file).environments()) == {"e1", "e2"}
    promote(rows(row(0.5, input="arxiv"), id="e2"), tmp_path)
    assert set(Store(file).environments()) == {"e2"}, "nothing names the first any more"


@pytest.mark.parametrize("environment", [{"dirty": True}, {"dirty": None}, {"commit": None}])
def test_rows_of_code_that_nobody_has_are_refused(tmp_path: Path, environment: dict[str, object]) -> None:
    run = write(tmp_path / "run.jsonl", [row()], {**ENVIRONMENT, **environment})
    assert main([str(run), "--results", str(tmp_path / "results")]) == 2
    assert not (tmp_path / "results").exists()


def test_a_stopped_race_is_refused_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped = row(impl="upstream")
    stopped.status, stopped.reason, stopped.steady = "interrupted", "stopped", None
    run = write(tmp_path / "run.jsonl", [row(impl="zoo"), stopped])
    assert main([str(run), "--results", str(tmp_path / "results")]) == 2
    assert "--resume" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_the_command_names_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run.jsonl", [row(), row(input="arxiv")])
    assert main([str(run), "--results", str(tmp_path / "results")]) == 0
    assert "gcn · arxiv" in capsys.readouterr().out
    assert set(written(tmp_path / "results")) == {"gcn cora zoo eager", "gcn arxiv zoo eager"}
    assert main([str(tmp_path / "nothing")]) == 2
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2
    assert "empty holds no rows; give the folder that" in capsys.readouterr().err


def test_a_race_for_a_question_stands_beside_and_replaces_its_own_name_alone(tmp_path: Path) -> None:
    promote(rows(row(1.0, impl="zoo"), row(2.0, impl="upstream")), tmp_path)
    for name, ms in (("claim-30", 3.0), ("claim-20", 4.0), ("claim-30", 5.0)):
        promote(rows(row(ms, impl="upstream"), id=f"e{ms}"), tmp_path, extra=name)
    assert set(written(tmp_path)) == {"gcn cora zoo eager", "gcn cora upstream eager"}
    found = load(tmp_path)
    assert {result.case.impl for result in found.results} == {"zoo", "upstream"}
    medians = {name: [float(str(r.environment)[1:]) for r in results] for name, results in found.extra.items()}
    assert medians == {"claim-20": [4.0], "claim-30": [5.0]}


@pytest.mark.parametrize("name", ["", "..", "a/b", "Claim 30"])
def test_a_name_that_is_no_folder_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run.jsonl", [row()])
    assert main([str(run), "--results", str(tmp_path / "results"), "--extra", name]) == 2
    assert repr(name) in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
