"""Random models against the upstream library's: how many examples are drawn, and what counts as the same result.

Truth is upstream's model in float64. What ours returns may be three times as far from it as what upstream returns in
the same dtype. Where upstream's rounding errors happen to cancel, or a result jumps (an activation at zero, a maximum
of two equal values), that is too strict: then the results count as the same if they are as near to the truth as those
of upstream's float64 model after its weights have moved by a rounding of the dtype. A gradient that cancels to zero is
rounding: errors of gradients are relative to the largest of the model's. In float64 all of this is as good as equality.
"""

import copy
import dataclasses
import importlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zoo

EXAMPLES = int(os.environ.get("ZOO_FUZZ_EXAMPLES", "20"))
# Few examples are the same in every run. Many are new each time; a failure prints what repeats it.
fuzz = settings(
    max_examples=EXAMPLES, derandomize=EXAMPLES <= 20, database=None, deadline=None, print_blob=True,
    phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
)  # fmt: skip

REFUSALS = (ValueError, TypeError, NotImplementedError)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
FLOOR = {torch.float64: 1e-11, torch.float32: 4e-6, torch.bfloat16: 1e-2}
Results = dict[str, Tensor]
Run = Callable[[Any, torch.dtype], Results]

dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31)
# For options that are refused.
rarely = st.integers(0, 24).map(lambda number: number == 13)


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


def convert(theirs: nn.Module, options: Iterable[str]) -> Any:
    """Ours, or None where the model is refused by a message that names one of the options."""
    try:
        return zoo.from_upstream(theirs)
    except REFUSALS as error:
        event("refused")
        assert any(re.search(rf"\b{option}\b", str(error)) for option in options), f"names no option: {error}"
        return None


def backward(outputs: Results, *inputs: Tensor) -> Results:
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs.values():
        weight = torch.arange(1.0, output.numel() + 1, dtype=torch.float64).cos().view(output.shape)
        total = total + (output.double() * weight).sum()
    if total.requires_grad:
        total.backward()
    gradients = {f"gradient of input {i}": _gradient(x) for i, x in enumerate(inputs)}
    return {name: value.detach().double() for name, value in {**outputs, **gradients}.items()}


def compare(theirs: nn.Module, run: Run, dtype: torch.dtype, floor: float = 0.0, least_gradient: float = 0.0) -> Any:
    """Assert that ours has upstream's results; returns our model, as it was before it ran.

    ``floor`` is the relative error allowed where truth itself is rounded. ``least_gradient`` is a norm: errors of
    gradients are relative to it where all gradients are smaller, because they cancel.
    """
    theirs = nn.Module.to(theirs, dtype)  # diffusers' own warns
    ours = zoo.from_upstream(theirs)
    found, own = _measured(zoo.from_upstream(theirs), run, dtype), _measured(copy.deepcopy(theirs), run, dtype)
    truth = own if dtype == torch.float64 else _measured(copy.deepcopy(theirs).double(), run, torch.float64)
    assert found.keys() == truth.keys()
    gradients = [_norm(value[value.isfinite()]) for name, value in truth.items() if name.startswith("gradient")]
    largest = max([least_gradient, *gradients])
    moved: Results = {}
    for name, expected in truth.items():
        assert found[name].shape == expected.shape, name
        known = expected.isfinite()
        # A gradient that upstream divides by zero has no truth.
        assert name.startswith("gradient") or not found[name][~known].isfinite().any(), name
        expected = expected[known]
        distance = _norm(found[name][known] - expected)
        scale = _norm(expected) + (largest if name.startswith("gradient") else 0.0) + 1e-30
        allowed = 3 * _norm(own[name][known] - expected) + max(FLOOR[dtype], floor) * scale
        if not distance <= allowed:
            moved = moved or _conditioning(theirs, run, dtype, truth)
            allowed = max(allowed, 3 * float(moved[name]))
        assert distance <= allowed, f"{name} in {dtype}: error {distance / scale:.2e}, allowed {allowed / scale:.2e}"
    return ours


def relative_error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    found, expected = found.detach(), expected.detach()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def _conditioning(theirs: nn.Module, run: Run, dtype: torch.dtype, truth: Results) -> Results:
    """How far the truth moves with its weights, at most, in some draws of one to three roundings' size.

    An activation that a rounding error turns from negative to positive needs a draw that does the same.
    """
    moved = {name: torch.zeros(()) for name in truth}
    for seed in range(24):
        near = copy.deepcopy(theirs).double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in near.parameters():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.mul_(1 + 2 * (1 + seed % 3) * torch.finfo(dtype).eps * drawn)
        for name, value in _measured(near, run, torch.float64).items():
            known = truth[name].isfinite()
            moved[name] = torch.maximum(moved[name], (value[known] - truth[name][known]).norm())
    return moved


def _measured(model: Any, run: Run, dtype: torch.dtype) -> Results:
    """Outputs, gradients of inputs and of parameters, and buffers, by upstream's names."""
    results = run(model, dtype)
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


def assert_equal_states(found: nn.Module, expected: nn.Module) -> None:
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name


def round_trips(theirs: nn.Module, ours: Any, preset: str | None = None) -> None:
    """To upstream and back, and through files: the same class, configuration and weights.

    The files are a folder that the family saves, or upstream's weights for a ``preset`` with ours' options.
    """
    back = zoo.to_upstream(ours)
    assert type(back) is type(theirs)
    assert_equal_states(back, theirs)
    again: Any = zoo.from_upstream(back)
    assert again.config == ours.config
    with tempfile.TemporaryDirectory() as folder:
        if preset is None:
            family = importlib.import_module(".".join(type(ours).__module__.split(".")[:2]))
            family.save(ours, folder)
            loaded: Any = family.load(folder)
        else:
            torch.save(back.state_dict(), f"{folder}/weights.pt")
            fields = {field.name: getattr(ours.config, field.name) for field in dataclasses.fields(ours.config)}
            dtype = next(ours.parameters()).dtype
            loaded = zoo.create(preset, weights=f"{folder}/weights.pt", dtype=dtype, **fields)
        assert loaded.config == ours.config
        assert_equal_states(loaded, ours)
