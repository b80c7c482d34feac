"""What several families use: first weights, images as rows, and what may be known of layers and ids."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.ops.common import compute_dtype as compute_dtype
from zoo.ops.common import to_images as to_images
from zoo.ops.common import to_rows as to_rows


def initialise(module: nn.Module) -> None:
    """As transformers does: normal with deviation 0.02, biases and the padding's vectors zero, norms one."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()


def channels_last(model: nn.Module) -> None:
    """Lay out the weights of all convolutions as they are used, wherever they were built or came from."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def on_host(tensor: Tensor) -> bool:
    """Whether values can be read at no cost, and Python may depend on them.

    Not those of a compiler, of a run without data, or of a trace or a transform of torch's.
    """
    if tensor.device.type != "cpu" or torch.compiler.is_compiling() or type(tensor) is not Tensor:
        return False
    traced = torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    return not traced and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def bounds_outside(ids: Tensor, limit: int) -> tuple[int, int] | None:
    """Least and greatest of ids, if one is not from 0 to below ``limit``. They are read."""
    if not ids.numel():
        return None
    low, high = (int(bound) for bound in ids.aminmax())
    return (low, high) if low < 0 or high >= limit else None
