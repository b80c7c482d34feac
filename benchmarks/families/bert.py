"""BERT over full and over ragged batches: both libraries' arms from one set of weights.

Shapes: B rows, T tokens of the longest, C width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families import base, bert_arms
from benchmarks.plan import Case
from benchmarks.strategies import checkpointed, reference_losses
from zoo.bert import Bert, BertConfig, pack, token_buckets
from zoo.bert.convert import WEIGHTS, skeleton
from zoo.bert.model import PRESETS

# Learning rate times width, since wide models need smaller steps: 2e-6 at 768. With untrained weights and no warm-up,
# two copies of one arm would diverge after some twenty steps at a typical rate of fine-tuning.
_RATE_TIMES_WIDTH = 1.5e-3


class BertWorkload(base.Workload):
    """Inference with random weights: ids in, hidden states and pooled output of ``BertModel`` out.

    ``BxT``: B rows of T tokens each, without a mask. ``skewed-BxT``: rows of unequal lengths that fill about half of
    the batch, with the pooled output; padded with a mask for transformers, packed on the host for the zoo.
    ``masked-BxT``: the same rows, padded for both, with a mask on the device.

    Training is fine-tuning of a classifier with float32 weights; the dtype is that of autocast. ``BxT`` as above;
    ``epoch-BxT``: an epoch of batches with rows of up to T tokens, one step per batch. Batches are padded to their
    longest row for transformers as shipped, padded to T for transformers tuned, and packed into declared sizes for the
    zoo. ``epoch-static-BxT``: the same, with ``dynamic=False`` for transformers as shipped.
    """

    family = "bert"
    models = ("bert-base", "bert-large", "bert-base-6", "bert-debug")
    inputs = (
        *("32x128", "256x128", "8x512", "1x128", "2x32"),
        *("skewed-64x512", "masked-16x384", "skewed-4x32", "masked-4x32"),
        *("epoch-32x512", "epoch-static-32x512", "epoch-4x32", "epoch-static-4x32"),
    )

    workloads = ("inference", "train")
    cpu_race = ("bert-debug", "2x32")
    gpu_races, gpu_training = (("bert-base", "32x128"), ("bert-base", "skewed-64x512")), (("bert-base", "32x128"),)
    quick_races = (("bert-base", "32x128"),)

    def cannot(self, case: Case) -> str | None:
        given, limit = bert_arms.task(case.input), PRESETS[case.model].positions
        if given.epoch and case.workload != "train":
            return f"{case.input} is for training"
        if given.skewed and case.workload == "train":
            return f"{case.input} is an input of inference; training takes BxT, epoch-BxT or epoch-static-BxT"
        if given.length > limit:
            return f"{case.input} needs {given.length} positions, and {case.model} has {limit}"
        if given.epoch and case.dynamic and case.impl != "upstream":
            return f"{case.impl} has declared shapes; dynamic ones are for batches that are padded to their longest row"
        if given.kind == "epoch-static" and case.dynamic:
            return f"{case.input} is about static shapes; dynamic ones are raced on {case.input.replace('static-', '')}"
        return None

    def estimate(self, case: Case, *, reference: bool) -> int:
        """Estimated device memory: weights, and the live tensors of a layer without fusion."""
        if case.workload == "train":
            return training_memory(case, reference=reference)
        config, given, itemsize = PRESETS[case.model], bert_arms.task(case.input), base.dtype_of(case).itemsize
        parameters, tokens = base.parameters_of(Bert, config), given.batch * given.length
        wide = 8 * config.hidden_size + 3 * config.intermediate_size
        # A materialised mask, as numbers.
        masks = tokens * given.length * (1 + itemsize) if given.skewed else 0
        running = (parameters + tokens * wide) * itemsize + masks
        if not reference:
            return running
        rows = min(bert_arms.REFERENCE_ROWS, given.batch)
        scores = 3 * config.num_attention_heads * given.length
        return running + 8 * (parameters + tokens * config.hidden_size + rows * given.length * (wide + scores))

    def build(self, case: Case, *, data_root: str | None, seed: int) -> base.Prepared:
        if case.workload == "train":
            return prepare_training(case, seed=seed)
        config, given = PRESETS[case.model], bert_arms.task(case.input)
        device, dtype = torch.device(case.device), base.dtype_of(case)
        weights = base.SeededWeights(skeleton(config), seed=seed, dtype=dtype, device=device)
        host_ids, host_mask = bert_arms.draw_inputs(config, given, seed=seed)
        preparation: dict[str, float] = {}
        sizes = {"batch": given.batch, "length": given.length, "tokens": given.tokens}
        inputs: dict[str, Any] = {"input_ids": host_ids.to(device)}
        packs = given.kind == "skewed" and case.impl == "zoo"
        model: nn.Module
        if case.impl == "zoo":
            model = bert_arms.ZooStep(base.zoo_model(Bert, config, weights, WEIGHTS.placements(config)))
            if packs:
                with base.timed("packing on the host", preparation, "cpu"):
                    buckets = token_buckets(given.batch, given.length)
                    batch = pack(host_ids, host_mask, config=config, buckets=buckets)
                inputs = {"input_ids": batch.to(device)}
                sizes["packed_tokens"] = batch.input_ids.numel()
        else:
            model = bert_arms.Step(bert_arms.build(config, weights), ready_mask=case.impl == "upstream-tuned")
        if given.skewed and not packs:
            inputs["attention_mask"] = host_mask.to(device)

        def reference() -> Tensor:
            mask = host_mask.to(device) if given.skewed else None
            return bert_arms.reference_output(config, weights, host_ids.to(device), mask)

        filled = f"skewed lengths, {given.tokens / (given.batch * given.length):.0%} filled"
        return base.Prepared(
            model=model.eval(),
            inputs=inputs,
            compile_regions=base.upstream_regions(case, base.accelerated_inside),
            reference=reference,
            bytes=bert_arms.bytes_moved(config, given, dtype.itemsize),
            bytes_formula=bert_arms.BYTES_FORMULA,
            flops=bert_arms.flops(config, given.lengths()),
            data=f"generated ({filled if given.skewed else 'full rows'})",
            preparation_seconds=preparation,
            sizes=sizes | base.encoder_sizes(Bert, config),
            count=given.batch,
            unit="sequences",
        )


# --- training ---


def config_of(model: str) -> BertConfig:
    """The config of a classifier without dropout, since arms would draw different dropout masks."""
    return replace(
        PRESETS[model],
        head="sequence-classification",
        num_labels=bert_arms.LABELS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def prepare_training(case: Case, *, seed: int) -> base.Prepared:
    config, asked = config_of(case.model), bert_arms.task(case.input)
    device = torch.device(case.device)
    weights = base.SeededWeights(skeleton(config), seed=seed, dtype=torch.float32, device=device)
    batches = bert_arms.Batches(case.impl, config, asked, device, seed=seed)

    model: nn.Module
    if case.impl == "zoo":
        model = base.zoo_model(Bert, config, weights, WEIGHTS.placements(config))
    else:
        model = bert_arms.build(config, weights)
    training = base.Training(
        loss=lambda model, batch: model(**batch).loss,
        batch=batches.checked,
        learning_rate=_RATE_TIMES_WIDTH / config.hidden_size,
        autocast=base.autocast_of(base.dtype_of(case)),
    )
    if asked.epoch:
        epoch = batches.epoch
        training = replace(training, shapes=batches.shapes(), loader=lambda: epoch, round=bert_arms.ROUND[device.type])

    def reference() -> Tensor:
        theirs = bert_arms.build(config, weights).requires_grad_(True)
        checkpointed(theirs.base_model.encoder.layer)
        padded = bert_arms.Batches("upstream", config, asked, device, seed=seed)
        return reference_losses(theirs, replace(training, batch=padded.checked))

    sizes, lengths = batches.sizes(), batches.lengths
    return base.Prepared(
        model=model.requires_grad_(True).train(),
        inputs={},
        compile_regions=base.upstream_regions(case, base.accelerated),
        dynamic=False if asked.kind == "epoch-static" else None,
        reference=reference,
        bytes=bert_arms.training_bytes(config, base.dtype_of(case).itemsize),
        bytes_formula=bert_arms.TRAINING_BYTES_FORMULA,
        flops=sum(bert_arms.training_flops(config, rows) for rows in lengths) // len(lengths),
        data="generated (an epoch of log-normal lengths)" if asked.epoch else "generated (full rows)",
        preparation_seconds=batches.preparation(),
        sizes=sizes | base.encoder_sizes(Bert, config),
        count=sizes["tokens"],
        unit="tokens",
        training=training,
    )


def training_memory(case: Case, *, reference: bool) -> int:
    """Estimated device memory of an arm with maximum padding, or of the reference if that takes more."""
    config, asked = config_of(case.model), bert_arms.task(case.input)
    parameters, tokens, layers = base.parameters_of(Bert, config), asked.batch * asked.length, config.num_hidden_layers
    # Scores, their softmax and its gradient, if attention materialises them: on a CPU, and in float64.
    scores = 3 * asked.batch * config.num_attention_heads * asked.length**2
    # Saved tensors per token and layer: the input, three projections, attention's output, inputs and outputs of both
    # norms, and input and output of the activation.
    inside = tokens * (10 * config.hidden_size + 2 * config.intermediate_size)
    running = 4 * layers * (inside + (scores if case.device == "cpu" else 0))
    exact = 8 * (layers * tokens * config.hidden_size + 2 * (inside + scores) + 4 * parameters)
    epoch = 16 * bert_arms.EPOCH[case.device] * tokens if asked.epoch else 0
    return 20 * parameters + epoch + (max(running, exact) if reference else running)


WORKLOAD = BertWorkload()
