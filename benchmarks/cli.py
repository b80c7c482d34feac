"""Shared parts of the commands: checked options, usage errors as one line on stderr with exit code 2, progress."""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

BAD_USAGE = 2
WIDTH = 80


class UsageError(ValueError):
    """The command cannot be run as given; the message says why and what to do."""


def require_zoo() -> None:
    """Raise UsageError with the zoo's own message if it cannot be imported, as with an old torch."""
    try:
        import zoo  # noqa: F401
    except ImportError as error:
        raise UsageError(str(error)) from error


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """The nearest known word, else all of them: ``did you mean 'cora'?``."""
    known = sorted(known)
    near = difflib.get_close_matches(wrong, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"available: {', '.join(known) or 'nothing'}"


def pick(option: str, given: Sequence[str], known: Iterable[str]) -> list[str]:
    """Values of an option that may be repeated or be a comma list, without duplicates; UsageError if one is unknown."""
    values = [value.strip() for part in given for value in part.split(",") if value.strip()]
    if given and not values:
        raise UsageError(f"{option} is empty; {did_you_mean('', known)}")
    for value in values:
        if value not in known:
            raise UsageError(f"{option}: {value!r} is not known; {did_you_mean(value, known)}")
    return list(dict.fromkeys(values))


def run_command(function: Callable[..., int], program: str, arguments: Sequence[str] | None = None) -> int:
    """The exit code of ``function`` called with command-line arguments; 2 after a usage error, printed on one line."""
    import typer

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(function)
    command = typer.main.get_command(app)
    try:
        code = command.main(
            args=None if arguments is None else list(arguments), prog_name=program, standalone_mode=False
        )
    except UsageError as error:
        message = str(error)
    except Exception as error:
        # The error is from click, or from typer's copy of click, depending on the release. Both have this method.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
    else:
        return int(code or 0)
    print(f"error: {' '.join(message.split())} (see --help)", file=sys.stderr)
    return BAD_USAGE


class Progress:
    """Prints progress. The time left is estimated from the planned seconds and the pace so far."""

    def __init__(self, console: Console, planned: float) -> None:
        self.console, self.planned = console, max(planned, 1.0)
        self.done = self._current = 0.0
        self._began = time.monotonic()

    def begin(self, what: str, seconds: float) -> None:
        """End the current item and begin ``what``, planned to take ``seconds``."""
        self.done, self._current = min(self.done + self._current, self.planned), seconds
        # Half a minute at the planned pace is added, so that the first processes do not swing the estimate.
        pace = (time.monotonic() - self._began + 30.0) / (self.done + 30.0)
        left = f"about {words((self.planned - self.done) * pace)} left"
        line, room = f"  [{100 * self.done / self.planned:3.0f} %] {what}", WIDTH - len(left) - 2
        line = line if len(line) <= room else line[: room - 1] + "…"
        self.console.print(f"{line}, {left}")

    def note(self, text: str) -> None:
        self.console.print(f"  {text}")


def words(seconds: float) -> str:
    """A duration as text: ``40 s``, ``3 min``."""
    if seconds >= 90:
        return f"{round(seconds / 60)} min"
    return f"{round(seconds / 5) * 5 if seconds > 10 else max(1, round(seconds))} s"
