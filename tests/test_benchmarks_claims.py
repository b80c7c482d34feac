"""Verdicts on claims follow from rows alone: synthetic ones here, with every way a claim can come out."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.claims import judge, page
from benchmarks.claims.claim import CLAIMS, Claim, Part, Where, commands, parse_limit
from benchmarks.claims.judge import Broken, Measured, quotient
from benchmarks.record import Check, Memory, Result, Rows, Work, load
from benchmarks.report.docs import Spec, drift, make_table, make_value, update
from benchmarks.report.model import MeasuredRace, races
from tests.rows import ENVIRONMENT, ENVIRONMENTS, failure, row, write

EAGER, FULL, TUNED = "upstream eager", "upstream full", "upstream-tuned full"
CORA = Where(family="gnn", model="gcn", input="cora", dtype="float32")
ARXIV = replace(CORA, input="arxiv")
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


def part(limit: str, *where: Where, **options: Any) -> Part:
    low, high = parse_limit(limit)
    values = {"says": "gain", "figure": "speed", "arms": (FULL, EAGER), "where": where or (CORA,), **options}
    return Part(low=low, high=high, **values)


def verdict(one: Part, *results: Result) -> str:
    return judge.of_part(one, judge.places(one, shown(*results))).text


# One race


@pytest.mark.parametrize(
    ("allowed", "speedup", "said"),
    [
        ("1.4 to 1.6", 1.5, "holds"),
        ("1.6 to 1.8", 1.5, "fails (less)"),
        ("1.1 to 1.3", 1.5, "fails (more)"),
        ("at least 1.0", 1.5, "holds"),
        ("at most 1.0", 1.5, "fails (more)"),
        ("1.4 to 1.5", 1.5, "cannot be told: the interval crosses 1.5×"),
        ("1.5 to 1.6", 1.5, "cannot be told: the interval crosses 1.5×"),
    ],
)
def test_where_the_interval_lies_decides(allowed: str, speedup: float, said: str) -> None:
    assert verdict(part(allowed), *pair(speedup)) == said


def test_few_rounds_decide_nothing() -> None:
    few = [
        row(1.0, rounds=3, impl="upstream", strategy="eager"),
        row(0.5, rounds=3, impl="upstream", strategy="full"),
    ]
    assert "too few rounds" in verdict(part("1.9 to 2.1"), *few)


def test_what_does_not_run_fails_and_what_was_not_run_says_nothing() -> None:
    eager = row(impl="upstream", strategy="eager")
    crash = failure("crashed", "misaligned address", impl="upstream", strategy="full")
    assert verdict(part("at least 1.0"), eager, crash) == "fails (upstream full: crashed)"
    too_large = failure("does-not-fit", "needs 200 GiB", impl="upstream", strategy="full")
    assert verdict(part("at least 1.0"), eager, too_large) == "not measured yet"
    assert verdict(part("at least 1.0"), eager) == "not measured yet"
    assert verdict(part("at least 1.0")) == "not measured yet"


def test_a_wrong_output_is_no_gain() -> None:
    eager, full, twin = pair(2.0)
    full.check = Check(error=0.5, eager_error=1e-7, reference_dtype="float64")
    assert verdict(part("at least 1.0"), eager, full, twin) == "fails (upstream full: its output is wrong)"
    assert verdict(part("at most 10", figure="error over eager's", arms=(FULL,)), eager, full, twin) == "fails (more)"


# Several races


@pytest.mark.parametrize(
    ("speedups", "said"),
    [
        ((1.5, 1.52), "holds"),
        ((2.5, 2.52), "fails (more)"),
        ((2.5, 1.1), "fails"),
        ((1.5, 2.5), "depends on the input: holds in 1 of 2 races, fails in 1"),
        # What is open, on the edge, cannot be told, and is not said to depend on anything.
        ((1.6, 1.4), "cannot be told: open in 2 of 2 races"),
        ((1.5, 1.4), "cannot be told: holds in 1 of 2 races, open in 1"),
        ((2.5, 1.4), "cannot be told: fails in 1 of 2 races, open in 1"),
        ((1.5, 1.4, 2.5), "depends on the input: holds in 1 of 3 races, fails in 1, open in 1"),
    ],
)
def test_a_part_holds_or_fails_if_it_does_so_in_every_race(speedups: tuple[float, ...], said: str) -> None:
    inputs = ("cora", "arxiv", "karate")[: len(speedups)]
    several = part("1.4 to 1.6", *(replace(CORA, input=name) for name in inputs))
    results = [result for name, gain in zip(inputs, speedups, strict=True) for result in pair(gain, input=name)]
    assert verdict(several, *results) == said


def test_a_verdict_depends_on_what_tells_the_races_apart() -> None:
    options = {field: getattr(CORA, field) for field in vars(CORA)}
    assert set(judge.DIMENSIONS) == {*options, "gpu"} - {"device"}  # claims are about GPUs
    other = {"family": "bert", "model": "gat", "input": "arxiv", "dtype": "bfloat16", "workload": "train"}
    for field, value in other.items():
        both = part("1.4 to 1.6", CORA, replace(CORA, **{field: value}))
        said = f"depends on the {field}: holds in 1 of 2 races, fails in 1"
        assert verdict(both, *pair(1.5), *pair(2.5, **{field: value})) == said
    # Of races that differ in more, the one thing that tells them apart, or all where no single one does.
    more = (CORA, replace(CORA, model="gat"), replace(CORA, model="gat", workload="train"))
    results = [*pair(1.5), *pair(1.5, model="gat"), *pair(2.5, model="gat", workload="train")]
    assert verdict(part("1.4 to 1.6", *more), *results).startswith("depends on the workload: ")
    fourth = (*more, replace(CORA, workload="train"))
    results += pair(1.5, workload="train")
    assert verdict(part("1.4 to 1.6", *fourth), *results).startswith("depends on the model and the workload: ")


def test_two_gpus_are_two_races_and_of_torch_the_newest_counts() -> None:
    a100 = {"e1": ENVIRONMENT, "e2": {**ENVIRONMENT, "gpu": "NVIDIA A100"}}
    results = [*pair(1.5), *pair(2.5, environment="e2")]
    found = judge.places(part("1.4 to 1.6"), races(results, a100))
    assert judge.of_part(part("1.4 to 1.6"), found).text == "depends on the GPU: holds in 1 of 2 races, fails in 1"
    newer = {"e1": ENVIRONMENT, "e2": {**ENVIRONMENT, "torch": "2.13.0"}}
    found = judge.places(part("1.4 to 1.6"), races(results, newer))
    assert [place.outcome for place in found] == ["fails"]


def test_a_race_that_was_run_for_the_claim_counts_before_its_familys() -> None:
    eager = row(1.0, impl="upstream", strategy="eager")
    one, other = replace(CLAIMS[10], parts=(part("1.4 to 1.6"),)), part("at least 3.0", arms=(TUNED, EAGER))

    def said(rows: Rows) -> str:
        return page.one_claim({"id": "10"}, rows, {10: replace(one, parts=(*one.parts, other))})

    tuned = row(0.25, seed=3, impl="upstream-tuned", strategy="full")
    again = said(Rows(pair(1.1), ENVIRONMENTS, {"claim-10": [*pair(1.5), tuned]}))
    assert "fails for" not in again and again.count("holds") == 3  # both parts, and the verdict
    # The family's where the race beside lacks the arms.
    apart = said(Rows(pair(1.1), ENVIRONMENTS, {"claim-10": [eager, tuned]}))
    assert "fails: less" in apart and apart.count("| holds |") == 1
    # And where it is of a newer torch.
    newer = {**ENVIRONMENTS, "e2": {**ENVIRONMENT, "torch": "2.13.0"}}
    assert "fails: less" in said(Rows(pair(1.1, environment="e2"), newer, {"claim-10": pair(1.5)}))
    mean = part("around 2.0", CORA, ARXIV, mean=True)
    main, beside = shown(*pair(1.0), *pair(2.0, input="arxiv")), shown(*pair(4.0, input="arxiv"))
    found = judge.places(mean, [*(replace(race, extra="a mean") for race in beside), *main])
    assert [len(place.races) for place in found] == [2] and found[0].outcome == "holds"


def test_races_of_other_models_do_not_count() -> None:
    assert verdict(part("at least 1.0"), *pair(1.5, input="arxiv"), *pair(1.5, model="gat")) == "not measured yet"
    assert verdict(part("at least 1.0"), *pair(1.5, workload="train"), *pair(1.5, device="cpu")) == "not measured yet"


def test_a_mean_is_of_all_races_or_not_measured() -> None:
    mean = part("around 2.0", CORA, ARXIV, mean=True)
    assert verdict(mean, *pair(2.0)) == "not measured yet"
    assert verdict(mean, *pair(1.0), *pair(4.0, input="arxiv")) == "holds"
    found = judge.places(mean, shown(*pair(1.0), *pair(4.0, input="arxiv")))
    assert isinstance(found[0].measured, Measured)
    assert found[0].measured.value == pytest.approx(2.0, rel=0.01) and len(found[0].races) == 2


def test_a_comparison_of_races_divides_their_figures() -> None:
    more = part("at least 1.0", CORA, against=ARXIV)
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
    full.cold.seconds, full.warm.recompiles = 3.0, ["a", "b"]
    regional = row(0.6, cold=1.5, seed=4, impl="upstream", strategy="regional")
    (race,) = shown(eager, full, twin, regional)
    assert value(figure("peak memory", FULL, EAGER, race=race)) == 1.5
    assert value(figure("kernels", FULL, EAGER, race=race)) == 0.25
    assert value(figure("cold compile time", FULL, "upstream regional", race=race)) == 2.0
    assert value(figure("cold compile seconds", FULL, race=race)) == 3.0
    assert value(figure("recompiles", FULL, race=race)) == 2
    assert value(figure("error over eager's", FULL, race=race)) == pytest.approx(2.1e-7 / 1.9e-7, rel=0.5)
    p50 = next(arm.p50 for arm in race.arms if arm.name == "upstream full")
    assert p50 is not None
    assert value(figure("first call over a later one", FULL, race=race)) == pytest.approx(1 + 3000 / p50)


def figure(name: str, *arms: str, race: MeasuredRace) -> Measured | Broken | None:
    return judge.measure(part("at least 1", figure=name, arms=arms), race)


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
    full.cold.later_calls = calls
    assert value(figure("calls before the steady state", FULL, race=shown(full)[0])) == before


def test_figures_without_their_numbers_are_not_measured() -> None:
    eager, full, twin = pair(2.0)
    full.cold = full.warm = full.memory = full.check = full.work = None
    (race,) = shown(eager, full, twin)
    two = {"peak memory", "kernels", "cold compile time"}
    for name in judge.FIGURES.keys() - {"speed", "epoch"}:
        assert figure(name, FULL, *([EAGER] if name in two else []), race=race) is None, name


# Claims


def claim(*parts: Part, **options: Any) -> Claim:
    return Claim(**{"number": 1, "theme": "Gains", "title": "Gains", "text": "It gains.", "parts": parts, **options})


def test_a_claim_is_what_its_parts_are() -> None:
    holds, fails = part("at least 1.4", says="a"), part("at least 1.9", says="b")
    unclear, never = part("at least 1.5", says="c"), part("at least 1.0", ARXIV, says="d")
    one = shown(*pair(1.5))
    assert judge.of_claim(claim(holds), one).text == "holds"
    assert judge.of_claim(claim(fails, fails), one).text == "fails (less)"
    mixed = judge.of_claim(claim(holds, fails, unclear), one)
    assert mixed.word == "depends"
    assert mixed.text == "depends on what is asked: holds for a; fails for b; cannot be told for c"
    assert mixed.brief == "holds in part"
    assert judge.of_claim(claim(holds, unclear), one).text == "holds for a; cannot be told for c"
    assert judge.of_claim(claim(holds, unclear), one).brief == "holds in part, the rest cannot be told"
    assert judge.of_claim(claim(fails, unclear), one).brief == "fails in part, the rest cannot be told"
    other = part("at least 1.5", CORA, ARXIV, says="e")
    open_ones = shown(*pair(1.5), *pair(1.5, input="arxiv"))
    assert judge.of_claim(claim(unclear, other), open_ones).text == "cannot be told"
    two = [part(f"1.4 to {high}", CORA, ARXIV, says=name) for high, name in ((1.6, "f"), (1.7, "g"))]
    split = judge.of_claim(claim(*two, unclear), shown(*pair(1.5), *pair(2.5, input="arxiv")))
    assert split.text == "depends for f, g; cannot be told for c" and split.brief == "holds in part"
    assert judge.of_claim(claim(holds, never), one).text == "holds; not all measured"
    assert judge.of_claim(claim(never), one).text == "not measured yet"
    assert judge.of_claim(claim(part("at least 1.4", CORA, ARXIV)), one).text == "holds; not all measured"
    assert judge.of_claim(claim(not_here="no."), one).text == "not measured here"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: part("2.0 to 1.0"), "no range"),
        (lambda: Part("x", "speed", (FULL, EAGER), -math.inf, math.inf, (CORA,)), "no range"),
        (lambda: Part("x", "speed", (FULL, EAGER), 1.0, 2.0, ()), "no races"),
        (lambda: Claim(1, "", "", ""), "why nothing is"),
        (lambda: CORA.case("upstream fast"), "no arm 'upstream fast'"),
    ],
)
def test_what_claims_nothing_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


# The page


BOOK = {
    7: claim(part("1.4 to 1.6", says="inference"), part("at least 1", ARXIV, says="larger"), number=7),
    9: claim(number=9, title="Not here", not_here="it is elsewhere."),
}


def block(text: str, *results: Result) -> str:
    rows = Rows(list(results), ENVIRONMENTS)
    spec = Spec.parse(text)
    make = {"claim": page.one_claim, "claims": page.all_claims, "verdict": page.verdict}[spec.kind]
    return make(spec.options, rows, BOOK)


def test_a_claim_that_is_not_measured_here_says_why() -> None:
    text = block("claim id=9")
    assert text == "> It gains.\n\nVerdict: *not measured here*.\n\nNot measured here: it is elsewhere."


def test_of_many_races_the_least_middle_and_most_are_shown_and_all_count() -> None:
    names = [f"m{index}" for index in range(9)]
    many = part("1.0 to 3.0", *(replace(CORA, model=name) for name in names))
    results = [result for index, name in enumerate(names) for result in pair(1.2 + 0.3 * index, model=name)]
    lines = page.one_claim({"id": "7"}, Rows(results, ENVIRONMENTS), {7: claim(many, number=7)}).splitlines()
    rows = [line for line in lines if line.startswith("| gain")]
    assert [re.search(r"m\d", line)[0] for line in rows[:3]] == ["m0", "m4", "m8"]  # type: ignore[index]
    assert (
        "9 races" in rows[3]
        and "depends on the model: holds in 6 of 9 races, fails in 2, open in 1" in rows[3]
        and len(rows) == 4
    )


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


def test_names_of_parts_stand_in_lists_and_no_figure_or_empty_verdict_is_on_the_page() -> None:
    assert [p.says for one in CLAIMS.values() for p in one.parts if re.search("[,:;]", p.says)] == []
    typed = " ".join(one.note + one.not_here for one in CLAIMS.values())
    assert re.findall(r"\d\S*\s*(?:×|ms|MiB|%)", typed) == []
    text = PAGE.read_text(encoding="utf-8")
    said = re.findall(r"^<summary><b>.*</b>: (.*)</summary>$", text, re.MULTILINE)
    assert len(said) == len(CLAIMS) == 32 and max(map(len, said)) <= 60
    assert not re.search(r"depends on (?:the run|the race|:|\s:)|holds in 0 ", text)


def test_regional_compilation_is_held_against_what_the_zoo_stands_for() -> None:
    ours, full = (f"zoo {strategy} + CUDA graph" for strategy in ("regional", "full"))
    figures = {(one.figure, *one.arms): one.where for one in CLAIMS[22].parts}
    assert ("cold compile time", full, ours) in figures
    families = {where.family for where in figures["speed", ours, full]}
    assert families >= {"gnn", "bert", "llm", "resnet", "unet"}


# Commands


def test_commands_name_arms_where_options_would_make_more() -> None:
    dynamic, tuned = "upstream full dynamic", "upstream-tuned full max-autotune"
    assert commands([part("at least 1", arms=(dynamic, FULL))]) == [
        "python -m benchmarks.run --family gnn --model gcn --input cora --workload inference --dtype float32 "
        "--device cuda --impl upstream --strategy full --mode default --dynamic",
    ]
    (command,) = commands([part("at least 1", arms=(tuned, EAGER))])
    assert command.endswith("--arm 'upstream eager' --arm 'upstream-tuned full max-autotune'")
    (command,) = commands([part("at least 1", arms=(dynamic, EAGER))])
    assert command.endswith("--mode default --dynamic --arm 'upstream eager' --arm 'upstream full dynamic'")
    (together,) = commands([part("at least 1", CORA, replace(CORA, model="gat"))])
    assert "--model gcn,gat " in together
