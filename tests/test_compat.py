"""What is done for some releases of torch alone."""

from __future__ import annotations

import pytest
import torch

from zoo.engine import compat


class Unreadable:
    def __str__(self) -> str:
        raise AssertionError("written out for a log that nobody reads")


def test_a_fallback_is_named_without_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import exc

    monkeypatch.setattr(exc.OperatorIssue, "operator_str", exc.OperatorIssue.operator_str)  # put back at the end
    monkeypatch.setattr(compat, "FALLBACKS_ARE_LAZY", (99, 0))
    compat.name_fallbacks_alone()
    for error in (exc.MissingOperatorWithDecomp, exc.MissingOperatorWithoutDecomp):
        assert "zoo.norm" in error.operator_str("zoo.norm", [Unreadable()], {"x": Unreadable()})


@pytest.mark.slow
def test_a_chain_of_operators_compiles_in_no_time() -> None:
    """On 2.11 a chain half as long takes minutes without the shorter name; a timeout of the run would tell."""
    from zoo.ops.conv import operator

    like = "zoo_test_compat", "(Tensor x, Tensor y) -> Tensor", lambda x, y: torch.empty_like(x)

    @operator(*like)
    def link(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    @operator(*like)
    def last(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - y

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(32):
            x = link(x, x)
        return last(x, x + 1)

    assert torch.equal(torch.compile(chain, backend="inductor")(torch.zeros(2)), -torch.ones(2))
