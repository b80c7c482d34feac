"""Verdicts on claims follow from rows alone: synthetic ones here, with every way a claim can come out."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import claims
from benchmarks.claims import Claim, Part, known_claims, parse_limit, places
from benchmarks.record import Check, Result, Rows
from benchmarks.report.docs import Spec, make_table
from benchmarks.report.model import MeasuredRace, races
from tests.rows import ENVIRONMENT, ENVIRONMENTS, failure, row

EAGER, FULL = "upstream eager", "upstream full"
CORA = ("gnn", "gcn", "cora", "inference", "float32", "cuda")
ARXIV = ("gnn", "gcn", "arxiv", "inference", "float32", "cuda")
PAGE = Path(__file__).resolve().parent.parent / "docs/results/claims.md"


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


def part(limit: str, *where: tuple[str, ...], **options: Any) -> Part:
    low, high = parse_limit(limit)
    values = {"says": "gain", "figure": "speed", "arms": (FULL, EAGER), "races": where or (CORA,), **options}
    return Part(low=low, high=high, **values)


def outcomes(one: Part, *results: Result) -> list[str]:
    return [place.outcome + f" {place.why}".rstrip() for place in places(one, shown(*results))]


def test_what_does_not_run_fails_and_what_was_not_run_says_nothing() -> None:
    eager = row(impl="upstream", strategy="eager")
    crash = failure("crashed", "misaligned address", impl="upstream", strategy="full")
    assert outcomes(part("at least 1.0"), eager, crash) == ["fails upstream full: crashed"]
    too_large = failure("does-not-fit", "needs 200 GiB", impl="upstream", strategy="full")
    assert outcomes(part("at least 1.0"), eager, too_large) == outcomes(part("at least 1.0"), eager) == []
    assert outcomes(part("at least 1.0"), *pair(1.5, input="arxiv"), *pair(1.5, model="gat")) == []


def test_a_wrong_output_is_no_gain() -> None:
    eager, full, twin = pair(2.0)
    full.check = Check(error=0.5, eager_error=1e-7, reference_dtype="float64")
    assert outcomes(part("at least 1.0"), eager, full, twin) == ["fails upstream full: its output is wrong"]
    assert outcomes(part("at most 10", figure="error over eager's", arms=(FULL,)), eager, full, twin) == ["fails more"]


def test_two_gpus_are_two_races_and_of_torch_the_newest_counts() -> None:
    results = [*pair(1.5), *pair(2.5, environment="e2")]
    a100 = {"e1": ENVIRONMENT, "e2": {**ENVIRONMENT, "gpu": "NVIDIA A100"}}
    assert [place.outcome for place in places(part("1.4 to 1.6"), races(results, a100))] == ["holds", "fails"]
    newer = {"e1": ENVIRONMENT, "e2": {**ENVIRONMENT, "torch": "2.13.0"}}
    assert [place.outcome for place in places(part("1.4 to 1.6"), races(results, newer))] == ["fails"]


def test_figures_without_their_numbers_are_not_measured() -> None:
    eager, full, twin = pair(2.0)
    full.cold = full.warm = full.memory = full.check = None
    (race,) = shown(eager, full, twin)
    for name in claims.FIGURES.keys() - {"speed"}:
        arms = (FULL, EAGER) if name in ("peak memory", "cold compile time") else (FULL,)
        assert claims.measure(part("at least 1", figure=name, arms=arms), race) is None, name


def test_the_page_has_a_line_a_claim_and_says_what_is_not_measured() -> None:
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


def test_no_figure_is_typed_and_every_claim_is_on_the_page() -> None:
    typed = " ".join(one.note + one.not_here for one in known_claims().values())
    assert re.findall(r"\d\S*\s*(?:×|ms|MiB|%)", typed) == []
    said = re.findall(r"^<summary>.+ <b>(.*)</b></summary>$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(said) == len(known_claims())
