"""Progress of a run in plain lines: what runs now, how much is done, how long the rest may take."""

from __future__ import annotations

import time

from rich.console import Console

WIDTH = 80
LINE_SECONDS = 60.0  # between two lines on one long piece


class Progress:
    """The time left follows from the seconds planned for the whole run, and from how long things took so far."""

    def __init__(self, console: Console, planned: float) -> None:
        self.console = console
        self.planned = max(planned, 1.0)
        self.done = 0.0
        self._current = 0.0
        self._what = ""
        self._began = self._told = time.monotonic()

    def race(self, name: str) -> None:
        """A race starts; what begins from now on belongs to it."""
        self.console.print(name, markup=False, highlight=False)

    def begin(self, what: str, seconds: float) -> None:
        """What was going on is over; this starts, planned to take ``seconds``."""
        self.done = min(self.done + self._current, self.planned)
        self._what, self._current = what, seconds
        self._tell(self.done, what)

    def partway(self, share: float) -> None:
        """A share (0 to 1) of what is going on is done; a line where it takes long."""
        if share < 1 and time.monotonic() - self._told >= LINE_SECONDS:
            self._tell(self.done + share * self._current, f"{self._what}, {100 * share:.0f} %")

    def left(self, done: float) -> float:
        """Seconds that the rest may take, so many of the planned ones being done."""
        # The plan counts for half a minute of its own, so that the first processes do not swing the estimate.
        pace = (time.monotonic() - self._began + 30.0) / (done + 30.0)
        return max(0.0, self.planned - done) * pace

    def _tell(self, done: float, what: str) -> None:
        self._told = time.monotonic()
        left = f"about {words(self.left(done))} left"
        line, room = f"  [{100 * done / self.planned:3.0f} %] {what}", WIDTH - len(left) - 2
        line = line if len(line) <= room else line[: room - 1] + "…"
        self.console.print(f"{line}, {left}", markup=False, highlight=False)

    def note(self, text: str) -> None:
        """Print something that stays."""
        self.console.print(f"  {text}", markup=False, highlight=False)


def words(seconds: float) -> str:
    """A duration for people: ``40 s``, ``3 min``."""
    if seconds < 90:
        return f"{max(1, round(seconds / 5) * 5) if seconds > 10 else max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min"
