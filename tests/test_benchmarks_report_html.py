"""The HTML report: whole, offline, escaped, and its leading sentences right."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html.parser import HTMLParser

import pytest

from benchmarks.record import Result
from benchmarks.report import advice, cells, charts, html, selection, summary, tables
from benchmarks.report.model import races
from benchmarks.report.selection import commands_of
from tests.rows import ENVIRONMENT, ENVIRONMENTS, failure, race, row, uncompiled
from tests.rows import shown as shown_race
from tests.rows import ways as one_armed

VOID = {"meta", "input", "br", "img"}


class Page(HTMLParser):
    """A page read strictly: every tag closed in order, no id twice, and all that it says, names and refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.rows: list[Mapping[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        if tag == "tr" and "data-impl" in given:
            self.rows.append(given)
        for key, value in attrs:
            assert not key.startswith("on"), f"{tag} has {key}"
            if key == "id":
                self.ids.append(str(value))
            elif key == "href":
                self.references.append(str(value))
            elif key in ("src", "data", "srcset", "action", "poster") and not str(value).startswith(
                "data:image/svg+xml"
            ):
                self.loads.append(str(value))
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def _page(results: list[Result], environments: Mapping[str, Mapping[str, object]] = ENVIRONMENTS) -> Page:
    return Page(html.report(results, environments))


@pytest.fixture(scope="module")
def plain() -> str:
    """The page of one race; drawing it takes a second."""
    return html.report(race(), ENVIRONMENTS)


# The page


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
        assert one.title in text and advice.lead(one) in text
        for arm in one.arms:
            assert cells.name(arm) in text
        for _, lines in (tables.speeds(one), tables.costs(one), tables.compiles(one)):
            assert all(cell in text for line in lines for cell in line)
        assert all(command in text for command in commands_of([one]))
    assert "zoo hierarchical: timeout 60 s without a word" in text
    # Four reasons that differ in a number.
    assert "upstream full: 4× break: Unsupported: self-loop op 0 (and the like with other numbers)" in text
    assert "self-loop op 3" not in text
    assert len(page.rows) == sum(len(one.arms) + len(one.failures) for one in shown)
    outcomes = {str(attributes["data-outcome"]) for attributes in page.rows}
    assert "than transformers' best as shipped" in text
    assert outcomes == {"faster", "slower", "reference", "timeout"}
    assert "than torch-geometric's best as shipped" in text
    for step in ("upstream eager", "ours, eager", "+ regions", "+ outer CUDA graph"):
        assert text.count(step) >= len(shown)
    assert "driver 580.65" in text and "libraries: triton 3.6.0" in text
    assert page.tags.count("img") == 2 + 2 * len(shown)  # speed-ups a family; latency and total time a race
    assert page.tags.count("article") == len(shown)


def test_the_page_begins_with_what_was_gained_over_each_arm_of_upstream(plain: str) -> None:
    text = Page(plain).text
    said = summary.gains(races(race(), ENVIRONMENTS))
    assert list(said) == [
        "upstream eager",
        "upstream full",
        "upstream full reduce-overhead",
        "upstream regional",
        "upstream's best tuned arm",
    ]
    assert all(f"{name}: {words}" in text for name, words in said.items())
    assert text.index(said["upstream eager"]) < text.index("1 race, 9 arms that ran")
    assert re.fullmatch(
        r"0\.0492 instead of 0\.\d+ ms a call, 1\.45 instead of 4\.20 s to compile from cold caches \(2\.89× less\); "
        r"medians\. A call is 14\.\d× as fast over 1 race: faster in 1\.",
        said["upstream full"],
    )
    assert summary.gains(races([failure("crashed", "signal 11")], ENVIRONMENTS)) == {}


def test_the_page_loads_nothing_and_every_reference_has_its_target(plain: str) -> None:
    text = plain
    page = Page(text)
    assert page.loads == [] and "link" not in page.tags
    assert page.references and {reference[:1] for reference in page.references} == {"#"}
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert "http" not in text and "@import" not in text
    assert text == html.report(race(), ENVIRONMENTS)  # the same rows make the same file


def test_a_cold_compile_that_hit_a_cache_is_named() -> None:
    results = race()
    results[6].cold.cache_hits = 3
    assert "The cold compile of these hit a cache: zoo full." in _page(results).text


def test_what_was_not_measured_is_left_out_and_said() -> None:
    page = _page(uncompiled(race()))
    assert page.tags.count("img") == 1 + 1
    assert "Compile times were not measured here." in page.text and "Total time" not in page.text
    assert "compile s, cold / warm" not in page.text
    page = _page([failure("crashed", "signal 11"), failure("does-not-fit", "needs 300 GiB", impl="upstream")])
    assert "zoo eager: crashed signal 11" in page.text and "upstream eager: does-not-fit needs 300 GiB" in page.text
    assert "no advice is possible" in page.text and "img" not in page.tags
    assert "0 races" in _page([], {}).text
    bare = row(1.0, impl="zoo", strategy="eager")
    bare.cold = bare.warm = bare.memory = bare.check = bare.work = bare.command = None
    page = _page([bare])
    assert "Only zoo eager has a steady time: 1.0" in page.text and page.tags.count("img") == 1


def test_hostile_strings_stay_text() -> None:
    evil = '</script><script>alert("$x$")</script><img src=x onerror=alert(1)>&amp;'
    results = race(family=evil, model=evil, input="$\\frac{1}{0}$ \n\x00 {{ 7*7 }}")
    results[1].cold.breaks = [evil]  # type: ignore[union-attr]
    for result in results:
        result.command = evil
        result.data = evil
    results.append(
        failure("failed", evil, family=evil, model=evil, input=results[0].case.input, impl=evil, strategy=evil)
    )
    page = _page(results, {"e1": {**ENVIRONMENT, "gpu": evil, "libraries": {evil: evil}}})
    assert page.tags.count("script") == 1 and page.loads == []
    assert page.text.count("onerror=alert(1)") > 10 and "{{ 7*7 }}" in page.text and "&amp;" in page.text


def test_a_loss_is_marked_wherever_its_verdict_stands_in_the_cell() -> None:
    text = html.report(race({"upstream-tuned full + CUDA graph": 0.5}), ENVIRONMENTS)
    assert re.search(r'<b class="slower">0\.\d+× [^<]* slower \(upstream-tuned full \+ CUDA graph\)</b>', text)
    for cell, outcome in (
        ("1.5× [1.4, 1.6] faster (upstream slower-than-ever)", "faster"),
        ("0.791× [0.7, 0.8] slower (upstream full)", "slower"),
        ("reference", "reference"),
        ("–", ""),
        ("", ""),
    ):
        assert cells.outcome(cell) == outcome


def test_families_come_as_their_pages_and_explanations_last() -> None:
    names = ("claims", "own", "patterns", "unet", "attention", "resnet", "gnn", "llm", "bert")
    shown = races([row(1.0, family=name) for name in names], ENVIRONMENTS)
    assert list(selection.by_family(shown)) == [
        "gnn", "llm", "bert", "resnet", "unet", "own", "attention", "patterns", "claims"
    ]  # fmt: skip


def test_ways_that_run_alone_are_one_table_and_compared() -> None:
    page = _page(one_armed())
    text = page.text
    assert page.tags.count("article") == page.tags.count("img") == 0 and page.tags.count("table") == 2
    assert text.index("short · inference") < text.index("packed 1.0") < text.index("padded 2.0")
    assert text.index("long · inference") < text.index("padded 4.") < text.index("packed 4.") < text.index("nested")
    assert re.search(r"padded 2\.0\d 2\.\d+ 0\.50\d× \[0\.4\d+, 0\.5\d+\] slower", text)
    assert "nested · long · inference · float32 · cuda: crashed signal 11" in text and "unpaired" in text
    assert "times the floor" not in text and "kernels" not in text  # of which no row says anything
    assert "no other arm to compare it with" not in text

    def compared(results: list[Result]) -> bool:
        return tables.are_alternatives(races(results, ENVIRONMENTS))

    # One arm of a family with an upstream library, or one way alone, is no comparison.
    assert compared(one_armed())
    assert not compared(one_armed("gnn")) and not compared(one_armed()[1:3]) and not compared(race(family="attention"))
    assert _said(one_armed()).startswith("The fastest way: packed for short, 1.02 ms a call, 2.0")


def test_columns_that_no_row_fills_are_left_out(plain: str) -> None:
    assert tables.filled(("a", "b", "c", "d"), [("–", "1", "–", "– → –"), ("–", "–", "not measured", "–")]) == (
        ["a", "b"],
        [["–", "1"], ["–", "–"]],
    )
    assert tables.filled(("a", "b"), []) == (["a", "b"], [])
    assert "compile s, cold / warm" in plain


# Where regional and full meet


def test_an_arm_faster_in_most_rounds_but_not_by_its_median_pays_nothing_back() -> None:
    results = [row(cold=1.4, warm=0.7, strategy="regional"), row(cold=2.9, warm=1.3, strategy="full")]
    regional, full = (result.steady for result in results)
    quiet = [0.1 * (1 + number) for number in range(22)]
    regional.device_ms = [*quiet, *[0.05] * 8]
    full.device_ms = [*(time / 1.2 for time in quiet), *[20.0] * 8]  # something else ran in these rounds
    shown = shown_race(results)
    assert [arm.name for arm in shown.arms] == ["zoo regional", "zoo full"]
    assert shown.verdict(shown.arms[1], shown.arms[0]) == "faster"
    assert "Run zoo regional from the first call on" in advice.lead(shown)
    assert charts.break_even(shown) is not None


# The family's sentences


def _said(results: list[Result]) -> str:
    return " ".join(summary.sentences(races(results, ENVIRONMENTS)))


def test_a_family_is_led_by_its_range_its_worst_row_and_what_to_run() -> None:
    wins, loses = race(), race({"zoo regional + CUDA graph": 20.0, "zoo regional": 9.0}, input="arxiv")
    said = _said([*wins, *loses])
    assert re.fullmatch(
        r"Ours is 0\.4\d\d× to 8\.53× \(median 4\.\d+×\) as fast as torch-geometric's best as shipped over 2 races: "
        r"faster in 1, slower in 1 \(gcn, arxiv\)\. "
        r"Against its best tuned, 0\.05\d\d× to 1\.085× \(median 0\.5\d+×\) over 2 races: "
        r"faster in 1, slower in 1 \(gcn, arxiv\)\. "
        r"Our worst result: zoo regional on gcn, arxiv, 5\.\d+× slower\. "
        r"In a new process, run eager up to 1,000 calls \(in 2 of 2 races\), .*",
        said,
    ), said
    page = _page([*wins, *loses])
    assert said in page.text
    assert "gcn · arxiv · our worst result" in page.text
    assert page.text.index(said) < page.text.index("our worst result") < page.text.index(advice.lead(shown_race(wins)))


def test_what_a_family_is_told_to_run_is_what_advise_chooses() -> None:
    (only,) = races(race(), ENVIRONMENTS)
    for calls in summary.CALLS:
        picked = advice.choose(only, calls, "cold")
        name = "eager" if picked.arm.name == "zoo eager" else picked.arm.name
        assert f"{name} " in summary.what_to_run([only])[0]
    assert summary.what_to_run([only]) == [
        "In a new process, run eager up to 1,000 calls (in 1 of 1 race), "
        "zoo regional + CUDA graph for 10,000 or more (in 1 of 1 race)."
    ]


def test_a_family_that_nothing_can_be_said_of_says_so() -> None:
    assert "Compile times were not measured here" in _said(uncompiled(race()))
    wrong = [row(1.0, impl="upstream"), row(0.5, strategy="regional", seed=1)]
    wrong[1].check.error = 0.5  # a regional arm that computes something else is not ours
    assert "zoo regional !" in _page(wrong).text
    assert _said([failure("crashed", "signal 11")]) == "No upstream library was measured here."
    theirs = [result for result in race(family="claims") if result.case.impl == "upstream"]
    assert _said(theirs).startswith("The fastest arm of each race is 1.6") and "run" not in _said(theirs)


def test_a_family_is_held_against_what_ran_of_upstream() -> None:
    shipped = [result for result in race() if result.case.impl != "upstream"]
    failed = failure("out-of-memory", "7 GiB", impl="upstream", strategy="eager")
    said = _said([*shipped, failed])
    assert said.startswith("Ours is 1.085× as fast as torch-geometric's best tuned over 1 race: faster in 1. In a new")
    captured = [
        row(time, noise=0.0, family="optimizers", impl=impl, strategy="eager", cuda_graph=True)
        for impl, time in (("zoo", 0.5), ("upstream", 2.0), ("upstream-tuned", 1.0))
    ]
    assert _said(captured).startswith("Ours is 2.00× as fast as upstream's best over 1 race: faster in 1.")


# The leading sentence


def _scaled(factor: float, *names: str) -> Callable[[], list[Result]]:
    return lambda: race(dict.fromkeys(names, factor))


COMPILED = (
    "upstream full reduce-overhead",
    "upstream-tuned full + CUDA graph",
    "zoo full",
    "zoo regional",
    "zoo regional + CUDA graph",
)


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
        (
            race,
            r"For fewer than 3,8\d\d calls where the compiler already runs, 9,\d\d\d in a new process, "
            r"run zoo eager; beyond that zoo regional \+ CUDA graph, which is 8\.53× faster than "
            r"torch-geometric's best as shipped and 1\.085× faster than torch-geometric's best tuned\. "
            r"With warm caches: from 1,9\d\d calls, [78],\d\d\d in a new process\.",
        ),
        (
            _scaled(20.0, *COMPILED),
            r"Do not compile: no compiled arm is measurably faster than zoo eager, which is 1\.\d\d× faster than "
            r"torch-geometric's best as shipped and .*× faster than torch-geometric's best tuned\.",
        ),
        (
            _scaled(0.5, "upstream-tuned full + CUDA graph"),
            r"For fewer than 3,8\d\d calls where the compiler already runs, 9,\d\d\d in a new process, "
            r"run zoo eager; from there zoo regional \+ CUDA graph; "
            r"from 9\d\.\dk calls on upstream-tuned full \+ CUDA graph; "
            r"ours, zoo regional \+ CUDA graph, is 1\.8\d× slower than it\..*",
        ),
        (
            lambda: uncompiled(race()),
            r"In steady state zoo regional \+ CUDA graph is the fastest, 0\.0492 ms a call, which is 8\.53× faster "
            r"than torch-geometric's best as shipped and 1\.085× .* tuned\. Compile times were not measured here\.",
        ),
        (
            _three_steps,
            r"For fewer than 1,9\d\d calls where the compiler already runs, 6,\d\d\d in a new process, run zoo eager; "
            r"from there zoo regional; from 8\d\.\dk calls on zoo full; "
            r"no arm of torch-geometric ran, so there is no comparison\. With warm caches: from 9\d\d and 1,9\d\d "
            r"calls; in a new process for fewer than 4,\d\d\d calls run zoo eager; beyond that zoo full\.",
        ),
        (
            lambda: [row(1.0, rounds=4, seed=1), row(0.5, rounds=4, seed=2, strategy="regional", cold=1.0)],
            r"Too few rounds to tell the arms apart; measure again with at least 6 rounds\.",
        ),
        (
            lambda: [row(1.0, seed=1), row(1.4, seed=2, impl="upstream"), row(1.0, seed=3, control=True)],
            r"No arm of this race is compiled: run zoo eager, which is 1\.\d+× faster than .*",
        ),
        (
            lambda: [row(0.5, strategy="regional", cold=1.0), row(0.9, strategy="full", cold=3.0, seed=1)],
            r"Run zoo regional from the first call on; no arm of torch-geometric ran, so there is no comparison\.",
        ),
        (lambda: [failure("crashed", "signal 11")], r"No arm has a steady time.*no advice is possible\."),
    ],
)
def test_the_lead_says_what_to_use(rows: Callable[[], list[Result]], said: str) -> None:
    lead = advice.lead(shown_race(rows()))
    assert re.fullmatch(said, lead), lead


def test_the_lead_repeats_the_tables_figures() -> None:
    shown = shown_race(race())
    ours = shown.ours
    assert ours is not None
    cold, warm = cells.break_even(shown, ours).split("/")
    lead = advice.lead(shown)
    assert f"fewer than {cold} calls" in lead and f"With warm caches: from {warm} calls" in lead
    assert cells.speedup(shown, ours, shown.best_shipped).split()[0] in lead


def test_the_lead_names_what_cannot_be_told_from_its_choice_and_leaves_out_what_is_wrong() -> None:
    alike = race({"zoo full": 0.048 / 0.197, "zoo eager (A/A)": 1.05})
    lead = advice.lead(shown_race(alike))
    assert "No measurable difference to zoo regional + CUDA graph: zoo full" in lead
    wrong = race({"zoo full": 0.01})
    check = wrong[6].check
    check.error = 0.5
    assert "zoo full" not in advice.lead(shown_race(wrong))
