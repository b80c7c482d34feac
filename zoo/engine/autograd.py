"""Gradients that are kernels: they have none of their own, and refuse to be differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


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
        return self._ctx.saved_tensors  # type: ignore[no-any-return]

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
