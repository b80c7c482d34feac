"""Checks of arguments and of config fields: what passes, and what the message says of what does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from zoo import validate

X = torch.zeros(2, 3)


@dataclass
class Config:
    heads: Any = 4
    width: Any = 8
    kind: Any = "a"
    rate: Any = 0.1
    pad: Any = 0


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (X, {"shape": "B T"}),
        (X, {"shape": "2 T", "kinds": "floating", "like": X}),
        (X, {"shape": "N | B T", "sizes": {"T": 3}}),
        (X.int(), {"kinds": "integer", "like": X}),
        (X.bool(), {"kinds": (torch.bool,)}),
    ],
)
def test_tensors_that_fit(given: Any, options: dict[str, Any]) -> None:
    validate.tensor("x", given, **options)


@pytest.mark.parametrize(
    ("given", "options", "error", "words"),
    [
        (None, {"shape": "B T"}, TypeError, r"x is a NoneType, expected a dense tensor \[B, T\]"),
        (X.to_sparse(), {}, TypeError, "x is a torch.sparse_coo, expected a dense tensor"),
        (X, {"shape": "B 4"}, ValueError, r"x has shape \[2, 3\], expected \[B, 4\]"),
        (X, {"shape": "B B", "hint": "; make it square"}, ValueError, r"expected \[B, B\]; make it square"),
        (X, {"shape": "N | B T", "sizes": {"T": 4}}, ValueError, r"expected \[N\] or \[B, 4\]"),
        (X, {"kinds": "integer"}, TypeError, "x is torch.float32, expected int64 or int32"),
        (X.long(), {"kinds": "floating", "like": X}, TypeError, "x is torch.int64, expected torch.float32"),
        (X.half(), {"kinds": "floating", "like": X}, TypeError, r"use x.to\(torch.float32\), or torch.autocast"),
        (X.double(), {"kinds": "floating", "like": X}, TypeError, r"use x.to\(torch.float32\)$"),
        (X, {"like": X.to("meta")}, ValueError, "x is on cpu and the weights on meta; move one of them"),
    ],
)
def test_tensors_that_do_not(given: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        validate.tensor("x", given, **options)


def test_autocast_takes_other_dtypes_but_float64() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        validate.tensor("x", X.half(), kinds="floating", like=X)
        with pytest.raises(TypeError, match="torch.float64"):
            validate.tensor("x", X.double(), kinds="floating", like=X)


def test_ranges_are_read_on_the_host_alone() -> None:
    ids = torch.tensor([[0, 5]])
    validate.in_range("ids", ids, 6, "vocab_size")
    validate.in_range("ids", ids.to("meta"), 5, "vocab_size")
    with pytest.raises(ValueError, match="ids has values from 0 to 5, but vocab_size is 5: pass 0 to 4"):
        validate.in_range("ids", ids, 5, "vocab_size")


def test_a_compiled_model_checks_while_it_is_traced() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        validate.tensor("x", x, "B T | N", kinds="floating", like=x, sizes={"B": 2})
        return x + 1

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), X + 1)


@pytest.mark.parametrize(
    ("check", "changes", "words"),
    [
        (lambda c: validate.positive(c, "heads", "width"), {"width": 0}, "width is 0, expected a positive integer"),
        (lambda c: validate.positive(c, "heads"), {"heads": True}, "heads is True, expected a positive integer"),
        (lambda c: validate.positive_number(c, "rate"), {"rate": 0.0}, "rate is 0.0, expected a positive number"),
        (
            lambda c: validate.divides(c, "heads", "width"),
            {"heads": 3},
            "width is 8 and heads is 3: the first must be a multiple of the second",
        ),
        (lambda c: validate.one_of(c, "kind", ("a", None)), {"kind": "b"}, "kind is 'b', expected one of 'a', None"),
        (lambda c: validate.probability(c, "rate"), {"rate": 1.0}, "rate is 1.0, expected a probability below 1"),
        (lambda c: validate.optional_index(c, "pad", "width"), {"pad": 8}, "pad is 8, but width is 8: pass 0 to 7"),
    ],
)
def test_fields(check: Any, changes: dict[str, Any], words: str) -> None:
    check(Config())
    with pytest.raises(ValueError, match=words):
        check(Config(**changes))
