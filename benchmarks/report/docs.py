"""The generated parts of the documentation: found by markers, made from rows, rewritten or checked for drift.

A table is between two marker lines, and a value between two markers in running text::

    <!-- table: race model=gcn input=cora -->
    ...
    <!-- end table -->

    It takes <!-- value: p50 model=gcn input=cora arm="zoo regional" -->0.236 ms<!-- end --> a call.

Fenced code is left alone, so that docs can show a marker.
"""

from __future__ import annotations

import difflib
import functools
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import claims, deploy
from benchmarks.cli import did_you_mean
from benchmarks.record import Compile, Result, Rows
from benchmarks.report import cells, charts, tables
from benchmarks.report.model import (
    SELECTING,
    MeasuredArm,
    MeasuredRace,
    commands_of,
    extra_races,
    machine_name,
    machines,
    option,
    races_of,
    select,
)

PICTURE = "compile-and-call.svg"
MACHINE, OF_RACE = ("gpu", "torch"), (*SELECTING, "extra")
DEFAULTS = {"workload": "inference", "dtype": "float32"}
NOT_YET = "not measured yet"

TABLE = re.compile(r"^<!-- table:(.*?)-->\s*$")
END_TABLE = re.compile(r"^<!-- end table -->\s*$")
VALUE = re.compile(r"(?<!`)<!-- value:(.*?)-->(.*?)<!-- end -->")
OPEN_VALUE = re.compile(r"(?<!`)<!-- value:")
FENCE = re.compile(r"^\s*(```+|~~~+)")


@dataclass(frozen=True)
class Spec:
    """A parsed marker: ``race model=gcn input=cora`` is the kind ``race`` with two options."""

    kind: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Parse a marker's text. ValueError if it is empty or a word is not ``key=value``."""
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
    """The text with every block regenerated."""
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
    """The files themselves, every ``*.md`` below the folders, and the picture if a folder has it."""
    files = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; give Markdown files or folders")
        found = [*sorted(path.rglob("*.md")), *path.glob(PICTURE)] if path.is_dir() else [path]
        if not found:
            raise FileNotFoundError(f"{path} holds no Markdown; give *.md files, or folders of them such as docs")
        files += found
    return files


# Files ----------------------------------------------------------------------------------------------------------------


def regenerated(file: Path, rows: Rows) -> tuple[str, str]:
    """The current text of a Markdown file or the picture, and the text generated from the rows."""
    text = file.read_text(encoding="utf-8")
    if file.name == PICTURE:
        return text, charts.picture(tables.first_races({}, races_of(rows)), text)
    try:
        return text, rewrite(text, lambda spec: make_table(spec, rows), lambda spec: make_value(spec, rows))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def update(paths: list[Path], rows: Rows) -> list[Path]:
    """Rewrite the generated blocks and the picture in files and folders; return the files that changed."""
    made = [(file, *regenerated(file, rows)) for file in markdown_files(paths)]  # all or none
    changed = [(file, after) for file, before, after in made if before != after]
    for file, after in changed:
        file.write_text(after, encoding="utf-8")
    return [file for file, _ in changed]


def drift(paths: list[Path], rows: Rows) -> str:
    """A diff of generated parts that differ from the rows; empty without differences."""
    parts: list[str] = []
    for file in markdown_files(paths):
        before, after = (text.splitlines(keepends=True) for text in regenerated(file, rows))
        parts += difflib.unified_diff(before, after, str(file), f"{file} from the rows")
    return "".join(parts)


# Tables ---------------------------------------------------------------------------------------------------------------


def make_table(spec: Spec, rows: Rows) -> str:
    """The Markdown of a table block. ValueError on an unknown kind or option, or one that selects several races."""
    if spec.kind not in TABLES:
        raise ValueError(f"there is no table {spec.kind!r}; {did_you_mean(spec.kind, TABLES)}")
    options, make = TABLES[spec.kind]
    _refuse_options(spec, options)
    return make(spec, rows)


def _claims(spec: Spec, rows: Rows) -> str:
    return VALUE.sub(lambda found: make_value(Spec.parse(found[1]), rows), claims.page(rows))  # values in claims' notes


def _arms(spec: Spec, rows: Rows) -> str:
    wanted = spec.options.get("workload")
    shown = [race for race in _races(spec, rows) if wanted in (None, option(race, "workload"))]
    return f"{tables.markdown(*tables.arms(shown))}\n\n{_origin(shown)}"


def _front(spec: Spec, rows: Rows) -> str:
    first = tables.first_races(spec.options, races_of(rows))
    on = dict.fromkeys(race.machine for race in first.values() if race is not None)
    started = dict.fromkeys(machine_name(rows.environment(start), start.case.device) for start in rows.starts)
    said = "; ".join([*on, *(f"some new processes: {machine}" for machine in started if machine not in on)])
    said = f"\n\n{said}; bfloat16 unless a name says float32." if on else ""
    return tables.markdown(*tables.front(first, rows.starts)) + said


def _parallel(spec: Spec, rows: Rows) -> str:
    from benchmarks import parallel  # imports torch.distributed, which only this table needs

    return parallel.tables(rows)


def _races(spec: Spec, rows: Rows) -> tuple[MeasuredRace, ...]:
    """The families' races, or the extra ones of the name in ``extra=``."""
    if (name := spec.options.get("extra")) is None:
        return races_of(rows)
    if not (found := tuple(race for race in extra_races(rows) if race.extra == name)):
        raise ValueError(f"there are no extra rows {name!r}; {did_you_mean(name, rows.extra)}")
    return found


def _refuse_options(spec: Spec, known: Sequence[str]) -> None:
    for key in spec.options:
        if key not in known:
            raise ValueError(f"there is no option {key!r}; {did_you_mean(key, known)}")


def _select(spec: Spec, shown: Sequence[MeasuredRace], *, ignore: tuple[str, ...] = ()) -> list[MeasuredRace]:
    said = {**DEFAULTS, **spec.options}
    return select({key: said[key] for key in SELECTING if key in said and key not in ignore}, shown)


def _single(spec: Spec, rows: Rows, *needs: str) -> MeasuredRace | None:
    if not {"model", "input", *needs} <= spec.options.keys():
        arm = ' arm="zoo regional"' if needs else ""
        raise ValueError(f"{spec.kind} is of one {'arm' if needs else 'race'}; give model=... input=...{arm}")
    apart = [race for race in extra_races(rows) if tables.separates_kernels(race)]
    chosen = (_select(spec, apart) if spec.kind == "decomposition" else []) or _select(spec, _races(spec, rows))
    if len(chosen) > 1:
        raise ValueError(f"{len(chosen)} races match: {'; '.join(race.title for race in chosen)}; give more options")
    return chosen[0] if chosen else None


def _arm(race: MeasuredRace, name: str) -> MeasuredArm | Result:
    arms: dict[str, MeasuredArm | Result] = {arm.name: arm for arm in race.arms}
    arms |= {result.case.arm: result for result in race.failures}
    if name not in arms:
        raise ValueError(f"{race.title} has no arm {name!r}; {did_you_mean(name, arms)}")
    return arms[name]


def _nothing(spec: Spec, command: str = "benchmarks.run") -> str:
    words = ["python", "-m", command]
    for key in ("family", "model", "input", "workload", "dtype", "device"):
        if key in spec.options:
            words += [f"--{key}", spec.options[key]]
    return f"No rows measured yet; run `{shlex.join(words)}`."


def _origin(shown: Sequence[MeasuredRace], commands: str | None = None) -> str:
    commands = commands or "\n".join(commands_of(shown))
    if not commands:
        return f"{machines(shown)}. The rows name no command that measures them again."
    return f"{machines(shown)}. Measure it again:\n\n```sh\n{commands}\n```"


def _headline(spec: Spec, rows: Rows) -> str:
    """A row per race and the worst row. ``brief`` fits a phone, without commands and intervals."""
    shown = races_of(rows)
    chosen = _select(spec, shown)
    if not chosen:
        return _nothing(spec)
    # The worst row comes from all races of the family, so that the choice of models and inputs cannot hide it.
    everything = _select(spec, shown, ignore=("model", "input"))
    worst = tables.worst_row(everything)
    lines = tables.with_worst(chosen, worst)
    # Lists of these options give rows of one model and input that differ in nothing else.
    differ = [key for key in ("workload", "dtype") if len({option(race, key) for race, _ in lines}) > 1]

    def named(race: MeasuredRace) -> str:
        said = [option(race, key) for key in ("model", "input", *differ)]
        return ", ".join(word for word in said if spec.kind != "brief" or word != DEFAULTS["workload"])

    notes = []
    if worst is not None:
        race, arm, _ = worst
        wrong = ", with a wrong output" if arm.wrong else ""
        said = "" if spec.kind == "brief" else f": {cells.speedup_and_verdict(race, arm, race.best_shipped)}"
        name = f"{named(race)}, {arm.name}{said}{wrong}"
        notes.append(f"Our worst result in {cells.race_count(len(everything))}: {name}.")
    origin = list(dict.fromkeys(race for race, _ in lines))
    if spec.kind == "brief":
        brief = [
            [named(race) + (f", {arm.name}" if arm and arm is not race.ours else ""), *tables.brief_row(race, arm)]
            for race, arm in lines
        ]
        body = tables.markdown(tables.BRIEF, brief)
        measured_on = "; ".join(dict.fromkeys(race.machine for race in origin))
        return "\n\n".join([body, " ".join([*notes, f"{measured_on}."])])
    notes.append("Intervals are 95 % bootstrap over rounds; a difference within the A/A noise is undetermined.")
    rows_shown = [[named(race), *tables.headline_row(race, arm)] for race, arm in lines]
    body = tables.markdown(*tables.filled(tables.HEADLINE, rows_shown))
    return "\n\n".join([body, " ".join(notes), _origin(origin)])


def _race(race: MeasuredRace) -> str:
    parts = [tables.markdown(*tables.speeds(race)), tables.markdown(*tables.costs(race))] if race.arms else []
    return "\n\n".join(filter(None, [*parts, _failures(race.failures)]))


def _compile(race: MeasuredRace) -> str:
    head, rows = tables.compiles(race)
    failed = [result for result in race.failures if result.case.strategy != "eager"]
    parts = [tables.markdown(head, rows) if rows else "No arm that compiles ran.", _failures(failed)]
    return "\n\n".join(filter(None, parts))


def _failures(results: Iterable[Result]) -> str:
    """A list of failures. Reasons come from error messages, and are escaped for Markdown and HTML."""
    lines = [cells.failure(result) for result in results]
    for mark in "\\`*_<>[]":
        lines = [line.replace(mark, f"\\{mark}") for line in lines]
    return "\n".join(f"- {line}" for line in lines)


def _losses(race: MeasuredRace) -> str:
    table = tables.losses(race)
    return tables.markdown(*table) if table else "No curves; give `--curve` steps."


def _of_race(make: Callable[[MeasuredRace], str], *, alone: bool = False) -> Callable[[Spec, Rows], str]:
    """A table of one race; ``alone`` omits notes and commands, for use below a table of the same race."""

    def table(spec: Spec, rows: Rows) -> str:
        if (race := _single(spec, rows)) is None:
            return _nothing(spec)
        below = [] if alone else [" ".join(cells.notes(race)), _origin([race])]
        return "\n\n".join([make(race), *below])

    return table


def _kernels(spec: Spec, rows: Rows) -> str:
    if (race := _single(spec, rows, "arm")) is None:
        return _nothing(spec)
    arm = _arm(race, spec.options["arm"])
    if isinstance(arm, Result):
        return f"{arm.case.arm}: {arm.status}."
    command, work = arm.result.command, arm.result.work
    if work is None or not work.longest:
        return f"Not measured yet; run `{command}`." if command else "Not measured yet."
    note = (
        f"One call of {arm.name}, by the profiler. Times are of a profiled call: their sum, "
        f"{cells.significant(work.kernel_microseconds)} µs, is a little more or less than a call takes without one."
    )
    return "\n\n".join([tables.markdown(*tables.kernels(work)), note, _origin([race], command)])


# {kind: (its options, the function that makes its Markdown)}.
TABLES: dict[str, tuple[Sequence[str], Callable[[Spec, Rows], str]]] = {
    "front": (MACHINE, _front),
    "headline": (SELECTING, _headline),
    "brief": (SELECTING, _headline),
    "claims": ((), _claims),
    "startup": (SELECTING, lambda spec, rows: deploy.tables(spec.options, rows) or _nothing(spec, "benchmarks.deploy")),
    "parallel": ((), _parallel),
    "arms": (("extra", "workload"), _arms),
    "race": (OF_RACE, _of_race(_race)),
    "compile": (OF_RACE, _of_race(_compile)),
    "decomposition": (OF_RACE, _of_race(lambda race: tables.markdown(*tables.decomposition(race)))),
    "losses": (OF_RACE, _of_race(_losses, alone=True)),
    "kernels": ((*OF_RACE, "arm"), _kernels),
}


# Values ---------------------------------------------------------------------------------------------------------------


def make_value(spec: Spec, rows: Rows) -> str:
    """The text of a value block: a measured figure with its unit. ValueError on an unknown figure, option or arm."""
    if spec.kind not in VALUES:
        raise ValueError(f"there is no value {spec.kind!r}; {did_you_mean(spec.kind, VALUES)}")
    _refuse_options(spec, (*OF_RACE, "arm", "against"))
    if (race := _single(spec, rows, "arm")) is None:
        return NOT_YET
    found = _arm(race, spec.options["arm"])
    if isinstance(found, Result):
        return found.status
    return VALUES[spec.kind](race, found, spec.options.get("against", "shipped"))


def _speedup_value(race: MeasuredRace, arm: MeasuredArm, against: str) -> str:
    known = {"eager": race.reference, "shipped": race.best_shipped, "tuned": race.best_tuned}
    if against in known:
        over = known[against]
    else:
        found = _arm(race, against)
        over = found if isinstance(found, MeasuredArm) else None
    ratio = race.speedup(arm, over)
    return cells.times(ratio.value) if ratio else "not measured"


def _with_unit(number: float | None, unit: str) -> str:
    return "not measured" if number is None else f"{cells.significant(number)} {unit}"


VALUES: dict[str, Callable[[MeasuredRace, MeasuredArm, str], str]] = {
    "p50": lambda race, arm, against: _with_unit(arm.p50, "ms"),
    "speedup": _speedup_value,
    "compile-cold": lambda race, arm, against: _with_unit((arm.result.cold or Compile()).seconds, "s"),
    "break-even": lambda race, arm, against: cells.calls(race.break_even(arm, arm.result.cold)),
    "memory": lambda race, arm, against: f"{cells.memory(arm)} MiB" if arm.result.memory else "not measured",
    "graphs": lambda race, arm, against: cells.count((arm.result.counted or Compile()).graphs),
}
