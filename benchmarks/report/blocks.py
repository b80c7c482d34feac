"""Generated blocks in Markdown files: found by their markers, rewritten from rows, checked for drift.

A table stands between two marker lines, and a value between two markers in running text::

    <!-- table: race model=gcn input=cora -->
    ...
    <!-- end table -->

    It takes <!-- value: p50 model=gcn input=cora arm="zoo regional" -->0.236 ms<!-- end --> a call.

Fenced code is left alone, so that docs can show a marker.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

TABLE = re.compile(r"^<!-- table:(.*?)-->\s*$")
END_TABLE = re.compile(r"^<!-- end table -->\s*$")
VALUE = re.compile(r"(?<!`)<!-- value:(.*?)-->(.*?)<!-- end -->")
OPEN_VALUE = re.compile(r"(?<!`)<!-- value:")
FENCE = re.compile(r"^\s*(```+|~~~+)")


@dataclass(frozen=True)
class Spec:
    """What a marker asks for: ``race model=gcn input=cora`` is the kind ``race`` with two options."""

    kind: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> Spec:
        """A marker's text as a Spec. ValueError on an empty one, or a word that is no ``key=value``."""
        words = shlex.split(text)
        if not words:
            raise ValueError("the marker names nothing; write <!-- table: race model=... input=... -->")
        options = {}
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if not (key and equals and value):
                raise ValueError(f"{word!r} is no key=value; options look like model=gcn")
            if key in options:
                raise ValueError(f"{key} is given twice")
            options[key] = value
        return cls(words[0], options)


def rewrite(text: str, make_table: Callable[[Spec], str], make_value: Callable[[Spec], str]) -> str:
    """The text with every block made anew.

    Raises:
        ValueError: Naming the line, on a marker without its end or one that cannot be made.
    """
    lines = text.split("\n")
    made: list[str] = []
    fence: str | None = None
    number = 0
    while number < len(lines):
        line = lines[number]
        here = number + 1
        number += 1
        if mark := FENCE.match(line):
            if fence is None:
                fence = mark[1]
            elif mark[1].startswith(fence):
                fence = None
        elif fence is None and (marker := TABLE.match(line)):
            end = next((n for n in range(number, len(lines)) if END_TABLE.match(lines[n])), None)
            if end is None or any(TABLE.match(inner) for inner in lines[number:end]):
                raise ValueError(f"line {here}: the table is not closed; add the line <!-- end table -->")
            made += [line.rstrip(), "", _at(here, make_table, marker[1]), "", lines[end].rstrip()]
            number = end + 1
            continue
        elif fence is None:
            if END_TABLE.match(line):
                raise ValueError(f"line {here}: <!-- end table --> closes no table")
            if len(OPEN_VALUE.findall(line)) != len(VALUE.findall(line)):
                raise ValueError(f"line {here}: a value is not closed on its line; add <!-- end -->")
            line = VALUE.sub(functools.partial(_value, here, make_value), line)
        made.append(line)
    return "\n".join(made)


def _value(line: int, make: Callable[[Spec], str], found: re.Match[str]) -> str:
    return f"<!-- value:{found[1]}-->{_at(line, make, found[1])}<!-- end -->"


def _at(line: int, make: Callable[[Spec], str], text: str) -> str:
    try:
        return make(Spec.parse(text))
    except ValueError as error:
        raise ValueError(f"line {line}: {' '.join(text.split())}: {error}") from error


def markdown_files(paths: Iterable[Path]) -> list[Path]:
    """The files themselves, and every ``*.md`` below the folders.

    Raises:
        FileNotFoundError: On a path that is not there, or a folder without Markdown, of which nothing could be said.
    """
    files = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; give Markdown files or folders")
        found = sorted(path.rglob("*.md")) if path.is_dir() else [path]
        if not found:
            raise FileNotFoundError(f"{path} holds no Markdown; give *.md files, or folders of them such as docs")
        files += found
    return files
