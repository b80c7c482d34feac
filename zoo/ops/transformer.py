"""Operators of transformer blocks: norms of rows, matrix products, gates, and attention to few keys.

Norms run alone or fused with the residual add before them. RMS norm: Zhang and Sennrich, 2019. Layer norm: Ba, Kiros
and Hinton, 2016.

Products may have a lower precision than their float32 weight. Autocast writes the weight's gradient twice, first in the
low dtype and then converted. Here the product writes float32 directly, and the bias gradient is one pass over the rows.

Shape legend: R rows, C columns, N rows of a weight, I width inside the MLP. Attention: B images, T queries and L keys
of each, N heads, D width of a head. "Low" means in the dtype of products.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.engine.autograd import Function, differentiable_once
from zoo.ops import triton as kernels
from zoo.ops.common import accumulation_dtype, compute_dtype, differentiated, kernels_run, tma_runs

# The widest rows that a program holds.
WIDEST_RMS_NORM, WIDEST_NORM = 16384, 8192


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X [..., C], weight [C] -> [..., C]: normed in at least float32, rounded to the dtype of x, then weighted."""
    if not _rms_norm_fits(x, weight):
        return reference_rms_norm(x, weight, eps)
    if differentiated(x, weight):
        return _Norm.apply(x, None, None, weight, None, eps, None, False)
    return kernels.norms.norm(x, None, None, weight, None, eps, keep=False)[0]


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of the residual stream x [..., C] and ``added`` [..., C] or None, and the RMS norm of the sum.

    Continue with the returned sum, even if ``added`` is None: the norm's backward adds the sum's gradient.
    """
    if not _rms_norm_fits(x, weight, added):
        total = x if added is None else x + added
        return total, reference_rms_norm(total, weight, eps)
    if differentiated(x, weight, added):
        normed, total = _Norm.apply(x, added, None, weight, None, eps, None, True)
    else:
        normed, _, total, *_ = kernels.norms.norm(x, added, None, weight, None, eps)
    return total, normed


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm`` by torch's operators, which the compiler fuses with their neighbours."""
    normed = x.to(accumulation_dtype(x.dtype))
    return weight * (normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rms_norm_fits(x: Tensor, weight: Tensor, added: Tensor | None = None) -> bool:
    if added is not None and (added.shape != x.shape or added.dtype != x.dtype):
        return False
    alike = weight.shape == x.shape[-1:] and weight.dtype == x.dtype
    return alike and x.shape[-1] <= WIDEST_RMS_NORM and kernels_run(x, weight, added)


class _Norm(torch.autograd.Function):
    """Layer norm of a sum (RMS norm without a bias), then the norm's copy in ``low_dtype``, or the sum if kept.

    The shift is added before the norm, or ``after`` it to the kept sum.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor | None,
        eps: float, low_dtype: torch.dtype | None, keep_sum: bool, after: bool = False,
    ) -> Any:  # fmt: skip
        before, behind = (None, shift) if after else (shift, None)
        out, low, total, summed, mean, rstd = kernels.norms.norm(x, added, before, weight, bias, eps, low_dtype, behind)
        ctx.save_for_backward(summed, mean, rstd, weight)
        ctx.adds, ctx.keep_sum, ctx.after = added is not None, keep_sum, after
        ctx.added_dtype = None if added is None or added.dtype == out.dtype else added.dtype
        ctx.sums = 1 + (bias is not None) + (shift is not None)
        if keep_sum:
            return out, total if ctx.adds else x.view_as(x)
        return out if low is None else (out, low)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, other: Tensor | None = None) -> tuple[Tensor | None, ...]:
        low_grad, sum_grad = (None, other) if ctx.keep_sum else (other, None)
        given = *ctx.saved_tensors, grad, low_grad, sum_grad, ctx.added_dtype
        out, low, sums = kernels.norms.norm_backward(*given, ctx.sums, ctx.after)
        weight, bias, shift = (*sums, None, None)[:3]
        return out, (out if low is None else low) if ctx.adds else None, shift, weight, bias, *(None,) * 4


def add_layer_norm(
    x: Tensor, added: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    low_dtype: torch.dtype | None = None, count: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Layer norm of x [..., C] + added [..., C] + shift [C], and its copy in ``low_dtype`` for the next products.

    The shift, or None, is the bias of the preceding product, which omits it; the same pass sums its gradient. Rows from
    a count [1] int32 on may be left out.
    """
    if _add_layer_norm_fits(x, added, shift, weight, bias):
        low_dtype = None if low_dtype == x.dtype else low_dtype
        if not differentiated(x, added, shift, weight, bias):
            out, low, *_ = kernels.norms.norm(x, added, shift, weight, bias, eps, low_dtype, count=count, keep=False)
            return out, out if low is None else low
        out = _Norm.apply(x, added, shift, weight, bias, eps, low_dtype, False)
        return (out, out) if low_dtype is None else out
    out = F.layer_norm(x + (added if shift is None else added + shift), weight.shape, weight, bias, eps)
    return out, out if low_dtype is None else out.to(low_dtype)


def _add_layer_norm_fits(x: Tensor, added: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor) -> bool:
    """Whether the kernels take these tensors; torch broadcasts or refuses all others."""
    # Autocast normalises in float32 for any input dtype.
    if x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type):
        return False
    vectors = weight, bias, shift
    fit = all(each is None or (each.shape == x.shape[-1:] and each.dtype == x.dtype) for each in vectors)
    return fit and added.shape == x.shape and x.shape[-1] <= WIDEST_NORM and kernels_run(x, added, *vectors)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of x [R, C] with weight [C] and bias [C], in float32: [R, C] in the dtype of ``x``."""
    if x.shape[-1] > WIDEST_NORM or not kernels_run(x, weight, bias):
        return F.layer_norm(x, weight.shape, weight, bias, eps).to(x.dtype)
    if differentiated(x, weight, bias):
        return _Norm.apply(x, None, None, weight, bias, eps, None, False)
    return kernels.norms.norm(x, None, None, weight, bias, eps, keep=False)[0]


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum of x [R, C] and residual [R, C], and its layer norm: [R, C] each, in the wider dtype of the two.

    Computed in float32; the sum is rounded before it is normed. A shift [C] is added only to the returned sum, after
    the norm. Raises ValueError for other shapes.
    """
    if x.shape != residual.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}, expected that of x, {tuple(x.shape)}")
    if shift is not None and shift.shape != x.shape[-1:]:
        raise ValueError(f"shift has shape {tuple(shift.shape)}, expected one number a column: ({x.shape[-1]},)")
    given = x, residual, weight, bias, shift
    if x.shape[-1] > WIDEST_NORM or not kernels_run(*given):
        total = residual + x
        normed = F.layer_norm(total, weight.shape, weight, bias, eps).to(total.dtype)
        return total if shift is None else total + shift.to(total.dtype), normed
    if differentiated(*given):
        normed, total = _Norm.apply(residual, x, shift, weight, bias, eps, None, True, True)
        return total, normed
    normed, _, total, *_ = kernels.norms.norm(residual, x, None, weight, bias, eps, after=shift, keep=shift is None)
    return total, normed


_LOW = (torch.bfloat16, torch.float16)


def takes_low(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether autocast would convert weight and bias for x, so that ``low_linear`` applies."""
    wide = weight.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32)
    return wide and x.dtype in _LOW and torch.is_autocast_enabled(x.device.type) and compute_dtype(x) == x.dtype


def with_low_copy(x: Tensor) -> tuple[Tensor, Tensor]:
    """X, and its copy in the dtype of products under autocast. Continue with the returned x."""
    low = compute_dtype(x)
    if low == x.dtype:
        return x, x
    if kernels_run(x) and differentiated(x):
        return _WithLowCopy.apply(x, low)
    return x, x.to(low)


def low_linear(x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None) -> Tensor:
    """Low x [..., C] times float32 weight [N, C], plus bias [N]: low [..., N]. Differentiable.

    Instead of a bias, the product of x [R, C] may add the low tensor ``added`` [R, N] itself.
    """
    return _Linear.apply(x, weight, bias, added)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of a float32 weight [N, C] from the product's gradient [R, N] and input [R, C], both low.

    On NVIDIA GPUs from Ampere on the product writes its float32 sums directly, without a conversion pass.
    """
    if x.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):
            return grad.float().t() @ x.float()
    if x.shape[0] and kernels_run(x) and torch.version.hip is None:
        return torch.mm(grad.t(), x, out_dtype=torch.float32)
    return (grad.t() @ x).float()


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum x [..., C] over rows, in float32: [C] in another dtype. It is a bias gradient, itself not differentiable."""
    if kernels_run(x):
        return kernels.tiles.column_sums(x, dtype)
    return x.reshape(-1, x.shape[-1]).sum(0, dtype=accumulation_dtype(x.dtype)).to(dtype)


class _WithLowCopy(torch.autograd.Function):
    """One node with both outputs, so that one pass adds both gradients of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: torch.dtype) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x.to(low)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, low_grad: Tensor) -> tuple[Tensor, None]:
        return (grad + low_grad).to(grad.dtype), None


class _Linear(torch.autograd.Function):
    """Gradients of weight and bias are summed and stored in float32; ``added`` has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None) -> Tensor:
        low = weight.to(x.dtype)
        x_learns, weight_learns = ctx.needs_input_grad[:2]
        # Each factor is saved only for the gradient of the other. A frozen weight saves no activation.
        ctx.save_for_backward(x if weight_learns else None, low if x_learns else None)
        if added is not None:
            return torch.addmm(added, x, low.t())
        return F.linear(x, low, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, low), wanted = ctx.saved_tensors, ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad @ low if wanted[0] else None
        grad_weight = weight_gradient(rows, x.reshape(-1, x.shape[-1])) if wanted[1] else None
        grad_bias = column_sums(rows, torch.float32) if wanted[2] else None
        return grad_x, grad_weight, grad_bias, grad if wanted[3] else None


# With fewer rows the library's product and a separate gate are faster, measured on an H200.
LEAST_ROWS = 2048


def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """GELU of x [..., I] plus bias [I], by erf or by its tanh approximation: [..., I], in the dtype of x."""
    if kernels_run(x, bias):
        return _activated(kernels.tiles.bias_gelu, kernels.tiles.bias_gelu_backward, x, bias, tanh)
    return F.gelu(x + bias, approximate="tanh" if tanh else "none").to(x.dtype)


def _activated(kernel: Function, gradients: Function, x: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    if differentiated(x, bias):
        return _Activation.apply(kernel, gradients, x, bias, *options)
    return kernel(x, bias, *options)


class _Activation(torch.autograd.Function):
    """A kernel's output. Another kernel computes the gradients of x and bias, from the same arguments."""

    @staticmethod
    def forward(
        ctx: Any, kernel: Function, gradients: Function, x: Tensor, bias: Tensor | None, *options: Any
    ) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.gradients, ctx.options = gradients, options
        return kernel(x, bias, *options)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.gradients(grad, *ctx.saved_tensors, *ctx.options), *(None for _ in ctx.options)


def gated_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """X [..., 2 I] plus bias [2 I]; then GELU (by erf) of the second half times the first half: [..., I].

    Rounded once. This and ``gated_gelu_product`` raise ValueError for other shapes.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x has {x.shape[-1]} columns, expected an even number: two halves")
    if bias.shape != x.shape[-1:]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}, expected one number a column: ({x.shape[-1]},)")
    if kernels_run(x, bias):
        return _activated(kernels.tiles.gated, kernels.tiles.gated_backward, x, bias)
    # Under autocast parameters stay in float32, and would make activations float32 as well.
    up, gate = (x + bias.to(x.dtype)).chunk(2, dim=-1)
    return up * F.gelu(gate)


def has_aligned_rows(x: Tensor) -> bool:
    """Whether rows of half precision begin on 16 bytes, as TMA needs. A region cannot check the address of a tensor."""
    return x.is_contiguous() and not (x.shape[-1] % 8 or (not torch.compiler.is_compiling() and x.storage_offset() % 8))


def product_runs(x: Tensor, weight: Tensor, bias: Tensor | None, few: bool = False) -> bool:
    """Whether the zoo's TMA kernel computes this product: of enough rows, or ``few``, without gradients and casts."""
    least = 2 if few else LEAST_ROWS  # the stride of a single row may be any number, which TMA does not take
    if x.dtype not in _LOW or x.dtype != weight.dtype or x.numel() < least * x.shape[-1]:
        return False
    if not (has_aligned_rows(x) and has_aligned_rows(weight) and weight.shape[0] % 16 == 0):
        return False
    if differentiated(x, weight, bias) or torch.is_autocast_enabled(x.device.type):
        return False
    return tma_runs(x, weight, bias)


def product(x: Tensor, weight: Tensor, bias: Tensor, activation: str = "", count: Tensor | None = None) -> Tensor:
    """X [..., C] times weight [I, C] plus bias [I], then nothing, ``gelu`` (by erf) or ``tanh`` (its approximation).

    Call it where ``product_runs``. Rows from a count [1] int32 on are left out: they hold whatever was in memory.
    """
    rows = kernels.tiles.product(x.reshape(-1, x.shape[-1]), weight, bias, activation, count)
    return rows.view(*x.shape[:-1], weight.shape[0])


def gated_gelu_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``gated_gelu`` of x [R, C] times weight [2 I, C] plus bias [2 I]: [R, I]; fused if ``product_runs``."""
    if weight.shape[0] % 2 or x.shape[1:] != weight.shape[1:] or bias.shape != weight.shape[:1]:
        shapes = ", ".join(str(tuple(each.shape)) for each in (x, weight, bias))
        raise ValueError(f"x, weight and bias have shapes {shapes}; expected [R, C], [2 I, C] and [2 I]")
    if product_runs(x, weight, bias):
        return kernels.tiles.product(x, weight, bias, "gated")
    # The gate adds the bias: for a product with bias the library takes a kernel that clears a buffer first.
    return gated_gelu(F.linear(x, weight), bias)


def swiglu(x: Tensor) -> Tensor:
    """SiLU of the first half of x [..., 2 I] times the second: [..., I] (https://arxiv.org/abs/2002.05202)."""
    if kernels_run(x):
        return _activated(kernels.tiles.gated, kernels.tiles.gated_backward, x, None)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


# Maximum keys and head width of the kernel. With more keys the library's attention is faster, measured on an H200.
MOST_KEYS = 128
WIDEST_HEAD = 256


def short_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention of query [B, T, N, D] to key and value [B, L, N, D] with N heads: [B T, N D], heads concatenated.

    The zoo's kernels run for few keys, without a bias [B, 1, 1, L] on the scores and without gradients. The library's
    are made for long rows of keys. Raises ValueError for other shapes.
    """
    expected = (query.shape[0], key.shape[1], *query.shape[2:])
    if key.shape != value.shape or tuple(key.shape) != expected:
        shapes = ", ".join(str(tuple(each.shape)) for each in (query, key, value))
        raise ValueError(f"query, key and value have shapes {shapes}; expected [B, T, N, D] and twice [B, L, N, D]")
    if bias is None and 0 < key.shape[1] <= MOST_KEYS and _heads_fit(query, key, value):
        return kernels.attention.short_attention(query, key, value)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return mixed.transpose(1, 2).reshape(-1, query.shape[2] * query.shape[3])


def packed_attention(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """Attention within sequences that are stored one after the other: query, key and value [R, N, D] -> [R, N D].

    Sequence s has rows ``offsets[s]`` to ``offsets[s + 1]`` (int32, on the device, end excluded), at most ``longest``.
    """
    if _heads_fit(query, key, value):
        return kernels.attention.short_attention(query[None], key[None], value[None], offsets, longest)
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(query, key, value, offsets, offsets, longest, longest).flatten(1)  # type: ignore[union-attr]


def _heads_fit(query: Tensor, key: Tensor, value: Tensor) -> bool:
    low, width = query.dtype in _LOW and query.dtype == key.dtype == value.dtype, query.shape[-1]
    fits = low and 0 < width <= WIDEST_HEAD and width % 8 == 0
    return fits and not differentiated(query, key, value) and kernels_run(query, key, value)
