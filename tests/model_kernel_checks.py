"""Models with their kernels against themselves without: outputs and gradients, and outputs where nothing learns."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zoo
import zoo.ops.common
from tests.kernel_checks import DEVICE, MARKS, kernels_run  # noqa: F401
from zoo.ops.triton import group_norm

pytestmark = MARKS
# Options and sizes of inputs that the interpreter gets through. ResNets have checks of their own, norm by norm.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bert-debug": ({"num_hidden_layers": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, {}),
    "llm-debug": ({"num_hidden_layers": 2, "head_dim": 32}, {"tokens": 9}),
    "gcn-debug": ({}, {}),
    "gat-debug": ({}, {}),
    "graphsage-debug": ({}, {}),
    "unet-xl-debug": ({"norm_num_groups": 2}, {"batch": 1, "size": 4}),
}


def results(model: nn.Module, inputs: dict[str, Any], autocast: bool = False) -> list[Tensor]:
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        out = pytree.tree_leaves(model(**inputs))[0]
    above = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view(out.shape)
    gradients = torch.autograd.grad((out.double() * above).sum(), list(model.parameters()), allow_unused=True)
    return [out.detach(), *(each for each in gradients if each is not None)]


@pytest.mark.parametrize(
    ("name", "autocast"), [*((name, False) for name in MODELS), ("bert-debug", True), ("unet-xl-debug", True)]
)
def test_a_model_trains_as_without_kernels(name: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # which runs one program after the other
        monkeypatch.setattr(group_norm, "ENOUGH", 6)
        monkeypatch.setattr(group_norm, "GRADIENT_PROGRAMS", 24)
    options, sizes = MODELS[name]
    model = zoo.create(name, device=DEVICE, **options).train()
    inputs = zoo.example_inputs(model, **sizes)
    ours = results(model, inputs, autocast)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        alone = pytree.tree_leaves(model(**inputs))[0]  # runs an attention of its own
    monkeypatch.setattr(zoo.ops.common, "triton_runs_on", lambda device: False)
    plain = results(model, inputs, autocast)
    assert not all(torch.equal(*both) for both in zip(ours, plain, strict=True)), "no kernel ran"
    widened = pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)
    exact = results(copy.deepcopy(model).double(), widened)
    for found, alike, wanted in zip([*ours, alone], [*plain, plain[0]], [*exact, exact[0]], strict=True):
        assert found.dtype == alike.dtype
        errors = [float((each.double() - wanted).norm() / (wanted.norm() + 1e-9)) for each in (found, alike)]
        assert errors[0] <= (1.5 if DEVICE == "cuda" else 3) * errors[1] + (1e-3 if autocast else 3e-6), errors
