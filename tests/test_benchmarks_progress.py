"""Progress: plain lines that fit, and an estimate that follows what things really take."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.progress import Progress, words


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr("benchmarks.progress.time.monotonic", lambda: clock[0])
    return clock


def test_lines_say_what_runs_how_far_and_how_long(now: list[float]):
    text = io.StringIO()
    progress = Progress(Console(file=text, width=80), 100)
    progress.race("gcn on karate")
    progress.begin("zoo full: cold process", 40)
    progress.begin("a very long name of an arm that would not fit into one line of a small terminal", 60)
    now[0] += 10.0
    progress.partway(0.2)  # too soon for another line
    now[0] += 60.0
    progress.partway(0.5)
    progress.note("an arm failed")
    lines = text.getvalue().splitlines()
    assert lines[0] == "gcn on karate" and lines[-1] == "  an arm failed"
    assert lines[1].startswith("  [  0 %] zoo full: cold process, about 2 min left")
    assert [line[:9] for line in lines[2:4]] == ["  [ 40 %]", "  [ 70 %]"] and len(lines) == 5
    assert all(len(line) <= 80 for line in lines) and all(line.endswith("left") for line in lines[1:4])


def test_the_estimate_follows_the_pace(now: list[float]):
    progress = Progress(Console(file=io.StringIO()), 1000)
    assert progress.left(0) == 1000
    progress.begin("first", 500)
    now[0] = 1000.0  # twice as long as planned
    progress.begin("second", 500)
    assert progress.done == 500 and 900 < progress.left(progress.done) <= 1000
    progress.begin("third", 0)
    assert progress.left(progress.done) == 0


@pytest.mark.parametrize(("seconds", "text"), [(0, "1 s"), (7, "7 s"), (43, "45 s"), (89, "90 s"), (150, "2 min")])
def test_durations_for_people(seconds: float, text: str):
    assert words(seconds) == text
