"""Verdicts on claims follow from rows alone: synthetic ones here, with every way a claim can come out."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.claims import CLAIMS, THEMES, verdicts
from benchmarks.claims import page as claims
from benchmarks.claims.claim import Claim, Part, Range, Where, around, at_least, at_most, between, commands
from benchmarks.claims.figures import (
    Broken,
    CompileSeconds,
    CompileTime,
    Epoch,
    Error,
    FirstCall,
    Kernels,
    Measured,
    PeakMemory,
    Recompiles,
    Speed,
    WarmUp,
    Way,
    quotient,
)
from benchmarks.record import Check, Memory, Result, Rows, Work, load
from benchmarks.report.docs import Spec, drift, make_table, make_value, update
from benchmarks.report.model import MeasuredRace, races
from tests.rows import ENVIRONMENT, failure, row, write

ENVIRONMENTS = {"e1": ENVIRONMENT}
EAGER, FULL, TUNED = Way(strategy="eager"), Way(), Way(impl="upstream-tuned")
CORA = Where(family="gnn", model="gcn", input="cora", dtype="float32")
ARXIV = replace(CORA, input="arxiv")
SPEED = Speed(FULL, EAGER)
PAGE = Path(__file__).resolve().parent.parent / "docs/claims.md"


def pair(speedup: float, *, noise: float = 0.004, **case: Any) -> list[Result]:
    """Upstream eager at 1 ms, upstream full faster by that, and a copy of it."""
    arms = [
        row(1.0, seed=0, noise=noise, impl="upstream", strategy="eager", **case),
        row(1 / speedup, seed=1, noise=noise, cold=4.0, impl="upstream", strategy="full", **case),
    ]
    twin = row(1 / speedup, seed=2, noise=noise, impl="upstream", strategy="full", control=True, **case)
    return [*arms, twin]


def shown(*results: Result) -> list[MeasuredRace]:
    return races(results, ENVIRONMENTS)


def part(allowed: Range, *where: Where, **options: Any) -> Part:
    return Part(**{"says": "gain", "figure": SPEED, "allowed": allowed, "where": where or (CORA,), **options})


def verdict(one: Part, *results: Result) -> str:
    return verdicts.of_part(one, verdicts.places(one, shown(*results))).text


# One race


@pytest.mark.parametrize(
    ("allowed", "speedup", "said"),
    [
        (between(1.4, 1.6), 1.5, "holds"),
        (between(1.6, 1.8), 1.5, "fails (less)"),
        (between(1.1, 1.3), 1.5, "fails (more)"),
        (at_least(1.0), 1.5, "holds"),
        (at_most(1.0), 1.5, "fails (more)"),
        (between(1.4, 1.5), 1.5, "cannot be told: the interval crosses 1.5×"),
        (between(1.5, 1.6), 1.5, "cannot be told: the interval crosses 1.5×"),
    ],
)
def test_where_the_interval_lies_decides(allowed: Range, speedup: float, said: str) -> None:
    assert verdict(part(allowed), *pair(speedup)) == said


def test_the_noise_of_the_race_widens_the_interval() -> None:
    edge = between(1.4, 1.502)
    quiet = pair(1.48, noise=0.001)
    assert verdict(part(edge), *quiet) == "holds"
    loud = [*quiet[:2], replace_times(quiet[2], 1.05)]
    assert verdict(part(edge), *loud).startswith("cannot be told: the interval crosses 1.5×")


def replace_times(result: Result, factor: float) -> Result:
    assert result.steady is not None
    result.steady.device_ms = [factor * t for t in result.steady.device_ms]
    return result


def test_few_rounds_decide_nothing() -> None:
    few = [
        row(1.0, rounds=3, impl="upstream", strategy="eager"),
        row(0.5, rounds=3, impl="upstream", strategy="full"),
    ]
    assert "too few rounds" in verdict(part(between(1.9, 2.1)), *few)


def test_what_does_not_run_fails_and_what_was_not_run_says_nothing() -> None:
    eager = row(impl="upstream", strategy="eager")
    crash = failure("crashed", "misaligned address", impl="upstream", strategy="full")
    assert verdict(part(at_least(1.0)), eager, crash) == "fails (upstream full: crashed)"
    too_large = failure("does-not-fit", "needs 200 GiB", impl="upstream", strategy="full")
    assert verdict(part(at_least(1.0)), eager, too_large) == "not measured yet"
    assert verdict(part(at_least(1.0)), eager) == "not measured yet"
    assert verdict(part(at_least(1.0))) == "not measured yet"


def test_a_wrong_output_is_no_gain() -> None:
    eager, full, twin = pair(2.0)
    full.check = Check(error=0.5, eager_error=1e-7, reference_dtype="float64")
    assert verdict(part(at_least(1.0)), eager, full, twin) == "fails (upstream full: its output is wrong)"
    assert verdict(part(at_most(10), figure=Error(FULL)), eager, full, twin) == "fails (more)"


# Several races


def test_a_part_holds_or_fails_if_it_does_so_everywhere() -> None:
    both = part(between(1.4, 1.6), CORA, ARXIV)
    assert verdict(both, *pair(1.5), *pair(1.52, input="arxiv")) == "holds"
    assert verdict(both, *pair(2.5), *pair(2.52, input="arxiv")) == "fails (more)"
    assert verdict(both, *pair(2.5), *pair(1.1, input="arxiv")) == "fails"
    said = "depends on the input: holds in 1 of 2 races, fails in 1"
    assert verdict(both, *pair(1.5), *pair(2.5, input="arxiv")) == said


def test_what_is_open_cannot_be_told_and_is_not_said_to_depend_on_anything() -> None:
    both = part(between(1.4, 1.6), CORA, ARXIV)
    on_the_edge = pair(1.4, input="arxiv")
    assert verdict(both, *pair(1.6), *on_the_edge) == "cannot be told: open in 2 of 2 races"
    assert verdict(both, *pair(1.5), *on_the_edge) == "cannot be told: holds in 1 of 2 races, open in 1"
    assert verdict(both, *pair(2.5), *on_the_edge) == "cannot be told: fails in 1 of 2 races, open in 1"
    three = part(between(1.4, 1.6), CORA, ARXIV, replace(CORA, input="karate"))
    said = "depends on the input: holds in 1 of 3 races, fails in 1, open in 1"
    assert verdict(three, *pair(1.5), *on_the_edge, *pair(2.5, input="karate")) == said


def test_a_verdict_depends_on_what_tells_the_races_apart() -> None:
    options = {field: getattr(CORA, field) for field in vars(CORA)}
    assert set(verdicts.DIMENSIONS) == {*options, "gpu"} - {"device"}  # claims are about GPUs
    other = {"family": "bert", "model": "gat", "input": "arxiv", "dtype": "bfloat16", "workload": "train"}
    for field, value in other.items():
        both = part(between(1.4, 1.6), CORA, replace(CORA, **{field: value}))
        said = f"depends on the {field}: holds in 1 of 2 races, fails in 1"
        assert verdict(both, *pair(1.5), *pair(2.5, **{field: value})) == said
    # Of races that differ in more, the one thing that tells them apart, or all where no single one does.
    more = (CORA, replace(CORA, model="gat"), replace(CORA, model="gat", workload="train"))
    results = [*pair(1.5), *pair(1.5, model="gat"), *pair(2.5, model="gat", workload="train")]
    assert verdict(part(between(1.4, 1.6), *more), *results).startswith("depends on the workload: ")
    fourth = (*more, replace(CORA, workload="train"))
    results += pair(1.5, workload="train")
    assert verdict(part(between(1.4, 1.6), *fourth), *results).startswith("depends on the model and the workload: ")


def test_two_gpus_are_two_races_and_of_torch_the_newest_counts() -> None:
    a100 = {"e1": ENVIRONMENT, "e2": {**ENVIRONMENT, "gpu": "NVIDIA A100"}}
    results = [*pair(1.5), *pair(2.5, environment="e2")]
    found = verdicts.places(part(between(1.4, 1.6)), races(results, a100))
    assert (
        verdicts.of_part(part(between(1.4, 1.6)), found).text == "depends on the GPU: holds in 1 of 2 races, fails in 1"
    )
    newer = {"e1": ENVIRONMENT, "e2": {**ENVIRONMENT, "torch": "2.13.0"}}
    found = verdicts.places(part(between(1.4, 1.6)), races(results, newer))
    assert [place.outcome for place in found] == ["fails"]


def test_a_race_that_was_run_for_the_claim_counts_before_its_familys() -> None:
    eager = row(1.0, impl="upstream", strategy="eager")
    one, other = replace(CLAIMS[10], parts=(part(between(1.4, 1.6)),)), part(at_least(3.0), figure=Speed(TUNED, EAGER))

    def said(rows: Rows) -> str:
        return claims.claim_table({"id": "10"}, rows, {10: replace(one, parts=(*one.parts, other))})

    tuned = row(0.25, seed=3, impl="upstream-tuned", strategy="full")
    again = said(Rows(pair(1.1), ENVIRONMENTS, {"claim-10": [*pair(1.5), tuned]}))
    assert "fails for" not in again and again.count("holds") == 3  # both parts, and the verdict
    # The family's where the race beside lacks the arms.
    apart = said(Rows(pair(1.1), ENVIRONMENTS, {"claim-10": [eager, tuned]}))
    assert "fails: less" in apart and apart.count("| holds |") == 1
    # And where it is of a newer torch.
    newer = {**ENVIRONMENTS, "e2": {**ENVIRONMENT, "torch": "2.13.0"}}
    assert "fails: less" in said(Rows(pair(1.1, environment="e2"), newer, {"claim-10": pair(1.5)}))
    mean = part(around(2.0), CORA, ARXIV, mean=True)
    main, beside = shown(*pair(1.0), *pair(2.0, input="arxiv")), shown(*pair(4.0, input="arxiv"))
    found = verdicts.places(mean, [*(replace(race, extra="a mean") for race in beside), *main])
    assert [len(place.races) for place in found] == [2] and found[0].outcome == "holds"


def test_races_of_other_models_do_not_count() -> None:
    assert verdict(part(at_least(1.0)), *pair(1.5, input="arxiv"), *pair(1.5, model="gat")) == "not measured yet"
    assert verdict(part(at_least(1.0)), *pair(1.5, workload="train"), *pair(1.5, device="cpu")) == "not measured yet"


def test_a_mean_is_of_all_races_or_not_measured() -> None:
    mean = part(around(2.0), CORA, ARXIV, mean=True)
    assert verdict(mean, *pair(2.0)) == "not measured yet"
    assert verdict(mean, *pair(1.0), *pair(4.0, input="arxiv")) == "holds"
    found = verdicts.places(mean, shown(*pair(1.0), *pair(4.0, input="arxiv")))
    assert isinstance(found[0].measured, Measured)
    assert found[0].measured.value == pytest.approx(2.0, rel=0.01) and len(found[0].races) == 2


def test_a_comparison_of_races_divides_their_figures() -> None:
    more = part(at_least(1.0), CORA, against=ARXIV)
    assert verdict(more, *pair(2.0), *pair(1.5, input="arxiv")) == "holds"
    assert verdict(more, *pair(1.5), *pair(2.0, input="arxiv")) == "fails (less)"
    assert verdict(more, *pair(1.5)) == "not measured yet"
    crash = failure("crashed", "signal 11", input="arxiv", impl="upstream", strategy="full")
    eager = row(input="arxiv", impl="upstream", strategy="eager")
    assert verdict(more, *pair(1.5), eager, crash) == "fails (upstream full: crashed)"
    wide = quotient(Measured(1, 2, 4, "a"), Measured(0, 1, math.inf, "b"))
    assert (wide.low, wide.value, wide.high) == (0.0, 2.0, math.inf)


# Figures


def test_figures_of_one_race() -> None:
    eager, full, twin = pair(2.0)
    full.memory, eager.memory = Memory(allocated=3 << 20), Memory(allocated=2 << 20)
    full.work, eager.work = Work(kernels=9), Work(kernels=36)
    assert full.cold is not None and full.warm is not None
    full.cold.seconds, full.warm.recompiles = 3.0, ["a", "b"]
    regional = row(0.6, cold=1.5, seed=4, impl="upstream", strategy="regional")
    (race,) = shown(eager, full, twin, regional)
    assert value(PeakMemory(FULL, EAGER).of(race)) == 1.5
    assert value(Kernels(FULL, EAGER).of(race)) == 0.25
    assert value(CompileTime(FULL, Way(strategy="regional")).of(race)) == 2.0
    assert value(CompileSeconds(FULL).of(race)) == 3.0
    assert value(Recompiles(FULL).of(race)) == 2
    assert value(Error(FULL).of(race)) == pytest.approx(2.1e-7 / 1.9e-7, rel=0.5)
    p50 = next(arm.p50 for arm in race.arms if arm.name == "upstream full")
    assert p50 is not None
    assert value(FirstCall(FULL).of(race)) == pytest.approx(1 + 3000 / p50)


def test_an_epoch_holds_what_was_compiled_on_the_way() -> None:
    eager, full, twin = pair(2.0)
    for each, milliseconds in ((eager, [10.0] * 8), (full, [25.0] + [5.0] * 7), (twin, [505.0] + [5.0] * 7)):
        assert each.steady is not None
        each.steady.calls_per_round, each.steady.wall_ms = 20, milliseconds
    (race,) = shown(eager, full, twin)
    # A thousand steps of 5 ms, and in the copy that came first twenty that took half a second longer.
    assert value(Epoch(FULL, EAGER, steps=1000).of(race)) == pytest.approx(10.0 / (5.0 + 10.0))
    assert value(Epoch(FULL, EAGER, steps=40).of(race)) == pytest.approx(0.4 / 10.2)
    (alone,) = shown(eager, full)
    assert value(Epoch(FULL, EAGER, steps=1000).of(alone)) == pytest.approx(10.0 / 5.4)
    full.steady = None
    assert Epoch(FULL, EAGER, steps=1000).of(shown(eager, full)[0]) is None


def value(measured: Measured | Broken | None) -> float:
    assert isinstance(measured, Measured) and measured.low == measured.value == measured.high and measured.shown
    return measured.value


@pytest.mark.parametrize(
    ("calls", "before"),
    [
        ([0.9, 0.5, 0.010, 0.010, 0.011, 0.010], 3),  # the second and the third warm up and record
        ([0.010, 0.010, 0.010, 0.011], 1),
        ([0.9, 0.010, 0.010, 0.2, 0.010, 0.010, 0.010], 5),
    ],
)
def test_calls_before_the_steady_state(calls: list[float], before: int) -> None:
    full = pair(2.0)[1]
    assert full.cold is not None
    full.cold.later_calls = calls
    assert value(WarmUp(FULL).of(shown(full)[0])) == before


def test_figures_without_their_numbers_are_not_measured() -> None:
    eager, full, twin = pair(2.0)
    full.cold = full.warm = full.memory = full.check = full.work = None
    (race,) = shown(eager, full, twin)
    figures = [FirstCall(FULL), CompileSeconds(FULL), Recompiles(FULL), WarmUp(FULL), Error(FULL)]
    for figure in [*figures, PeakMemory(FULL, EAGER), Kernels(FULL, EAGER), CompileTime(FULL, EAGER)]:
        assert figure.of(race) is None, figure.name


# Claims


def claim(*parts: Part, **options: Any) -> Claim:
    return Claim(**{"number": 1, "title": "Gains", "text": "It gains.", "parts": parts, **options})


def test_a_claim_is_what_its_parts_are() -> None:
    holds, fails = part(at_least(1.4), says="a"), part(at_least(1.9), says="b")
    unclear, never = part(at_least(1.5), says="c"), part(at_least(1.0), ARXIV, says="d")
    one = shown(*pair(1.5))
    assert verdicts.of_claim(claim(holds), one).text == "holds"
    assert verdicts.of_claim(claim(fails, fails), one).text == "fails (less)"
    mixed = verdicts.of_claim(claim(holds, fails, unclear), one)
    assert mixed.word == "depends"
    assert mixed.text == "depends on what is asked: holds for a; fails for b; cannot be told for c"
    assert mixed.brief == "holds in part"
    assert verdicts.of_claim(claim(holds, unclear), one).text == "holds for a; cannot be told for c"
    assert verdicts.of_claim(claim(holds, unclear), one).brief == "holds in part, the rest cannot be told"
    assert verdicts.of_claim(claim(fails, unclear), one).brief == "fails in part, the rest cannot be told"
    other = part(at_least(1.5), CORA, ARXIV, says="e")
    open_ones = shown(*pair(1.5), *pair(1.5, input="arxiv"))
    assert verdicts.of_claim(claim(unclear, other), open_ones).text == "cannot be told"
    two = [part(between(1.4, high), CORA, ARXIV, says=name) for high, name in ((1.6, "f"), (1.7, "g"))]
    split = verdicts.of_claim(claim(*two, unclear), shown(*pair(1.5), *pair(2.5, input="arxiv")))
    assert split.text == "depends for f, g; cannot be told for c" and split.brief == "holds in part"
    assert verdicts.of_claim(claim(holds, never), one).text == "holds; not all measured"
    assert verdicts.of_claim(claim(never), one).text == "not measured yet"
    assert verdicts.of_claim(claim(not_here="no."), one).text == "not measured here"


def test_a_part_that_lacks_races_is_measured_in_part() -> None:
    both = claim(part(at_least(1.4), CORA, ARXIV))
    assert verdicts.of_claim(both, shown(*pair(1.5))).text == "holds; not all measured"
    assert verdicts.of_claim(both, shown(*pair(1.5), *pair(1.5, input="arxiv"))).text == "holds"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: between(2.0, 1.0), "no range"),
        (lambda: Range(), "no range"),
        (lambda: Part(says="x", figure=SPEED, allowed=at_least(1), where=()), "no races"),
        (lambda: Claim(number=1, title="", text=""), "why nothing is"),
    ],
)
def test_what_claims_nothing_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


# The page


BOOK = {
    7: claim(part(between(1.4, 1.6), says="inference"), part(at_least(1), ARXIV, says="larger"), number=7),
    9: claim(number=9, title="Not here", not_here="it is elsewhere."),
}


def block(text: str, *results: Result) -> str:
    rows = Rows(list(results), ENVIRONMENTS)
    spec = Spec.parse(text)
    make = {"claim": claims.claim_table, "claims": claims.overview, "verdict": claims.verdict}[spec.kind]
    return make(spec.options, rows, BOOK)


def test_a_block_shows_claim_figures_verdict_machine_and_commands() -> None:
    text = block("claim id=7", *pair(1.5))
    assert text.startswith("> It gains.\n\n| it says | of | race | measured | claimed | so |\n")
    assert "| inference | upstream full over upstream eager | gcn, cora, inference, float32 | 1.0" in text
    assert "noise 0." in text and "| 1.4× to 1.6× | holds |" in text
    assert "| gcn, arxiv, inference, float32 | not measured yet | at least 1× |  |" in text
    assert "\n\nVerdict: *holds; not all measured*.\n\nNVIDIA H200, torch 2.11.0+cu130" in text
    assert text.endswith(
        "```sh\n"
        "python -m benchmarks.run --family gnn --model gcn --input cora --workload inference --dtype float32 "
        "--device cuda --impl upstream --strategy eager,full --mode default\n"
        "python -m benchmarks.run --family gnn --model gcn --input arxiv --workload inference --dtype float32 "
        "--device cuda --impl upstream --strategy eager,full --mode default\n```"
    )
    assert "Verdict: *fails (more); not all measured*." in block("claim id=7", *pair(2.5))
    assert "Verdict: *not measured yet*." in block("claim id=7") and "NVIDIA" not in block("claim id=7")


def test_a_claim_that_is_not_measured_here_says_why() -> None:
    text = block("claim id=9")
    assert text == "> It gains.\n\nVerdict: *not measured here*.\n\nNot measured here: it is elsewhere."


def test_of_many_races_the_least_middle_and_most_are_shown_and_all_count() -> None:
    names = [f"m{index}" for index in range(9)]
    many = part(between(1.0, 3.0), *(replace(CORA, model=name) for name in names))
    results = [result for index, name in enumerate(names) for result in pair(1.2 + 0.3 * index, model=name)]
    lines = claims.claim_table({"id": "7"}, Rows(results, ENVIRONMENTS), {7: claim(many, number=7)}).splitlines()
    rows = [line for line in lines if line.startswith("| gain")]
    assert [re.search(r"m\d", line)[0] for line in rows[:3]] == ["m0", "m4", "m8"]  # type: ignore[index]
    assert (
        "9 races" in rows[3]
        and "depends on the model: holds in 6 of 9 races, fails in 2, open in 1" in rows[3]
        and len(rows) == 4
    )


def test_overview_and_verdict_in_running_text() -> None:
    assert block("claims", *pair(1.5)).splitlines()[2:] == [
        "| [7](#7-gains) | Gains | holds; not all measured |",
        "| [9](#9-not-here) | Not here | not measured here |",
    ]
    assert block("verdict id=7", *pair(1.5)) == "holds; not all measured"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("claim", "give id=10"),
        ("claim id=8", "no claim 8"),
        ("claim id=7 model=gcn", "give id"),
        ("claims id=7", "all"),
    ],
)
def test_wrong_markers(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        block(text)


def test_the_check_sees_a_verdict_that_the_rows_do_not_give(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table: claim id=10 -->\n<!-- end table -->\n<!-- value: verdict id=10 --><!-- end -->\n")
    rows = tmp_path / "rows.jsonl"
    write(rows, pair(1.44))
    assert update([page], load(rows)) == [page] and drift([page], load(rows)) == ""
    assert re.search(r"Verdict: \*(holds|cannot be told)", page.read_text())
    page.write_text(re.sub(r"Verdict: \*[^*]*\*", "Verdict: *fails*", page.read_text()))
    assert "+Verdict: *" in drift([page], load(rows))
    write(tmp_path / "other.jsonl", pair(3.0))
    assert "fails for inference" in update_and_read(page, tmp_path / "other.jsonl")


def update_and_read(page: Path, rows: Path) -> str:
    update([page], load(rows))
    return page.read_text()


def test_kinds_are_known_to_the_docs() -> None:
    with pytest.raises(ValueError, match="did you mean 'claim'"):
        make_table(Spec.parse("clam id=1"), Rows([], {}))
    with pytest.raises(ValueError, match="did you mean 'verdict'"):
        make_value(Spec.parse("verdct id=1"), Rows([], {}))
    assert make_value(Spec.parse("verdict id=29"), Rows([], {})) == "not measured here"


def test_every_claim_has_its_section_once_in_its_theme() -> None:
    assert sorted(CLAIMS) == list(range(1, 33)) == sorted(c.number for theme in THEMES.values() for c in theme)
    wanted = []
    for theme, inside in THEMES.items():
        wanted.append(f"## {theme}")
        for one in inside:
            wanted += [f"### {claims.heading(one)}", f"<!-- table: claim id={one.number} -->"]
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index(wanted[0]) :]
    assert re.findall(r"^(?:##.*|<!-- table.*)$", section, re.MULTILINE) == wanted
    assert "<!-- table: claims -->" in text[: text.index(wanted[0])]


def test_names_of_parts_can_stand_in_a_list() -> None:
    assert [p.says for one in CLAIMS.values() for p in one.parts if re.search("[,:;]", p.says)] == []


def test_regional_compilation_is_held_against_what_the_zoo_stands_for() -> None:
    ours, full = (Way(impl="zoo", strategy=strategy, cuda_graph=True) for strategy in ("regional", "full"))
    figures = [one.figure for one in CLAIMS[22].parts]
    assert Speed(ours, full) in figures and CompileTime(full, ours) in figures
    families = {where.family for one in CLAIMS[22].parts if one.figure == Speed(ours, full) for where in one.where}
    assert families >= {"gnn", "bert", "llm", "resnet", "unet"}


def test_the_overview_is_short_and_no_verdict_is_empty() -> None:
    text = PAGE.read_text(encoding="utf-8")
    overview = text[text.index("<!-- table: claims -->") : text.index("## What is gained")]
    cells = [line.split(" | ")[-1].rstrip(" |") for line in overview.splitlines() if line.startswith("| [")]
    assert len(cells) == len(CLAIMS) and max(map(len, cells)) <= 60
    assert not re.search(r"depends on (?:the run|the race|:|\s:)|holds in 0 ", text)


def test_no_figure_of_the_page_is_typed() -> None:
    # Outside of blocks there are figures only where the page says how to read it.
    text = PAGE.read_text(encoding="utf-8")
    text = text[text.index("## What is gained") :]
    typed = re.sub(r"<!-- table.*?<!-- end table -->", "", text, flags=re.DOTALL)
    typed = re.sub(r"<!-- value:.*?<!-- end -->", "", typed, flags=re.DOTALL)
    typed = re.sub(r"^#.*$", "", typed, flags=re.MULTILINE)
    assert re.findall(r"\d\S*\s*(?:×|ms|MiB|%)", typed) == []


def test_claimed_ranges_read_as_the_claim_says_them() -> None:
    assert verdicts.claimed(part(around(1.33))) == "1.21× to 1.46×"
    assert verdicts.claimed(part(at_most(1.05))) == "at most 1.05×"
    assert verdicts.claimed(part(between(60, 120), figure=CompileSeconds(FULL))) == "60 s to 120 s"
    assert verdicts.claimed(part(at_most(5), figure=WarmUp(FULL))) == "at most 5"
    assert verdicts.claimed(part(between(0, 0), figure=Recompiles(FULL))) == "0"


# Commands


def test_commands_name_arms_where_options_would_make_more() -> None:
    dynamic, tuned = Way(dynamic=True), Way(impl="upstream-tuned", mode="max-autotune")
    assert commands([part(at_least(1), figure=Speed(dynamic, FULL))]) == [
        "python -m benchmarks.run --family gnn --model gcn --input cora --workload inference --dtype float32 "
        "--device cuda --impl upstream --strategy full --mode default --dynamic",
    ]
    (command,) = commands([part(at_least(1), figure=Speed(tuned, EAGER))])
    assert command.endswith("--arm 'upstream eager' --arm 'upstream-tuned full max-autotune'")
    (command,) = commands([part(at_least(1), figure=Speed(dynamic, EAGER))])
    assert command.endswith("--mode default --dynamic --arm 'upstream eager' --arm 'upstream full dynamic'")
    (together,) = commands([part(at_least(1), CORA, replace(CORA, model="gat"))])
    assert "--model gcn,gat " in together
