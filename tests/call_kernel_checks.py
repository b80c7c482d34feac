"""One small call of every kernel in Triton's interpreter: what it computes is what torch's own operators do.

Other files hold the details, and run on a GPU as well.
"""

import pytest
import torch
from torch import Tensor

from tests import test_kernel
from tests.kernel_checks import MARKS, kernels_run  # noqa: F401
from zoo.ops import common
from zoo.ops.triton import csr, group_norm

pytestmark = MARKS
# Dropout draws other numbers where no kernel runs: gnn_kernel_checks.py holds it. The interpreter rounds some numbers
# to the wrong one of float8: training_kernel_checks.py holds those that it need not round.
NAMES = [name for name in test_kernel.calls() if not name.endswith(("0.5", "float8"))]


@pytest.mark.parametrize("name", NAMES)
def test_a_call_computes_what_torchs_operators_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "has_tma", lambda device: True)
    # Small tiles and few programs, which run one after the other.
    monkeypatch.setattr(group_norm, "ENOUGH", 6)
    monkeypatch.setattr(group_norm, "GRADIENT_PROGRAMS", 24)
    monkeypatch.setattr(csr, "merge_tile", lambda _: {"CHUNKS": 32, "COLUMNS": 8, "num_warps": 1})
    found: list[list[Tensor]] = []
    for runs in (True, False):
        monkeypatch.setattr(common, "triton_runs_on", lambda device, runs=runs: runs)
        torch.manual_seed(0)
        operator, arguments = test_kernel.calls()[name]
        returned = test_kernel.run(operator, arguments)
        found.append([each.detach() for each in (*returned, *arguments) if isinstance(each, Tensor)])
    low = any(each.dtype == torch.bfloat16 for each in found[0])
    for ours, wanted in zip(*found, strict=True):
        assert ours.dtype == wanted.dtype and ours.shape == wanted.shape
        error = (ours.double() - wanted.double()).norm()
        # In bfloat16 either may round twice.
        assert error <= (2**-7 if low else 1e-5) * wanted.double().norm(), float(error)
