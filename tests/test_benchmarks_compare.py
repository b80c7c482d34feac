import functools
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import compare, stats
from benchmarks.cli import run_command
from benchmarks.compare import Change
from benchmarks.record import Result, Rows
from benchmarks.stats import Ratio
from tests.rows import ENVIRONMENT, ENVIRONMENTS, failure, race, row, write

main = functools.partial(run_command, compare.command, "compare")


def _compared(old: list[Result], new: list[Result]) -> dict[str, Change]:
    changes = compare.compare(Rows(old, ENVIRONMENTS), Rows(new, ENVIRONMENTS))
    return {change.row.case.arm: change for change in changes}


def _run(tmp_path: Path, old: list[Result], new: list[Result], *options: str) -> int:
    paths = [write(tmp_path / name / "rows.jsonl", rows) for name, rows in (("old", old), ("new", new))]
    return main([*map(str, paths), *options])


def test_verdicts_of_what_got_faster_slower_and_stayed() -> None:
    changes = _compared(race(), race({"zoo full": 0.8, "zoo regional": 1.2}))
    assert "zoo eager (A/A)" not in changes
    told = {arm: change.verdict for arm, change in changes.items() if change.verdict != "undetermined"}
    assert told == {"zoo full": "faster", "zoo regional": "slower"}
    slower = changes["zoo regional"]
    assert slower.ratio.value == pytest.approx(1 / 1.2, rel=0.01)
    assert slower.regressed(0.05) and slower.regressed(0.15) and not slower.regressed(0.25)


def test_a_slowdown_within_the_noise_of_either_run_is_undetermined() -> None:
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


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(tmp_path / "same", race(), race()) == 0
    assert _run(tmp_path / "faster", race(), race({"zoo full": 0.5})) == 0
    assert _run(tmp_path / "slower", race(), race({"zoo full": 1.2})) == 1
    said = capsys.readouterr().out
    assert "zoo full: slower by more than 5 %" in " ".join(said.split()) and max(map(len, said.splitlines())) <= 80
    assert _run(tmp_path / "allowed", race(), race({"zoo full": 1.2}), "--max-regression", "30%") == 0


def test_noise_that_hides_a_regression_has_its_own_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_cases_in_only_one_run_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = [row(1.0), row(1.0, model="gat")], [row(1.0), row(1.0, model="sage")]
    assert _run(tmp_path, old, new) == 0
    said = capsys.readouterr().out
    assert "Only in the old run:\n  gnn / gat" in said and "Only in the new run:\n  gnn / sage" in said


def test_different_devices_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = str(write(tmp_path / "old.jsonl", race()))
    new = str(write(tmp_path / "new.jsonl", race({"zoo full": 1.2}), {**ENVIRONMENT, "gpu": "NVIDIA A100"}))
    assert main([old, new]) == 2
    assert "old run is from NVIDIA H200, the new one from NVIDIA A100" in capsys.readouterr().err
    cpu = str(write(tmp_path / "cpu.jsonl", race(device="cpu")))
    assert main([old, cpu]) == 2 and "no arm is in both" in capsys.readouterr().err


def test_one_folder_with_two_devices_is_ambiguous(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "h200" / "rows.jsonl", race())
    write(tmp_path / "a100" / "rows.jsonl", race(), {**ENVIRONMENT, "gpu": "NVIDIA A100"})
    assert main([str(tmp_path), str(tmp_path / "h200")]) == 2
    assert "in the same run; give the folder or file of one device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{rows}"], "Missing argument"),
        (["{rows}", "{rows}", "--max-regresion", "3%"], "--max-regression"),
        (["{rows}", "{rows}", "--max-regression", "5"], "got '5'; write 5%"),
        (["{rows}", "{rows}", "--max-regression", "five"], "got 'five'; write 5%"),
        (["{rows}", "{rows}", "--max-regression", "-1%"], "at least 0, got '-1%'"),
        (["{rows}", "{rows}.gz"], "does not exist; give a .jsonl file"),
        (["{rows}", "{empty}"], "empty holds no rows; give the folder that benchmarks.run --out wrote to"),
        (["{empty}", "{rows}"], "empty holds no rows; give the folder that benchmarks.run --out wrote to"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    rows = write(tmp_path / "rows.jsonl", race())
    (tmp_path / "empty").mkdir()
    assert main([word.format(rows=rows, empty=tmp_path / "empty") for word in arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert captured.out == ""


def _ratio(low: float, high: float) -> Ratio:
    return Ratio((low + high) / 2, low, high, 30, paired=True)


@pytest.mark.parametrize(
    ("samples", "said"),
    [([], "no samples"), ([1.0, math.nan], "sample 1 is nan"), ([math.inf], "inf"), ([0.0], "above 0"), ([-1.0], "-1")],
)
def test_bad_samples_are_named(samples: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        stats.median(samples)
    with pytest.raises(ValueError, match=said):
        stats.unpaired_ratio(samples, [1.0])


def test_pairing_cancels_what_slows_a_whole_round() -> None:
    random = np.random.RandomState(1)
    drift = random.uniform(1, 3, size=40)  # a clock that wanders by a factor of three
    reference = drift * 2.0 * random.normal(1, 0.002, size=40)
    arm = drift * random.normal(1, 0.002, size=40)
    paired = stats.paired_ratio(list(reference), list(arm))
    assert paired.low < 2.0 < paired.high and paired.high - paired.low < 0.02
    unpaired = stats.unpaired_ratio(list(reference), list(arm))
    assert unpaired.high - unpaired.low > 10 * (paired.high - paired.low)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    random = np.random.RandomState(2)
    ratios = 0
    for _ in range(200):
        reference, arm = 3.0 * random.lognormal(0, 0.1, size=20), random.lognormal(0, 0.1, size=20)
        ratio = stats.paired_ratio(list(reference), list(arm))
        ratios += ratio.low <= 3.0 <= ratio.high
    assert 0.89 <= ratios / 200 <= 0.99


def test_too_few_rounds_give_no_interval() -> None:
    few = stats.MIN_ROUNDS - 1
    ratio = stats.paired_ratio([2.0] * few, [1.0] * few)
    assert ratio.value == 2 and not ratio.has_interval
    assert stats.verdict(ratio, 0.0) == "undetermined"
    assert stats.noise_floor(ratio) == math.inf
    enough = stats.paired_ratio([2.0] * 6, [1.0] * 6)
    assert enough.has_interval and stats.verdict(enough, 0.0) == "faster"
