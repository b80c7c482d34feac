"""The report command, and its HTML page: whole, offline, escaped, and its leading sentences right."""

import functools
import re
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks.cli import run_command
from benchmarks.record import Result
from benchmarks.report import cells, show, tables
from benchmarks.report.__main__ import command
from benchmarks.report.model import by_family, commands_of, races
from tests.rows import ENVIRONMENT, ENVIRONMENTS, failure, race, row, uncompiled, write
from tests.rows import shown as shown_race

main = functools.partial(run_command, command, "report")
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


def test_report_of_committed_rows_does_not_land_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(show, "ROOT", tmp_path)
    write(tmp_path / "results" / "h200" / "rows.jsonl", race())
    assert main([str(tmp_path / "results" / "h200")]) == 0
    assert [path.suffix for path in (tmp_path / "results").rglob("*.*")] == [".jsonl"]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"report.html"}


def test_update_then_check_then_drift(tmp_path: Path, docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write(tmp_path / "results" / "h200" / "rows.jsonl", race())
    options = ["--results", str(tmp_path / "results"), str(docs)]
    assert main(["--check", *options]) == 1
    assert main(["--update", *options]) == 0
    page = docs / "page.md"
    assert 'arm="zoo regional" -->0.236 ms<!-- end --> a call.' in page.read_text()
    assert main(["--check", *options]) == 0
    capsys.readouterr()

    stamp = page.stat().st_mtime_ns
    assert main(["--update", *options]) == 0  # nothing to do
    assert page.stat().st_mtime_ns == stamp and capsys.readouterr().out == ""

    page.write_text(page.read_text().replace("0.236 ms", "0.2 ms"))  # edited by hand
    assert main(["--check", *options]) == 1
    assert "+It takes" in (said := capsys.readouterr().out) and f"--update {docs}" in said
    assert main(["--update", *options]) == 0

    write(rows, race({"zoo regional": 0.5}))  # measured again
    assert main(["--check", *options]) == 1


def test_a_broken_block_changes_no_file(tmp_path: Path, docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (docs / "zz.md").write_text("\n<!-- table: rase model=gcn input=cora -->\n<!-- end table -->\n")
    assert main(["--update", "--results", str(tmp_path / "none"), str(docs)]) == 2
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
        (["--update", "{here}"], "holds no Markdown; give *.md files"),
    ],
)
def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main([word.format(here=tmp_path) for word in arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run" / "rows.jsonl", race())
    (tmp_path / "run" / "report.html").mkdir()
    assert main([str(tmp_path / "run")]) == 2
    assert (said := capsys.readouterr().err).count("\n") == 1 and "report.html" in said


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


def test_the_page_loads_nothing() -> None:
    text = show.report(race(), ENVIRONMENTS)
    page = Page(text)
    assert page.loads == [] and "link" not in page.tags
    assert page.references == []
    assert "http" not in text and "@import" not in text
    assert text == show.report(race(), ENVIRONMENTS)  # the same rows make the same file


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


def test_hostile_strings_stay_text() -> None:
    evil = '</script><script>alert("$x$")</script><img src=x onerror=alert(1)>&amp;'
    results = race(family=evil, model=evil, input="$\\frac{1}{0}$ \n\x00 {{ 7*7 }}")
    results[1].cold.breaks = [evil]
    for result in results:
        result.command = evil
        result.data = evil
    results.append(
        failure("failed", evil, family=evil, model=evil, input=results[0].case.input, impl=evil, strategy=evil)
    )
    page = _page(results, {"e1": {**ENVIRONMENT, "gpu": evil, "libraries": {evil: evil}}})
    assert "script" not in page.tags and page.loads == []
    assert page.text.count("onerror=alert(1)") > 10 and "{{ 7*7 }}" in page.text and "&amp;" in page.text


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


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (race, ["zoo regional + CUDA graph is the fastest, 0.0492 ms", "8.53× faster than", " 1.085× faster than"]),
        (race, ["in a new process with empty caches zoo eager finishes first, from 9,"]),
        (lambda: race(dict.fromkeys(COMPILED, 20.0)), ["zoo eager is the fastest", "zoo eager finishes first."]),
        (
            lambda: race({TUNED: 0.5}),
            ["upstream-tuned full + CUDA graph is the fastest", "ours, zoo regional + CUDA graph, is 1.8"],
        ),
        (
            lambda: race({"zoo full": 0.048 / 0.197, "zoo eager (A/A)": 1.05}),
            ["No measurable difference to zoo regional + CUDA graph: zoo full"],
        ),
        (lambda: uncompiled(race()), ["8.53× faster than", "Compile times were not measured here."]),
        (_three_steps, ["no arm of torch-geometric ran", "calls on zoo regional, from 8", "k calls on zoo full."]),
        (
            lambda: [row(rounds=4), row(0.5, rounds=4, strategy="full", cold=1.0)],
            ["Too few rounds", "at least 6 rounds"],
        ),
        (lambda: [failure("crashed", "signal 11")], ["No arm has a steady time", "no advice is possible."]),
    ],
)
def test_the_lead_says_what_to_use(rows: Callable[[], list[Result]], said: list[str]) -> None:
    lead = show.lead(shown_race(rows()))
    assert all(words.lower() in lead.lower() for words in said), lead


def test_the_lead_leaves_out_an_arm_with_a_wrong_output() -> None:
    results = race({"zoo full": 0.01})
    results[6].check.error = 0.5
    assert "zoo full" not in show.lead(shown_race(results))
