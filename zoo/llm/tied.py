"""A table of which tokens are looked up and which their logits are products with, as one node of the backward.

Left to autograd, the lookup's gradient is a table of zeros with a few rows in it, and then both tables are added: most
of both is read and written for nothing. Here one node is given both gradients. It hands the lookup's on as the rows
that it has, a sparse tensor, and the product's right after it: autograd adds the rows into that one in place where
nobody else holds it, and into a copy where somebody does.

Shape legend: V vocabulary, C width, N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import plain
from zoo.ops.common import differentiated, transformed

_sparse = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default


def look_up(embedding: nn.Embedding, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors of tokens, and the table for a product later on. Values and gradients are those of ``embedding(ids)``.

    Args:
        embedding: The table, with its options.
        ids: [...] integers.

    Returns:
        [..., C], and [V, C]: the weight, or the same memory with the node behind it. The node pays where both have
        gradients, and its rows are a small part of the table.
    """
    weight = embedding.weight
    if not (_pays(weight, ids) and _only_looks_up(embedding)):
        return embedding(ids), weight
    found: tuple[Tensor, Tensor] = _LookUp.apply(ids, weight, weight, embedding.padding_idx)
    return found


def _pays(weight: Tensor, ids: Tensor) -> bool:
    # Compilers and functional transforms know no sparse gradients; tensors that are sharded, or fake, have their rules.
    if torch.compiler.is_compiling() or transformed():
        return False
    if type(weight) not in (Tensor, nn.Parameter):
        return False
    few = 0 < 2 * ids.numel() <= weight.shape[0]
    return few and weight.device.type in ("cpu", "cuda") and differentiated(weight)


def _only_looks_up(embedding: nn.Embedding) -> bool:
    changes = embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse
    return plain(embedding, nn.Embedding) and not changes


class _LookUp(torch.autograd.Function):
    """Takes the weight twice, for its two gradients: autograd adds them in the order in which they are returned."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, same: Tensor, padding: int | None) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.vocabulary, ctx.padding = weight.shape[0], padding
        return F.embedding(ids, weight, padding), same.view_as(same)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, table: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, table, None
        (ids,) = ctx.saved_tensors
        if _takes_rows(grad, table):
            found = sparse_rows(grad.reshape(-1, grad.shape[-1]), ids.flatten(), ctx.vocabulary, ctx.padding)
        else:
            padding = -1 if ctx.padding is None else ctx.padding
            found = torch.ops.aten.embedding_dense_backward(grad, ids, ctx.vocabulary, padding, False)
        # The rows first: to a table that is there already autograd adds them in a copy.
        return None, found, table, None


def _takes_rows(grad: Tensor, table: Tensor | None) -> bool:
    # Rows on their own would become .grad as they are; a gradient of the gradient, and compilers, need torch's.
    if table is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    transforms = torch._C._functorch
    several = transforms.is_functorch_wrapped_tensor, transforms.is_legacy_batchedtensor  # gradients at once
    if any(stands_for(each) for each in (grad, table) for stands_for in several):
        return False
    # CUDA adds them to nothing else.
    return table.layout == torch.strided and table.is_contiguous()


def sparse_rows(grad: Tensor, ids: Tensor, vocabulary: int, padding: int | None) -> Tensor:
    """The gradient of a table, without its zeros: sums of the rows of equal ids, as torch computes them.

    A coalesced tensor is added without atomics, and needs indices that are unique and in order. Their number is not
    known without waiting for the device: the tokens that occur are filled up, to N, with others, whose rows are zero.

    Args:
        grad: [N, C].
        ids: [N] integers below V, N at most V.
        vocabulary: V.
        padding: Whose row is zero.

    Returns:
        [V, C] of N rows, sparse and coalesced.
    """
    count, width = grad.shape
    ids = ids.long()
    occurs = torch.zeros(vocabulary, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    spare = (~occurs).cumsum(0)
    # V - spare[-1] tokens occur.
    taken = (occurs | (spare <= spare[-1] + (count - vocabulary))).cumsum(0)
    tokens = torch.searchsorted(taken, torch.arange(1, count + 1, device=ids.device))
    places = taken[ids] - 1
    if padding is not None:
        places = places.masked_fill(ids == padding, count)
    # One row more, which is left out: that of padding.
    rows = torch.ops.aten.embedding_dense_backward(grad, places, count + 1, count, False)[:count]
    return _sparse(
        1, 1, (vocabulary, width), tokens[None], rows,
        dtype=rows.dtype, layout=torch.sparse_coo, device=rows.device, is_coalesced=True,
    )  # fmt: skip
