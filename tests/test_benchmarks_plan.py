"""Cases: names that tell arms apart, and options that expand into them."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.plan import Case, expand, refusal

CPU = Case(family="gnn", model="gcn", input="karate")
GPU = replace(CPU, device="cuda")


def nothing_refused(case: Case) -> None:
    return None


def names(base: Case, **options: object) -> list[str]:
    return [case.arm for case in expand([base], nothing_refused, **options)[0]]


GPU_ARMS = ["zoo eager", "zoo full", "zoo regional", "zoo regional + CUDA graph"]
THEIR_ARMS = ["upstream eager", "upstream full", "upstream regional"]
CONTROL = "zoo regional + CUDA graph (A/A)"
NAMES: list[tuple[Case, dict[str, Any], list[str]]] = [
    (
        GPU, {},
        [*GPU_ARMS, *THEIR_ARMS[:2], "upstream full reduce-overhead", "upstream regional", CONTROL],
    ),
    (CPU, {}, [*GPU_ARMS[:3], *THEIR_ARMS, "zoo regional (A/A)"]),
    (
        GPU, {"impls": ["zoo", "upstream-tuned"], "strategies": ["full", "full+cudagraph"]},
        [
            "zoo full", "zoo full + CUDA graph", "upstream-tuned full", "upstream-tuned full + CUDA graph",
            "zoo full + CUDA graph (A/A)",
        ],
    ),
    (CPU, {"impls": ["upstream"]}, [*THEIR_ARMS, "upstream regional (A/A)"]),
    (CPU, {"impls": ["zoo"], "strategies": ["eager"]}, ["zoo eager"]),  # one arm alone has no control
    (
        GPU, {"impls": ["zoo"], "strategies": ["eager", "full", "full+dynamic"]},
        ["zoo eager", "zoo full", "zoo full dynamic", "zoo full (A/A)"],  # the control is a static one's
    ),
    (CPU, {"impls": ["zoo"], "strategies": ["full+dynamic"]}, ["zoo full dynamic"]),
    (GPU, {"only": ["zoo regional*", "upstream eager"]}, [*GPU_ARMS[2:], "upstream eager", CONTROL]),
    (GPU, {"only": ["nothing"]}, []),
]  # fmt: skip


@pytest.mark.parametrize(("base", "options", "arms"), NAMES)
def test_options_and_their_arms(base: Case, options: dict[str, Any], arms: list[str]):
    assert names(base, **options) == arms


def test_the_zoo_without_its_kernels_is_an_implementation_to_ask_for_and_no_other_case_than_the_zoos():
    cases, _ = expand([GPU], nothing_refused, impls=["zoo", "zoo-library"], strategies=["eager", "regional+cudagraph"])
    captured = " regional + CUDA graph"
    assert [case.arm for case in cases] == [
        "zoo eager", f"zoo{captured}", "zoo-library eager", f"zoo-library{captured}", f"zoo{captured} (A/A)",
    ]  # fmt: skip
    assert {case.impl for case in cases} == {"zoo"} and len({case.key for case in cases}) == 5
    assert [case.kernels for case in cases] == [True, True, False, False, True]
    assert "the zoo runs no kernels of its own" in str(refusal(replace(CPU, kernels=False)))
    assert refusal(replace(GPU, kernels=False)) is None


def test_an_arm_that_cannot_be_is_left_out_with_the_reason():
    cases, refused = expand([GPU], declared, strategies=["full+dynamic", "eager"])
    assert [case.arm for case in cases] == ["zoo eager", "upstream full dynamic", "upstream eager", "zoo eager (A/A)"]
    assert {key.rpartition(" / ")[2]: why for key, why in refused.items()} == {"zoo full dynamic": "declared shapes"}


def declared(case: Case) -> str | None:
    return "declared shapes" if case.dynamic and case.impl == "zoo" else None


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"strategy": "eager", "mode": "reduce-overhead", "device": "cuda"}, "not compiled"),
        ({"strategy": "regional", "mode": "reduce-overhead", "device": "cuda"}, "full alone"),
        ({"strategy": "full", "mode": "reduce-overhead", "device": "cuda", "cuda_graph": True}, "itself"),
        ({"strategy": "full", "mode": "reduce-overhead"}, "GPU"),
        ({"strategy": "eager", "dynamic": True}, "dynamic shapes do not apply"),
        ({"strategy": "full", "cuda_graph": True}, "a CPU has no CUDA graphs"),
        ({"strategy": "full", "cuda_graph": True, "dynamic": True, "device": "cuda"}, "fixed shapes"),
        ({"strategy": "hierarchical", "impl": "upstream"}, "zoo model"),
    ],
)
def test_arms_that_cannot_exist(fields: dict[str, object], word: str):
    assert word in (refusal(replace(CPU, **fields)) or "")
