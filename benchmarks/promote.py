"""Adds a run's rows to the committed rows; a new measurement of a race replaces the earlier one.

python -m benchmarks.promote runs/today                     every race of the run
python -m benchmarks.promote runs/today --extra claim-30    in addition to the earlier race, under a name

Rows go to benchmarks/results/<gpu>-torch<version>/<family>-<workload>-<dtype>.jsonl, extra ones to the same file name
in extra/<name>/ there. Families' tables ignore extra rows; claims and decompositions look there first. Afterwards,
``python -m benchmarks.report --update`` makes the tables from the new rows.
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

from benchmarks.cli import UsageError, run_command
from benchmarks.record import EXTRA, RESULTS, Result, Rows, Store, device_name, load_run

# Statuses without information about the arm.
REFUSED = ("interrupted", "device-busy")


def promote(rows: Rows, results: Path, *, extra: str | None = None) -> dict[Path, list[tuple[str, ...]]]:
    """Write all rows into their files below ``results``; returns the written races by file.

    Under the name ``extra`` rows do not replace the earlier races, only rows of the same name. UsageError, before any
    write, if rows come from uncommitted code or from a stopped race.
    """
    if extra is not None and not re.fullmatch(r"[a-z0-9][a-z0-9-]*", extra):
        raise UsageError(f"--extra {extra!r} names a folder: small letters, digits and hyphens, as in claim-30")
    files: dict[Path, list[Result]] = defaultdict(list)
    for result in rows.results:
        case, environment = result.case, rows.environment(result)
        _check(result, environment)
        device = "-".join(device_name(environment, case.device).lower().split())
        folder = results / f"{device}-torch{str(environment.get('torch')).partition('+')[0]}"
        folder = folder if extra is None else folder / EXTRA / extra
        files[folder / f"{case.family}-{case.workload}-{case.dtype}.jsonl"].append(result)
    for file, new in files.items():
        _write(file, new, rows.environments)
    return {file: list(dict.fromkeys(result.case.race for result in new)) for file, new in files.items()}


def _check(result: Result, environment: Mapping[str, Any]) -> None:
    if result.status in REFUSED:
        raise UsageError(f"{result.case.key} is {result.status}; measure it to its end with --resume")
    if environment.get("commit") is None or environment.get("dirty") is not False:
        raise UsageError(
            f"{result.case.key} was measured on code that is not committed, so nobody could measure it again; commit, "
            "then measure"
        )


def _write(file: Path, new: Sequence[Result], environments: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the races of these results in the file: all of them, or on an error none."""
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


def command(
    run: Annotated[Path, typer.Argument(help="A run's folder or .jsonl file.")],
    extra: Annotated[str | None, typer.Option(help="Replace no race; add the rows under this name.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the committed rows.")] = RESULTS,
) -> int:
    """Put a run's rows among the committed ones, in place of older rows of the same races."""
    for file, races in promote(load_run(run), results, extra=extra).items():
        for race in races:
            print(f"{file}: {' · '.join(race[1:])}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(command, "python -m benchmarks.promote"))
