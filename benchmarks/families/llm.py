"""Decoder language models, a token at a time and a prompt at once: both libraries' arms from one set of weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.families import llm_arms, llm_steps, llm_train
from benchmarks.families.base import Prepared, SeededWeights, Workload, accelerated, dtype_of, zoo_model
from benchmarks.families.llm_steps import Task, task_of
from benchmarks.plan import Case
from zoo.llm import LLM, LLMConfig
from zoo.llm.config import PRESETS
from zoo.llm.convert import placements


class LlmWorkload(Workload):
    """Greedy inference with random weights.

    ``decode-BxS``: one call is one token for each of B rows over a cache of S slots, from embedding to the token that
    the next call feeds. Positions stay in the upper half of the cache and spread evenly over it, so that three
    quarters are filled on average. ``prefill-BxT``: one call takes B prompts of T tokens to the logits of their last
    position and the next token. ``answer-BxT``: a prompt, and one token more over the cache that it left: what a first
    call has to compile before a text is written.

    Training: ``BxT``, B rows of T tokens; weights and moments in the case's dtype. ``<model>-checkpointed`` keeps the
    layers' inputs only.
    """

    family = "llm"
    models = (
        *("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-0.6b", "qwen3-8b", "llm-debug"),
        *(name + llm_train.CHECKPOINTED for name in ("llama-3.2-1b", "llama-3.2-3b", "llm-debug")),
    )
    inputs = (
        *("decode-1x1024", "decode-8x1024", "decode-32x1024", "decode-128x1024"),
        *("prefill-1x2048", "prefill-1x8192", "prefill-4x2048", "answer-1x2048"),
        *("decode-1x64", "prefill-1x32", "answer-1x32"),
        *("4x2048", "1x8192", "1x32768", "1x65536", "1x131072", "2x16"),
    )

    workloads = ("inference", "train")
    autocasts = False
    cpu_race, cpu_training = ("llm-debug", "decode-1x64"), ("llm-debug", "2x16")
    gpu_races = (("llama-3.2-1b", "decode-1x1024"), ("llama-3.2-1b", "prefill-1x2048"))
    gpu_training, quick_races = (("llama-3.2-1b", "4x2048"),), (("llama-3.2-1b", "decode-1x1024"),)

    def cannot(self, case: Case) -> str | None:
        if case.workload == "train":
            return llm_train.cannot(case, _config(case))
        if case.model.endswith(llm_train.CHECKPOINTED):
            return f"{case.model} is for training"
        if llm_train.rows_of(case.input) is not None:
            return f"{case.input} is an input of training; inference takes decode-BxS, prefill-BxT or answer-BxT"
        slots, limit = task_of(case.input).slots, PRESETS[case.model].max_position_embeddings
        return f"{case.input} needs {slots} positions, and {case.model} has {limit}" if slots > limit else None

    def estimate(self, case: Case, *, reference: bool) -> int:
        return (llm_train.memory if case.workload == "train" else memory)(case, _config(case), reference=reference)

    def build(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        return (llm_train.prepare if case.workload == "train" else prepare)(case, _config(case), seed=seed)


def _config(case: Case) -> LLMConfig:
    return PRESETS[case.model.removesuffix(llm_train.CHECKPOINTED)]


def memory(case: Case, config: LLMConfig, *, reference: bool) -> int:
    """Estimated device memory of inference: weights, cache, and what is alive around a layer or the output product."""
    task, itemsize, parameters = task_of(case.input), dtype_of(case).itemsize, llm_arms.parameters(config)
    cached = case.impl == "zoo" or task.kind != "prefill"
    fed, cache = task.batch * task.tokens, task.batch * task.slots * llm_arms.slot_values(config)
    wide = 3 * config.hidden_size + 4 * config.intermediate_size
    wide += 4 * config.num_attention_heads * config.head_dim
    alive = fed * wide + 3 * task.batch * config.vocab_size
    held = (parameters + (cache if cached else 0) + alive) * itemsize
    masks = 0
    # Compiled as a whole, transformers masks a prompt even if nothing is padded. Torch turns a mask into numbers.
    if cached or (case.impl == "upstream" and case.strategy == "full"):
        groups = config.num_attention_heads // config.num_key_value_heads
        masks = fed * groups * task.slots * (1 + itemsize)
    if not reference:
        return held + masks
    # The float32 reference holds one layer, or the output product, at a time.
    largest = max(llm_arms.layer_matrices(config), 2 * llm_arms.vocabulary(config))
    past = 2 * 2 * task.batch * task.slots * config.num_key_value_heads * config.head_dim
    exact = 4 * (largest + past + fed * (4 * config.hidden_size + 4 * config.intermediate_size))
    return held + max(masks, exact)


def prepare(case: Case, config: LLMConfig, *, seed: int) -> Prepared:
    """Build model, cache and prompt of inference on the device."""
    task = task_of(case.input)
    device, dtype = torch.device(case.device), dtype_of(case)
    weights = SeededWeights(llm_arms.shapes(config), seed=seed, dtype=dtype, device=device)
    tokens = llm_arms.draw_tokens(config, task, seed=seed, device=device)
    past = partial(llm_arms.draw_past, config, task, seed=seed, dtype=dtype, device=device)
    step = _step(case, config, task, weights, tokens, past)

    def compile_layers(step: Any, **options: Any) -> None:
        step.model = accelerated(step.model, raised_limit=case.impl == "upstream-tuned", **options)

    def reference() -> Tensor:
        cached = past if task.kind == "decode" else None
        return llm_arms.reference_output(config, weights, task, tokens, cached)

    return Prepared(
        model=step.eval(),
        inputs={} if task.kind == "decode" else {"input_ids": tokens},
        compile_regions=None if case.impl == "zoo" else compile_layers,
        reset=step.reset,
        reference=reference,
        reference_dtype="float32",
        bytes=llm_arms.bytes_moved(config, task, dtype.itemsize),
        bytes_formula=llm_arms.BYTES_FORMULA,
        flops=llm_arms.flops(config, task),
        data=_data(case, task),
        sizes={
            "batch": task.batch,
            ("slots" if task.kind == "decode" else "tokens"): task.length,
            "layers": config.num_hidden_layers,
            "width": config.hidden_size,
            "parameters": llm_arms.parameters(config),
        },
        count=task.batch * task.tokens,
        unit="tokens",
    )


def _step(
    case: Case, config: LLMConfig, task: Task, weights: SeededWeights, tokens: Tensor, past: llm_steps.Past
) -> llm_steps.Step:
    """The module whose call is measured, with the case's model in it."""
    if case.impl == "zoo":
        model = zoo_model(LLM, config, weights, placements(config))
        if task.kind == "decode":
            return llm_steps.ZooDecode(model, task, tokens, past)
        return (llm_steps.ZooAnswer if task.kind == "answer" else llm_steps.ZooPrefill)(model, task, tokens)
    theirs = llm_arms.build(config, weights)
    if task.kind == "decode":
        return llm_steps.UpstreamDecode(theirs, task, tokens, past)
    if task.kind == "answer":
        return llm_steps.UpstreamAnswer(theirs, task, tokens)
    if case.impl == "upstream-tuned":
        llm_arms.without_mask(theirs)
    return llm_steps.UpstreamPrefill(theirs, task, tokens)


def _data(case: Case, task: Task) -> str:
    if task.kind == "decode":
        return "generated (cache half to wholly full)"
    kept = case.impl == "zoo" or task.kind == "answer"
    return f"generated (keys and values {'kept' if kept else 'not kept'})"


WORKLOAD = LlmWorkload()
