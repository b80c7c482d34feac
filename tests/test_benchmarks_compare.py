"""Rows: their round trip, what is refused by name, a run's among the committed ones, and two runs compared."""

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import compare, stats
from benchmarks.cli import UsageError, run_command
from benchmarks.compare import Change
from benchmarks.promote import command, promote
from benchmarks.record import KernelTime, Result, Rows, Store, device_name, load
from tests.rows import ENVIRONMENT, ENVIRONMENTS, failure, race, row, write

promoting = functools.partial(run_command, command, "promote")


def test_rows_survive_the_round_trip_and_the_newest_of_a_case_wins(tmp_path: Path) -> None:
    profiled = row(1.0, model="gat")
    profiled.work.longest = [KernelTime(name=f"kernel_{n}", launches=24.0, microseconds=300.5 - n) for n in range(2)]
    profiled.work.others = KernelTime(name="9 others", launches=12.5, microseconds=20.0)
    rows = [*race(), profiled, failure("crashed", "signal 11", strategy="hierarchical")]
    store = Store(write(tmp_path / "new" / "rows.jsonl", rows))
    assert store.results() == rows
    assert store.environments() == {"e1": ENVIRONMENT}
    path = write(tmp_path / "rows.jsonl", [row(1.0, seed=1), row(9.0, model="gat"), row(2.0, seed=2)])
    models = [(result.case.model, round(result.steady.samples[0])) for result in Store(path).results() if result.steady]
    assert models == [("gcn", 2), ("gat", 9)]


@pytest.mark.parametrize("keep", [1, 40, -1, None])
def test_append_after_a_row_cut_short_spoils_nothing_and_after_one_without_its_line_end_keeps_it(tmp_path, keep):
    path = write(tmp_path / "rows.jsonl", [row(1.0)])
    whole = path.read_bytes()
    cut = json.dumps(row(2.0, model="gat").to_json()).encode()[:keep]
    path.write_bytes(whole.rstrip(b"\n") if keep is None else whole + cut)
    store = Store(path)
    assert [result.case.model for result in store.results()] == ["gcn"]  # what was cut is dropped on reading
    store.append(row(3.0, model="sage").to_json())
    assert [result.case.model for result in store.results()] == ["gcn", "sage"]
    assert path.read_bytes().startswith(whole) and path.read_bytes().count(b"\n") == 3


def _changed(**changes: Any) -> dict[str, Any]:
    return {**row(1.0).to_json(), **changes}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (_changed(schema=7), r"rows\.jsonl:2: the row has schema 7, this code reads 1"),
        (_changed(speed=1, colour=2), r"speed: .*; colour: .*; newer code wrote this row: update"),
        (_changed(check={"error": 1e-7, "digits": 3}), r"check\.digits: Unexpected"),
        (_changed(case={"family": "gnn"}), r"case\.model: Field required"),
        (_changed(case=None), r"rows\.jsonl:2: case: Input should be"),
        (_changed(work={"longest": [{"name": "gemm"}]}), r"work\.longest\.0\.launches: Field required"),
        (_changed(status="fine"), "status 'fine'"),
        (_changed(environment="e9"), "environment 'e9' is in no row before it"),
        ('{"kind": "res', r"rows\.jsonl:2 is not a JSON row .* repair or delete"),
        ('{"kind": "environment", "id": "e1", "clock": NaN}', "NaN is not JSON"),
    ],
)
def test_unreadable_rows_are_refused_by_name(tmp_path: Path, bad: dict[str, Any] | str, said: str) -> None:
    path = write(tmp_path / "rows.jsonl", [])
    with path.open("a") as file:
        file.write(f"{bad if isinstance(bad, str) else json.dumps(bad)}\n")
    with pytest.raises(ValueError, match=said):
        Store(path).results()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_named(value: float) -> None:
    result = row(1.0)
    result.steady.device_ms[3] = value
    with pytest.raises(ValueError, match=r"steady\.device_ms\.3: Input should be a finite number"):
        result.to_json()


def test_load_reads_folders_and_keeps_environments_apart(tmp_path: Path) -> None:
    write(tmp_path / "a" / "rows.jsonl", [row(1.0)])
    write(tmp_path / "b" / "rows.jsonl", [row(2.0)], {**ENVIRONMENT, "gpu": "NVIDIA A100"})  # the same id
    rows = load(tmp_path)
    found = [device_name(rows.environment(result), result.case.device) for result in rows.results]
    assert found == ["NVIDIA H200", "NVIDIA A100"]
    write(tmp_path / "c" / "rows.jsonl", [row(3.0)])
    newest = load(tmp_path).results  # the same case, device and torch: the later path wins
    assert [round(result.steady.samples[0]) for result in newest if result.steady] == [3, 2]
    write(tmp_path / "d" / "rows.jsonl", [row(4.0)], {**ENVIRONMENT, "time": "2025-01-01T00:00:00Z"})  # measured before
    newest = load(tmp_path).results
    assert [round(result.steady.samples[0]) for result in newest if result.steady] == [3, 2]


FOLDER = "nvidia-h200-torch2.11.0"


def written(results: Path, name: str = "gnn-inference-float32.jsonl") -> dict[str, float]:
    """Times by model, input and arm, as they stand in the file."""
    rows = load(results / FOLDER / name).results
    return {f"{r.case.model} {r.case.input} {r.case.arm}": r.steady.device_ms[0] for r in rows}


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


@pytest.mark.parametrize(
    ("rows", "environment", "said"),
    [
        ([row()], {"dirty": True}, "not committed"),
        ([row()], {"dirty": None}, "not committed"),
        ([row()], {"commit": None}, "not committed"),
        ([row(), failure("interrupted", "stopped", impl="upstream")], {}, "measure it to its end with --resume"),
    ],
)
def test_rows_of_code_nobody_has_and_of_a_stopped_race_are_refused_whole(tmp_path, capsys, rows, environment, said):
    run = write(tmp_path / "run.jsonl", rows, {**ENVIRONMENT, **environment})
    assert promoting([str(run), "--results", str(tmp_path / "results")]) == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_the_command_names_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run.jsonl", [row(), row(input="arxiv")])
    assert promoting([str(run), "--results", str(tmp_path / "results")]) == 0
    assert "gcn · arxiv" in capsys.readouterr().out
    assert set(written(tmp_path / "results")) == {"gcn cora zoo eager", "gcn arxiv zoo eager"}
    assert promoting([str(tmp_path / "nothing")]) == 2


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
def test_a_name_that_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(name))):
        promote(rows(row()), tmp_path, extra=name)
    assert not list(tmp_path.iterdir())


comparing = functools.partial(run_command, compare.command, "compare")


def _compared(old: list[Result], new: list[Result]) -> dict[str, Change]:
    changes = compare.compare(Rows(old, ENVIRONMENTS), Rows(new, ENVIRONMENTS))
    return {change.row.case.arm: change for change in changes}


def _run(tmp_path: Path, old: list[Result], new: list[Result], *options: str) -> int:
    paths = [write(tmp_path / name / "rows.jsonl", rows) for name, rows in (("old", old), ("new", new))]
    return comparing([*map(str, paths), *options])


def test_verdicts_of_what_got_faster_slower_and_stayed_or_is_within_the_noise() -> None:
    changes = _compared(race(), race({"zoo full": 0.8, "zoo regional": 1.2}))
    assert "zoo eager (A/A)" not in changes
    told = {arm: change.verdict for arm, change in changes.items() if change.verdict != "undetermined"}
    assert told == {"zoo full": "faster", "zoo regional": "slower"}
    slower = changes["zoo regional"]
    assert slower.ratio.value == pytest.approx(1 / 1.2, rel=0.01)
    assert slower.regressed(0.05) and slower.regressed(0.15) and not slower.regressed(0.25)
    quiet, loud = race({"zoo full": 1.03}), race({"zoo full": 1.03, "zoo eager (A/A)": 1.08})
    assert _compared(race(), quiet)["zoo full"].verdict == "slower"
    assert _compared(race(), loud)["zoo full"].verdict == "undetermined"
    assert _compared(race({"zoo eager (A/A)": 1.08}), quiet)["zoo full"].verdict == "undetermined"


def test_what_else_changed_is_said() -> None:
    new = race()
    full = new[6]
    full.cold.graphs, full.cold.breaks, full.work.kernels, full.check.error = 3, ["why"], 30, 1e-3
    full.memory.allocated = 42_800_000
    change = _compared(race(), new)["zoo full"]
    assert change.notes == (
        "graphs 1 → 3", "breaks 0 → 1", "kernels 9 → 30", "memory 20.4 → 40.8 MiB", "error 2.1e-07 → 1.0e-03",
    )  # fmt: skip
    assert change.grew
    assert not _compared(new, race())["zoo full"].grew
    assert _compared(race(), race())["zoo full"].notes == ()


def test_exit_codes_tell_a_regression_from_noise_that_hides_one(tmp_path, capsys):
    assert _run(tmp_path / "same", race(), race()) == 0
    assert _run(tmp_path / "faster", race(), race({"zoo full": 0.5})) == 0
    assert _run(tmp_path / "slower", race(), race({"zoo full": 1.2})) == 1
    said = capsys.readouterr().out
    assert "zoo full: slower by more than 5 %" in " ".join(said.split()) and max(map(len, said.splitlines())) <= 80
    assert _run(tmp_path / "allowed", race(), race({"zoo full": 1.2}), "--max-regression", "30%") == 0
    loud = race({"zoo full": 1.1, "zoo eager (A/A)": 1.5})
    assert _run(tmp_path / "hidden", race(), loud) == compare.NOISY == 4
    words = " ".join(capsys.readouterr().out.split())
    assert "makes this measurement unusable: measure again on an idle machine" in words
    assert _run(tmp_path / "seen", race(), race({"zoo full": 3.0, "zoo eager (A/A)": 1.5})) == 1
    assert _run(tmp_path / "quiet", race(), race({"zoo eager (A/A)": 1.08})) == 0


@pytest.mark.parametrize("impl", ["zoo", "upstream"])
def test_a_case_that_newly_fails_is_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str], impl: str) -> None:
    fails = [failure("crashed", "signal 11", impl=impl, strategy="full")]
    rest = [result for result in race() if result.case.arm != f"{impl} full"]
    assert _run(tmp_path / "new", race(), [*rest, *fails]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "ok → crashed: signal 11" in said and f"{impl} full: newly crashed" in said
    assert _run(tmp_path / "still", [*rest, *fails], [*rest, *fails]) == 0
    assert _run(tmp_path / "healed", [*rest, *fails], race()) == 0
    assert "crashed → ok" in capsys.readouterr().out


@pytest.mark.parametrize("together", [False, True])
def test_counts_fail_only_when_asked(tmp_path: Path, together: bool) -> None:
    old, new = race(), race()
    if together:  # as by --steady-only
        for result in (*old, *new):
            result.cold = None
    (new[6].cold or new[6].warm).recompiles = ["a size changed"]
    assert _run(tmp_path / "a", old, new) == 0
    assert _run(tmp_path / "b", old, new, "--fail-on-counts") == 1
    assert _run(tmp_path / "c", new, old, "--fail-on-counts") == 0


def test_different_devices_are_refused_and_cases_in_only_one_run_are_listed(tmp_path, capsys):
    a100 = {**ENVIRONMENT, "gpu": "NVIDIA A100"}
    old, cpu = (str(write(tmp_path / f"{name}.jsonl", race(device=name))) for name in ("cuda", "cpu"))
    new = str(write(tmp_path / "both/a100.jsonl", race({"zoo full": 1.2}), a100))
    write(tmp_path / "both/h200.jsonl", race())
    for given, said in (
        ([old, new], "old run is from NVIDIA H200, the new one from NVIDIA A100"),
        ([old, cpu], "no arm is in both"),
        ([str(tmp_path / "both"), old], "in the same run; give the folder or file of one device"),
    ):
        assert comparing(given) == 2 and said in capsys.readouterr().err
    old, new = [row(1.0), row(1.0, model="gat")], [row(1.0), row(1.0, model="sage")]
    assert _run(tmp_path, old, new) == 0
    said = capsys.readouterr().out
    assert "Only in the old run:\n  gnn / gat" in said and "Only in the new run:\n  gnn / sage" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{rows}"], "Missing argument"),
        (["{rows}", "{rows}", "--max-regresion", "3%"], "--max-regression"),
        (["{rows}", "{rows}", "--max-regression", "5"], "got '5'; write 5%"),
        (["{rows}", "{rows}", "--max-regression", "-1%"], "at least 0, got '-1%'"),
        (["{rows}", "{rows}.gz"], "does not exist; give a .jsonl file"),
        (["{rows}", "{empty}"], "empty holds no rows; give the folder that benchmarks.run --out wrote to"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(tmp_path, capsys, arguments, said) -> None:
    rows = write(tmp_path / "rows.jsonl", race())
    (tmp_path / "empty").mkdir()
    assert comparing([word.format(rows=rows, empty=tmp_path / "empty") for word in arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("samples", "said"),
    [([], "no samples"), ([1.0, math.nan], "sample 1 is nan"), ([math.inf], "inf"), ([0.0], "above 0"), ([-1.0], "-1")],
)
def test_bad_samples_are_named(samples: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        stats.median(samples)
    with pytest.raises(ValueError, match=said):
        stats.unpaired_ratio(samples, [1.0])


def test_pairing_cancels_what_slows_a_whole_round_and_intervals_cover_the_truth() -> None:
    random = np.random.RandomState(1)
    drift = random.uniform(1, 3, size=40)  # a clock that wanders by a factor of three
    reference = drift * 2.0 * random.normal(1, 0.002, size=40)
    arm = drift * random.normal(1, 0.002, size=40)
    paired = stats.paired_ratio(list(reference), list(arm))
    assert paired.low < 2.0 < paired.high and paired.high - paired.low < 0.02
    unpaired = stats.unpaired_ratio(list(reference), list(arm))
    assert unpaired.high - unpaired.low > 10 * (paired.high - paired.low)
    random = np.random.RandomState(2)
    ratios = 0
    for _ in range(200):
        reference, arm = 3.0 * random.lognormal(0, 0.1, size=20), random.lognormal(0, 0.1, size=20)
        ratio = stats.paired_ratio(list(reference), list(arm))
        ratios += ratio.low <= 3.0 <= ratio.high
    assert 0.89 <= ratios / 200 <= 0.99
