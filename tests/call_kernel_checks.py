"""One small call of every kernel in Triton's interpreter: what it computes is what torch's own operators do.

Other files hold the details, and run on a GPU as well.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests import test_kernel
from tests.kernel_checks import MARKS, kernels_run  # noqa: F401
from zoo.ops import common, transformer
from zoo.ops.triton import csr, group_norm

pytestmark = MARKS
# Dropout draws other numbers where no kernel runs: gnn_kernel_checks.py holds it.
NAMES = [name for name in test_kernel.calls() if not name.endswith("0.5")]
# The interpreter multiplies matrices of bfloat16 as if they were integers.
LOW = torch.float16


def place(x: Any) -> Any:
    """What the interpreter computes with: float16 in place of bfloat16."""
    if isinstance(x, nn.Module):
        return copy.deepcopy(x).to(_dtype(next(x.parameters()).dtype))
    if isinstance(x, Tensor):
        return x.detach().to(_dtype(x.dtype)).requires_grad_(x.requires_grad)
    return _dtype(x)


def _dtype(x: Any) -> Any:
    return LOW if x is torch.bfloat16 else x


@pytest.mark.parametrize("name", NAMES)
def test_a_call_computes_what_torchs_operators_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "_is_hopper", lambda device: True)
    # Small tiles and few programs, which run one after the other.
    monkeypatch.setattr(group_norm, "ENOUGH", 6)
    monkeypatch.setattr(group_norm, "GRADIENT_PROGRAMS", 24)
    monkeypatch.setattr(csr, "merge_tile", lambda _: {"CHUNKS": 32, "COLUMNS": 8, "num_warps": 1})
    found: list[list[Tensor]] = []
    for runs in (True, False):
        monkeypatch.setattr(common, "triton_runs_on", lambda device, runs=runs: runs)
        torch.manual_seed(0)
        operator, arguments = test_kernel.calls()[name]
        arguments = pytree.tree_map(place, arguments)
        returned = test_kernel.run(operator, arguments)
        found.append([each.detach() for each in (*returned, *arguments) if isinstance(each, Tensor)])
    low = any(each.dtype == LOW for each in found[0])
    for ours, wanted in zip(*found, strict=True):
        assert ours.dtype == wanted.dtype and ours.shape == wanted.shape
        error = (ours.double() - wanted.double()).norm()
        assert error <= (4e-3 if low else 1e-5) * wanted.double().norm(), float(error)
