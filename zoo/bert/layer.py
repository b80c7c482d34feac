"""An encoder's configuration, embeddings, attention, repeated block, and heads.

    x ─┬─ qkv ── attention ── output product ─┐
       └──────────────────────────────────── add, norm ─┬─ product ── activation ── product ─┐
                                                        └───────────────────────────────── add, norm ── x

A packed batch runs through a variable-length attention kernel if one is available. Elsewhere (a CPU, float32, an old
GPU) its rows are padded for torch's attention, by index tables that all layers share. ``rows_of`` chooses, once per
call and outside the regions. A head returns its scores and its loss under transformers' names.

Shape legend: B rows, T tokens of a row, N tokens of a packed batch, S its rows with filler rows, C width,
I width inside the MLP, H heads, D width of a head, L labels, V vocabulary. [..., C] is [B, T, C] of a padded batch and
[N, C] of a packed one; ``unpack`` puts the padding back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import validate
from zoo.ops.common import compute_dtype, differentiated, is_unmodified, kernels_run
from zoo.ops.transformer import (
    add_layer_norm,
    bias_gelu,
    low_linear,
    packed_attention,
    product,
    product_runs,
    takes_low,
    with_low_copy,
)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """An encoder with learned positions and norms after the residual adds, and its head.

    Fields have transformers' names and meanings. An invalid value raises a ValueError that names the field.

    Args:
        kind: ``"bert"`` or ``"roberta"``. RoBERTa counts the positions of tokens, without padding, from
            ``pad_token_id + 1``, and has other layers in its heads.
        hidden_act: ``gelu``, ``gelu_new``, ``gelu_pytorch_tanh`` or ``relu``.
        head: ``none`` (hidden states), ``pooled`` (also the pooled first token), ``masked-lm``,
            ``sequence-classification``, ``token-classification`` or ``question-answering``.
        num_labels: Classes of the two classification heads.
        problem_type: Kind of a sequence's labels: ``regression``, ``single_label_classification`` or
            ``multi_label_classification``; None infers it from the labels.
        classifier_dropout: Dropout before the classifier; None for ``hidden_dropout_prob``.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    pad_token_id: int | None
    kind: str = "bert"
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    head: str = "pooled"
    num_labels: int = 2
    problem_type: str | None = None
    classifier_dropout: float | None = None

    def __post_init__(self) -> None:
        validate.positive(self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        validate.positive(self, "intermediate_size", "max_position_embeddings", "type_vocab_size", "num_labels")
        validate.divides(self, "num_attention_heads", "hidden_size")
        validate.one_of(self, "kind", ("bert", "roberta"))
        validate.one_of(self, "head", _HEADS)
        validate.one_of(self, "hidden_act", ACTIVATIONS)
        validate.one_of(self, "problem_type", (None, *PROBLEM_TYPES))
        validate.probability(self, "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
        validate.positive_number(self, "layer_norm_eps")
        validate.optional_index(self, "pad_token_id", "vocab_size")
        if self.head == "question-answering" and self.num_labels != 2:
            raise ValueError(f"num_labels is {self.num_labels}, but an answer has 2: where it starts and where it ends")
        if self.kind == "roberta" and self.pad_token_id is None:
            raise ValueError("pad_token_id is None, but kind 'roberta' counts positions by it")
        if self.positions < 1:
            raise ValueError(f"max_position_embeddings is {self.max_position_embeddings}, but positions start later")

    @property
    def first_position(self) -> int:
        """The position of a row's first token."""
        return 0 if self.kind == "bert" or self.pad_token_id is None else self.pad_token_id + 1

    @property
    def positions(self) -> int:
        """The longest row in tokens."""
        return self.max_position_embeddings - self.first_position


class BertEmbeddings(nn.Module):
    """Word, position and token type vectors, added up and normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, pad = config.hidden_size, config.pad_token_id
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=pad)
        self.position_embeddings = nn.Embedding(
            config.max_position_embeddings, width, padding_idx=pad if config.kind == "roberta" else None
        )
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None) -> Tensor:
        """Ids and types [...], positions [...] or [1, T] -> [..., C]. Defaults are type 0 and positions 0 to T - 1."""
        positions, types = self.position_embeddings.weight, self.token_type_embeddings.weight
        x = self.word_embeddings(input_ids)
        place = positions[: input_ids.shape[-1]] if position_ids is None else self.position_embeddings(position_ids)
        if token_type_ids is None:
            # A common type is added to the position vectors, which are fewer if rows share positions.
            place = place + types[0]
        else:
            x = x + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.norm(x + place))


class BertLayer(nn.Module):
    """Attention and MLP, each followed by a residual add and a norm.

    Under autocast the residual stream is float32. Products take a low-precision copy, which the preceding norm also
    writes. With the zoo's kernels the operator after a product adds the product's bias and sums the bias gradient. A
    submodule that was replaced or has a hook is called with the residual stream.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.heads = config.num_attention_heads
        self.attention_dropout = config.attention_probs_dropout_prob
        self.activation = ACTIVATIONS[config.hidden_act]
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.intermediate = nn.Linear(width, inner)
        self.output = nn.Linear(inner, width)
        self.output_norm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, mask: Tensor | None = None, rows: Rows | None = None) -> Tensor:
        """X [B, T, C] with a mask [B, 1, 1, T] that is added to the scores, or x [N, C] with its rows -> like x."""
        dropout = self.attention_dropout if self.training else 0.0
        x, low = with_low_copy(x)
        count = None if rows is None else rows.real
        qkv, _ = _product(x, low, self.qkv, count)
        mixed = attend(qkv, self.heads, mask, rows, dropout)
        x, low = self._add_norm(x, mixed, self.attention_output, self.attention_norm, count, low.dtype)
        hidden = self._activated(x, low, count)
        x, _ = self._add_norm(x, hidden, self.output, self.output_norm, count)
        return x

    def _activated(self, x: Tensor, low: Tensor, count: Tensor | None) -> Tensor:
        """The wide product and its activation: [..., I]."""
        layer, tanh = self.intermediate, self.activation is _gelu_tanh
        gelu = tanh or self.activation is F.gelu
        if gelu and is_unmodified(layer) and layer.bias is not None and product_runs(low, layer.weight, layer.bias):
            return product(low, layer.weight, layer.bias, "tanh" if tanh else "gelu", count)
        hidden, bias = _product(x, low, layer, without_bias=gelu)
        return self.activation(hidden) if bias is None else bias_gelu(hidden, bias, tanh)

    def _add_norm(
        self, x: Tensor, y: Tensor, layer: nn.Linear, norm: nn.LayerNorm, count: Tensor | None,
        low_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Product of y, dropout, residual add, and norm of the sum [..., C], in both dtypes."""
        # Dropout also applies to the bias.
        dropped = not is_unmodified(self.dropout, nn.Dropout) or (self.dropout.training and self.dropout.p > 0.0)
        added, bias = _product(y, y, layer, count, without_bias=not dropped)
        added = self.dropout(added)
        if is_unmodified(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None:
            return add_layer_norm(x, added, bias, norm.weight, norm.bias, norm.eps, low_dtype, count)
        x = norm(x + (added if bias is None else added + bias))
        return x, x if low_dtype is None else x.to(low_dtype)


def _product(
    x: Tensor, low: Tensor, layer: nn.Linear, count: Tensor | None = None, *, without_bias: bool = False
) -> tuple[Tensor, Tensor | None]:
    """A linear layer of x (``low`` is x in the dtype of products), and its bias if the caller must add it."""
    if not is_unmodified(layer):
        return layer(x), None
    weight, bias = layer.weight, layer.bias
    if bias is None or not kernels_run(low, weight, bias):
        return layer(low), None
    if count is not None and product_runs(low, weight, bias):
        return product(low, weight, bias, count=count), None
    if takes_low(low, weight, bias) and differentiated(low, weight, bias):
        return low_linear(low, weight, None if without_bias else bias), bias if without_bias else None
    if without_bias and low.dtype == weight.dtype == bias.dtype == compute_dtype(low):
        return F.linear(low, weight), bias
    return layer(low), None


class Rows(NamedTuple):
    """Extents of a packed batch's rows: offsets for the variable-length kernel, or index tables without it."""

    longest: int  # maximum tokens of a row in any batch
    offsets: Tensor | None = None  # [S + 1] int32, where each row begins, and the end of the last
    table: Tensor | None = None  # [S, longest] int64, the token at each place
    inverse: Tensor | None = None  # [N] int64, the place of each token in the table
    mask: Tensor | None = None  # [S, 1, 1, longest], like the result of ``key_mask``
    real: Tensor | None = None  # [1] int32, how many tokens are real; kernels leave out the rest


def attend(qkv: Tensor, heads: int, mask: Tensor | None, rows: Rows | None, dropout: float) -> Tensor:
    """Attention of every token to all tokens of its row: [B, T, 3 C] or [N, 3 C] -> [B, T, C] or [N, C].

    ``qkv`` holds queries, keys and values, concatenated. A padded batch needs the mask of ``key_mask``, or None if all
    rows are full. A packed batch needs the rows of ``rows_of``. ``dropout`` is the probability of dropping a weight.
    """
    if rows is None:
        return _attend_padded(qkv, heads, mask, dropout)
    if rows.offsets is None:
        mixed = _attend_padded(qkv[rows.table], heads, rows.mask, dropout)
        return mixed.flatten(0, 1)[rows.inverse]
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(-3)
    if dropout == 0.0:
        return packed_attention(q, k, v, rows.offsets, rows.longest)
    # The operator below torch's public function, which has no dropout.
    ends = rows.offsets, rows.offsets, rows.longest, rows.longest
    return torch.ops.aten._flash_attention_forward(q, k, v, *ends, dropout, False, False)[0].flatten(1)


def key_mask(attention_mask: Tensor, like: Tensor) -> Tensor:
    """A mask [B, T], 0 for padding -> the bias of scores [B, 1, 1, T]: minus infinity for padding, else 0.

    It has the scores' dtype. A row with only padding sees itself, so that its unused values are finite.
    """
    hidden = attention_mask == 0
    hidden = hidden & ~hidden.all(dim=1, keepdim=True)
    zeros = torch.zeros(hidden.shape, dtype=compute_dtype(like), device=like.device)
    return zeros.masked_fill(hidden, float("-inf"))[:, None, None]


def rows_of(offsets: Tensor, longest: int, tokens: int, like: Tensor, head_dim: int) -> Rows:
    """The rows of a packed batch of N tokens with offsets [S + 1], for the attention that runs on ``like``."""
    if kernel_runs(like, head_dim):
        return Rows(longest, offsets=offsets)
    starts, ends = offsets[:-1, None].long(), offsets[1:, None].long()
    place = torch.arange(longest, device=offsets.device)
    token = starts + place
    # An empty row unmasks its first place: a softmax over nothing is NaN.
    there = (token < ends) | (place == 0)
    table = torch.where(there, token, 0).clamp(max=tokens - 1)
    index = torch.arange(tokens, device=offsets.device)
    row = torch.searchsorted(offsets[1:].long().contiguous(), index, right=True)
    # Tokens behind the last row read any place.
    inverse = (row * longest + index - offsets.long()[row]).clamp(max=table.numel() - 1)
    return Rows(longest, table=table, inverse=inverse, mask=key_mask(there, like))


def kernel_runs(like: Tensor, head_dim: int) -> bool:
    """Whether torch's variable-length attention takes these tokens: half precision, on an Ampere GPU or newer."""
    if like.device.type != "cuda" or torch.version.hip is not None:
        return False
    if compute_dtype(like) not in (torch.float16, torch.bfloat16) or head_dim % 8 or head_dim > 256:
        return False
    ampere = torch.cuda.get_device_capability(like.device) >= (8, 0)
    return ampere and torch.backends.cuda.is_flash_attention_available()


def _attend_padded(qkv: Tensor, heads: int, mask: Tensor | None, dropout: float) -> Tensor:
    q, k, v = [part.transpose(1, 2) for part in qkv.unflatten(-1, (3, heads, -1)).unbind(-3)]
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    return mixed.transpose(1, 2).flatten(2)


class Encoding(NamedTuple):
    """Output of heads ``none`` and ``pooled``: [B, T, C], and the pooled first token [B, C], None without a pooler."""

    last_hidden_state: Tensor
    pooler_output: Tensor | None = None


class SequenceScores(NamedTuple):
    """Output of head ``sequence-classification``: logits [B, L], and a scalar loss if labels are given."""

    logits: Tensor
    loss: Tensor | None = None


class TokenScores(NamedTuple):
    """Output of ``masked-lm`` and ``token-classification``: logits [B, T, V or L], and a loss if labels are given."""

    logits: Tensor
    loss: Tensor | None = None


class Spans(NamedTuple):
    """Output of head ``question-answering``: logits [B, T], and a scalar loss if both positions are given."""

    start_logits: Tensor
    end_logits: Tensor
    loss: Tensor | None = None


class PoolerHead(nn.Module):
    """A linear layer and tanh on the first token of each row."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first: Tensor) -> Tensor:
        """First [B, C] -> [B, C]."""
        return torch.tanh(self.dense(first))


class MaskedLMHead(nn.Module):
    """The vocabulary's scores at every token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        # RoBERTa's head always has GELU.
        self.activation = ACTIVATIONS["gelu" if config.kind == "roberta" else config.hidden_act]
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor | None = None) -> TokenScores:
        """X [..., C], weight [V, C], labels [...], -100 for no label -> scores."""
        logits = F.linear(self.norm(self.activation(self.dense(x))), weight, self.bias)
        return TokenScores(logits, _cross_entropy(logits, labels))


class SequenceHead(nn.Module):
    """Scores of a row, from its first token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.problem_type, self.num_labels = config.problem_type, config.num_labels
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.first_dropout = nn.Dropout(rate) if config.kind == "roberta" else None
        self.dropout = nn.Dropout(rate)

    def forward(self, first: Tensor, labels: Tensor | None = None) -> SequenceScores:
        """First [B, C], labels [B] or [B, L] -> scores [B, L]."""
        if self.first_dropout is not None:
            first = self.first_dropout(first)
        logits = self.classifier(self.dropout(torch.tanh(self.dense(first))))
        if labels is None:
            return SequenceScores(logits)
        problem = self.problem_type or problem_of(labels, self.num_labels)
        if problem == "single_label_classification":
            return SequenceScores(logits, _cross_entropy(logits, labels))
        if problem == "multi_label_classification":
            return SequenceScores(logits, F.binary_cross_entropy_with_logits(logits, labels.to(logits)))
        return SequenceScores(logits, F.mse_loss(logits.flatten(), labels.to(logits).flatten()))


class TokenHead(nn.Module):
    """Scores of each token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> TokenScores:
        """X [..., C], labels [...], -100 for no label -> scores [..., L]."""
        logits = self.classifier(self.dropout(x))
        return TokenScores(logits, _cross_entropy(logits, labels))


class SpanHead(nn.Module):
    """Scores of each token as the answer's first token, and as its last token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.outputs = nn.Linear(config.hidden_size, 2)

    def forward(
        self, x: Tensor, start: Tensor | None = None, end: Tensor | None = None, rows: int = 0, row_length: int = 0,
        places: Tensor | None = None,
    ) -> Spans:  # fmt: skip
        """X [B, T, C] or [N, C]; start and end [B], the answer's first and last token -> scores of both.

        A target beyond the row means no answer. A packed batch needs its B ``rows``, its T ``row_length`` and its
        ``places`` [N].
        """
        start_logits, end_logits = (part.contiguous() for part in self.outputs(x).unbind(-1))
        if start is None or end is None:
            return Spans(start_logits, end_logits)
        losses = []
        lowest = torch.finfo(start_logits.dtype).min
        for logits, target in ((start_logits, start), (end_logits, end)):
            if places is not None:
                # Places without a token have no score and cannot be the answer.
                padded = logits.new_full((rows * row_length + 1,), lowest)
                logits = padded.index_copy(0, places, logits)[:-1].view(rows, row_length)
            length = logits.shape[1]
            target = target.flatten().long().clamp(0, length)
            if places is not None:
                aimed = logits.gather(1, target.clamp(max=length - 1)[:, None])[:, 0]
                target = target.masked_fill(aimed == lowest, length)
            losses.append(F.cross_entropy(logits, target, ignore_index=length))
        return Spans(start_logits, end_logits, (losses[0] + losses[1]) / 2)


Output = Encoding | SequenceScores | TokenScores | Spans
Head = PoolerHead | MaskedLMHead | SequenceHead | TokenHead | SpanHead
_HEADS: dict[str, type[Head] | None] = {
    "none": None, "pooled": PoolerHead, "masked-lm": MaskedLMHead, "sequence-classification": SequenceHead,
    "token-classification": TokenHead, "question-answering": SpanHead,
}  # fmt: skip


def make_head(config: BertConfig) -> Head | None:
    """The head that the config names."""
    cls = _HEADS[config.head]
    return None if cls is None else cls(config)


def problem_of(labels: Tensor, num_labels: int) -> str:
    """The problem type that transformers infers from a sequence's labels when the config names none."""
    if num_labels == 1:
        return "regression"
    return "single_label_classification" if labels.dtype in validate.INTEGERS else "multi_label_classification"


def _cross_entropy(logits: Tensor, labels: Tensor | None) -> Tensor | None:
    if labels is None:
        return None
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten().long())


def check_labels(
    config: BertConfig, labels: Tensor | None, start_positions: Tensor | None, end_positions: Tensor | None, rows: int,
    length: int, tokens: int | None,
) -> None:  # fmt: skip
    """Refuse labels that the head does not take or that have another shape. ``tokens`` is N of a packed batch."""
    head, spans = config.head, {"start_positions": start_positions, "end_positions": end_positions}
    given = [name for name, value in spans.items() if value is not None]
    if given and head != "question-answering":
        raise ValueError(f"start_positions and end_positions are for head 'question-answering', and this is {head!r}")
    if len(given) == 1:
        raise ValueError("start_positions and end_positions go together, and one of them is missing")
    for name in given:
        validate.tensor(name, spans[name], "B | B 1", sizes={"B": rows})
    if labels is None:
        return
    classes = config.vocab_size if head == "masked-lm" else config.num_labels
    if head in ("masked-lm", "token-classification"):
        shape, sizes = ("B T", {}) if tokens is None else ("B T | N", {"N": tokens})
        validate.tensor("labels", labels, shape, sizes={"B": rows, "T": length, **sizes})
    elif head == "sequence-classification":
        problem = config.problem_type or problem_of(labels, classes)
        shape = "B | B 1" if problem == "single_label_classification" or classes == 1 else "B L"
        hint = "; integers are class numbers, floats a number for each label"
        validate.tensor("labels", labels, shape, sizes={"B": rows, "L": classes}, hint=hint)
        if problem != "single_label_classification" or classes == 1:
            return
    else:
        hint = "; pass start_positions and end_positions" if head == "question-answering" else ""
        raise ValueError(f"labels given, but head {head!r} takes none{hint}")
    validate.in_range("labels", labels, classes, "the number of classes", ", or -100 for no label", ignored=-100)
