"""The models that claims speak of: all ways to run one compute the same, and each has the property that it is for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.claims.claim import CLAIMS
from benchmarks.compiler import Recorder
from benchmarks.families import Prepared, load
from benchmarks.families.claims import SUBJECTS, WORKLOAD
from benchmarks.families.claims_models import PIXELS, rollout, seen
from benchmarks.plan import Case, expand
from benchmarks.strategies import apply, execution_mode
from benchmarks.training import Trainer
from tests.workloads import error, prepare

INFERS = [name for name, subject in SUBJECTS.items() if subject.infers]
TRAINS = [name for name, subject in SUBJECTS.items() if subject.loss is not None]
TUNED = [name for name, subject in SUBJECTS.items() if subject.tuned is not None]
SMALL_LLAMA = [("prefill-1x32", "inference"), ("decode-1x64", "inference"), ("2x16", "train")]


def case(model: str, **changes: Any) -> Case:
    return Case(**{"family": "claims", "model": model, "input": "small", "impl": "upstream", **changes})


def compiled(one: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Prepared, Any, Recorder]:
    """The case under aot_eager, what to call, and what counts its graphs; the signatures of its layers are known."""
    monkeypatch.setenv("BENCHMARKS_BACKEND", "aot_eager")
    torch.compiler.reset()
    prepared = prepare(one)
    recorder = Recorder(prepared.model)
    with execution_mode(one), recorder.watching_signatures():
        if prepared.training is None:
            prepared.model(**prepared.inputs)
    recorder.restart()
    return prepared, apply(one, prepared), recorder


# Inference


@pytest.mark.parametrize("model", INFERS)
def test_inference_is_the_reference_s(model: str) -> None:
    prepared = prepare(case(model))
    assert not prepared.model.training and prepared.flops is None
    with torch.inference_mode():
        assert error(prepared.model(**prepared.inputs), prepared.reference()) < 3e-6
        half = prepare(case(model, dtype="bfloat16"))
        assert 1e-5 < error(half.model(**half.inputs), half.reference()) < 5e-2
        list(prepared.model.parameters())[-1].add_(0.5)
        assert error(prepared.model(**prepared.inputs), prepared.reference()) > 1e-4
        if model in TUNED:
            tuned = prepare(case(model, impl="upstream-tuned"))
            assert error(tuned.model(**tuned.inputs), tuned.reference()) < 3e-6


@pytest.mark.parametrize("model", INFERS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_as_a_whole_it_is_the_same(model: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    one = case(model, strategy="full", dynamic=dynamic)
    prepared, call, recorder = compiled(one, monkeypatch)
    with execution_mode(one):
        assert error(call(**prepared.inputs), prepared.reference()) < 3e-6
    # A part between two breaks may hold nothing to compile.
    assert recorder.facts().graphs == (4 if model == "graph-breaks" else 1)


# Training


@pytest.mark.parametrize("impl", ["upstream", "upstream-tuned"])
@pytest.mark.parametrize("model", TRAINS)
def test_losses_are_the_reference_s_and_fall(model: str, impl: str) -> None:
    one = case(model, workload="train", impl=impl)
    if WORKLOAD.refuses(one):
        assert impl == "upstream-tuned" and SUBJECTS[model].tuned is None
        return
    prepared = prepare(one)
    arm = Trainer(one, prepared)
    losses = arm.losses(arm.eager())
    assert len(losses) == prepared.training.checked
    torch.testing.assert_close(losses.double(), prepared.reference(), rtol=1e-4, atol=1e-6)
    if model != "ppo-vit":  # what a player reaches in a few steps says nothing
        curve = arm.losses(arm.eager(), 120)
        assert curve[-10:].mean() < 0.95 * curve[:10].mean()


@pytest.mark.slow
@pytest.mark.parametrize("model", TRAINS)
def test_compiled_training_takes_the_same_steps(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = case(model, workload="train", strategy="full")
    prepared, call, recorder = compiled(one, monkeypatch)
    arm = Trainer(one, prepared)
    losses = arm.losses(arm.compiled(call))
    torch.testing.assert_close(losses.double(), prepared.reference(), rtol=1e-4, atol=1e-6)
    # The policy acts without gradients on some pictures and learns with them from more.
    assert recorder.facts().graphs == (2 if model == "ppo-vit" else 1)


# What each is for


def graphs_and_breaks(one: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    prepared, call, recorder = compiled(one, monkeypatch)
    with execution_mode(one):
        call(**prepared.inputs)
    facts = recorder.facts()
    return facts.graphs, len(facts.breaks), len(facts.recompiles)


def test_graph_breaks_are_there_and_the_tuned_model_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _, breaks, _ = graphs_and_breaks(case("graph-breaks", strategy="full"), monkeypatch)
    assert breaks >= 1
    tuned = case("graph-breaks", strategy="full", impl="upstream-tuned")
    assert graphs_and_breaks(tuned, monkeypatch) == (1, 0, 0)


@pytest.mark.slow
def test_each_batch_size_has_its_variant_or_all_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = len(prepare(case("batch-sizes")).inputs["batches"])
    tuned = case("batch-sizes", strategy="regional", impl="upstream-tuned")
    assert graphs_and_breaks(tuned, monkeypatch) == (sizes, 0, 0)
    dynamic = case("batch-sizes", strategy="regional", dynamic=True)
    graphs, breaks, recompiles = graphs_and_breaks(dynamic, monkeypatch)
    assert graphs <= 2 and breaks == recompiles == 0  # a batch of one is a size of its own


def test_of_the_whole_step_regional_compiles_one_block_and_tuned_holds_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = case("whole-step", workload="train", strategy="regional")
    prepared, _, _ = compiled(one, monkeypatch)
    assert [module._compiled_call_impl is not None for module in prepared.model.blocks] == [True, False]
    tuned = prepare(replace(one, impl="upstream-tuned"))
    batch = tuned.training.batch(0)
    assert tuned.model(batch["ids"], batch["ids"]).ndim == 0


def test_the_player_sees_where_it_is_and_moves() -> None:
    place, goal = torch.tensor([[-1.0, 1.0]]), torch.tensor([[1.0, 1.0]])
    picture = seen(place, goal)
    assert picture.shape == (1, 2, PIXELS, PIXELS)
    assert [divmod(int(channel.argmax()), PIXELS) for channel in picture[0]] == [(31, 0), (31, 31)]

    def right(pictures: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[5.0, 0.0, 0.0]]).expand(len(pictures), 3)

    pictures, pushes, _, returns = rollout(right, {"place": place, "goal": goal, "noise": torch.zeros(4, 1, 2)})
    assert pictures.shape == (4, 2, PIXELS, PIXELS) and pushes.shape == (4, 2)
    assert divmod(int(pictures[-1, 0].argmax()), PIXELS)[1] > 5
    assert (returns.diff() > 0).all()  # it comes nearer, and less is left to lose
    far, near = (seen(x, goal) for x in (place, goal))
    assert float((far[:, 0] * far[:, 1]).sum()) < float((near[:, 0] * near[:, 1]).sum())


def test_a_policy_learns_to_come_nearer() -> None:
    one = case("ppo-vit", workload="train")
    prepared = prepare(one)
    arm = Trainer(one, prepared)
    ahead = {**prepared.training.batch(0), "noise": torch.zeros(3, 4, 2)}

    def reached() -> float:
        with torch.no_grad():
            return float(rollout(prepared.model, ahead)[3].mean())

    before = reached()
    step = arm.eager()
    for _ in range(20):
        step()
    assert reached() > before


# The decoder


@pytest.mark.parametrize(("name", "workload"), SMALL_LLAMA)
def test_the_decoder_is_checked_like_the_language_models(name: str, workload: str) -> None:
    one = case("llama-small", input=name, workload=workload)
    prepared = prepare(one)
    if workload == "train":
        arm = Trainer(one, prepared)
        torch.testing.assert_close(arm.losses(arm.eager()), prepared.reference(), rtol=1e-3, atol=0)
        return
    assert prepared.reset is not None
    with torch.inference_mode():
        prepared.reset()
        assert error(prepared.model(**prepared.inputs), prepared.reference()) < 1e-4


def test_the_decoder_has_the_widths_of_seven_billion() -> None:
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    whole = 32 * layer + 2 * 32000 * 4096 + 4096
    assert 6.7e9 < whole < 6.8e9
    prepared_bytes = WORKLOAD.memory_bytes(case("llama-7b-8", input="prefill-1x2048", device="cuda", dtype="bfloat16"))
    assert prepared_bytes > 2 * (8 * layer + 2 * 32000 * 4096)
    train = case("llama-7b-8", input="2x2048", workload="train", device="cuda", dtype="bfloat16")
    assert 30e9 < WORKLOAD.memory_bytes(train) < 130e9


# Names, memory, arms


@pytest.mark.parametrize(("model", "input"), [(m, i) for m in SUBJECTS for i in SUBJECTS[m].sizes])
@pytest.mark.parametrize("workload", ["inference", "train"])
def test_memory_covers_what_is_made(model: str, input: str, workload: str) -> None:
    one = case(model, input=input, workload=workload, device="cuda", dtype="bfloat16")
    if WORKLOAD.refuses(one) is None:
        subject = SUBJECTS[model]
        with torch.device("meta"):
            weights = sum(p.numel() for p in subject.build(**subject.sizes[input].model).parameters())
        each = 12 if workload == "inference" else 20  # of a weight: the reference, and what training adds
        assert weights * each < WORKLOAD.memory_bytes(replace(one, dtype="float32")) < 130e9


def test_it_is_no_family_of_the_zoo() -> None:
    assert "no model of the zoo" in str(WORKLOAD.refuses(case("mlp", impl="zoo")))


def test_which_arms_there_are() -> None:
    assert WORKLOAD.default_races("cpu", False) == [("recommender", "small")]
    inference, training = (WORKLOAD.default_races("cuda", False, name) for name in ("inference", "train"))
    for races, workload in ((inference, "inference"), (training, "train")):
        for model, name in races:
            assert WORKLOAD.refuses(case(model, input=name, workload=workload, device="cuda")) is None
    assert ("llama-7b-8", "2x2048") in training and ("ppo-vit", "256") in training
    cases, refused = expand([case("mlp", input="1", device="cuda")], WORKLOAD.refuses)
    arms = [one.arm for one in cases if not one.control]
    assert arms == ["upstream eager", "upstream full", "upstream full reduce-overhead"]
    assert any("speaks of a part of mlp" in why for why in refused.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "mlp", "input": "256"}, "mlp has the inputs small, 1, 4096"),
        ({"model": "mlp", "impl": "upstream-tuned"}, "another way to write mlp"),
        ({"model": "mlp", "workload": "train"}, "mlp is for inference"),
        ({"model": "whole-step"}, "whole-step is for training"),
        ({"model": "llama-small", "input": "256"}, "llama-small has the inputs"),
        ({"model": "llama-small", "input": "2x16"}, "an input of training"),
        ({"model": "llama-small", "input": "prefill-1x2048"}, "4096 positions, and llama-small has 512"),
        ({"model": "nothing"}, "is not one of"),
    ],
)
def test_what_does_not_exist_is_refused(changes: dict[str, str], said: str) -> None:
    wrong = replace(case("mlp"), **changes)  # type: ignore[arg-type]
    assert said in str(WORKLOAD.refuses(wrong))
    with pytest.raises(ValueError, match=said):
        prepare(wrong)


# The claims


def looked_at(number: int) -> list[tuple[Any, Any]]:
    return [
        (where, arm)
        for part in CLAIMS[number].parts
        for where in (*part.where, *([part.against] if part.against else []))
        for arm in part.arms
    ]


@pytest.mark.parametrize("number", sorted(CLAIMS))
def test_every_arm_that_a_claim_looks_at_exists(number: int) -> None:
    for where, arm in looked_at(number):
        wanted = where.case(arm)
        assert load(where.family).refuses(wanted) is None, wanted.key
        options = {"impls": [wanted.impl], "strategies": [wanted.strategy_name], "modes": [wanted.mode]}
        cases, _ = expand([wanted], load(where.family).refuses, dynamic=wanted.dynamic, **options)
        assert wanted in cases
