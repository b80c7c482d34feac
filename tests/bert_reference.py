"""transformers' encoders at a tiny size, with every weight drawn, and batches to try them on."""

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.fuzzing import randomize, relative_error

SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 40, "type_vocab_size": 2,
}  # fmt: skip
NAMES = {
    "pooled": "Model", "masked-lm": "ForMaskedLM", "sequence-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification", "question-answering": "ForQuestionAnswering",
}  # fmt: skip
KINDS = ("bert", "roberta")
CASES = [(kind, head) for kind in KINDS for head in NAMES]


def make(kind: str, head: str, **options: Any) -> Any:
    cls = getattr(transformers, {"bert": "Bert", "roberta": "Roberta"}[kind] + NAMES[head])
    labels = {} if head == "question-answering" else {"num_labels": 3}
    extra = {name: options.pop(name) for name in ("add_pooling_layer",) if name in options}
    return randomize(cls(cls.config_class(**{**SIZES, **labels, **options}), **extra), 0).eval()


def batch(kind: str, rows: int = 4, tokens: int = 11) -> dict[str, Tensor]:
    """Ids, mask and token types; the first row is full, the second has one token, the others end in between."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, tokens, (rows, 1), generator=generator)
    lengths[0] = tokens
    lengths[1:2] = 1
    mask = (torch.arange(tokens) < lengths).long()
    pad = 1 if kind == "roberta" else 0
    ids = torch.randint(2, SIZES["vocab_size"], (rows, tokens), generator=generator)
    types = torch.randint(2, (rows, tokens), generator=generator)
    return {"input_ids": torch.where(mask == 1, ids, pad), "attention_mask": mask, "token_type_ids": types}


def labels(head: str, rows: int = 4, tokens: int = 11) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if head == "question-answering":
        start = torch.randint(tokens, (rows,), generator=generator)
        return {"start_positions": start, "end_positions": (start + 2).clamp(max=tokens)}
    if head == "sequence-classification":
        return {"labels": torch.randint(3, (rows,), generator=generator)}
    if head == "pooled":
        return {}
    classes = SIZES["vocab_size"] if head == "masked-lm" else 3
    drawn = torch.randint(classes, (rows, tokens), generator=generator)
    return {"labels": torch.where(torch.rand(drawn.shape, generator=generator) < 0.3, drawn, -100)}


def compare(ours: Any, theirs: Any, where: Tensor | None = None) -> None:
    """Every field of ours against the one of the same name of theirs; fields of tokens only ``where`` they are."""
    for name, value in ours._asdict().items():
        expected = theirs.get(name)
        assert (value is None) == (expected is None), name
        if value is None:
            continue
        assert value.shape == expected.shape, name
        if where is not None and value.shape[:2] == where.shape:
            value, expected = value[where], expected[where]
        assert value.isfinite().all(), name
        assert (error := relative_error(value, expected)) < 1e-5, (name, error)
