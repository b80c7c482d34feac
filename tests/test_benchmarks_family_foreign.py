"""What only the models of other libraries do: steps of ``generate()``, arms that they have, sizes."""

from typing import Any

import pytest
import torch

from benchmarks.families import foreign, load
from benchmarks.plan import Case
from benchmarks.strategies import apply
from tests.workloads import error, output_of, prepare
from zoo.engine.graphed_step import GraphedStep

pytestmark = [
    pytest.mark.usefixtures("eager_backend"),
    pytest.mark.filterwarnings("ignore:.*became symbolic:zoo.RegionWarning"),
]


def case(**changes: Any) -> Case:
    return Case(**{"family": "foreign", "model": "llama-debug", "input": "static-4", **changes})


@pytest.mark.slow
@pytest.mark.parametrize("input", ["static-4", "dynamic-4"])
@pytest.mark.parametrize(
    ("impl", "strategy"),
    [("upstream", "full"), ("upstream", "regional"), ("upstream-tuned", "regional"), ("zoo", "regional")],
)
def test_generation_compiled(input: str, impl: str, strategy: str) -> None:
    torch.compiler.reset()
    arm = case(input=input, impl=impl, strategy=strategy)
    prepared = prepare(arm)
    reference = prepared.reference()
    assert error(output_of(arm, prepared, apply(arm, prepared), calls=3), reference.repeat(3, 1)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["upstream", "zoo"])
def test_a_step_of_generation_has_a_cuda_graph(impl: str) -> None:
    """Of the zoo, or in transformers' own way, which a CPU compiles without one."""
    torch.compiler.reset()
    arm = case(impl=impl, strategy="regional" if impl == "zoo" else "full")
    prepared = prepare(arm)
    step, reference = prepared.model, prepared.reference()
    if impl == "zoo":
        step = apply(arm, prepared)
        output_of(arm, prepared, step)
        prepared.capture()
    else:
        prepared.compile_full(step, mode="reduce-overhead", dynamic=None, backend="eager")
    assert error(output_of(arm, prepared, step, calls=3), reference.repeat(3, 1)) < 1e-5
    assert isinstance(step.step, GraphedStep) if impl == "zoo" else hasattr(step.model, "_compiled_call")


@pytest.mark.slow
@pytest.mark.parametrize(("impl", "strategy"), [("upstream", "eager"), ("upstream", "full"), ("zoo", "regional")])
def test_continuous_batching(impl: str, strategy: str) -> None:
    pytest.importorskip("transformers", minversion="5.24")  # that of 5.20 ends the process on a CPU
    torch.compiler.reset()
    arm = case(input="continuous-4", impl=impl, strategy=strategy)
    prepared = prepare(arm)
    step = prepared.model
    try:
        assert error(output_of(arm, prepared, apply(arm, prepared), calls=2), prepared.reference().repeat(2)) < 1e-5
        assert (step.manager.continuous_batching_config.varlen_compile_config is None) == (strategy != "full")
    finally:
        step.stop()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"input": "2x32"}, "the inputs of llama-debug are dynamic-4, static-4, continuous-4"),
        ({"impl": "zoo"}, "the model is the library's, eager is upstream's arm"),
        ({"impl": "zoo", "strategy": "hierarchical"}, "declares no regions"),
        ({"impl": "upstream-tuned"}, "only regional has a recompile limit"),
        ({"input": "dynamic-4", "strategy": "regional", "cuda_graph": True, "device": "cuda"}, "of many sizes"),
        ({"impl": "upstream", "cuda_graph": True, "device": "cuda"}, "transformers captures a step"),
    ],
)
def test_arms_that_there_are_not(changes: dict[str, Any], reason: str) -> None:
    dtype = "bfloat16" if "device" in changes else "float32"
    refused = load("foreign").refuses(case(**{"impl": "upstream", "dtype": dtype, **changes}))
    assert refused is not None and reason in refused


@pytest.mark.slow
def test_models_are_of_real_size() -> None:
    millions = {name: foreign.parameters(name) // 1_000_000 for name in foreign.MODELS if "debug" not in name}
    assert millions == {"llama-1b": 1235, "vit-l": 304, "flux-4-8": 2545, "convnext-base": 88, "whisper-small": 241}
    one = case(model="llama-1b", input="static-64", dtype="bfloat16", device="cuda")
    assert 10e9 < load("foreign").estimate(one, reference=False) < load("foreign").estimate(one, reference=True) < 17e9
