"""BERT over full and over ragged batches: both libraries' arms from one set of weights.

Shapes: B rows, T tokens of the longest, C width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families import bert_arms, bert_train
from benchmarks.families.base import (
    Prepared,
    SeededWeights,
    Workload,
    accelerated,
    dtype_of,
    parameters_of,
    timed,
    zoo_model,
)
from benchmarks.plan import Case
from zoo.bert import Bert, PackedBatch, pack, token_buckets
from zoo.bert.convert import placements
from zoo.bert.model import PRESETS


class BertWorkload(Workload):
    """Inference with random weights: ids in, hidden states and pooled output of ``BertModel`` out.

    ``BxT``: B rows of T tokens each, without a mask. ``skewed-BxT``: rows of unequal lengths, about half of the batch
    filled, from which the pooled output is asked; padded with a mask for transformers, packed on the host for the zoo.

    Training is fine-tuning as a classifier over float32 weights; the dtype is that of autocast. ``BxT`` as above;
    ``epoch-BxT``: an epoch of batches of rows of any lengths up to T, a step a batch: padded to the longest of a batch
    for transformers as shipped, to T for it tuned, packed into declared sizes for the zoo. ``epoch-static-BxT``: the
    same, with ``dynamic=False`` for transformers as shipped.
    """

    family = "bert"
    models = ("bert-base", "bert-large", "bert-base-6", "bert-debug")
    inputs = (
        *("32x128", "256x128", "8x512", "1x128", "skewed-64x512", "2x32", "skewed-4x32"),
        *("epoch-32x512", "epoch-static-32x512", "epoch-4x32", "epoch-static-4x32"),
    )

    workloads = ("inference", "train")
    cpu_race = ("bert-debug", "2x32")
    gpu_races, gpu_training = (("bert-base", "32x128"), ("bert-base", "skewed-64x512")), (("bert-base", "32x128"),)
    quick_races = (("bert-base", "32x128"),)

    def cannot(self, case: Case) -> str | None:
        if case.workload == "train":
            return bert_train.cannot(case)
        if case.input.startswith("epoch-"):
            return f"{case.input} is for training"
        length, limit = bert_arms.task(case.input).length, PRESETS[case.model].positions
        return f"{case.input} needs {length} positions, and {case.model} has {limit}" if length > limit else None

    def estimate(self, case: Case, *, reference: bool) -> int:
        """Estimated device memory: weights, and what is alive at once in a layer whose steps are not fused."""
        if case.workload == "train":
            return bert_train.memory(case, reference=reference)
        config, given, itemsize = PRESETS[case.model], bert_arms.task(case.input), dtype_of(case).itemsize
        parameters, tokens = parameters_of(Bert, config), given.batch * given.length
        wide = 8 * config.hidden_size + 3 * config.intermediate_size
        # A mask that is written out, as numbers.
        masks = tokens * given.length * (1 + itemsize) if given.skewed else 0
        running = (parameters + tokens * wide) * itemsize + masks
        if not reference:
            return running
        rows = min(bert_arms.REFERENCE_ROWS, given.batch)
        scores = 3 * config.num_attention_heads * given.length
        return running + 8 * (parameters + tokens * config.hidden_size + rows * given.length * (wide + scores))

    def build(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        if case.workload == "train":
            return bert_train.prepare(case, seed=seed)
        config, given = PRESETS[case.model], bert_arms.task(case.input)
        device, dtype = torch.device(case.device), dtype_of(case)
        weights = SeededWeights(bert_arms.shapes(config), seed=seed, dtype=dtype, device=device)
        host_ids, host_mask = bert_arms.draw_inputs(config, given, seed=seed)
        preparation: dict[str, float] = {}
        sizes: dict[str, int] = {}
        inputs: dict[str, Any] = {"input_ids": host_ids.to(device)}
        model: nn.Module
        if case.impl == "zoo":
            model = ZooStep(zoo_model(Bert, config, weights, placements(config)))
            if given.skewed:
                with timed("packing on the host", preparation, "cpu"):
                    buckets = token_buckets(given.batch, given.length)
                    batch = pack(host_ids, host_mask, config=config, buckets=buckets)
                inputs = {"input_ids": batch.to(device)}
                sizes["packed_tokens"] = batch.input_ids.numel()
        else:
            model = bert_arms.UpstreamStep(bert_arms.build(config, weights), ready_mask=case.impl == "upstream-tuned")
            if given.skewed:
                inputs["attention_mask"] = host_mask.to(device)

        def compile_layers(step: Any, **options: Any) -> None:
            step.model = accelerated(step.model, raised_limit=case.impl == "upstream-tuned", **options)

        def reference() -> Tensor:
            mask = host_mask.to(device) if given.skewed else None
            return bert_arms.reference_output(config, weights, host_ids.to(device), mask)

        filled = f"skewed lengths, {given.tokens / (given.batch * given.length):.0%} filled"
        return Prepared(
            model=model.eval(),
            inputs=inputs,
            compile_regions=None if case.impl == "zoo" else compile_layers,
            reference=reference,
            bytes=bert_arms.bytes_moved(config, given, dtype.itemsize),
            bytes_formula=bert_arms.BYTES_FORMULA,
            flops=bert_arms.flops(config, given.lengths()),
            data=f"generated ({filled if given.skewed else 'full rows'})",
            preparation_seconds=preparation,
            sizes={
                "batch": given.batch,
                "length": given.length,
                "tokens": given.tokens,
                **sizes,
                "layers": config.num_hidden_layers,
                "width": config.hidden_size,
                "parameters": parameters_of(Bert, config),
            },
            count=given.batch,
            unit="sequences",
        )


class ZooStep(nn.Module):
    """One call of the zoo's model: of full rows all that it returns, of a packed batch what is pooled."""

    regions = Bert.regions

    def __init__(self, model: Bert) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor | PackedBatch) -> Tensor | tuple[Tensor, Tensor]:
        """Ids [B, T], or a packed batch -> hidden states [B, T, C] and pooled [B, C], or these alone."""
        output: Any = self.model(input_ids)
        pooled: Tensor = output.pooler_output
        return pooled if isinstance(input_ids, PackedBatch) else (output.last_hidden_state, pooled)


WORKLOAD = BertWorkload()
