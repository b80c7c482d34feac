"""Fine-tuning of BERT as a classifier of texts: float32 weights, autocast, batches of one shape or of many lengths.

Shapes: B rows, T tokens, N tokens of a packed batch, C width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families import bert_texts, bert_upstream, bert_work
from benchmarks.families.base import UNSCALED, Prepared, Training, accelerated, autocast_of, dtype_of
from benchmarks.families.bert_batches import EPOCH, ROUND, Batches
from benchmarks.families.bert_texts import LABELS
from benchmarks.families.llm_weights import SeededWeights
from benchmarks.plan import Case
from benchmarks.training import checkpointed, reference_losses
from zoo.bert import Bert, BertConfig
from zoo.bert.convert import placements
from zoo.bert.model import PRESETS
from zoo.weights import fill

DROPOUT = "-dropout"
# Times the width: wide models take smaller steps. 2e-6 at 768: with weights that nobody trained and no warm-up, two
# copies of one arm part after some twenty steps at a rate of fine-tuning.
_RATE_TIMES_WIDTH = 1.5e-3

BYTES_FORMULA = (
    "Weights of the layers are read in the forward and again for gradients by inputs, in the dtype of autocast. And 32 "
    "bytes for every weight of all: its gradient is written, and the optimizer reads weight, gradient and two moments "
    "and writes three. Left out, so that it is a lower bound: activations."
)


def config_of(model: str) -> BertConfig:
    """The config of a model's name: a classifier, without dropout unless the name says otherwise."""
    rate = 0.1 if model.endswith(DROPOUT) else 0.0
    return replace(
        PRESETS[model.removesuffix(DROPOUT)],
        head="sequence-classification",
        num_labels=LABELS,
        hidden_dropout_prob=rate,
        attention_probs_dropout_prob=rate,
    )


def refuses(case: Case) -> str | None:
    """Why there is no such training, names that exist taken for granted; or None."""
    task = bert_texts.task(case.input)
    if task is None:
        return f"{case.input} is an input of inference; training takes BxT, epoch-BxT or epoch-static-BxT"
    if task.length > config_of(case.model).positions:
        return f"{case.input} needs {task.length} positions, and {case.model} has {config_of(case.model).positions}"
    if case.dtype == "float16":
        return UNSCALED
    if task.epoch and case.dynamic:
        if case.impl != "upstream":
            return f"{case.impl} has declared shapes; dynamic ones are for batches that are padded to their longest row"
        if task.static:
            return f"{case.input} is about static shapes; dynamic ones are raced on {case.input.replace('static-', '')}"
    return None


def prepare(case: Case, *, seed: int) -> Prepared:
    """Build model and batches on the device.

    Args:
        case: What to build.
        seed: Of the weights and the texts.
    """
    config, task = config_of(case.model), bert_texts.task(case.input)
    assert task is not None
    device = torch.device(case.device)
    weights = SeededWeights(bert_upstream.shapes(config), seed=seed, dtype=torch.float32, device=device)
    batches = Batches(case.impl, config, task, device, seed=seed)

    model: nn.Module
    compile_layers: Callable[..., nn.Module] | None = None
    if case.impl == "zoo":
        model, loss = zoo_model(config, weights), zoo_loss
    else:
        model, loss = bert_upstream.build(config, weights), upstream_loss
        compile_layers = functools.partial(accelerated, raised_limit=case.impl == "upstream-tuned")

    training = Training(
        loss=loss,
        batch=batches.checked,
        learning_rate=_RATE_TIMES_WIDTH / config.hidden_size,
        autocast=autocast_of(dtype_of(case)),
        random=case.model.endswith(DROPOUT),
    )
    if task.epoch:
        epoch = batches.epoch
        training = replace(training, shapes=batches.shapes(), loader=lambda: epoch, round=ROUND[device.type])

    def reference() -> Tensor:
        theirs = bert_upstream.build(config, weights).requires_grad_(True)
        checkpointed(theirs.base_model.encoder.layer)
        padded = Batches("upstream", config, task, device, seed=seed)
        return reference_losses(theirs, replace(training, loss=upstream_loss, batch=padded.checked))

    sizes, lengths = batches.sizes(), batches.lengths
    return Prepared(
        model=model.requires_grad_(True).train(),
        inputs={},
        compile_regions=compile_layers,
        dynamic=False if task.static else None,
        reference=reference,
        bytes=bytes_moved(config, getattr(torch, case.dtype).itemsize),
        bytes_formula=BYTES_FORMULA,
        flops=sum(flops(config, rows) for rows in lengths) // len(lengths),
        data="generated (an epoch of log-normal lengths)" if task.epoch else "generated (full rows)",
        preparation_seconds=batches.preparation(),
        sizes={
            **sizes,
            "layers": config.num_hidden_layers,
            "width": config.hidden_size,
            "parameters": parameters(config),
        },
        count=sizes["tokens"],
        unit="tokens",
        training=training,
    )


def zoo_model(config: BertConfig, weights: SeededWeights) -> Bert:
    """The zoo's classifier with these weights."""
    with torch.device("meta"):
        model = Bert(config)
    fill(model, weights, placements(config), device=weights.device, dtype=None, source="drawn weights")
    return model


def zoo_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    """Cross entropy of ids [B, T] or a packed batch, and labels [B]."""
    loss: Tensor = model(batch["input_ids"], labels=batch["labels"]).loss
    return loss


def upstream_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    """The same of ids and, where rows are short, a mask."""
    loss: Tensor = model(**batch).loss
    return loss


def parameters(config: BertConfig) -> int:
    """All weights: encoder, pooler, classifier."""
    return bert_work.parameters(config) + LABELS * (config.hidden_size + 1)


def flops(config: BertConfig, lengths: list[int]) -> int:
    """Gradients by inputs and by weights each take what the forward does; padding is no work to be done."""
    return 3 * (bert_work.flops_of_rows(config, lengths) + 2 * len(lengths) * LABELS * config.hidden_size)


def bytes_moved(config: BertConfig, itemsize: int) -> int:
    """Fewest bytes that one step moves through device memory, as :data:`BYTES_FORMULA` says."""
    layers = config.num_hidden_layers * bert_work.layer_weights(config)
    return 2 * layers * itemsize + 32 * parameters(config)


def memory_bytes(case: Case) -> int:
    """Peak memory of an arm, padded as far as any batch is, and of the reference, whose layers run twice."""
    config, task = config_of(case.model), bert_texts.task(case.input)
    assert task is not None
    tokens, layers = task.rows * task.length, config.num_hidden_layers
    # Scores, their softmax and its gradient, where attention writes them out: on a CPU, and in float64.
    scores = 3 * task.rows * config.num_attention_heads * task.length**2
    running = 4 * layers * (tokens * inside(config) + (scores if case.device == "cpu" else 0))
    passing = layers * tokens * config.hidden_size
    reference = 8 * (passing + 2 * (tokens * inside(config) + scores) + 4 * parameters(config))
    epoch = 16 * EPOCH[case.device] * tokens if task.epoch else 0
    return 20 * parameters(config) + epoch + max(running, reference) + bert_work.PROCESS_BYTES


def inside(config: BertConfig) -> int:
    """Values that a token leaves behind in a layer for the backward.

    Its input, three projections, what attention gives, what goes into both norms and comes out, and both sides of the
    activation.
    """
    return 10 * config.hidden_size + 2 * config.intermediate_size
