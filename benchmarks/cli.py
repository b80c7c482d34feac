"""Shared parts of the commands: checked options, usage errors as one line on stderr with exit code 2, progress."""

from __future__ import annotations

import difflib
import sys
import time
from collections import defaultdict
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
    """Prints progress. Items of a plan have a kind and seconds; those left take as long as ended ones of their kind."""

    def __init__(self, console: Console, plan: Iterable[tuple[str, float]]) -> None:
        self.console, self._current = console, ("", 0.0, time.monotonic())
        self.left, self.done, self.spent = (defaultdict[str, float](float) for _ in range(3))
        for kind, seconds in plan:
            self.left[kind] += seconds

    def begin(self, what: str, kind: str, seconds: float, more: float = 0.0) -> None:
        """End the current item and begin ``what``, planned to take ``seconds``, and known to take ``more``."""
        (last, planned, began), self._current = self._current, (kind, seconds + more, time.monotonic())
        self.left[kind] += more
        self.left[last] -= planned
        self.done[last] += planned
        self.spent[last] += self._current[2] - began
        # Two seconds at the planned pace are added, so that a short item does not swing the pace of its kind.
        paces = {each: (self.spent[each] + 2.0) / (self.done[each] + 2.0) for each in self.left}
        self.ahead, spent = sum(max(0.0, self.left[each]) * paces[each] for each in paces), sum(self.spent.values())
        left = f"about {words(self.ahead)} left"
        line, room = f"  [{100 * spent / (spent + self.ahead or 1.0):3.0f} %] {what}", WIDTH - len(left) - 2
        line = line if len(line) <= room else line[: room - 1] + "…"
        self.console.print(f"{line}, {left}")

    def note(self, text: str) -> None:
        self.console.print(f"  {text}")


def words(seconds: float) -> str:
    """A duration as text: ``40 s``, ``3 min``."""
    if seconds >= 90:
        return f"{round(seconds / 60)} min"
    return f"{round(seconds / 5) * 5 if seconds > 10 else max(1, round(seconds))} s"
