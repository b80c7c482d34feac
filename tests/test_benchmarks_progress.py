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


def test_a_terminal_gets_a_live_bar():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80)
    with Progress(console, 10) as progress:
        progress.race("gcn on karate")
        progress.begin("zoo full", 5)
        progress.note("an arm failed")
    assert "an arm failed" in text.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0, "1 s"), (7, "7 s"), (43, "45 s"), (89, "90 s"), (150, "2 min")])
def test_durations_for_people(seconds: float, text: str):
    assert words(seconds) == text
