"""Conditions for Triton kernels, dtypes and layouts. Shape legend: B images, C channels, H height, W width."""

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor, nn

from zoo.engine.autograd import dynamo_constant, transformed

_unsafe_view = torch.ops.aten._unsafe_view.default
# Dtypes that the kernels take. They compute in float32.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HAS_TRITON = importlib.util.find_spec("triton") is not None
# The environment variable ZOO_OWN_KERNELS=0 disables the zoo's kernels, as if Triton were missing.
ENABLED = os.environ.get("ZOO_OWN_KERNELS") != "0"


# The GPU does not change, so no guard is needed.
@dynamo_constant
def triton_runs_on(device: torch.device) -> bool:
    """Whether Triton is installed and supports this GPU. Callable inside a region: the compiler folds the answer."""
    return device.type == "cuda" and HAS_TRITON and ENABLED and _triton_knows(device)


@functools.cache
def _triton_knows(device: torch.device) -> bool:
    # Triton's stated minimum. Older GPUs run many kernels, but no products of bfloat16.
    return torch.version.hip is not None or torch.cuda.get_device_properties(device).major >= 8


@dynamo_constant
def has_tma(device: torch.device) -> bool:
    """Whether a GPU is a Hopper, for which kernels that read tiles by TMA were measured."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_properties(device).major == 9


@dynamo_constant
def converts_float8(device: torch.device) -> bool:
    """Whether a device takes float8_e4m3fn: False for NVIDIA's GPUs before 8.9, True for all other devices."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return not nvidia or torch.cuda.get_device_capability(device) >= (8, 9)


def kernels_run(*tensors: Tensor | None) -> bool:
    """Whether an operator on these tensors runs the zoo's kernels. The compiler folds the answer inside a region.

    Kernels take three dtypes, on a GPU that Triton supports. They have no derivatives for forward mode and torch.func,
    take no tensor subclass that wraps others, and are invisible to a mode that observes each operator.
    """
    first = tensors[0]
    if first is None or not triton_runs_on(first.device) or transformed() or watched():
        return False
    for each in tensors:  # a plain loop: the compiler traces it in each block
        if each is not None and (each.dtype not in KERNEL_DTYPES or hasattr(each, "__tensor_flatten__")):
            return False
    return True


def tma_runs(*tensors: Tensor | None) -> bool:
    """Whether an operator on these tensors runs kernels that read by TMA."""
    return kernels_run(*tensors) and has_tma(tensors[0].device)  # type: ignore[union-attr]


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether autograd records operations on these tensors. A region guards on both of its conditions anyway."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def watched() -> bool:
    """Whether a mode like ``FlopCounterMode`` or ``FakeTensorMode`` observes each operator. It cannot see kernels."""
    return not torch.compiler.is_dynamo_compiling() and torch._C._len_torch_dispatch_stack() > 0


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which operators compute and sum a floating-point dtype: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def compute_dtype(like: Tensor) -> torch.dtype:
    """The dtype of products of ``like``, including autocast."""
    device = like.device.type
    if like.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return like.dtype


def is_unmodified(layer: nn.Module, cls: type[nn.Module] = nn.Linear) -> bool:
    """Whether a layer has exactly this class and no hooks, so that using its tensors equals calling it.

    Adapters replace a layer or its ``forward``, some pruning and quantisation methods change its weight before each
    call, and interpretability tools hook gradients.
    """
    if type(layer) is not cls or "forward" in vars(layer):
        return False
    return not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def to_rows(x: Tensor) -> Tensor:
    """[B, C, H, W] -> [B H W, C], without a copy in channels_last."""
    rows = x.permute(0, 2, 3, 1)
    # The compiler would guard the base of a view as well.
    return _unsafe_view(rows, (-1, x.shape[1])) if rows.is_contiguous() else rows.reshape(-1, x.shape[1])


def to_images(rows: Tensor, like: Tensor) -> Tensor:
    """[B H W, C] -> [B, C, H, W] in channels_last, with the size of ``like``; a view."""
    count, _, height, width = like.shape
    return rows.view(count, height, width, -1).permute(0, 3, 1, 2)


def ceil_div(value: int, parts: int) -> int:
    """``value / parts``, rounded up. ``triton.cdiv`` does the same but costs the host microseconds at every launch."""
    return -(-value // parts)


def next_power(value: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(value - 1, 0).bit_length()


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, without importing DTensor's module."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def to_local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; any other tensor is returned unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined, no-any-return]
