"""Operators that the compiler does not look into: one node in a compiled graph each, by ``torch.library``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo.engine.compat import name_fallbacks_alone
from zoo.ops.common import Function, differentiable_once

# Looking for a module that is there already takes the host as long as a small launch.
_module = functools.cache(importlib.import_module)


class OperatorLibrary:
    """The operators of one namespace.

    ``torch.library.custom_op`` would do the same, and import Dynamo at the first eager call.

    Args:
        namespace: As in ``torch.ops.<namespace>``.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._library = torch.library.Library(namespace, "FRAGMENT")
        self._implementations: dict[str, Function] = {}

    def operator(self, schema: str) -> Callable[[Function], Any]:
        """Make a function the operator of its name. An argument that it writes to is marked in the schema."""

        def define(function: Function) -> Any:
            name = f"{self.namespace}::{function.__name__}"
            torch.library.define(name, schema, lib=self._library, tags=torch.Tag.pt2_compliant_tag)
            torch.library.impl(name, "default", function, lib=self._library)
            self._implementations[function.__name__] = function
            return getattr(getattr(torch.ops, self.namespace), function.__name__).default

        return define

    def fake(self, name: str) -> Callable[[Function], Function]:
        """Register the function that says shapes and dtypes of the outputs."""

        def register(shapes: Function) -> Function:
            @functools.wraps(shapes)
            def traced(*arguments: Any) -> Any:
                # Whoever asks is about to compile a graph with the operator in it.
                name_fallbacks_alone()
                return shapes(*arguments)

            torch.library.register_fake(f"{self.namespace}::{name}", traced, lib=self._library)
            return shapes

        return register

    def autograd(
        self, name: str, backward: Function, setup_context: Callable[..., None], *, twice: bool = False
    ) -> None:
        """Register a backward.

        Args:
            name: The operator's.
            backward: As ``torch.library.register_autograd`` takes it.
            setup_context: The same.
            twice: Whether all that the backward calls has gradients itself. Of what else it calls autograd would take
                the second derivative for zero: unless this is set, asking for one is an error.
        """
        if not twice:
            backward = differentiable_once(backward)
        torch.library.register_autograd(
            f"{self.namespace}::{name}", backward, setup_context=setup_context, lib=self._library
        )

    def no_gradient(self, name: str, remedy: str) -> None:
        """Make asking for gradients of an operator's output an error, which ends in ``remedy``."""

        def refuse(ctx: Any, *_: Any) -> None:
            raise RuntimeError(f"{name} has no gradient; {remedy}")

        self.autograd(name, refuse, lambda ctx, inputs, output: None)


def launcher(module: str, name: str, x: Tensor) -> Function:
    """What launches the kernels of ``module``, on the device of ``x`` whichever is current."""
    launch: Function = getattr(_module(module), name)
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return launch

    def on_its_device(*arguments: Any) -> Any:
        # Triton launches on the current device, wherever the tensors are.
        with torch.cuda.device(x.device):
            return launch(*arguments)

    return on_its_device
