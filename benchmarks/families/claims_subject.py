"""What a small model that a claim speaks of is to the harness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Sizes = Mapping[str, Any]
Inputs = dict[str, Any]
Loss = Callable[[Any, Inputs], Tensor]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a race is: what the model takes, and what its inputs take."""

    model: Sizes = field(default_factory=dict)
    inputs: Sizes = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model as people write it, in plain PyTorch; there is none of the zoo's beside it.

    Args:
        build: Makes the model.
        draw: Makes what one call is given: on the CPU, numbers in float32.
        draw_training: The same for a training step, where it is something else.
        sizes: By the name of the input; ``small`` is for a CPU and for tests.
        tuned: Makes the model as the claim says to write it, with weights of the same names; None if there is no such.
        part: The module that is compiled where only a part is; None if there is no such.
        loss: Of the model and what was drawn, for training; None for a model that is not trained.
        tuned_loss: The same for the tuned model, where it is another.
        infers: Whether there is inference of it.
    """

    build: Callable[..., nn.Module]
    draw: Callable[..., Inputs]
    draw_training: Callable[..., Inputs] | None = None
    sizes: Mapping[str, Size]
    tuned: Callable[..., nn.Module] | None = None
    part: Callable[[Any], nn.Module] | None = None
    loss: Loss | None = None
    tuned_loss: Loss | None = None
    infers: bool = True


def converted(inputs: Inputs, device: torch.device | str, dtype: torch.dtype) -> Inputs:
    """On the device, and numbers that are not indices in the dtype."""

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    moved: Inputs = pytree.tree_map(convert, inputs)
    return moved


def tensors(inputs: Any) -> list[Tensor]:
    """All tensors in it."""
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


class Made(TorchDispatchMode):
    """Counts the values that operators make while gradients are on: a call keeps no more for its backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        views = any(returned.alias_info is not None for returned in function._schema.returns)
        if torch.is_grad_enabled() and not views:
            self.values += sum(tensor.numel() for tensor in tensors(result))
        return result
