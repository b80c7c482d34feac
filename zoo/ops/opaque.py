"""Operators that the compiler does not look into: one node in a compiled graph each, by ``torch.library``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from zoo.engine.compat import name_fallbacks_alone
from zoo.ops.common import Function


def operator(namespace: str, schema: str, shapes: Function) -> Callable[[Function], Any]:
    """Make a function an operator, which has no gradient.

    ``torch.library.custom_op`` would do the same, and import Dynamo at the first eager call.

    Args:
        namespace: As in ``torch.ops.<namespace>``.
        schema: Arguments and outputs; an argument that is written to is marked in it.
        shapes: Says shapes and dtypes of the outputs; takes the same arguments.
    """

    def define(function: Function) -> Any:
        @functools.wraps(shapes)
        def traced(*arguments: Any) -> Any:
            # Whoever asks is about to compile a graph with the operator in it.
            name_fallbacks_alone()
            return shapes(*arguments)

        name = f"{namespace}::{function.__name__}"
        torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, "default", function)
        torch.library.register_fake(name, traced)
        return getattr(getattr(torch.ops, namespace), function.__name__).default

    return define
