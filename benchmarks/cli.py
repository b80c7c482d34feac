"""What the commands share: options that are checked, and wrong usage as one line on stderr with exit code 2."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Sequence

BAD_USAGE = 2


class UsageError(ValueError):
    """The command cannot do what it was asked; the message says why and what to do."""


def require_zoo() -> None:
    """Raise UsageError with the zoo's own message where it cannot be imported, as with a torch that is too old."""
    try:
        import zoo  # noqa: F401
    except ImportError as error:
        raise UsageError(str(error)) from error


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """The nearest known word, else all of them: ``did you mean 'cora'?``."""
    known = sorted(known)
    near = difflib.get_close_matches(wrong, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there is: {', '.join(known) or 'nothing'}"


def pick(option: str, given: Sequence[str], known: Iterable[str]) -> list[str]:
    """Values of an option that may be repeated or take a comma list, without repetition.

    Raises:
        UsageError: On a value that is not known, with a suggestion.
    """
    values = [value.strip() for part in given for value in part.split(",") if value.strip()]
    for value in values:
        if value not in known:
            raise UsageError(f"{option}: {value!r} is not known; {did_you_mean(value, known)}")
    return list(dict.fromkeys(values))


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
        # Typer's own click, or click itself, depending on the release: both have this method.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
    else:
        return int(code or 0)
    print(f"error: {' '.join(message.split())} (see {program} --help)", file=sys.stderr)
    return BAD_USAGE
