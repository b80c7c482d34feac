"""The patterns as a family: both sides compute one thing, and cost what the pages say."""

from typing import Any

import pytest
import torch

import zoo
from benchmarks.families import Prepared
from benchmarks.families.patterns import PAGES, PATTERNS, pattern
from benchmarks.plan import Case
from tests import workloads
from tests.workloads import call, error


def case(model: str = "layer-values", **changes: Any) -> Case:
    return Case(**{"family": "patterns", "model": model, "input": "small", **changes})


def prepare(model: str, **changes: Any) -> Prepared:
    return workloads.prepare(case(model, **changes))


def test_every_page_that_says_so_is_raced():
    written = {path.stem for path in PAGES.glob("*.md") if "the code that is raced" in path.read_text()}
    assert written == set(PATTERNS)


@pytest.mark.parametrize("impl", ["upstream", "zoo"])
@pytest.mark.parametrize("model", PATTERNS)
def test_both_sides_match_the_reference(model: str, impl: str):
    prepared = prepare(model, impl=impl)
    reference = prepared.reference()
    assert reference.dtype == torch.float64 and not prepared.model.training
    assert error(call(prepared), reference) < 3e-6
    assert prepared.bytes > sum(parameter.nbytes for parameter in prepared.model.parameters())
    half = prepare(model, impl=impl, dtype="bfloat16")
    assert call(half).dtype == torch.bfloat16
    assert 1e-4 < error(call(half), half.reference()) < 5e-2
    with torch.no_grad():
        next(prepared.model.blocks.parameters()).add_(0.5)
    assert error(call(prepared), prepared.reference()) > 1e-3, "a wrong weight shows"


@pytest.mark.parametrize("model", PATTERNS)
def test_the_zoo_s_side_fits_a_cuda_graph(model: str):
    prepared = prepare(model, impl="zoo")
    zoo.compile_regions(prepared.model, backend="aot_eager")
    with torch.inference_mode():
        step = zoo.cuda_graph(prepared.model, kwargs=prepared.inputs, clone_outputs=False)
        assert error(step(**prepared.inputs), prepared.reference()) < 3e-6


def test_blocks_with_a_cuda_graph_each_ask_for_it(monkeypatch: pytest.MonkeyPatch):
    prepared, asked = prepare("outer-cuda-graph", impl="upstream"), []
    for block in prepared.model.blocks:
        monkeypatch.setattr(block, "compile", lambda **options: asked.append(options["mode"]))
    prepared.compile_regions(prepared.model, mode=None, backend="inductor")
    assert asked == ["reduce-overhead"] * 4


@pytest.mark.parametrize("model", PATTERNS)
def test_the_large_size_is_both_sides_own(model: str):
    sizes, module = PATTERNS[model][0], pattern(model)
    with torch.device("meta"):
        before, after = module.Before(**sizes), module.After(**sizes)
    assert [(n, p.shape) for n, p in before.named_parameters()] == [(n, p.shape) for n, p in after.named_parameters()]
