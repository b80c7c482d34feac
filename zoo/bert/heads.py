"""The heads, one class per task, each with its loss and its output.

Outputs are named tuples with transformers' names, which the compiler and a CUDA graph take apart into tensors.

Shape legend: B rows, T tokens of a row, N tokens of a packed batch, C width, L labels, V vocabulary. [..., C] is
[B, T, C] of a padded batch and [N, C] of a packed one; ``unpack`` puts the padding back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import validate
from zoo.bert.layer import ACTIVATIONS, BertConfig


class Encoding(NamedTuple):
    """Of heads ``none`` and ``pooled``: [B, T, C], and [B, C] of each row's first token, None without a pooler."""

    last_hidden_state: Tensor
    pooler_output: Tensor | None = None


class SequenceScores(NamedTuple):
    """Of head ``sequence-classification``: logits [B, L], and a scalar loss where labels were given."""

    logits: Tensor
    loss: Tensor | None = None


class TokenScores(NamedTuple):
    """Of heads ``masked-lm`` and ``token-classification``: logits [B, T, V or L], a loss where labels were given."""

    logits: Tensor
    loss: Tensor | None = None


class Spans(NamedTuple):
    """Of head ``question-answering``: logits [B, T], and a scalar loss where both positions were given."""

    start_logits: Tensor
    end_logits: Tensor
    loss: Tensor | None = None


class PoolerHead(nn.Module):
    """The first token of each row, through a product and a hyperbolic tangent."""

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
        if not config.tie_word_embeddings:
            # transformers' untied head has a second bias that no output depends on; kept for the way back.
            self.unused_bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor | None = None) -> TokenScores:
        """X [..., C], weight [V, C], which may be the word table's, labels [...], -100 where none is -> scores."""
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
        """X [..., C], labels [...], -100 where none is -> scores [..., L]."""
        logits = self.classifier(self.dropout(x))
        return TokenScores(logits, _cross_entropy(logits, labels))


class SpanHead(nn.Module):
    """Scores of each token to be the first or the last of the answer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.outputs = nn.Linear(config.hidden_size, 2)

    def forward(
        self,
        x: Tensor,
        start: Tensor | None = None,
        end: Tensor | None = None,
        rows: int = 0,
        row_length: int = 0,
        places: Tensor | None = None,
    ) -> Spans:
        """X [B, T, C] or [N, C]; start and end [B], the answer's first and last token -> scores of both.

        Targets below zero mean the first token, those past the row no answer. A packed batch comes with its B ``rows``,
        its T ``row_length`` and ``places`` [N], the index of each token in B x T; ``rows * row_length`` is filling.
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


def make_head(config: BertConfig) -> Head | None:
    """The head that the config names."""
    kinds: dict[str, type[Head]] = {
        "pooled": PoolerHead,
        "masked-lm": MaskedLMHead,
        "sequence-classification": SequenceHead,
        "token-classification": TokenHead,
        "question-answering": SpanHead,
    }
    return kinds[config.head](config) if config.head in kinds else None


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
    config: BertConfig,
    labels: Tensor | None,
    start_positions: Tensor | None,
    end_positions: Tensor | None,
    rows: int,
    length: int,
    tokens: int | None,
) -> None:
    """Refuse labels that the head does not take, or of another shape; ``tokens`` is N of a packed batch."""
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
    validate.kind("labels", labels, "integer", hint=" class numbers")
    validate.in_range("labels", labels, classes, "the number of classes", ", or -100 for no label", ignored=-100)
