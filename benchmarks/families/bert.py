"""BERT over full and over ragged batches: both libraries' arms from one set of weights."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families import bert_texts, bert_train, bert_upstream, bert_work
from benchmarks.families.base import Prepared, accelerated, dtype_of, refuses_unknown
from benchmarks.families.bert_upstream import UpstreamStep
from benchmarks.families.cuts import CUTS, MARK, cut
from benchmarks.families.llm_weights import SeededWeights
from benchmarks.plan import Case
from zoo.bert import Bert, BertConfig, PackedBatch, pack, token_buckets
from zoo.bert.convert import placements
from zoo.bert.model import PRESETS
from zoo.weights import fill


class BertWorkload:
    """Inference with random weights: ids in, hidden states and pooled output of ``BertModel`` out.

    ``BxT``: B rows of T tokens each, without a mask. ``skewed-BxT``: rows of unequal lengths, about half of the batch
    filled, from which the pooled output is asked; padded with a mask for transformers, packed on the host for the zoo.
    ``-cut-<name>`` models race the zoo's cut into other regions (``cuts``); transformers' arms are the same in
    all of them.

    Training is fine-tuning as a classifier over float32 weights; the dtype is that of autocast. ``BxT`` as above;
    ``epoch-BxT``: an epoch of batches of rows of any lengths up to T, a step a batch: padded to the longest of a batch
    for transformers as shipped, to T for it tuned, packed into declared sizes for the zoo. ``epoch-static-BxT``: the
    same, with ``dynamic=False`` for transformers as shipped. ``-dropout`` models are trained with dropout.
    """

    family = "bert"
    models: tuple[str, ...] = (
        "bert-base",
        "bert-large",
        "bert-base-6",
        "bert-debug",
        "bert-base-dropout",
        "bert-debug-dropout",
        *(f"{preset}{MARK}{name}" for preset in ("bert-base", "bert-debug") for name in CUTS["bert"]),
    )
    inputs: tuple[str, ...] = (
        "32x128",
        "256x128",
        "8x512",
        "1x128",
        "skewed-64x512",
        "2x32",
        "skewed-4x32",
        "epoch-32x512",
        "epoch-static-32x512",
        "epoch-4x32",
        "epoch-static-4x32",
    )

    def default_races(self, device: str, quick: bool, workload: str = "inference") -> list[tuple[str, str]]:
        """(model, input) pairs of a plain run."""
        if device == "cpu":
            return [("bert-debug", "2x32")]
        if workload == "train":
            return [("bert-base", "32x128")]
        races = [("bert-base", "32x128"), ("bert-base", "skewed-64x512")]
        return races[:1] if quick else races

    def dtypes(self, device: str) -> tuple[str, ...]:
        """Supported dtypes, the default first."""
        return ("float32", "bfloat16") if device == "cpu" else ("bfloat16", "float16", "float32")

    def refuses(self, case: Case) -> str | None:
        """Why this combination does not exist, or None."""
        if reason := refuses_unknown(self, case, ("inference", "train")):
            return reason
        if case.workload == "train":
            return f"{case.model}: other cuts are for inference" if MARK in case.model else bert_train.refuses(case)
        if case.model.endswith(bert_train.DROPOUT):
            return f"{case.model} is for training; dropout does nothing in inference"
        if (task := bert_texts.task(case.input)) is not None and task.epoch:
            return f"{case.input} is for training"
        length, limit = bert_work.task(case.input).length, _config(case).positions
        if length > limit:
            return f"{case.input} needs {length} positions, and {case.model} has {limit}"
        return None

    def memory_bytes(self, case: Case) -> int:
        """Estimated peak device memory of the case in bytes, the reference included, which any arm may compute."""
        if case.workload == "train":
            return bert_train.memory_bytes(case)
        config, task = _config(case), bert_work.task(case.input)
        itemsize = dtype_of(case).itemsize
        running = bert_work.memory(config, task, itemsize)
        reference = bert_work.reference_memory(config, task, bert_upstream.REFERENCE_ROWS)
        return running + reference

    def prepare(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        """Build model and batch on the device.

        Args:
            case: What to build.
            data_root: Not used: there is no data set.
            seed: Of the weights, the ids and the order of the rows.

        Raises:
            ValueError: If the case is one that :meth:`refuses` names.
        """
        if reason := self.refuses(case):
            raise ValueError(f"{case.arm}: {reason}")
        if case.workload == "train":
            return bert_train.prepare(case, seed=seed)
        config, task = _config(case), bert_work.task(case.input)
        device, dtype = torch.device(case.device), dtype_of(case)
        weights = SeededWeights(bert_upstream.shapes(config), seed=seed, dtype=dtype, device=device)
        host_ids, host_mask = bert_work.draw_inputs(config, task, seed=seed)
        preparation, sizes = {}, {}
        inputs: dict[str, Any]
        model: nn.Module
        if case.impl == "zoo":
            model, inputs = _zoo_step(case, weights), {"input_ids": host_ids.to(device)}
            if task.skewed:
                start = time.perf_counter()
                buckets = token_buckets(task.batch, task.length)
                batch = pack(host_ids, host_mask, config=config, buckets=buckets)
                preparation["packing on the host"] = time.perf_counter() - start
                inputs = {"input_ids": batch.to(device)}
                sizes["packed_tokens"] = batch.input_ids.numel()
        else:
            model = UpstreamStep(bert_upstream.build(config, weights), ready_mask=case.impl == "upstream-tuned")
            inputs = {"input_ids": host_ids.to(device)}
            if task.skewed:
                inputs["attention_mask"] = host_mask.to(device)

        def compile_layers(step: Any, **options: Any) -> None:
            step.model = accelerated(step.model, raised_limit=case.impl == "upstream-tuned", **options)

        def reference() -> Tensor:
            mask = host_mask.to(device) if task.skewed else None
            return bert_upstream.reference_output(config, weights, host_ids.to(device), mask)

        return Prepared(
            model=model.eval(),
            inputs=inputs,
            compile_regions=None if case.impl == "zoo" else compile_layers,
            reference=reference,
            reference_dtype="float64",
            bytes=bert_work.bytes_moved(config, task, dtype.itemsize),
            bytes_formula=bert_work.BYTES_FORMULA,
            flops=bert_work.flops(config, task),
            data=_data(task),
            preparation_seconds=preparation,
            sizes={
                "batch": task.batch,
                "length": task.length,
                "tokens": task.tokens,
                **sizes,
                "layers": config.num_hidden_layers,
                "width": config.hidden_size,
                "parameters": bert_work.parameters(config),
            },
            count=task.batch,
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


def _zoo_step(case: Case, weights: SeededWeights) -> ZooStep:
    config = _config(case)
    with torch.device("meta"):
        model = Bert(config)
    fill(model, weights, placements(config), device=weights.device, dtype=None, source="drawn weights")
    step = ZooStep(model.requires_grad_(False))
    if name := case.model.partition(MARK)[2]:
        cut(step, "bert", name)
    return step


def _config(case: Case) -> BertConfig:
    return PRESETS[case.model.partition(MARK)[0]]


def _data(task: bert_work.Task) -> str:
    if not task.skewed:
        return "generated (full rows)"
    return f"generated (skewed lengths, {task.tokens / (task.batch * task.length):.0%} filled)"


WORKLOAD = BertWorkload()
