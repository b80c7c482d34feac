"""Progress: plain lines that fit, and an estimate that follows what things really take."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.progress import Progress, words


def plain() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=80), text


def test_plain_lines_say_what_runs_how_far_and_how_long():
    console, text = plain()
    with Progress(console, 100) as progress:
        progress.race("gcn on karate")
        progress.begin("zoo full: cold process", 40)
        progress.begin("a very long name of an arm that would not fit into one line of a small terminal", 60)
    lines = text.getvalue().splitlines()
    assert lines[0] == "gcn on karate"
    assert lines[1].startswith("  [  0 %] zoo full: cold process, about ")
    assert lines[2].startswith("  [ 40 %] a very long name")
    assert lines[2].endswith("left")
    assert all(len(line) <= 80 for line in lines)


def test_the_estimate_follows_the_pace(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("benchmarks.progress.time.monotonic", lambda: now[0])
    console, _ = plain()
    progress = Progress(console, 1000)
    assert progress.left() == 1000
    progress.begin("first", 500)
    now[0] = 1000.0  # twice as long as planned
    progress.begin("second", 500)
    assert 900 < progress.left() <= 1000
    progress.begin("third", 0)
    assert progress.left() == 0


def test_rounds_that_take_longer_than_planned_say_so(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("benchmarks.progress.time.monotonic", lambda: now[0])
    console, text = plain()
    progress = Progress(console, 12)
    progress.begin("race: arms 3, rounds 40", 2)
    for number in range(1, 41):
        now[0] += 6.0  # four minutes in all, and nobody had known
        progress.partway(number / 40, now[0])
        if number < 40:
            assert progress.left() >= 240 - now[0]
    progress.begin("kernel counts and profile", 10)
    assert progress.done == pytest.approx(240)
    first, *later, last = text.getvalue().splitlines()
    assert first.startswith("  [  0 %] race: arms 3, rounds 40, about ")
    assert [line.partition(", about")[0] for line in later] == [
        "  [ 24 %] race: arms 3, rounds 40, 25 %",
        "  [ 48 %] race: arms 3, rounds 40, 50 %",
        "  [ 72 %] race: arms 3, rounds 40, 75 %",
    ]
    assert [line.rpartition(", ")[2] for line in later] == ["about 3 min left", "about 2 min left", "about 70 s left"]
    assert last.startswith("  [ 96 %] kernel counts")


def test_short_rounds_are_no_lines_and_no_longer_than_planned(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("benchmarks.progress.time.monotonic", lambda: now[0])
    console, text = plain()
    progress = Progress(console, 30)
    progress.begin("race", 20)
    for number in range(1, 11):
        now[0] += 0.5
        progress.partway(number / 10, now[0])
    progress.begin("counting", 10)
    assert progress.planned == 15 and progress.done == 5
    assert len(text.getvalue().splitlines()) == 2


def test_a_terminal_gets_a_live_bar():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80)
    with Progress(console, 10) as progress:
        progress.race("gcn on karate")
        progress.begin("zoo full", 5)
        progress.partway(0.5, 2.0)
        progress.note("an arm failed")
    assert "an arm failed" in text.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0, "1 s"), (7, "7 s"), (43, "45 s"), (89, "90 s"), (150, "2 min")])
def test_durations_for_people(seconds: float, text: str):
    assert words(seconds) == text
