"""The configuration of an encoder: one frozen dataclass, fields named as transformers names them."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("bert", "roberta")
HEADS = (
    "none",
    "pooled",
    "masked-lm",
    "sequence-classification",
    "token-classification",
    "question-answering",
)
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")

# How an encoder is used and trained, not what it is: a checkpoint may differ from a preset in these.
USE_FIELDS = (
    "head",
    "num_labels",
    "problem_type",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
)


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """An encoder with learned positions and norms after the residual adds, and what stands on it.

    Args:
        kind: ``"bert"``, or ``"roberta"``: positions are counted from ``pad_token_id + 1`` over the tokens that are not
            padding, and the heads are cut a little differently.
        vocab_size: Rows of the word table.
        hidden_size: Width of the residual stream.
        num_hidden_layers: Depth.
        num_attention_heads: Heads; they share ``hidden_size`` evenly.
        intermediate_size: Width inside the MLP.
        max_position_embeddings: Rows of the position table. RoBERTa uses none up to ``pad_token_id``.
        type_vocab_size: Rows of the token type table.
        layer_norm_eps: Added to the variance.
        pad_token_id: Gets no gradient; RoBERTa counts positions by it.
        hidden_act: Of the MLP: ``gelu``, ``gelu_new``, ``gelu_pytorch_tanh`` or ``relu``.
        hidden_dropout_prob: Of embeddings and of what is added to the residual stream.
        attention_probs_dropout_prob: Of the attention's weights.
        head: ``none`` (hidden states), ``pooled`` (and the first token's, pooled), ``masked-lm``,
            ``sequence-classification``, ``token-classification`` or ``question-answering``.
        num_labels: Classes of the two classification heads.
        problem_type: What a sequence's labels are: ``regression``, ``single_label_classification`` or
            ``multi_label_classification``; None to tell from the labels, as transformers does.
        classifier_dropout: Before the classifier; ``hidden_dropout_prob`` when None.
        tie_word_embeddings: The masked language model's output product uses the word table.

    Raises:
        ValueError: If a field has a value that makes no sense; the message names it.
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
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
            "type_vocab_size",
            "num_labels",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}, expected a positive integer")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size} and num_attention_heads is {self.num_attention_heads}: the first "
                "must be a multiple of the second"
            )
        for name, known in (
            ("kind", KINDS),
            ("head", HEADS),
            ("hidden_act", ACTIVATIONS),
            ("problem_type", (None, *PROBLEM_TYPES)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {known}")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name} is {value!r}, expected a probability below 1")
        if not self.layer_norm_eps > 0:
            raise ValueError(f"layer_norm_eps is {self.layer_norm_eps!r}, expected a positive number")
        if self.head == "question-answering" and self.num_labels != 2:
            raise ValueError(f"num_labels is {self.num_labels}, but an answer has 2: where it starts and where it ends")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id is {self.pad_token_id}, but the vocabulary has {self.vocab_size} tokens")
        if self.kind == "roberta" and self.pad_token_id is None:
            raise ValueError("pad_token_id is None, but kind 'roberta' counts positions by it")
        if self.positions < 1:
            raise ValueError(
                f"max_position_embeddings is {self.max_position_embeddings}, but positions start at "
                f"{self.first_position}: not one is left"
            )

    @property
    def first_position(self) -> int:
        """The position of a row's first token."""
        return 0 if self.kind == "bert" or self.pad_token_id is None else self.pad_token_id + 1

    @property
    def positions(self) -> int:
        """The longest row in tokens."""
        return self.max_position_embeddings - self.first_position
