"""What every family promises, asked of everything in the registry. A new family is picked up unedited."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import zoo
from tests.blocks import MODES, graphs_of
from zoo.registry import Family, families

DEBUG = [name for name in zoo.list_models() if name.endswith("-debug")]
# One UNet is enough for the quick tier: tracing one takes as long as all models of the other families.
COMPILED = [pytest.param(name, marks=pytest.mark.slow) if name == "unet-debug" else name for name in DEBUG]
# Millions of parameters; presets of ResNets and UNets are held against their libraries' own.
PUBLISHED = {
    "bert-tiny": 4.4, "bert-mini": 11.2, "bert-small": 28.8, "bert-medium": 41.4, "bert-base-6": 67.0,
    "bert-base": 109.5, "bert-large": 335.1, "roberta-base": 124.6, "roberta-large": 355.4,
    "llama-3.2-1b": 1235.814, "llama-3.2-3b": 3212.75, "llama-3.1-8b": 8030.261, "qwen3-0.6b": 596.05,
    "qwen3-8b": 8190.735,
}  # fmt: skip


def family_of(name: str) -> Family:
    return next(family for family in families() if name in family.presets)


def outputs_of(model: torch.nn.Module, inputs: dict[str, object]) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(model(**inputs)) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", zoo.list_models())
def test_every_preset_builds_without_memory(name: str) -> None:
    model = zoo.create(name, device="meta")
    assert type(model) in family_of(name).weights.classes
    assert model.config == family_of(name).presets[name]
    assert type(model).regions and all(region.why for region in type(model).regions)
    report = zoo.find_regions(model)
    assert report.declared and not report.obstacles, str(report)
    assert PUBLISHED.keys() <= set(zoo.list_models())
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    assert millions == pytest.approx(PUBLISHED.get(name, millions), abs=0.06)
    package = importlib.import_module(f"zoo.{family_of(name).name}")
    assert all(getattr(package, cls.__name__) is cls for cls in (type(model), *(r.cls for r in type(model).regions)))
    if not name.endswith("-debug"):
        tables = {p for each in model.modules() if isinstance(each, torch.nn.Embedding) for p in each.parameters()}
        blocks = [model.get_submodule(each) for found in report.regions for each in found.modules]
        inside = {parameter for block in blocks for parameter in block.parameters()} - tables
        weights = set(model.parameters()) - tables
        assert sum(p.numel() for p in inside) >= 0.85 * sum(p.numel() for p in weights)


# The tests below, which compare numbers, do so within the budget: in evaluation without gradients and with them.
@pytest.mark.parametrize(
    ("training", "mode"),
    [
        (False, "inference_mode"), (True, "grad"), pytest.param(False, "autocast", marks=pytest.mark.slow),
        pytest.param(True, "no_grad", marks=pytest.mark.slow), pytest.param(True, "autocast", marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", COMPILED)
def test_regions_hold_their_budget_in_every_mode(name: str, training: bool, mode: str) -> None:
    model = zoo.compile_regions(zoo.create(name), backend="eager").train(training)
    with MODES[mode]():
        stays_within_budget(model)


def stays_within_budget(model: torch.nn.Module) -> None:
    inputs = zoo.example_inputs(model)
    with zoo.enforce_budget(model):
        model(**inputs)
        model(**inputs)
        model(**zoo.example_inputs(model, seed=1))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_regions_compute_what_eager_does(name: str, autocast: bool) -> None:
    model = zoo.create(name)
    inputs = zoo.example_inputs(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = outputs_of(model, inputs)
        zoo.compile_regions(model, backend="aot_eager")
        needed = zoo.find_regions(model, kwargs=inputs).graphs_needed
        for found, wanted in zip(outputs_of(model, inputs), expected, strict=True):
            assert found.dtype == wanted.dtype
            assert (found - wanted).float().norm() <= (2e-2 if autocast else 1e-5) * wanted.float().norm()
        assert sum(graphs_of(model).values()) == needed
        stays_within_budget(model)
        zoo.uncompile(model)
        torch.testing.assert_close(outputs_of(model, inputs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", COMPILED)
def test_a_whole_model_compiles_into_one_graph(name: str) -> None:
    model = zoo.create(name)
    inputs = zoo.example_inputs(model)
    if "edge_index" in inputs:  # sorting edges is not for a compiler
        inputs["edge_index"] = model.prepare(inputs["edge_index"], num_nodes=len(inputs["x"]))
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
        torch.testing.assert_close(outputs_of(compiled, inputs), outputs_of(model, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", COMPILED)
def test_gradients_pass_through_compiled_regions(name: str) -> None:
    model = zoo.create(name)
    inputs = zoo.example_inputs(model)

    def gradients() -> list[torch.Tensor | None]:
        loss = sum(output.square().sum() for output in outputs_of(model, inputs))
        return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))

    expected = gradients()
    zoo.compile_regions(model, backend="aot_eager")
    with zoo.enforce_budget(model):
        got = gradients()
    torch.testing.assert_close(got, expected)


# Compiling is slow on a CPU: a layer or two, and a block of each kind, without those named here.
SMALLER: dict[str, tuple[dict[str, Any], list[str]]] = {
    "bert-debug": ({"num_hidden_layers": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, []),
    "gat-debug": ({"num_layers": 1}, []),
    "gcn-debug": ({"num_layers": 2}, []),
    "graphsage-debug": ({"num_layers": 2}, []),
    "llm-debug": ({"num_hidden_layers": 1, "qk_norm": True, "qkv_bias": True, "sliding_window": 3}, ["head"]),
    "resnet-debug": ({}, ["stem", "head", "stages.1", "stages.2", "stages.3"]),
    "unet-xl-debug": ({}, ["text_projections", "down.0", "down.1", "up.0", "up.1.resnets.0"]),
}
IN_SHORT = ("bert-debug", "gcn-debug", "llm-debug", "resnet-debug")


@pytest.mark.parametrize(
    "name", [name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.slow) for name in SMALLER]
)
def test_inductor_gives_the_same_numbers_and_gradients(name: str) -> None:
    options, exclude = SMALLER[name]
    # In float32 activations at zero fall to either side. Torch 2.11's attention has no compiled backward in float64.
    dtype = torch.float64 if name == "resnet-debug" else torch.float32
    eager = zoo.create(name, dtype=dtype, **options).train()
    inputs = zoo.example_inputs(eager)
    found = []
    for model in (copy.deepcopy(eager), zoo.compile_regions(eager, exclude=exclude)):
        outputs = outputs_of(model, inputs)
        sum(output.square().sum() for output in outputs).backward()
        gradients = [each.grad for each in model.parameters()]
        found.append([*(output.detach() for output in outputs), *gradients, *model.buffers()])
    limits = {"rtol": 1e-6, "atol": 1e-8} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found[1], found[0], **limits)


@pytest.mark.parametrize("name", DEBUG)
def test_a_model_takes_part_in_an_outer_cuda_graph(name: str) -> None:
    model = zoo.create(name)
    inputs, others = zoo.example_inputs(model), zoo.example_inputs(model, seed=1)
    # What is not a tensor (a prepared graph) is static; so is anything of integers that a model prepares itself.
    moving = [key for key, value in inputs.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    static = [key for key in inputs if key not in moving]
    others = {**inputs, **{key: others[key] for key in moving}}
    with torch.inference_mode():
        step = zoo.cuda_graph(model, (), inputs, static=static)
        torch.testing.assert_close(step(**others), model(**others))


@pytest.mark.parametrize("name", DEBUG)
def test_example_inputs_are_seeded_and_refuse_unknown_sizes(name: str) -> None:
    model = zoo.create(name)
    first, second, other = zoo.example_inputs(model), zoo.example_inputs(model), zoo.example_inputs(model, seed=1)
    tensors = [[t for t in pytree.tree_leaves(i) if isinstance(t, torch.Tensor)] for i in (first, second, other)]
    torch.testing.assert_close(tensors[0], tensors[1], rtol=0, atol=0)
    assert any(not torch.equal(a, b) for a, b in zip(tensors[0], tensors[2], strict=True))
    with pytest.raises(TypeError, match="have no size 'sead', did you mean 'seed'.*they have .*seed"):
        zoo.example_inputs(model, sead=1)
    with pytest.raises(TypeError, match="seed is '1', expected an integer"):
        zoo.example_inputs(model, seed="1")
    with pytest.raises(ValueError, match=f"seed is {2**64}, expected .* fits into 64 bits"):
        zoo.example_inputs(model, seed=2**64)


@pytest.mark.parametrize("name", ["resnet-debug", "unet-debug"])
def test_images_and_weights_are_channels_last_wherever_weights_come_from(name: str, tmp_path: Path) -> None:
    model = zoo.create(name)
    ours, theirs = (
        {key: tensor.contiguous() for key, tensor in each.state_dict().items()}
        for each in (model, zoo.to_upstream(model))
    )
    torch.save(ours, tmp_path / "ours.pt")
    torch.save(theirs, tmp_path / "theirs.pt")
    assigned = zoo.create(name)
    assigned.load_state_dict(ours, assign=True)
    inputs = zoo.example_inputs(model)
    plain = {key: value.contiguous() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    (expected, *_) = outputs_of(model, inputs)
    loaded = [zoo.create(name, weights=tmp_path / file) for file in ("ours.pt", "theirs.pt")]
    for other in (model, copy.deepcopy(model), zoo.from_upstream(zoo.to_upstream(model)), assigned, *loaded):
        seen = [module.weight for module in other.modules() if isinstance(module, torch.nn.Conv2d)]
        weights = len(seen)
        for module in other.modules():
            # The convolutions of UNets' blocks are never called as modules.
            if type(module).__name__ in ("Conv2d", "ResnetBlock"):
                module.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))
        with torch.no_grad():
            for given in (inputs, plain):
                assert torch.equal(outputs_of(other, given)[0], expected)
        assert len(seen) > weights + 10
        assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in seen)
