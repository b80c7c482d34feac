"""Puts a run's rows among the committed ones: a race that was measured again replaces the race of before.

python -m benchmarks.promote runs/today                              every race of the run
python -m benchmarks.promote runs/today --model gcn --input arxiv    of these alone
python -m benchmarks.promote runs/today --extra claim-30             beside the race of before, which stays

They go to benchmarks/results/<gpu>-torch<version>/<family>-<workload>-<dtype>.jsonl. Beside, they go to the same file
in extra/<name>/: a family's tables are made without them, claims and decompositions look there first. Then
``python -m benchmarks.report --update`` makes the tables anew.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cli import UsageError, did_you_mean, run_command
from benchmarks.plan import Case
from benchmarks.record import EXTRA, RESULTS, Result, Rows, Store, device_name, load_run

Race = tuple[str, ...]
# What says nothing about the arm.
NOT_KEPT = ("interrupted", "device-busy")


def promote(rows: Rows, results: Path, *, extra: str | None = None) -> dict[Path, list[Race]]:
    """Put all rows into their files below ``results``; the races of each file that were written.

    Args:
        rows: What was measured.
        results: Where committed rows are.
        extra: What they answer, for rows that stand beside the earlier races instead of replacing them. Rows of
            the same name are replaced.

    Raises:
        UsageError: If rows are of code that was not committed, or tell of a stopped run, or ``beside`` is no name of a
            folder; nothing is written then.
    """
    if extra is not None and not re.fullmatch(r"[a-z0-9][a-z0-9-]*", extra):
        raise UsageError(f"--extra {extra!r} names a folder: small letters, digits and hyphens, as in claim-30")
    files: dict[Path, list[Result]] = defaultdict(list)
    for result in rows.results:
        _refuse(result, rows.environment(result))
        file = _file(result.case, rows.environment(result))
        files[results / (file if extra is None else file.parent / EXTRA / extra / file.name)].append(result)
    for file, new in files.items():
        _write(file, new, rows.environments)
    return {file: list(dict.fromkeys(result.case.race for result in new)) for file, new in files.items()}


def _refuse(result: Result, environment: Mapping[str, Any]) -> None:
    if result.status in NOT_KEPT:
        raise UsageError(f"{result.case.key} is {result.status}; measure it to its end with --resume")
    if environment.get("commit") is None or environment.get("dirty") is not False:
        raise UsageError(
            f"{result.case.key} was measured on code that is not committed, so nobody could measure it again; commit, "
            "then measure"
        )


def _file(case: Case, environment: Mapping[str, Any]) -> Path:
    device = "-".join(device_name(environment, case.device).lower().split())
    version = str(environment.get("torch")).partition("+")[0]
    return Path(f"{device}-torch{version}") / f"{case.family}-{case.workload}-{case.dtype}.jsonl"


def _write(file: Path, new: Sequence[Result], environments: Mapping[str, Mapping[str, Any]]) -> None:
    """The file with these results in place of all of their races, whole or not at all."""
    races = {result.case.race for result in new}
    store = Store(file)
    kept = [result for result in store.results() if result.case.race not in races]
    known = {**environments, **store.environments()}
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
    os.close(descriptor)
    written = Store(Path(name))
    named: set[str | None] = {None}
    try:
        for result in (*kept, *new):
            if result.environment not in named:
                named.add(result.environment)
                written.append({**known[str(result.environment)], "id": result.environment})
            written.append(result.to_json())
        os.chmod(name, 0o644)
        os.replace(name, file)
    finally:
        Path(name).unlink(missing_ok=True)


def _only(results: list[Result], what: str, wanted: list[str]) -> list[Result]:
    known = {getattr(result.case, what) for result in results}
    for value in wanted:
        if value not in known:
            raise UsageError(f"--{what}: no row is of {value!r}; {did_you_mean(value, known)}")
    return [result for result in results if not wanted or getattr(result.case, what) in wanted]


def command(
    run: Annotated[Path, typer.Argument(help="A run's folder or .jsonl file.")],
    model: Annotated[list[str] | None, typer.Option(help="Races of these models alone.")] = None,
    input: Annotated[list[str] | None, typer.Option(help="Races on these inputs alone.")] = None,
    extra: Annotated[
        str | None, typer.Option(help="Leave the races of before, put these beside them under this name.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Where committed rows are.")] = RESULTS,
) -> int:
    """Put a run's rows among the committed ones, in place of older rows of the same races."""
    try:
        rows = load_run(run)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    found = _only(_only(rows.results, "model", model or []), "input", input or [])
    for file, races in promote(Rows(found, rows.environments), results, extra=extra).items():
        for race in races:
            print(f"{file}: {' · '.join(race[1:])}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    return run_command(command, "python -m benchmarks.promote", arguments)


if __name__ == "__main__":
    sys.exit(main())
