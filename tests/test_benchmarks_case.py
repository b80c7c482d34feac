"""Cases: names that tell arms apart, and options that expand into them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.case import DEFAULT_ARMS, IMPLEMENTATIONS, STRATEGY_NAMES, Case, expand, races_of, refusal, twin_of

CPU = Case(family="gnn", model="gcn", input="karate")
GPU = replace(CPU, device="cuda")


def nothing_refused(case: Case) -> None:
    return None


def names(base: Case, **options: object) -> list[str]:
    return [case.arm for case in expand([base], nothing_refused, **options)[0]]


def test_default_arms_on_a_gpu_are_those_of_the_rules():
    assert names(GPU) == [
        "zoo eager",
        "zoo full",
        "zoo regional",
        "zoo regional + CUDA graph",
        "upstream eager",
        "upstream full",
        "upstream full reduce-overhead",
        "upstream regional",
        "zoo regional + CUDA graph (A/A)",
    ]


def test_default_arms_on_a_cpu_leave_out_cuda_graphs():
    assert names(CPU) == [
        "zoo eager",
        "zoo full",
        "zoo regional",
        "upstream eager",
        "upstream full",
        "upstream regional",
        "zoo regional (A/A)",
    ]


def test_the_zoo_without_its_kernels_is_an_implementation_to_ask_for_and_no_other_case_than_the_zoos():
    cases, _ = expand([GPU], nothing_refused, impls=["zoo", "zoo-library"], strategies=["eager", "regional+cudagraph"])
    assert [case.arm for case in cases] == [
        "zoo eager",
        "zoo regional + CUDA graph",
        "zoo-library eager",
        "zoo-library regional + CUDA graph",
        "zoo regional + CUDA graph (A/A)",
    ]
    assert {case.impl for case in cases} == {"zoo"} and len({case.key for case in cases}) == 5
    assert [case.kernels for case in cases] == [True, True, False, False, True]
    assert "runs no kernels of the zoo's own" in str(refusal(replace(CPU, kernels=False)))
    assert refusal(replace(GPU, kernels=False)) is None


def test_given_options_are_combined():
    assert names(GPU, impls=["zoo", "upstream-tuned"], strategies=["full", "full+cudagraph"]) == [
        "zoo full",
        "zoo full + CUDA graph",
        "upstream-tuned full",
        "upstream-tuned full + CUDA graph",
        "zoo full + CUDA graph (A/A)",
    ]


def test_a_mode_alone_applies_to_what_it_can():
    arms = names(CPU, modes=["max-autotune-no-cudagraphs"])
    assert "zoo full max-autotune-no-cudagraphs" in arms
    assert not any("eager" in arm for arm in arms)


def test_an_implementation_alone_runs_its_default_arms():
    assert names(CPU, impls=["upstream"]) == [
        "upstream eager",
        "upstream full",
        "upstream regional",
        "upstream regional (A/A)",
    ]
    assert names(CPU, impls=["upstream-tuned"])[0] == "upstream-tuned eager"


def test_one_arm_alone_has_no_control():
    assert names(CPU, impls=["zoo"], strategies=["eager"]) == ["zoo eager"]


def test_dynamic_is_for_compiled_arms():
    assert names(CPU, impls=["zoo"], dynamic=True)[:2] == ["zoo eager", "zoo full dynamic"]


def test_what_a_workload_refuses_is_left_out_with_its_reason():
    cases, refused = expand([CPU], lambda case: "no" if case.impl == "upstream" else None)
    assert {case.impl for case in cases} == {"zoo"}
    assert set(refused.values()) == {"no"}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"strategy": "eager", "mode": "reduce-overhead", "device": "cuda"}, "not compiled"),
        ({"strategy": "regional", "mode": "reduce-overhead", "device": "cuda"}, "full alone"),
        ({"strategy": "full", "mode": "reduce-overhead", "device": "cuda", "cuda_graph": True}, "itself"),
        ({"strategy": "full", "mode": "reduce-overhead"}, "GPU"),
        ({"strategy": "regional", "mode": "max-autotune", "device": "cuda"}, "full alone"),
        ({"strategy": "full", "mode": "max-autotune"}, "GPU"),
        ({"strategy": "eager", "dynamic": True}, "dynamic shapes do not apply"),
        ({"strategy": "full", "cuda_graph": True}, "a CPU has no CUDA graphs"),
        ({"strategy": "full", "cuda_graph": True, "dynamic": True, "device": "cuda"}, "fixed shapes"),
        ({"strategy": "magic"}, "strategy 'magic' is not one of eager"),
        ({"mode": "magic"}, "mode 'magic' is not one of default"),
        ({"impl": "magic"}, "implementation 'magic' is not one of zoo"),
        ({"strategy": "hierarchical", "impl": "upstream"}, "zoo model"),
    ],
)
def test_arms_that_cannot_exist(fields: dict[str, object], word: str):
    assert word in (refusal(replace(CPU, **fields)) or "")


def test_every_default_arm_can_exist():
    for impl, name, mode, _ in DEFAULT_ARMS:
        assert impl in IMPLEMENTATIONS and name in STRATEGY_NAMES
        strategy, _, graph = name.partition("+")
        assert refusal(replace(GPU, impl=impl, strategy=strategy, mode=mode, cuda_graph=bool(graph))) is None


def test_keys_tell_all_arms_apart():
    cases, _ = expand([GPU], nothing_refused)
    cases += expand([GPU], nothing_refused, impls=IMPLEMENTATIONS, strategies=STRATEGY_NAMES, dynamic=True)[0]
    unique = {case.key: case for case in cases}
    assert len(unique) == len({tuple(case.to_json().items()) for case in cases})


def test_the_control_copies_the_zoos_last_arm():
    cases, _ = expand([GPU], nothing_refused)
    assert cases[-1] == replace(twin_of(cases[:-1]), control=True)
    assert cases[-1].strategy_name == "regional+cudagraph"


def test_races_are_told_apart_by_what_arms_share():
    other = replace(CPU, input="cora")
    cases, _ = expand([CPU, other], nothing_refused)
    assert [race[2] for race in races_of(cases)] == ["karate", "cora"]


def test_only_arms_that_match_a_pattern_and_a_control_of_them():
    base = Case(family="f", model="m", input="i", device="cuda")
    cases, _ = expand([base], lambda case: None, only=["zoo regional*", "upstream eager"])
    assert [case.arm for case in cases] == [
        "zoo regional",
        "zoo regional + CUDA graph",
        "upstream eager",
        "zoo regional + CUDA graph (A/A)",
    ]
    assert expand([base], lambda case: None, only=["nothing"]) == ([], {})
