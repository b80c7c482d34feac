"""Operators of our own: a Triton kernel on a GPU, torch's own operators elsewhere, one node in a compiled graph.

An operator is defined in a family's ``operators.py``. Its kernels lie in the family's ``kernels`` package, which is
imported when one runs first: importing the zoo brings no Triton.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo import ahead
from zoo.engine.compat import name_fallbacks_alone

Function = Callable[..., Any]


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
        """Register the function that says shapes and dtypes of the outputs.

        Whoever asks it is about to run the operator: kernels are compiled from here on, see ahead.py.
        """
        implementation = self._implementations[name]

        def register(shapes: Function) -> Function:
            @functools.wraps(shapes)
            def shapes_and_kernels(*arguments: Any) -> Any:
                outputs = shapes(*arguments)
                name_fallbacks_alone()
                if ahead.ENABLED and triton_runs_on(arguments[0].device):
                    ahead.compile_kernels(implementation, arguments)
                return outputs

            torch.library.register_fake(f"{self.namespace}::{name}", shapes_and_kernels, lib=self._library)
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


def differentiable_once(backward: Function) -> Function:
    """A backward whose outputs refuse to be differentiated, whatever they are computed of.

    Torch's ``once_differentiable`` refuses only where the gradient that came in depends on something.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        ctx = _UnpackedOnce(ctx)
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        many = outputs if isinstance(outputs, tuple) else (outputs,)
        marker = torch.ones((), requires_grad=True)
        # Autograd goes along paths that lead to what it is asked for, and passes the marker by: these lead there.
        paths = [each for each in (*grads, *ctx.saved_tensors) if isinstance(each, Tensor) and each.requires_grad]
        many = tuple(_Refused.apply(each, marker, *paths) if isinstance(each, Tensor) else each for each in many)
        return many if isinstance(outputs, tuple) else many[0]

    return run


class _UnpackedOnce:
    """A context that keeps its saved tensors: a checkpoint gives them no second time."""

    def __init__(self, ctx: Any) -> None:
        self.__dict__["_ctx"] = ctx

    @functools.cached_property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor | None, ...] = self._ctx.saved_tensors
        return saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *paths: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(
            "trying to differentiate twice what is once_differentiable: the gradient is a kernel's, which has none of "
            "its own; compute it without create_graph=True"
        )


# What the kernels take; they compute in float32.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HAS_TRITON = importlib.util.find_spec("triton") is not None
# ZOO_OWN_KERNELS=0 in the environment leaves everything to the libraries and the compiler, as where Triton is missing.
ENABLED = os.environ.get("ZOO_OWN_KERNELS") != "0"


def triton_runs_on(device: torch.device) -> bool:
    """Whether Triton is installed and knows this GPU. May be asked inside a region: the compiler folds the answer."""
    if device.type != "cuda" or not HAS_TRITON or not ENABLED:
        return False
    if device.index is None or torch.compiler.is_dynamo_compiling():
        # Whichever is current; and what a region read of a cache it would look at again in every call.
        return _triton_knows(device)
    return _triton_is_known_to_know(device)


def _triton_knows(device: torch.device) -> bool:
    # What Triton says it supports. On older ones it does much, but no products of bfloat16.
    return torch.version.hip is not None or torch.cuda.get_device_properties(device).major >= 8


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether this GPU is of the generation of the H100 and H200. Not for regions: it reads a cache."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


_triton_is_known_to_know = functools.cache(_triton_knows)
# Looking for a module that is there already takes the host as long as a small launch.
_module = functools.cache(importlib.import_module)


def differentiated(*tensors: Tensor) -> bool:
    """Whether somebody may ask for gradients of what is computed of these.

    May be asked inside a region: the compiler guards both anyway.
    """
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def transformed() -> bool:
    """Whether a functional transform of torch's runs, which takes no backward of ours. May be asked inside a region."""
    return torch._C._are_functorch_transforms_active()


def forward_mode() -> bool:
    """Whether derivatives are taken on the way, which no operator of ours has. May be asked inside a region."""
    return torch.autograd.forward_ad._current_level >= 0


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


def wide(dtype: torch.dtype) -> torch.dtype:
    """What numbers of a floating-point dtype are computed and summed in, at least float32."""
    return torch.promote_types(dtype, torch.float32)


def ceil_div(value: int, parts: int) -> int:
    """Whole parts that hold ``value``. ``triton.cdiv`` is the same, and takes the host microseconds at every launch."""
    return -(-value // parts)


def next_power(value: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(value - 1, 0).bit_length()
