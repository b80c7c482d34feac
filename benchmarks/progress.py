"""Progress of a run: what runs now, how much is done, how long the rest may take."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

WIDTH = 80
# Between two plain lines on one long piece.
LINE_SECONDS = 60.0


class Progress:
    """A live bar on a terminal, plain lines elsewhere.

    The time left follows from the seconds planned for the whole run, and from how long things took so far.
    """

    def __init__(self, console: Console, planned: float) -> None:
        self.console = console
        self.planned = max(planned, 1.0)
        self.done = 0.0
        self._current = 0.0
        self._part = 0.0
        self._what = ""
        self._context = ""
        self._began = self._told = time.monotonic()
        self._bar: Bar | None = None
        if console.is_terminal:
            # Once a second: drawing must not be what a measurement on two cores measures.
            self._bar = Bar(
                TextColumn("{task.description}", table_column=None),
                BarColumn(bar_width=12),
                TextColumn("{task.percentage:>3.0f}% {task.fields[left]}"),
                console=console,
                refresh_per_second=1,
                transient=True,
            )
            self._task = self._bar.add_task("", total=self.planned, left="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def race(self, name: str) -> None:
        """A race starts; what begins from now on belongs to it."""
        self._context = name
        if self._bar is None:
            self.console.print(name, markup=False, highlight=False)

    def begin(self, what: str, seconds: float) -> None:
        """What was going on is over; this starts, planned to take ``seconds``."""
        self.done = min(self.done + self._current, self.planned)
        self._what, self._current, self._part = what, seconds, 0.0
        self._tell()

    def partway(self, share: float, seconds: float) -> None:
        """A share (0 to 1) of what is going on took ``seconds``; the rest is expected to go on at that pace."""
        now = seconds / share
        self.planned += now - self._current
        self._current, self._part = now, seconds
        if self._bar is not None or (share < 1 and time.monotonic() - self._told >= LINE_SECONDS):
            self._tell(f", {100 * share:.0f} %")

    def left(self) -> float:
        """Seconds that the rest may take, by what was planned and what that took so far."""
        elapsed, done = time.monotonic() - self._began, self.done + self._part
        going = self._current - self._part if self._part else 0.0  # measured, not planned
        # The plan counts for half a minute of its own, so that the first processes do not swing the estimate.
        pace = (elapsed + 30.0) / (done + 30.0)
        return going + max(0.0, self.planned - done - going) * pace

    def _tell(self, share: str = "") -> None:
        done, what = self.done + self._part, self._what + share
        left = f"about {words(self.left())} left"
        self._told = time.monotonic()
        if self._bar is not None:
            where = self._context.partition(",")[0]
            text = f"{where}: {what}" if where else what
            self._bar.update(self._task, description=_cut(text, 44), completed=done, total=self.planned, left=left)
        else:
            line = f"  [{100 * done / self.planned:3.0f} %] {what}"
            self.console.print(f"{_cut(line, WIDTH - len(left) - 2)}, {left}", markup=False, highlight=False)

    def note(self, text: str) -> None:
        """Print something that stays."""
        self.console.print(f"  {text}", markup=False, highlight=False)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def words(seconds: float) -> str:
    """A duration for people: ``40 s``, ``3 min``."""
    if seconds < 90:
        return f"{max(1, round(seconds / 5) * 5) if seconds > 10 else max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min"
