"""Runs a typer command so that wrong usage is one line on stderr, with a suggestion, and exit code 2."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Sequence

BAD_USAGE = 2


class UsageError(ValueError):
    """The command cannot do what it was asked; the message says why and what to do."""


def require_zoo() -> None:
    """Refuse to go on with a torch that the zoo refuses, in the one line that it says.

    Raises:
        UsageError: If ``import zoo`` fails.
    """
    try:
        import zoo  # noqa: F401
    except ImportError as error:
        raise UsageError(str(error)) from error


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """What a wrong word most likely meant, else all there is: ``did you mean 'cora'?``."""
    known = sorted(known)
    near = difflib.get_close_matches(wrong, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there is: {', '.join(known) or 'nothing'}"


def run_command(function: Callable[..., int], program: str, arguments: Sequence[str] | None = None) -> int:
    """The exit code of ``function`` called with command-line arguments (``sys.argv`` if None).

    The function's UsageError and typer's own errors are printed on one line and give 2.
    """
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
        # Typer carries its own copy of click from 0.16 or so on and uses click itself before: told by what they share.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
    else:
        return int(code or 0)
    print(f"error: {' '.join(message.split())} (see {program} --help)", file=sys.stderr)
    return BAD_USAGE
