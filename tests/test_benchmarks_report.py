"""The report: its page, its tables in the terminal and in the docs, and claims whose verdicts follow from rows."""

import functools
import io
import re
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import claims
from benchmarks.claims import Claim, Part, known_claims, parse_limit, places
from benchmarks.cli import run_command
from benchmarks.plan import arms_of
from benchmarks.record import Check, Result, Rows, Steady
from benchmarks.report import cells, show, tables
from benchmarks.report.__main__ import command
from benchmarks.report.docs import Spec, make_table, make_value, rewrite
from benchmarks.report.model import MeasuredArm, MeasuredRace, by_family, commands_of, races
from tests.rows import ENVIRONMENT, ENVIRONMENTS, failure, race, row, uncompiled, write
from tests.rows import shown as shown_race
from zoo.advise import number

reporting = functools.partial(run_command, command, "report")
MARKED = """# Title

<!-- table: race model=gcn input=cora -->
<!-- end table -->

It takes <!-- value: p50 model=gcn input=cora arm="zoo regional" --><!-- end --> a call.
"""


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "page.md").write_text(MARKED)
    return folder


def test_report_of_committed_rows_does_not_land_among_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(show, "ROOT", tmp_path)
    write(tmp_path / "results" / "h200" / "rows.jsonl", race())
    assert reporting([str(tmp_path / "results" / "h200")]) == 0
    assert [path.suffix for path in (tmp_path / "results").rglob("*.*")] == [".jsonl"]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"report.html"}


def test_update_then_check_then_drift(tmp_path: Path, docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write(tmp_path / "results" / "h200" / "rows.jsonl", race())
    options = ["--results", str(tmp_path / "results"), str(docs)]
    assert reporting(["--check", *options]) == 1
    assert reporting(["--update", *options]) == 0
    page = docs / "page.md"
    assert 'arm="zoo regional" -->0.236 ms<!-- end --> a call.' in page.read_text()
    assert reporting(["--check", *options]) == 0
    capsys.readouterr()

    stamp = page.stat().st_mtime_ns
    assert reporting(["--update", *options]) == 0  # nothing to do
    assert page.stat().st_mtime_ns == stamp and capsys.readouterr().out == ""

    page.write_text(page.read_text().replace("0.236 ms", "0.2 ms"))  # edited by hand
    assert reporting(["--check", *options]) == 1
    assert "+It takes" in (said := capsys.readouterr().out) and f"--update {docs}" in said
    assert reporting(["--update", *options]) == 0

    write(rows, race({"zoo regional": 0.5}))  # measured again
    assert reporting(["--check", *options]) == 1


def test_a_broken_block_changes_no_file(tmp_path: Path, docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (docs / "zz.md").write_text("\n<!-- table: rase model=gcn input=cora -->\n<!-- end table -->\n")
    assert reporting(["--update", "--results", str(tmp_path / "none"), str(docs)]) == 2
    assert f"{docs / 'zz.md'}: line 2: rase model=gcn input=cora: there is no table 'rase'" in capsys.readouterr().err
    assert (docs / "page.md").read_text() == MARKED


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "got 0; or did you mean --update or --check?"),
        (["--update", "--check"], "exclude each other"),
        (["--chek"], "--check"),
        (["{here}/none"], "does not exist"),
        (["{here}"], "holds no rows; run python -m benchmarks.run --out"),
        (["--check", "{here}/none.md"], "does not exist; give Markdown"),
        (["--check", "{here}"], "holds no Markdown; give *.md files"),
        (["{here}/run"], "report.html"),  # which cannot be written
    ],
)
def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    if arguments == ["{here}/run"]:
        write(tmp_path / "run" / "rows.jsonl", race())
        (tmp_path / "run" / "report.html").mkdir()
    assert reporting([word.format(here=tmp_path) for word in arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1


VOID = {"meta", "input", "br", "img"}


class Page(HTMLParser):
    """A page read strictly: every tag closed in order, no id twice, and all that it says, names and refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.ids, self.references, self.loads, self.tags, self.words = [], [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == [] and len(set(self.ids)) == len(self.ids)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        self.open += [] if tag in VOID else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for key, value in attrs:
            assert not key.startswith("on"), f"{tag} has {key}"
            found = {"id": self.ids, "href": self.references}.get(key, self.loads)
            if key in ("id", "href", "src", "data", "srcset", "action", "poster"):
                found += [] if str(value).startswith("data:image/svg+xml") else [str(value)]
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


def _page(results: list[Result], environments: Mapping[str, Mapping[str, object]] = ENVIRONMENTS) -> Page:
    return Page(show.report(results, environments))


def test_every_race_arm_and_failure_appears_with_its_figures_and_command() -> None:
    results = [
        *race(),
        failure("timeout", "60 s without a word", strategy="hierarchical"),
        *race({"zoo regional + CUDA graph": 20.0}, input="arxiv", dtype="bfloat16"),
        *race(family="llm", model="llama-debug", input="prompt"),
    ]
    page = _page(results)
    text = page.text
    shown = races(results, ENVIRONMENTS)
    for one in shown:
        assert one.title in text and show.lead(one) in text
        for arm in one.arms:
            assert cells.name(arm) in text
        for _, lines in (tables.speeds(one), tables.costs(one), tables.compiles(one)):
            assert all(cell in text for line in lines for cell in line)
        assert all(command in text for command in commands_of([one]))
    assert "zoo hierarchical: timeout 60 s without a word" in text
    # Four reasons that differ in a number.
    assert "upstream full: 4× break: Unsupported: self-loop op 0 (and the like with other numbers)" in text
    assert "self-loop op 3" not in text
    for step in ("upstream eager", "ours, eager", "+ regions", "+ outer CUDA graph"):
        assert text.count(step) >= len(shown)
    assert "driver 580.65, triton 3.6.0" in text
    assert page.tags.count("img") == 2 + len(shown)  # speed-ups a family, total time a race
    gains = [line for chosen in by_family(shown).values() for line in show.gains(chosen).values()]
    assert all(line in text for line in gains) and len(gains) == len(shown)
    assert page.tags.count("article") == len(shown)


def test_what_was_gained_is_told_against_each_upstream_arm() -> None:
    one = shown_race(race({"upstream-tuned full + CUDA graph": 0.9}))
    (line,) = show.gains([one]).values()
    theirs = [arm for arm in one.arms if arm.result.case.impl != "zoo"]
    assert len(theirs) == 5 and line.startswith("gcn · cora: zoo regional + CUDA graph compiles in 1.42 s, then takes")
    for arm in theirs:
        cost = "" if arm.cold_seconds is None else f"{number(arm.cold_seconds)} s to compile, "
        assert f"as fast as {arm.name} ({cost}{number(arm.p50)} ms)" in line
    said = "compiles in 1 s, then takes 2 ms a call, not measurably faster or slower than a (3 s to compile, 4 ms)"
    assert show.gain(1.0, 2.0, [("a", 3.0, 4.0, None)]) == said
    loud = shown_race(race({"zoo eager (A/A)": 1.5}))
    assert "makes this measurement unusable" in show.gains([loud])[loud]


def test_the_page_loads_nothing_and_hostile_strings_stay_text() -> None:
    text = show.report(race(), ENVIRONMENTS)
    page = Page(text)
    assert page.loads == [] and "link" not in page.tags
    assert page.references == []
    assert "http" not in text and "@import" not in text
    assert text == show.report(race(), ENVIRONMENTS)  # the same rows make the same file
    evil = '</script><script>alert("$x$")</script><img src=x onerror=alert(1)>&amp;'
    results = race(family=evil, model=evil, input="$\\frac{1}{0}$ \n\x00 {{ 7*7 }}")
    results[1].cold.breaks = [evil]
    for result in results:
        result.command = evil
        result.data = evil
    case = {"family": evil, "model": evil, "input": results[0].case.input, "impl": evil, "strategy": evil}
    results.append(failure("failed", evil, **case))
    page = _page(results, {"e1": {**ENVIRONMENT, "gpu": evil, "libraries": {evil: evil}}})
    assert "script" not in page.tags and page.loads == []
    assert page.text.count("onerror=alert(1)") > 10 and "{{ 7*7 }}" in page.text and "&amp;" in page.text


def test_what_was_not_measured_is_left_out_and_said() -> None:
    page = _page(uncompiled(race()))
    assert page.tags.count("img") == 1
    assert "Compile times were not measured here." in page.text and "Total time" not in page.text
    assert "compile s, cold / warm" not in page.text
    page = _page([failure("crashed", "signal 11"), failure("does-not-fit", "needs 300 GiB", impl="upstream")])
    assert "zoo eager: crashed signal 11" in page.text and "upstream eager: does-not-fit needs 300 GiB" in page.text
    assert "no advice is possible" in page.text and "img" not in page.tags
    assert "0 races" in _page([], {}).text
    bare = row(1.0, impl="zoo", strategy="eager")
    bare.cold = bare.warm = bare.memory = bare.check = bare.work = bare.command = None
    page = _page([bare])
    assert "Only zoo eager has a steady time: 1.0" in page.text and "img" not in page.tags


TUNED = "upstream-tuned full + CUDA graph"
COMPILED = ("upstream full reduce-overhead", TUNED, "zoo full", "zoo regional", "zoo regional + CUDA graph")


def _three_steps() -> list[Result]:
    """Eager, then what compiles soon, then what takes longer to compile and is a little faster."""
    return [
        row(1.0, strategy="eager", seed=1),
        row(0.5, strategy="regional", cold=1.0, warm=0.5, seed=2),
        row(0.4, strategy="full", cold=10.0, warm=0.7, seed=3),
        row(1.0, strategy="eager", seed=4, control=True),
    ]


def test_arms_in_a_cuda_graph_are_told_apart_by_the_noise_of_their_own_kind() -> None:
    graph = {"strategy": "regional", "cuda_graph": True}
    rows = [
        row(1.0, seed=1, **graph), row(1.01, seed=2, control=True, **graph), row(1.1, seed=3, impl="upstream", **graph),
        row(2.0, strategy="eager", seed=4), row(3.0, strategy="eager", seed=5, control=True),
        row(2.6, impl="upstream", strategy="eager", seed=6),
    ]  # fmt: skip
    found = shown_race(rows)
    ours, theirs, our_eager, their_eager = found.arms
    assert found.noise(ours, theirs) == pytest.approx(0.01, abs=0.01) and found.noise() == found.noise(ours, our_eager)
    assert found.noise(our_eager) == pytest.approx(0.5, abs=0.02)
    assert found.verdict(ours, theirs) == "faster" and found.verdict(our_eager, their_eager) == "undetermined"
    # A control of one kind alone serves all.
    alone = shown_race([each for each in rows if each.case.captured or not each.case.control])
    assert alone.noise(our_eager) == alone.noise(ours) == found.noise(ours)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (race, ["zoo regional + CUDA graph is the fastest, 0.0492 ms", "8.53× faster than", " 1.085× faster than"]),
        (race, ["in a new process with empty caches zoo eager finishes first, from 9,"]),
        (lambda: race(dict.fromkeys(COMPILED, 20.0)), ["zoo eager is the fastest", "zoo eager finishes first."]),
        (lambda: race({TUNED: 0.5}), [f"{TUNED} is the fastest", "ours, zoo regional + CUDA graph, is 1.8"]),
        (
            lambda: race({"zoo full": 0.048 / 0.197, "zoo eager (A/A)": 1.05}),
            ["No measurable difference to zoo regional + CUDA graph: zoo full"],
        ),
        (lambda: uncompiled(race()), ["8.53× faster than", "Compile times were not measured here."]),
        (_three_steps, ["no arm of torch-geometric ran", "calls on zoo regional, from 8", "k calls on zoo full."]),
        (lambda: [row(rounds=4), row(0.5, rounds=4, strategy="full", cold=1.0)], ["Too few rounds", "at least 6"]),
        (lambda: [failure("crashed", "signal 11")], ["No arm has a steady time", "no advice is possible."]),
    ],
)
def test_the_lead_says_what_to_use(rows: Callable[[], list[Result]], said: list[str]) -> None:
    lead = show.lead(shown_race(rows()))
    assert all(words.lower() in lead.lower() for words in said), lead


def _arm(shown: MeasuredRace, name: str) -> MeasuredArm:
    return next(arm for arm in shown.arms if arm.name == name)


def _printed(results: list[Result], width: int) -> str:
    """What the terminal shows, nothing of it cut off or wider than the terminal."""
    console = Console(file=io.StringIO(), width=width)
    show.render(results, ENVIRONMENTS, console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    return text


# Races: what is odd in them. All else is in the tables of the committed rows, which test_docs.py compares.


def test_without_an_eager_arm_others_are_the_reference_of_speed_and_of_rounding() -> None:
    results = [result for result in race() if result.case.arm != "upstream eager"]
    shown = shown_race([*results, failure("crashed", "signal 11", impl="upstream", strategy="eager")])
    assert shown.reference.name == "zoo eager"
    results = race()
    for result in results:
        if result.case.impl == "upstream":
            result.check.eager_error = None
    assert not any(arm.wrong for arm in shown_race(results).arms)
    results[2].check.error = 100 * results[-1].check.eager_error
    assert [arm.name for arm in shown_race(results).arms if arm.wrong] == ["upstream full reduce-overhead"]


def test_a_wrong_output_is_marked_no_best_and_worse_than_a_slow_one() -> None:
    results = race()
    results[2].check.error = 3e-3  # of the fastest as shipped
    shown = shown_race(results)
    wrong = _arm(shown, "upstream full reduce-overhead")
    assert [arm for arm in shown.arms if arm.wrong] == [wrong] and cells.name(wrong).endswith("!")
    assert shown.best_shipped.name == "upstream regional"
    assert any(f"not counted among the best: {wrong.name}" in note for note in cells.race_notes(shown))
    results = [*race(), *race({"zoo regional + CUDA graph": 20.0}, input="arxiv")]
    next(r for r in results if r.case.arm == "zoo regional" and r.case.input == "cora").check.error = 3e-3
    assert re.search(r"races: gcn, cora, zoo regional: .* faster, with a wrong", _table("headline family=gnn", results))
    results = race({"zoo full": 0.01})
    results[6].check.error = 0.5
    assert "zoo full" not in show.lead(shown_race(results))


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda results: results.pop(), "noise is unknown"),
        (lambda results: [result.steady.device_ms.clear() for result in results], "wall clock"),
        (lambda rows: [setattr(r.steady, "rounds", [n % 10 for n in r.steady.rounds]) for r in rows], "unpaired: "),
        (lambda results: setattr(results[7], "environment", "e2"), "unpaired: zoo regional."),
        (lambda results: setattr(results[7].cold, "cache_empty_at_start", False), "no cold figure: zoo regional"),
    ],
)
def test_notes_say_what_is_not_as_it_should_be(change: Callable[[list[Result]], None], note: str) -> None:
    results = race()
    assert not any(note in said for said in cells.race_notes(shown_race(results)))
    change(results)
    (shown,) = races(results, {**ENVIRONMENTS, "e2": {**ENVIRONMENT, "id": "e2"}})
    assert any(note in said for said in cells.race_notes(shown))
    regional = _arm(shown, "zoo regional")
    assert shown.clock == ("wall" if note == "wall clock" else "device")
    assert shown.speedup(regional, shown.reference).paired == (not note.startswith("unpaired"))
    assert (regional.paid("cold") is None) == (note == "no cold figure: zoo regional")
    assert (cells.seconds(regional.result.cold) == cells.NOTHING) == (regional.paid("cold") is None)
    assert regional.paid("warm") is not None and results[7].cold.seconds == 1.4, "the row keeps both"


def _extreme() -> list[Result]:
    """Every column at its widest: a long arm name, an arm that loses by far, counts of three digits, failures."""
    results = race({"upstream regional": 15.0, "upstream full": 1234.0})
    longest = {"impl": "upstream-tuned", "strategy": "full", "mode": "max-autotune-no-cudagraphs", "cuda_graph": True}
    results += [
        row(0.8, cold=123.4, warm=12.3, graphs=120, kernels=12345, breaks=12, **longest),
        failure("failed", "Unsupported: [bold]nested[/bold] " + "and so on " * 100, strategy="hierarchical"),
    ]
    return results


@pytest.mark.parametrize("width", [80, 140])
def test_the_terminal_shows_every_figure_and_names_failures_bests_and_noise(width: int) -> None:
    results = _extreme()
    text, shown = " ".join(_printed(results, width).split()), shown_race(results)
    for _, lines in (tables.speeds(shown), tables.costs(shown)):
        assert all(figure in text for _, *figures in lines for figure in figures)
    assert "zoo hierarchical: failed: Unsupported: [bold]nested[/bold] and so on" in text
    assert "Best upstream as shipped: upstream full reduce-overhead, 0.420 ms." in text
    assert "Best upstream tuned: upstream-tuned full + CUDA graph, 0.0534 ms." in text
    assert re.search(r"A/A noise 0\.\d+ % \(zoo eager against its copy\)", text)
    assert "eager's own is 1.9e-07" in text
    assert "No rows." in _printed([], 80)
    assert "crashed: signal 11" in _printed([failure("crashed", "signal 11")], 80)
    started_only = row(1.0, strategy="regional", cold=2.0, graphs=1)
    started_only.steady = None
    few = row(1.0, rounds=3)
    text = " ".join(_printed([started_only, few], 80).split())
    assert "Fewer than 6 rounds, so no interval: zoo eager." in text
    empty = Result(case=row().case, environment="e1", steady=Steady())
    assert "zoo eager" in _printed([empty], 80)


def test_merged_commands_are_ones_that_the_harness_takes() -> None:
    (command,) = commands_of(races([*race(), *race(model="gat")], ENVIRONMENTS))
    said = command.split()
    impls, strategies, modes = (said[said.index(key) + 1].split(",") for key in ("--impl", "--strategy", "--mode"))
    arms = arms_of(row().case, impls=impls, strategies=strategies, modes=modes)  # what benchmarks.run makes of them
    assert {result.case for result in race() if not result.case.control} <= set(arms)


# Tables of the docs: what rows of before give, and what no page shows today. All others are on the pages, which are
# compared with the committed rows in test_docs.py.


def _table(text: str, results: list[Result]) -> str:
    return make_table(Spec.parse(text), Rows(results, ENVIRONMENTS))


KERNELS = 'kernels model=gcn input=cora arm="zoo regional + CUDA graph"'


@pytest.mark.parametrize(
    "text", ["race model=gcn input=cora", "headline family=gnn", "compile model=gat input=cora", KERNELS]
)
def test_a_table_without_rows_says_so(text: str) -> None:
    assert _table(text, []).startswith("No rows measured yet; run `python -m benchmarks.run --")


def test_newest_torch_is_shown_and_two_gpus_need_a_choice() -> None:
    results = [*race({"zoo regional": 2.0}), *race()]
    for result in results[: len(results) // 2]:
        result.environment = "e2"

    def table(options: str, **second: str) -> str:
        rows = Rows(results, {**ENVIRONMENTS, "e2": {**ENVIRONMENT, **second}})
        return make_table(Spec.parse(f"race model=gcn input=cora {options}"), rows)

    assert "torch 2.13.0" in table("", torch="2.13.0")
    assert "torch 2.11.0" in table("torch=2.11.0+cu130", torch="2.13.0")
    with pytest.raises(ValueError, match=r"NVIDIA A100 \(cuda\) and NVIDIA H200 \(cuda\); add gpu="):
        table("", gpu="NVIDIA A100")
    assert "NVIDIA A100, torch" in table('gpu="NVIDIA A100"', gpu="NVIDIA A100")


@pytest.mark.parametrize(
    ("make", "text", "said"),
    [
        (make_table, "rase model=gcn input=cora", "no table 'rase'; did you mean 'race'"),
        (make_table, "race model=gcn", "give model=... input=..."),
        (make_table, 'race model=gcn input=cora arm="zoo regional"', "no option 'arm'"),
        (make_table, "kernels model=gcn input=cora", "kernels is of one arm; give model=... input=... arm="),
        (make_table, "race modle=gcn input=cora", "no option 'modle'; did you mean 'model'"),
        (make_table, "race model=gcn,gat input=cora", "2 races match: gcn .* gat"),
        (make_value, "p500 model=gcn input=cora arm=x", "no value 'p500'; did you mean 'p50'"),
        (make_value, "p50 model=gcn input=cora", "give model=... input=... arm="),
        (make_value, 'p50 model=gcn input=cora arm="zoo regionl"', "no arm 'zoo regionl'; did you mean 'zoo regional'"),
    ],
)
def test_wrong_markers(make: Callable[[Spec, Rows], str], text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(Spec.parse(text), Rows([*race(), *race(model="gat")], ENVIRONMENTS))


def _rewritten(text: str) -> str:
    return rewrite(text, lambda spec: f"table of {spec.kind}", lambda spec: f"value of {spec.kind}")


def test_blocks_are_replaced_and_the_rest_and_markers_in_code_are_kept() -> None:
    text = "a\n<!-- table: race x=1 -->\nold\n\nolder\n<!-- end table -->\nb <!-- value: p50 -->3<!-- end --> c\n"
    once = _rewritten(text)
    assert once == (
        "a\n<!-- table: race x=1 -->\n\ntable of race\n\n<!-- end table -->\n"
        "b <!-- value: p50 -->value of p50<!-- end --> c\n"
    )
    code = (
        "```md\n<!-- table: race -->\n<!-- value: x -->\n```\n~~~~\n<!-- end table -->\n~~~\n~~~~\n`<!-- value: x -->`"
    )
    for unchanged in (once, code):
        assert _rewritten(unchanged) == unchanged


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n<!-- table: race -->\n", "line 2: the table is not closed"),
        ("<!-- table: a -->\n<!-- table: b -->\n<!-- end table -->", "line 1: the table is not closed"),
        ("<!-- end table -->", "line 1: .* closes no table"),
        ("x <!-- value: p50 --> y", "line 1: a value is not closed"),
        ("<!-- table: -->\n<!-- end table -->", "line 1: .*names nothing"),
        ("<!-- table: race cora -->\n<!-- end table -->", "line 1: race cora: 'cora' is no key=value"),
        ("<!-- table: race a=1 a=2 -->\n<!-- end table -->", "a is given twice"),
    ],
)
def test_broken_markers_name_their_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _rewritten(text)


EAGER, FULL = "upstream eager", "upstream full"
CORA = ("gnn", "gcn", "cora", "inference", "float32", "cuda")
ARXIV = ("gnn", "gcn", "arxiv", "inference", "float32", "cuda")
PAGE = Path(__file__).resolve().parent.parent / "docs/results/claims.md"


def pair(speedup: float, *, noise: float = 0.004, **case: Any) -> list[Result]:
    arms = [
        row(1.0, seed=0, noise=noise, impl="upstream", strategy="eager", **case),
        row(1 / speedup, seed=1, noise=noise, cold=4.0, impl="upstream", strategy="full", **case),
    ]
    twin = row(1 / speedup, seed=2, noise=noise, impl="upstream", strategy="full", control=True, **case)
    return [*arms, twin]


def part(limit: str, *where: tuple[str, ...], **options: Any) -> Part:
    low, high = parse_limit(limit)
    values = {"says": "gain", "figure": "speed", "arms": (FULL, EAGER), "races": where or (CORA,), **options}
    return Part(low=low, high=high, **values)


def outcomes(one: Part, *results: Result) -> list[str]:
    return [place.outcome + f" {place.why}".rstrip() for place in places(one, races(results, ENVIRONMENTS))]


def test_what_does_not_run_or_is_wrong_fails_and_what_has_no_numbers_says_nothing() -> None:
    eager = row(impl="upstream", strategy="eager")
    crash = failure("crashed", "misaligned address", impl="upstream", strategy="full")
    assert outcomes(part("at least 1.0"), eager, crash) == ["fails upstream full: crashed"]
    too_large = failure("does-not-fit", "needs 200 GiB", impl="upstream", strategy="full")
    assert outcomes(part("at least 1.0"), eager, too_large) == outcomes(part("at least 1.0"), eager) == []
    assert outcomes(part("at least 1.0"), *pair(1.5, input="arxiv"), *pair(1.5, model="gat")) == []
    eager, full, twin = pair(2.0)
    full.check = Check(error=0.5, eager_error=1e-7, reference_dtype="float64")
    assert outcomes(part("at least 1.0"), eager, full, twin) == ["fails upstream full: its output is wrong"]
    assert outcomes(part("at most 10", figure="error over eager's", arms=(FULL,)), eager, full, twin) == ["fails more"]
    eager, full, twin = pair(2.0)
    full.cold = full.warm = full.memory = full.check = None
    (race,) = races([eager, full, twin], ENVIRONMENTS)
    for name in claims.FIGURES.keys() - {"speed"}:
        arms = (FULL, EAGER) if name in ("peak memory", "cold compile time") else (FULL,)
        assert claims.measure(part("at least 1", figure=name, arms=arms), race) is None, name


def test_the_page_has_a_line_a_claim_says_what_is_not_measured_and_no_figure_is_typed() -> None:
    parts = part("1.4 to 1.6"), part("at least 1", ARXIV, says="larger")
    one = Claim(7, "Gains", "`full` gains.", parts, "Note.")
    text = claims.page(Rows(pair(1.5), ENVIRONMENTS), {7: one})
    summary = "<summary><code>full</code> gains. <b>Holds.</b></summary>"
    assert f'<details markdown="1" id="claim-7">\n{summary}\n\n| it says |' in text
    assert "| gain | upstream full over upstream eager | gcn, cora, inference, float32 | 1" in text
    assert "| larger | upstream full over upstream eager | 1 race | – | at least 1× | not measured yet |" in text
    assert "Note.\n\nNVIDIA H200" in text and "```sh\npython -m benchmarks.run --family gnn" in text
    with pytest.raises(ValueError, match="no option 'id'"):
        make_table(Spec.parse("claims id=7"), Rows([], {}))
    typed = " ".join(one.note + one.not_here for one in known_claims().values())
    assert re.findall(r"\d\S*\s*(?:×|ms|MiB|%)", typed) == []
    said = re.findall(r"^<summary>.+ <b>(.*)</b></summary>$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(said) == len(known_claims())
