"""Operators on images in channels_last: convolutions, batch and group norms, and the operations fused with them.

    norm_act     relu(norm(x))   relu(norm(x) + residual)   relu(norm(x) + norm(residual))
    bias_act     relu(x + bias)  relu(x + bias + residual)
    conv_...     the same after a convolution; a 1 × 1 convolution runs as a product fused with them
    ..._pool     the same without a residual, then the maximum of 3 × 3 pixels at a stride of 2: the end of a stem

Group norm: Wu and He, 2018. torch's group norm converts to the contiguous format, and needs separate passes for the
shift and SiLU.

Shape legend: B or N images, C channels, H height, W width, R rows (pixels of all images), O channels of the output, D
channels after space-to-depth, S channels of a skip connection.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.engine.autograd import differentiable_once
from zoo.engine.compat import name_fallbacks_alone
from zoo.ops import triton as kernels
from zoo.ops.attention import few_rows
from zoo.ops.common import (
    KERNEL_DTYPES,
    accumulation_dtype,
    ceil_div,
    compute_dtype,
    differentiated,
    is_unmodified,
    kernels_run,
    tma_runs,
    to_images,
    to_rows,
    watched,
)
from zoo.ops.transformer import column_sums, has_aligned_rows, product_runs

# Convolutions with at most so many output pixels and at least so many channels run as products. So do those of one
# image with fewer channels and at most FEW_PIXELS, by the kernel for few rows. Measured on an H200.
MOST_PIXELS, LEAST_CHANNELS, FEW_PIXELS = 256, 640, 64


def conv_add(x: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    """X [R, C] plus bias [C] plus residual [R, C], if any: [R, C], in the wider dtype of x and residual. Rounded once.

    In channels_last torch adds a convolution's bias without vector loads. Raises ValueError for other shapes.
    """
    if residual is not None and x.shape != residual.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}, expected that of x, {tuple(x.shape)}")
    if kernels_run(x, bias, residual):
        learn = differentiated(x, bias, residual)
        return _ConvAdd.apply(x, bias, residual) if learn else kernels.tiles.conv_add(x, bias, residual)
    # Under autocast parameters stay float32, and would make activations float32 as well.
    total = x + bias.to(x.dtype)
    return total if residual is None else total + residual


class _ConvAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
        ctx.dtypes = x.dtype, bias.dtype, None if residual is None else residual.dtype
        return kernels.tiles.conv_add(x, bias, residual)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Each summand has the gradient of the sum; the bias gradient is the sum over rows."""
        x, bias, residual = ctx.dtypes
        grad_bias = column_sums(grad, bias) if ctx.needs_input_grad[1] else None
        return grad.to(x), grad_bias, None if residual is None else grad.to(residual)


def conv3(x: Tensor, weight: Tensor) -> Tensor:
    """A 3 × 3 convolution with a padding of 1 and no bias: [B, C_in, H, W] -> [B, C_out, H, W]."""
    return _product_of_windows(x, weight, None, 1) if windows_run(x, weight, 1) else F.conv2d(x, weight, padding=1)


def conv(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """A convolution with its bias: [B, C_in, H, W] -> [B, C_out, H', W']. A modified layer is called as a module."""
    weight, bias = layer.weight, layer.bias
    if not kernels_run(x, weight, bias) or not is_unmodified(layer, nn.Conv2d):
        return layer(x)
    if _is_of_windows(x, layer):
        return _product_of_windows(x, weight, bias, layer.stride[0])
    if bias is None:
        return layer(x)
    x = layer._conv_forward(x, weight, None)
    return to_images(conv_add(to_rows(x), bias), x)


def windows_run(x: Tensor, weight: Tensor, stride: int) -> bool:
    """Whether a 3 × 3 convolution of x [B, C, H, W], padded by 1, is computed as a product of its windows.

    This pays off for few pixels and many channels: weight reads dominate, and a matrix product reads weights faster.
    """
    if differentiated(x, weight) or x.shape[1] != weight.shape[1]:
        return False
    many = x.shape[1] >= LEAST_CHANNELS
    if not many:
        # The kernel of few rows takes tensors of one dtype that tensor cores multiply.
        alike = x.dtype != torch.float32 and compute_dtype(x) == x.dtype == weight.dtype
        if not (alike and x.shape[0] == 1 and x.shape[1] % 16 == 0 and tma_runs(x, weight)):
            return False
    pixels = x.shape[0] * ceil_div(x.shape[2], stride) * ceil_div(x.shape[3], stride)
    return (
        pixels <= (MOST_PIXELS if many else FEW_PIXELS)
        and weight.is_contiguous(memory_format=torch.channels_last)
        and kernels_run(x, weight)
    )


def _is_of_windows(x: Tensor, layer: nn.Conv2d) -> bool:
    usual = layer.kernel_size == (3, 3) and layer.padding == (1, 1) and layer.groups == 1
    usual = usual and layer.dilation == (1, 1) and not differentiated(layer.bias)
    return usual and windows_run(x, layer.weight, layer.stride[0])


def _product_of_windows(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    windows, matrix = kernels.tiles.windows(x.permute(0, 2, 3, 1), stride), weight.permute(0, 2, 3, 1).flatten(1)
    few = x.shape[1] < LEAST_CHANNELS
    rows = kernels.decode.linear(windows, matrix, bias=bias) if few else F.linear(windows, matrix, bias)
    return rows.view(x.shape[0], ceil_div(x.shape[2], stride), -1, weight.shape[0]).permute(0, 3, 1, 2)


# Where squares of 2 × 2 begin in image and weight. The weight has a zero tap first, so that the padding of 3 is even.
_IMAGE_OFFSET, _WEIGHT_OFFSET = 4, 1


def stem_conv(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """The first convolution of a network, without its bias: images in any layout -> [N, O, H', W'] in channels_last.

    Fast kernels of convolution libraries need multiples of eight channels; three leave most of a matrix unit idle. If
    kernels run, a 7 × 7 convolution of stride 2 is computed as a 4 × 4 convolution of stride 1 over 2 × 2 squares with
    16 channels: the same products, plus zeros. With a, b in 0 .. 6, p, r in 0 .. 3 and q, s in 0, 1,

        y[i, j] = Σ w[a, b] x[2 i + a - 3, 2 j + b - 3]
                = Σ w[2 p + q - 1, 2 r + s - 1] x[2 (i + p - 2) + q, 2 (j + r - 2) + s]
    """
    options = conv.stride, conv.padding, conv.dilation, conv.groups
    usual = conv.kernel_size == (7, 7) and options == ((2, 2), (3, 3), (1, 1), 1) and conv.in_channels <= 4
    if not (usual and x.numel() and kernels_run(x, conv.weight)) or differentiated(x):
        x = x.contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, conv.weight, None, *options)  # type: ignore[arg-type]
    height, width = (x.shape[2] + 1) // 2 + 3, (x.shape[3] + 1) // 2 + 3
    depth = 8 if x.shape[1] <= 2 else 16  # a multiple of eight, and a power of two
    squares = space_to_depth(x, _IMAGE_OFFSET, height, width, depth, compute_dtype(x))
    # Autocast casts the weight inside the convolution.
    return F.conv2d(squares, space_to_depth(conv.weight, _WEIGHT_OFFSET, 4, 4, depth, conv.weight.dtype))


def space_to_depth(x: Tensor, offset: int, height: int, width: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Squares of 2 × 2 pixels as channels: [N, C, H, W] -> [N, D, height, width] in channels_last.

    Channel (2 q + s) D / 4 + c of pixel (i, j) is channel c of pixel (2 i + q - offset, 2 j + s - offset), zero outside
    and where there is no channel c. D is at least 4 C and a power of two.
    """
    if kernels_run(x) and not differentiated(x):
        return kernels.tiles.space_to_depth(x, offset, height, width, channels, dtype)
    below, right = 2 * height - x.shape[2] - offset, 2 * width - x.shape[3] - offset
    x = x if x.dtype == dtype else x.to(dtype)  # the compiler would trace even a cast that changes nothing
    wide = F.pad(x, (offset, right, offset, below, 0, channels // 4 - x.shape[1]))
    squares = wide.unflatten(3, (width, 2)).unflatten(2, (height, 2)).permute(0, 3, 5, 1, 2, 4)
    return squares.flatten(1, 3).contiguous(memory_format=torch.channels_last)


# The kernels hold all channels of a group at once.
WIDEST_GROUP = 4096


def group_norm(
    x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> Tensor:
    """Group norm of images x [B, C, H, W] in channels_last; weight and bias [C]. Statistics are in float32.

    A shift [B, C], if given, is added to each pixel first. With ``silu`` SiLU follows the norm.
    """
    if not _group_norm_fits(groups, x, weight, bias, shift):
        return _reference_group_norm(x, shift, weight, bias, groups, eps, silu)
    if shift is not None and shift.stride(1) != 1:
        shift = shift.contiguous()
    if differentiated(x, weight, bias, shift):
        return _GroupNorm.apply(x, None, shift, weight, bias, groups, eps, silu)
    return kernels.group_norm.group_norm(x, None, shift, weight, bias, groups, eps, silu)[0]


def cat_group_norm(
    x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor]:
    """Concatenate channels of x [B, C, H, W] and skip [B, S, H, W] and compute their group norm, in fused passes.

    Returns the norm and the concatenation, [B, C + S, H, W] in channels_last. A group may span x and skip.
    """
    if not _group_norm_fits(groups, x, weight, bias, skip):
        joined = torch.cat([x, skip.to(x.dtype)], dim=1).contiguous(memory_format=torch.channels_last)
        return _reference_group_norm(joined, None, weight, bias, groups, eps, silu), joined
    if differentiated(x, skip, weight, bias):
        return _GroupNorm.apply(x, skip, None, weight, bias, groups, eps, silu)
    return kernels.group_norm.group_norm(x, skip, None, weight, bias, groups, eps, silu)[:2]


def _group_norm_fits(groups: int, x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    return weight.shape[0] // groups <= WIDEST_GROUP and kernels_run(x, weight, *others)


def _reference_group_norm(
    x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> Tensor:
    dtype = accumulation_dtype(x.dtype)
    shifted = x.to(dtype) if shift is None else x.to(dtype) + shift.to(dtype)[:, :, None, None]
    out = F.group_norm(shifted, groups, weight.to(dtype), bias.to(dtype), eps)
    return (F.silu(out) if silu else out).to(x.dtype, memory_format=torch.channels_last)


class _GroupNorm(torch.autograd.Function):
    """The norm of x; with a skip connection the norm of their concatenation, and the concatenation."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, skip: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int,
        eps: float, silu: bool,
    ) -> Any:  # fmt: skip
        ctx.silu, ctx.channels, ctx.skip_dtype = silu, x.shape[1], None if skip is None else skip.dtype
        # If a backward reads a tensor's strides, Dynamo copies the gradients into another layout.
        ctx.shift_stride = 0 if shift is None else shift.stride(0)
        out, joined, statistics = kernels.group_norm.group_norm(x, skip, shift, weight, bias, groups, eps, silu)
        ctx.save_for_backward(joined, shift, weight, bias, statistics)
        return out if skip is None else (out, joined)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, joined_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
        given = grad, *ctx.saved_tensors, joined_grad, ctx.shift_stride, ctx.channels, ctx.silu
        grad_x, grad_skip, *others = kernels.group_norm.group_norm_backward(*given)
        return grad_x, None if ctx.skip_dtype is None else grad_skip.to(ctx.skip_dtype), *others, None, None, None


# Mean, variance, weight and bias of a norm, each None without a norm.
Tensors: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
NO_NORM: Tensors = (None, None, None, None)


class Norm(NamedTuple):
    """A batch norm as operators take it; vectors are [C]."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor | None  # None for a norm without running statistics
    running_variance: Tensor | None
    batches: Tensor | None = None  # number of batches so far, int64
    of_batch: bool = False  # normalise x by batch statistics, and update the running statistics in place
    momentum: float = 0.0
    eps: float = 1e-5


def norm_act(x: Tensor, norm: Norm, residual: Tensor | None = None, residual_norm: Norm | None = None) -> Tensor:
    """Relu of the batch norm of x [N, C, H, W] or [R, C], plus a residual or a normed residual, before the relu.

    Images in channels_last are read without a copy; the result is channels_last. Kernels compute in float32, round once
    and have no second derivatives. Raises ValueError for batch statistics of a single row.
    """
    given = x, *norm[:2], residual, *(() if residual_norm is None else residual_norm[:2])
    alike = residual_norm is None or residual_norm[5:] == norm[5:]
    if alike and _kernels_fit(x, residual, *given):
        _check(x, residual, norm, residual_norm or ())
        own, other = _tensors(x, norm), _tensors(residual, residual_norm)
        if differentiated(*given):
            return _NormAct.apply(x, *own, residual, *other, norm.eps, norm.of_batch)
        return kernels.batch_norm.norm_act(x, own, residual, other, norm.eps)
    out = _normalised(x, norm)
    if residual is not None:
        out = out + (residual if residual_norm is None else _normalised(residual, residual_norm))
    return F.relu(out)


def conv_norm_act(
    x: Tensor, layer: nn.Conv2d, norm: Norm, residual: Tensor | None = None, residual_norm: Norm | None = None
) -> Tensor:
    """``norm_act`` of a convolution: x [N, C, H, W] -> [N, O, H', W'], the size of the residual.

    A 1 × 1 convolution runs as a matrix product, fused with the norm.
    """
    if not norm.of_batch and layer.bias is None and (residual_norm is None or residual_norm.eps == norm.eps):
        own, other = _tensors(x, norm), _tensors(residual, residual_norm)
        if (out := _pointwise_act(x, layer, own, residual, other, norm.eps, few=True)) is not None:
            return out
    return norm_act(conv(x, layer), norm, residual, residual_norm)


def _pointwise_act(
    x: Tensor, conv: nn.Conv2d, own: Tensors, residual: Tensor | None, other: Tensors, eps: float, few: bool = False
) -> Tensor | None:
    """Relu of a normed 1 × 1 convolution plus a residual, by one kernel; None if the kernel takes no such arguments."""
    weight = conv.weight
    if weight.shape[1:] != (x.shape[1], 1, 1) or conv.stride != (1, 1) or conv.padding != (0, 0):
        return None
    if not is_unmodified(conv, nn.Conv2d):
        return None
    rows, matrix, added = to_rows(x), weight.flatten(1), None
    if differentiated(*own[2:], residual, *other[2:]) or not product_runs(rows, matrix, own[3], few):
        return None
    if residual is not None:
        added = to_rows(residual)
        alike = added.dtype == rows.dtype and added.shape == (rows.shape[0], matrix.shape[0])
        if not alike or not has_aligned_rows(added):
            return None
    return to_images(kernels.batch_norm.product_norm_act(rows, matrix, own, added, other, eps), x)


def _kernels_fit(x: Tensor, residual: Tensor | None, *vectors: Tensor | None) -> bool:
    alike = x.numel() > 0 and (residual is None or residual.dtype == x.dtype)
    return alike and kernels_run(x, residual, *vectors)


def _check(x: Tensor, residual: Tensor | None, *norms: Sequence[Any]) -> None:
    """Refuse tensors that kernels would read out of bounds. Skipped in traced blocks: it doubles Dynamo's time."""
    if torch.compiler.is_compiling():
        return
    shape, channels, device = x.shape, x.shape[1:2], x.device
    if len(shape) not in (2, 4):
        raise ValueError(f"x has shape {tuple(shape)}, expected rows [R, C] or images [N, C, H, W]")
    if residual is not None and (residual.shape != shape or residual.device != device):
        found = f"{tuple(residual.shape)} on {residual.device}"
        raise ValueError(f"residual has shape {found}, expected that of x, {tuple(shape)} on {device}")
    for norm in norms:
        for name, each in zip(Norm._fields[:4], norm[:4], strict=False):
            if each is not None and not (each.shape == channels and each.device == device and each.is_contiguous()):
                found = f"{tuple(each.shape)} and stride {each.stride()} on {each.device}"
                raise ValueError(f"{name} has shape {found}, expected {tuple(channels)} without gaps on {device}")


def _normalised(x: Tensor, norm: Norm) -> Tensor:
    if norm.batches is not None and norm.of_batch:
        norm.batches.add_(1)
    statistics = norm.running_mean, norm.running_variance
    return F.batch_norm(x, *statistics, norm.weight, norm.bias, norm.of_batch, norm.momentum, norm.eps)


def _tensors(x: Tensor | None, norm: Norm | None) -> Tensors:
    """Mean and variance for the norm of x, its weight and bias. Batch statistics update the running statistics."""
    if x is None or norm is None:
        return NO_NORM
    mean, variance = norm.running_mean, norm.running_variance
    if norm.of_batch:
        mean, variance = kernels.batch_norm.batch_statistics(x.detach(), mean, variance, norm.batches, norm.momentum)
    return mean, variance, norm.weight, norm.bias


class _NormAct(torch.autograd.Function):
    """Batch statistics are inputs here; the gradient of x includes their dependence on x."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, mean, variance, weight, bias, residual, *other, ctx.eps, ctx.of_batch = arguments
        out: Tensor = kernels.batch_norm.norm_act(x, (mean, variance, weight, bias), residual, tuple(other), ctx.eps)
        # Without a residual the backward recomputes the relu. A residual without a norm is not needed.
        kept = None if other[0] is None else residual
        ctx.save_for_backward(x, mean, variance, weight, bias, kept, *other, None if residual is None else out)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, variance, weight, bias, residual, *other, out = ctx.saved_tensors
        affine = any(ctx.needs_input_grad[3:5]) or any(ctx.needs_input_grad[8:10])
        grad_x, grad_weight, grad_bias, grad_residual, *grad_other = kernels.batch_norm.norm_act_backward(
            grad, x, (mean, variance, weight, bias), residual, tuple(other), out, ctx.eps, ctx.of_batch, affine
        )
        return grad_x, None, None, grad_weight, grad_bias, grad_residual, None, None, *grad_other, None, None


def bias_act(x: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    """Relu of x [N, C, H, W] plus bias [C] plus residual, if given: ``norm_act`` of a model with folded norms."""
    if _kernels_fit(x, residual, bias) and not differentiated(x, residual, bias):
        _check(x, residual, (None, bias))
        return kernels.batch_norm.norm_act(x, (None, None, None, bias), residual, NO_NORM, 0.0)
    out = x + (bias if x.dim() == 2 else bias[:, None, None])
    return F.relu(out if residual is None else out + residual)


def norm_act_pool(x: Tensor, norm: Norm) -> Tensor:
    """Norm, relu and the maximum of 3 × 3 pixels at a stride of 2: [N, C, H, W] -> [N, C, ⌈H / 2⌉, ⌈W / 2⌉].

    The result is in channels_last, in the dtype of ``x``. NaN propagates.
    """
    given = x, norm.weight, norm.bias
    if not norm.of_batch and _kernels_fit(x, None, *given) and not differentiated(*given):
        _check(x, None, norm)
        return kernels.batch_norm.norm_act_pool(x, _tensors(x, norm), norm.eps)
    return max_pool(norm_act(x, norm))


def bias_act_pool(x: Tensor, bias: Tensor) -> Tensor:
    """``norm_act_pool`` with a bias [C] instead of a norm."""
    if _kernels_fit(x, None, bias) and not differentiated(x, bias):
        _check(x, None, (None, bias))
        return kernels.batch_norm.norm_act_pool(x, (None, None, None, bias), 0.0)
    # Bias and relu are monotonic, so they can follow the maximum, on a quarter of the pixels.
    return F.relu(F.max_pool2d(x, 3, 2, 1) + bias[:, None, None])


def max_pool(x: Tensor) -> Tensor:
    """Max pooling over 3 × 3 pixels at a stride of 2; ties take the first: [N, C, H, W] -> [N, C, ⌈H / 2⌉, ⌈W / 2⌉].

    If kernels run, the result is in channels_last, and there are no second derivatives.
    """
    if _kernels_fit(x, None):
        return _MaxPool.apply(x) if differentiated(x) else kernels.batch_norm.max_pool(x)[0]
    return F.max_pool2d(x, 3, 2, 1)


class _MaxPool(torch.autograd.Function):
    """Saves the argmax of each window, one byte, instead of the image."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.height, ctx.width = x.shape[2:]
        out, which = kernels.batch_norm.max_pool(x)
        ctx.save_for_backward(which)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return kernels.batch_norm.max_pool_backward(grad, *ctx.saved_tensors, ctx.height, ctx.width)


def mean_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """A linear layer of the mean over pixels, the end of a network: [N, C, H, W] -> [N, O]."""
    # For one image our kernels are faster. A region compiles another graph for one image anyway.
    one = x.shape[0] == 1 and _kernels_fit(x, None) and not differentiated(x, layer.weight, layer.bias)
    means = kernels.batch_norm.mean(x) if one else x.mean((2, 3))
    if one and is_unmodified(layer) and few_rows(means, (layer.weight, None)):
        return kernels.decode.linear(means, layer.weight, bias=layer.bias)
    return layer(means)


def conv_bias_act(x: Tensor, conv: nn.Conv2d, residual: Tensor | None = None) -> Tensor:
    """``bias_act`` of a convolution with a bias, without gradients: x [N, C, H, W] -> [N, O, H', W'], as the residual.

    It is one call of cuDNN, or a product: of a 1 × 1 convolution of many pixels, or a 3 × 3 convolution of few. A
    modified layer is called as a module.
    """
    bias: Any = conv.bias
    if not is_unmodified(conv, nn.Conv2d):
        out = conv(x)
        return F.relu(out if residual is None else out + residual)
    if (out := _pointwise_act(x, conv, (*NO_NORM[:3], bias), residual, NO_NORM, 0.0)) is not None:
        return out
    if _is_of_windows(x, conv):
        return bias_act(_product_of_windows(x, conv.weight, None, conv.stride[0]), bias, residual)
    options: Any = conv.stride, conv.padding, conv.dilation, conv.groups
    # FLOP counters do not know the operator.
    if x.is_cuda and torch.version.hip is None and x.dtype in KERNEL_DTYPES and not watched():
        return torch.ops.zoo_resnet.conv_act(x, conv.weight, bias, residual, *options)  # type: ignore[no-any-return]
    return bias_act(F.conv2d(x, conv.weight, None, *options), bias, residual)


def _conv_act(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *options: Any) -> Tensor:
    """Images, weight and the result are in channels_last. Options are stride, padding, dilation and groups."""
    if not torch.backends.cudnn.enabled:
        out = F.conv2d(x, weight, bias, *options)
        out = (out if residual is None else out + residual).relu_()
    elif residual is None:
        out = torch.ops.aten.cudnn_convolution_relu(x, weight, bias, *options)
    else:
        out = torch.ops.aten.cudnn_convolution_add_relu(x, weight, residual, 1, bias, *options)
    return out.contiguous(memory_format=torch.channels_last)


def _like_conv_act(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *options: Any) -> Tensor:
    name_fallbacks_alone()  # this runs when a graph with the operator is compiled
    out = torch.ops.aten.convolution.default(x, weight, bias, *options[:3], False, [0, 0], options[3])
    return out.contiguous(memory_format=torch.channels_last)


# cuDNN's calls have no meta functions. ``torch.library.custom_op`` would import Dynamo at the first eager call.
_CONV_ACT = "zoo_resnet::conv_act"
torch.library.define(
    _CONV_ACT,
    "(Tensor x, Tensor weight, Tensor bias, Tensor? residual, int[] stride, int[] padding, int[] dilation, int groups)"
    " -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl(_CONV_ACT, "default", _conv_act)
torch.library.register_fake(_CONV_ACT, _like_conv_act)
