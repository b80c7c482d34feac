"""What several families use: first weights, images as rows, and what may be known of layers and ids.

In channels_last a row of channels for each pixel is the same memory.

Shape legend: B images, C channels, H height, W width, R = B H W rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Looked up once, not in every call.
_unsafe_view = torch.ops.aten._unsafe_view.default


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


def to_rows(x: Tensor) -> Tensor:
    """[B, C, H, W] -> [R, C], without a copy in channels_last."""
    rows = x.permute(0, 2, 3, 1)
    # Of a view the compiler would guard the base as well.
    return _unsafe_view(rows, (-1, x.shape[1])) if rows.is_contiguous() else rows.reshape(-1, x.shape[1])


def to_images(rows: Tensor, like: Tensor) -> Tensor:
    """[R, C] -> [B, C, H, W] in channels_last, with the size of ``like``; a view."""
    count, _, height, width = like.shape
    return rows.view(count, height, width, -1).permute(0, 3, 1, 2)


def plain(layer: nn.Module, cls: type[nn.Module] = nn.Linear) -> bool:
    """Whether a layer is of this very class, and nobody listens to its calls: then its tensors stand for it.

    Adapters take a layer's place or that of its ``forward``, some ways to prune or to quantise change its weight before
    each call, and who explains a model listens to gradients.
    """
    if type(layer) is not cls or "forward" in vars(layer):
        return False
    there, back = (layer._forward_hooks, layer._forward_pre_hooks), (layer._backward_hooks, layer._backward_pre_hooks)
    return not any(there) and not any(back)


def ordinary(tensor: Tensor | None) -> bool:
    """Whether a tensor is there, and not made of several that stand for it."""
    return tensor is not None and not hasattr(tensor, "__tensor_flatten__")


def compute_dtype(like: Tensor) -> torch.dtype:
    """The dtype that products of ``like`` have, autocast included."""
    device = like.device.type
    if like.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return like.dtype


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
