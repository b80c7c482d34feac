"""How cases are drawn at random, and how a model is held against the upstream library's in float64.

A gradient that cancels to zero is rounding: errors of gradients are relative to the largest of the model's.
"""

import copy
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zoo

EXAMPLES = int(os.environ.get("ZOO_FUZZ_EXAMPLES", "20"))
# Few examples are the same in every run. Many are new each time; a failure prints what repeats it.
fuzz = settings(
    max_examples=EXAMPLES, derandomize=EXAMPLES <= 20, database=None, deadline=None, print_blob=True,
    phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
)  # fmt: skip
Results = dict[str, Tensor]
seeds = st.integers(0, 2**31)


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


def randomize(module: nn.Module, seed: int) -> Any:
    """Draw every weight: at zero and one a forgotten bias or norm would not show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if not tensor.is_floating_point():
                continue
            drawn = torch.randn(tensor.shape, generator=generator)
            if name.endswith("running_var"):
                tensor.copy_(drawn.abs() + 0.5)
            elif tensor.dim() == 1:
                tensor.copy_(
                    0.2 * drawn + (1.0 if re.search(r"(?i)(norm|bn|downsample\.1|module)\S*weight", name) else 0.0)
                )
            else:
                tensor.copy_(drawn * max(1, tensor[0].numel()) ** -0.5)
    return module


def backward(outputs: Results, *inputs: Tensor) -> Results:
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs.values():
        weight = torch.arange(1.0, output.numel() + 1, dtype=torch.float64).cos().view(output.shape)
        total = total + (output.double() * weight).sum()
    if total.requires_grad:
        total.backward()
    gradients = {f"gradient of input {i}": _gradient(x) for i, x in enumerate(inputs)}
    return {name: value.detach().double() for name, value in {**outputs, **gradients}.items()}


def compare(theirs: nn.Module, run: Callable[[Any], Results], limit: float) -> Any:
    """Assert that ours has upstream's results within a relative error; returns our model, as it was before it ran."""
    theirs = nn.Module.double(theirs)  # diffusers' own warns
    ours = zoo.from_upstream(theirs)
    found, truth = _measured(zoo.from_upstream(theirs), run), _measured(copy.deepcopy(theirs), run)
    assert found.keys() == truth.keys()
    largest = max(_norm(value) for name, value in truth.items() if name.startswith("gradient"))
    for name, expected in truth.items():
        assert found[name].shape == expected.shape, name
        scale = _norm(expected) + (largest if name.startswith("gradient") else 0.0) + 1e-30
        error = _norm(found[name] - expected) / scale
        assert error <= limit, f"{name}: error {error:.2e}, allowed {limit:.2e}"
    return ours


def relative_error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    found, expected = found.detach(), expected.detach()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def _measured(model: Any, run: Callable[[Any], Results]) -> Results:
    """Outputs, gradients of inputs and of parameters, and buffers, by upstream's names."""
    results = run(model)
    if type(model).__module__.startswith("zoo."):
        for parameter in model.parameters():
            parameter.data = _gradient(parameter)
        model = zoo.to_upstream(model)
        gradients = dict(model.named_parameters())
    else:
        gradients = {name: _gradient(parameter) for name, parameter in model.named_parameters()}
    results |= {f"gradient of {name}": value.detach().double() for name, value in gradients.items()}
    persistent = model.state_dict().keys() - gradients.keys()
    return results | {n: b.detach().double() for n, b in model.named_buffers() if n in persistent}


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def _norm(value: Tensor) -> float:
    return float(value.double().norm())
