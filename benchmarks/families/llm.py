"""Decoder language models, a token at a time and a prompt at once: both libraries' arms from one set of weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.families import llm_steps, llm_train, llm_upstream, llm_weights, llm_work
from benchmarks.families.base import Prepared, accelerated, dtype_of, refuses_unknown
from benchmarks.families.llm_work import Task
from benchmarks.plan import Case
from zoo.llm import LLM, LLMConfig
from zoo.llm.config import PRESETS
from zoo.llm.convert import placements
from zoo.weights import fill


class LlmWorkload:
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
    models: tuple[str, ...] = (
        "llama-3.2-1b",
        "llama-3.2-3b",
        "llama-3.1-8b",
        "qwen3-0.6b",
        "qwen3-8b",
        "llm-debug",
        *(name + llm_train.CHECKPOINTED for name in ("llama-3.2-1b", "llama-3.2-3b", "llm-debug")),
    )
    inputs: tuple[str, ...] = (
        "decode-1x1024",
        "decode-8x1024",
        "decode-32x1024",
        "decode-128x1024",
        "prefill-1x2048",
        "prefill-1x8192",
        "prefill-4x2048",
        "answer-1x2048",
        "decode-1x64",
        "prefill-1x32",
        "answer-1x32",
        "4x2048",
        "1x8192",
        "1x32768",
        "1x65536",
        "1x131072",
        "2x16",
    )

    def default_races(self, device: str, quick: bool, workload: str = "inference") -> list[tuple[str, str]]:
        """(model, input) pairs of a plain run."""
        if workload == "train":
            return [("llm-debug", "2x16")] if device == "cpu" else [("llama-3.2-1b", "4x2048")]
        if device == "cpu":
            return [("llm-debug", "decode-1x64")]
        races = [("llama-3.2-1b", "decode-1x1024"), ("llama-3.2-1b", "prefill-1x2048")]
        return races[:1] if quick else races

    def dtypes(self, device: str) -> tuple[str, ...]:
        """Supported dtypes, the default first."""
        return ("float32", "bfloat16") if device == "cpu" else ("bfloat16", "float16", "float32")

    def refuses(self, case: Case) -> str | None:
        """Why this combination does not exist, or None."""
        if reason := refuses_unknown(self, case, ("inference", "train")):
            return reason
        if case.workload == "train":
            return llm_train.refuses(case, _config(case))
        if case.model.endswith(llm_train.CHECKPOINTED):
            return f"{case.model} is for training"
        if llm_train.rows_of(case.input) is not None:
            return f"{case.input} is an input of training; inference takes decode-BxS, prefill-BxT or answer-BxT"
        slots, limit = llm_work.task(case.input).slots, PRESETS[case.model].max_position_embeddings
        if slots > limit:
            return f"{case.input} needs {slots} positions, and {case.model} has {limit}"
        return None

    def memory_bytes(self, case: Case) -> int:
        """Estimated peak device memory of the case in bytes, the reference included, which any arm may compute."""
        if case.workload == "train":
            return llm_train.memory_bytes(case, _config(case))
        return memory_bytes(case, _config(case))

    def running_bytes(self, case: Case) -> int:
        """The same without the reference of training."""
        if case.workload == "train":
            return llm_train.memory_bytes(case, _config(case), reference=False)
        return memory_bytes(case, _config(case))

    def prepare(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        """Build model, cache and prompt on the device.

        Args:
            case: What to build.
            data_root: Not used: there is no data set.
            seed: Of the weights, the tokens and what the cache holds.

        Raises:
            ValueError: If the case is one that :meth:`refuses` names.
        """
        if reason := self.refuses(case):
            raise ValueError(f"{case.arm}: {reason}")
        if case.workload == "train":
            return llm_train.prepare(case, _config(case), seed=seed)
        return prepare(case, _config(case), seed=seed)


def memory_bytes(case: Case, config: LLMConfig) -> int:
    """Estimated peak device memory of inference, the reference included."""
    task = llm_work.task(case.input)
    ours = case.impl == "zoo"
    cached = ours or task.kind != "prefill"
    # Compiled as a whole, transformers masks a prompt even if nothing is padded.
    mask = cached or (case.impl == "upstream" and case.strategy == "full")
    itemsize = dtype_of(case).itemsize
    running = llm_work.memory(config, task, itemsize, cached=cached, mask=mask)
    held = llm_work.memory(config, task, itemsize, cached=cached, mask=False)
    return max(running, held + llm_work.reference_memory(config, task))


def prepare(case: Case, config: LLMConfig, *, seed: int) -> Prepared:
    """Build model, cache and prompt of inference on the device.

    Args:
        case: What to build.
        config: Of its model.
        seed: Of the weights, the tokens and what the cache holds.
    """
    task = llm_work.task(case.input)
    device, dtype = torch.device(case.device), dtype_of(case)
    weights = llm_weights.SeededWeights(llm_upstream.shapes(config), seed=seed, dtype=dtype, device=device)
    tokens = llm_weights.draw_tokens(config, task, seed=seed, device=device)

    def past(layer: int) -> tuple[Tensor, Tensor]:
        return llm_weights.draw_past(config, task, layer, seed=seed, dtype=dtype, device=device)

    step = _step(case, config, task, weights, tokens, past)

    def compile_layers(step: Any, **options: Any) -> None:
        step.model = accelerated(step.model, raised_limit=case.impl == "upstream-tuned", **options)

    def reference() -> Tensor:
        cached = past if task.kind == "decode" else None
        return llm_upstream.reference_output(config, weights, task, tokens, cached)

    return Prepared(
        model=step.eval(),
        inputs={} if task.kind == "decode" else {"input_ids": tokens},
        compile_regions=None if case.impl == "zoo" else compile_layers,
        reset=step.reset,
        reference=reference,
        reference_dtype="float32",
        bytes=llm_work.bytes_moved(config, task, dtype.itemsize),
        bytes_formula=llm_work.BYTES_FORMULA,
        flops=llm_work.flops(config, task),
        data=_data(case, task),
        sizes={
            "batch": task.batch,
            ("slots" if task.kind == "decode" else "tokens"): task.length,
            "layers": config.num_hidden_layers,
            "width": config.hidden_size,
            "parameters": llm_work.parameters(config),
        },
        count=task.batch * task.tokens,
        unit="tokens",
    )


def _step(
    case: Case,
    config: LLMConfig,
    task: Task,
    weights: llm_weights.SeededWeights,
    tokens: Tensor,
    past: llm_steps.Past,
) -> llm_steps.Step:
    """The module whose call is measured, with the case's model in it."""
    if case.impl == "zoo":
        with torch.device("meta"):
            model = LLM(config)
        fill(model, weights, placements(config), device=weights.device, dtype=None, source="drawn weights")
        model.requires_grad_(False)
        if task.kind == "decode":
            return llm_steps.ZooDecode(model, task, tokens, past)
        return (llm_steps.ZooAnswer if task.kind == "answer" else llm_steps.ZooPrefill)(model, task, tokens)
    theirs = llm_upstream.build(config, weights)
    if task.kind == "decode":
        return llm_steps.UpstreamDecode(theirs, task, tokens, past)
    if task.kind == "answer":
        return llm_steps.UpstreamAnswer(theirs, task, tokens)
    if case.impl == "upstream-tuned":
        llm_upstream.without_mask(theirs)
    return llm_steps.UpstreamPrefill(theirs, task, tokens)


def _data(case: Case, task: Task) -> str:
    if task.kind == "decode":
        return "generated (cache half to wholly full)"
    kept = case.impl == "zoo" or task.kind == "answer"
    return f"generated (keys and values {'kept' if kept else 'not kept'})"


def _config(case: Case) -> LLMConfig:
    return PRESETS[case.model.removesuffix(llm_train.CHECKPOINTED)]


WORKLOAD = LlmWorkload()
