"""The kernels of the family as torch operators, so that a layer stays one graph.

On a GPU each runs Triton kernels, elsewhere torch's own operators compute the same. Layers use them where kernels run
(``kernels_run``, ``few_rows``); nothing else of the family knows them.

Shape legend: M rows of features, N rows of a weight, C columns, B batch, H query heads, K key and value heads, S slots,
D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.llm import fallback
from zoo.ops.common import KERNEL_DTYPES, triton_runs_on
from zoo.ops.opaque import OperatorLibrary, launcher

# From here on a matrix product of the vendor's library reads weights as fast.
MOST_ROWS = 4
# A program holds a whole row of a norm.
WIDEST_NORM = 16384

_LIBRARY = OperatorLibrary("zoo_llm")


def kernels_run(x: Tensor) -> bool:
    """Whether operators on ``x`` run kernels of our own."""
    return x.dtype in KERNEL_DTYPES and triton_runs_on(x.device)


def attention_fits(width: int) -> bool:
    """Whether the kernels take heads of this width."""
    return width >= 32 and width & (width - 1) == 0


def few_rows(x: Tensor, *weights: Tensor) -> bool:
    """Whether products of x [M, C] with these weights are for our kernels: few rows, and weights that are plain."""
    plain = all(not hasattr(weight, "__tensor_flatten__") and weight.dtype == x.dtype for weight in weights)
    return plain and x.shape[0] <= MOST_ROWS


def _implementation(module: str, name: str, x: Tensor) -> Any:
    return launcher(f"zoo.llm.kernels.{module}", name, x) if kernels_run(x) else getattr(fallback, name)


def _for_heads(module: str, name: str, x: Tensor, width: int) -> Any:
    return _implementation(module, name, x) if attention_fits(width) else getattr(fallback, name)


@_LIBRARY.operator("(Tensor x, Tensor norm, float eps, Tensor weight, Tensor? bias) -> Tensor")
def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """RMS norm of x [M, C], times weight [N, C], plus bias [N]: [M, N]."""
    return _implementation("products", "norm_linear", x)(x, norm, eps, weight, bias)


@_LIBRARY.fake("norm_linear")
def _(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@_LIBRARY.operator("(Tensor x, Tensor weight, Tensor residual) -> Tensor")
def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """Features x [M, C] times weight [N, C], plus residual [M, N]."""
    return _implementation("products", "linear_add", x)(x, weight, residual)


@_LIBRARY.fake("linear_add")
def _(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@_LIBRARY.operator("(Tensor x, Tensor norm, float eps, Tensor weight) -> Tensor")
def norm_gate(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """RMS norm of x [M, C] times weight [2 N, C]; SiLU of the first half times the second: [M, N]."""
    return _implementation("products", "norm_gate", x)(x, norm, eps, weight)


@_LIBRARY.fake("norm_gate")
def _(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


@_LIBRARY.operator("(Tensor qkv, Tensor rotary, int heads, int key_heads) -> (Tensor, Tensor, Tensor)")
def split_rotated(qkv: Tensor, rotary: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as they come from their product, taken apart and the first two rotated. With a gradient.

    Args:
        qkv: [B, T, (H + 2 K) D]; the backward does not need it.
        rotary: [B or 1, T, D] float32, cosines and sines of the tokens' positions.
        heads: H.
        key_heads: K.

    Returns:
        [B, T, H, D], [B, T, K, D] and [B, T, K, D].
    """
    parts: tuple[Tensor, Tensor, Tensor] = _for_heads("rotary", "split_rotated", qkv, rotary.shape[2])(
        qkv, rotary, heads, key_heads
    )
    return parts


@_LIBRARY.fake("split_rotated")
def _(qkv: Tensor, rotary: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (qkv.new_empty(*qkv.shape[:2], n, rotary.shape[2]) for n in (heads, key_heads, key_heads))
    return query, key, value


@_LIBRARY.operator("(Tensor query, Tensor key, Tensor value, Tensor rotary) -> Tensor")
def join_rotated(query: Tensor, key: Tensor, value: Tensor, rotary: Tensor) -> Tensor:
    """Gradient of what ``split_rotated`` took apart, [B, T, (H + 2 K) D], from those of its outputs."""
    return _for_heads("rotary", "join_rotated", query, query.shape[3])(query, key, value, rotary)


@_LIBRARY.fake("join_rotated")
def _(query: Tensor, key: Tensor, value: Tensor, rotary: Tensor) -> Tensor:
    heads = query.shape[2] + key.shape[2] + value.shape[2]
    return query.new_empty(*query.shape[:2], heads * query.shape[3])


_LIBRARY.autograd(
    "split_rotated",
    lambda ctx, *grads: (join_rotated(*grads, *ctx.saved_tensors), None, None, None),
    lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


@_LIBRARY.operator("(Tensor x) -> Tensor")
def swiglu(x: Tensor) -> Tensor:
    """SiLU of the first half of x [R, 2 I] times the second: [R, I]. With a gradient."""
    return _implementation("swiglu", "swiglu", x)(x)


@_LIBRARY.fake("swiglu")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@_LIBRARY.operator("(Tensor grad, Tensor x) -> Tensor")
def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of x [R, 2 I] from that of ``swiglu``'s output [R, I]."""
    return _implementation("swiglu", "swiglu_backward", x)(grad, x)


@_LIBRARY.fake("swiglu_backward")
def _(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_LIBRARY.autograd(
    "swiglu",
    lambda ctx, grad: swiglu_backward(grad, ctx.saved_tensors[0]),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@_LIBRARY.operator("(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
def rms_norm_rows(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm of x [..., C], and the factors [...] in float32 that it multiplied with. With a gradient."""
    _check_norm(x, weight)
    return _implementation("rms_norm", "rms_norm_rows", x)(x, weight, eps)  # type: ignore[no-any-return]


@_LIBRARY.fake("rms_norm_rows")
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@_LIBRARY.operator("(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """X [..., C] plus residual [..., C], the RMS norm of that, and its factors [...]. With a gradient.

    Raises:
        ValueError: If dtypes or shapes differ, or rows are wider than ``WIDEST_NORM``.
    """
    _check_norm(x, weight, residual=residual)
    return _implementation("rms_norm", "add_rms_norm", x)(x, residual, weight, eps)  # type: ignore[no-any-return]


@_LIBRARY.fake("add_rms_norm")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@_LIBRARY.operator("(Tensor grad, Tensor x, Tensor weight, Tensor scale, Tensor? above) -> (Tensor, Tensor)")
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, above: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of what was normed and of the weight, in one pass over the rows.

    Args:
        grad: [..., C], of the norm's output.
        x: [..., C], what was normed.
        weight: [C].
        scale: [...], the factors that the forward returned.
        above: [..., C], the gradient that reached x past the norm; None if none did.

    Returns:
        [..., C], which holds ``above`` as well, and [C].
    """
    _check_norm(x, weight, grad=grad, above=above)
    return _implementation("rms_norm", "rms_norm_backward", x)(grad, x, weight, scale, above)  # type: ignore[no-any-return]


@_LIBRARY.fake("rms_norm_backward")
def _(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, above: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _check_norm(x: Tensor, weight: Tensor, **others: Tensor | None) -> None:
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"a weight {list(weight.shape)} of {weight.dtype} does not fit x {list(x.shape)} of {x.dtype}; "
            f"expected [{x.shape[-1]}] of the same dtype"
        )
    if x.shape[-1] > WIDEST_NORM:
        raise ValueError(f"rows are {x.shape[-1]} wide, at most {WIDEST_NORM} are taken")
    for name, other in others.items():
        if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
            raise ValueError(
                f"{name} is {list(other.shape)} of {other.dtype}, expected it like x: {list(x.shape)} of {x.dtype}"
            )


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.mark_non_differentiable(output[1])


def _norm_gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return (*rms_norm_backward(grad, *ctx.saved_tensors, None), None)


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[0], inputs[2], output[2])
    ctx.mark_non_differentiable(output[2])


def _sum_gradients(ctx: Any, above: Tensor, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    both, weight = rms_norm_backward(grad, *ctx.saved_tensors, above)
    return both, both, weight, None


_LIBRARY.autograd("rms_norm_rows", _norm_gradients, _keep_norm)
_LIBRARY.autograd("add_rms_norm", _sum_gradients, _keep_sum)


@_LIBRARY.operator(
    "(Tensor qkv, Tensor(a!) cache, Tensor positions, Tensor rotary, Tensor? q_norm, Tensor? k_norm, float eps, "
    "int heads, int? window) -> Tensor"
)
def decode_attention(
    qkv: Tensor,
    cache: Tensor,
    positions: Tensor,
    rotary: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    heads: int,
    window: int | None,
) -> Tensor:
    """Attention of one new token a row over the cache, which gets the token's key and value first.

    Args:
        qkv: [B, (H + 2 K) D], queries, keys and values as they come from their product.
        cache: [2, B, K, S, D], written in place.
        positions: [B] int64, of the new tokens. Slots up to them are read. By kernels one that the cache has no slot
            for is not written, and sees what the nearest slot would; elsewhere it is an error.
        rotary: [B, D] float32, cosines and sines of the positions.
        q_norm: [D], weight of the queries' RMS norm, or None.
        k_norm: [D], of the keys'.
        eps: Of both.
        heads: H.
        window: How many last tokens are seen; None for all.

    Returns:
        [B, H D].
    """
    arguments = qkv, cache, positions, rotary, q_norm, k_norm, eps, heads, window
    return _for_heads("decode", "decode_attention", qkv, cache.shape[4])(*arguments)


@_LIBRARY.fake("decode_attention")
def _(
    qkv: Tensor,
    cache: Tensor,
    positions: Tensor,
    rotary: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    heads: int,
    window: int | None,
) -> Tensor:
    return qkv.new_empty(qkv.shape[0], heads * cache.shape[4])


@_LIBRARY.operator(
    "(Tensor qkv, Tensor(a!) cache, Tensor positions, Tensor rotary, Tensor? q_norm, Tensor? k_norm, float eps, "
    "int heads) -> Tensor"
)
def rotate_into(
    qkv: Tensor,
    cache: Tensor,
    positions: Tensor,
    rotary: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    heads: int,
) -> Tensor:
    """What stands before ``prefill_attention``: norms of heads, rotation, keys and values into the cache.

    Args:
        qkv: [B, T, (H + 2 K) D], queries, keys and values as they come from their product.
        cache: [2, B, K, S, D], written in place.
        positions: [B, T] int64. One may occur twice in a row if it is the same token; one without a slot is not written
            by kernels, and elsewhere an error.
        rotary: [B or 1, T, D] float32, cosines and sines of the positions.
        q_norm: [D], weight of the queries' RMS norm, or None.
        k_norm: [D], of the keys'.
        eps: Of both.
        heads: H.

    Returns:
        Queries [B, T, H, D].
    """
    arguments = qkv, cache, positions, rotary, q_norm, k_norm, eps, heads
    return _for_heads("rotary", "rotate_into", qkv, cache.shape[4])(*arguments)


@_LIBRARY.fake("rotate_into")
def _(
    qkv: Tensor,
    cache: Tensor,
    positions: Tensor,
    rotary: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    heads: int,
) -> Tensor:
    return qkv.new_empty(*positions.shape, heads, cache.shape[4])


@_LIBRARY.operator("(Tensor query, Tensor cache, Tensor positions, int? window) -> Tensor")
def prefill_attention(query: Tensor, cache: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Attention of many new tokens a row over a cache that holds them already; see ``zoo.llm.attend``.

    Query [B, T, H, D], cache [2, B, K, S, D], positions [B, T] int64 -> [B, T, H, D]. Slots that no token of a block
    sees are not read.
    """
    return _for_heads("prefill", "prefill_attention", query, query.shape[3])(query, cache, positions, window)


@_LIBRARY.fake("prefill_attention")
def _(query: Tensor, cache: Tensor, positions: Tensor, window: int | None) -> Tensor:
    return query.new_empty(query.shape)


@_LIBRARY.operator(
    "(Tensor logits, Tensor(a!) tokens, Tensor(b!) positions, Tensor(c!) finished, Tensor(d!) step, "
    "Tensor(e!) output, Tensor ends, Tensor pad) -> ()"
)
def accept_greedy(
    logits: Tensor,
    tokens: Tensor,
    positions: Tensor,
    finished: Tensor,
    step: Tensor,
    output: Tensor,
    ends: Tensor,
    pad: Tensor,
) -> None:
    """Take each row's most likely token, the first of equals, and move on to the next step.

    Args:
        logits: [B, V].
        tokens: [B, 1] int64, set to the tokens that are fed next.
        positions: [B, 1] int64, moved on but for rows that have ended.
        finished: [B] bool, rows that have ended, before and after.
        step: [1] int64, moved on.
        output: [S, B] int64, gets the tokens at ``step``; ``pad`` for rows that had ended.
        ends: [E] int64, tokens that end a row; E is a power of two.
        pad: Scalar int64.
    """
    _implementation("choice", "accept_greedy", logits)(logits, tokens, positions, finished, step, output, ends, pad)


@_LIBRARY.fake("accept_greedy")
def _(logits: Tensor, *_: Tensor) -> None:
    return None
