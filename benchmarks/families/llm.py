"""Decoder language models, decoding and prefill: both libraries' arms from one set of weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.families import base, llm_arms
from benchmarks.families.llm_arms import Task, task_of
from benchmarks.plan import Case
from benchmarks.strategies import reference_losses
from zoo.llm import LLM, LLMConfig, LLMLayer
from zoo.llm.convert import WEIGHTS, quantize
from zoo.llm.model import PRESETS
from zoo.training import LinearCrossEntropy, checkpoint_regions, float8_products

TRAINING_BYTES_FORMULA = (
    "Every weight is read in the forward and twice in the backward, its gradient written and read, and the optimizer "
    "reads and writes the weight and two moments. Left out, so that it is a lower bound: activations and logits."
)
# Learning rate times width, since wide models need smaller steps: 1e-4 at 2,048.
_RATE_TIMES_WIDTH = 0.2
CHECKPOINTED = "-checkpointed"
QUANTIZED = {"int8": "int8", "fp8": "float8_e4m3fn"}
# Above this many tokens per row only two steps are checked: the reference takes minutes for each.
_LONG = 16384
# Rows of logits that the reference takes at a time.
REFERENCE_ROWS = 4096


class LlmWorkload(base.Workload):
    """Greedy inference with random weights.

    ``decode-BxS``: one call decodes one token for each of B rows over a cache of S slots, from the embedding to the
    next call's token. Positions are spread evenly over the upper half of the cache, which is thus three quarters full
    on average. ``prefill-BxT``: one call computes the last position's logits and the next token of B prompts of T
    tokens. ``answer-BxT``: a prompt, then one more token over its cache: everything that must be compiled before a
    text is generated.

    ``<model>-int8``, ``<model>-fp8``: the zoo's arms have quantized weights, upstream's those of the case's dtype.

    Training: ``BxT``, B rows of T tokens; weights and moments in the case's dtype. ``<model>-checkpointed`` keeps only
    the layers' inputs. In the zoo's arms of ``<model>-fp8`` the layers' products are of float8.
    """

    family = "llm"
    models = (
        *("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-0.6b", "qwen3-8b", "llm-debug"),
        *(name + CHECKPOINTED for name in ("llama-3.2-1b", "llama-3.2-3b", "llm-debug")),
        *(f"{name}-{kind}" for name in ("llama-3.2-1b", "llama-3.1-8b", "llm-debug") for kind in QUANTIZED),
    )
    inputs = (
        *("decode-1x1024", "decode-8x1024", "decode-32x1024", "decode-128x1024"),
        *("prefill-1x2048", "prefill-1x8192", "prefill-4x2048", "answer-1x2048"),
        *("decode-1x64", "prefill-1x32", "answer-1x32"),
        *("1x2048", "4x2048", "8x2048", "1x8192", "1x32768", "1x65536", "1x131072", "2x16"),
    )

    workloads = ("inference", "train")
    autocasts = False
    cpu_race, cpu_training = ("llm-debug", "decode-1x64"), ("llm-debug", "2x16")
    gpu_races = (("llama-3.2-1b", "decode-1x1024"), ("llama-3.2-1b", "prefill-1x2048"))
    gpu_training, quick_races = (("llama-3.2-1b", "4x2048"),), (("llama-3.2-1b", "decode-1x1024"),)

    def cannot(self, case: Case) -> str | None:
        config, given, train = _config(case), task_of(case.input), case.workload == "train"
        if case.model.endswith(CHECKPOINTED) and not train:
            return f"{case.model} is for training"
        if quantized(case) == "int8" and train:
            return "weights of int8 do not learn"
        if train and given.kind:
            return f"{case.input} is an input of inference; training takes BxT: 4x2048"
        if not train and not given.kind:
            return f"{case.input} is an input of training; inference takes decode-BxS, prefill-BxT or answer-BxT"
        if given.slots > config.max_position_embeddings:
            return f"{case.input} needs {given.slots} positions, and {case.model} has {config.max_position_embeddings}"
        if case.model.endswith(CHECKPOINTED) and case.impl == "zoo" and case.strategy != "regional":
            return "activation checkpointing of the zoo is one of compiled regions; for others see upstream's"
        return None

    def estimate(self, case: Case, *, reference: bool) -> int:
        return (training_memory if case.workload == "train" else memory)(case, _config(case), reference=reference)

    def build(self, case: Case, *, data_root: str | None, seed: int) -> base.Prepared:
        return (prepare_training if case.workload == "train" else prepare)(case, _config(case), seed=seed)


def _config(case: Case) -> LLMConfig:
    return PRESETS[case.model.removesuffix(CHECKPOINTED).removesuffix(f"-{quantized(case)}")]


def quantized(case: Case) -> str | None:
    kind = case.model.rpartition("-")[2]
    return kind if kind in QUANTIZED else None


def memory(case: Case, config: LLMConfig, *, reference: bool) -> int:
    """Estimated device memory of inference: weights, cache, and live tensors around a layer or the output product."""
    task, itemsize, parameters = task_of(case.input), base.dtype_of(case).itemsize, base.parameters_of(LLM, config)
    cached = case.impl == "zoo" or task.kind != "prefill"
    fed, cache = task.batch * task.tokens, task.batch * task.slots * llm_arms.slot_values(config)
    wide = 3 * config.hidden_size + 4 * config.intermediate_size
    wide += 4 * config.num_attention_heads * config.head_dim
    alive = fed * wide + 3 * task.batch * config.vocab_size
    held = (parameters + (cache if cached else 0) + alive) * itemsize
    masks = 0
    # Compiled whole, transformers masks a prompt even without padding. Torch converts a mask to numbers.
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


def prepare(case: Case, config: LLMConfig, *, seed: int) -> base.Prepared:
    task = task_of(case.input)
    device, dtype = torch.device(case.device), base.dtype_of(case)
    weights = base.SeededWeights(llm_arms.skeleton(config), seed=seed, dtype=dtype, device=device)
    tokens = llm_arms.draw_tokens(config, task, seed=seed, device=device)
    past = functools.partial(llm_arms.draw_past, config, task, seed=seed, dtype=dtype, device=device)
    step = _step(case, config, task, weights, tokens, past)

    def reference() -> Tensor:
        cached = past if task.kind == "decode" else None
        return llm_arms.reference_output(config, weights, task, tokens, cached)

    narrow = case.impl == "zoo" and quantized(case)
    saved = base.parameters_of(LLM, config) * (dtype.itemsize - 1) if narrow else 0
    kept = "" if case.impl == "zoo" or task.kind == "answer" else "not "
    length = "slots" if task.kind == "decode" else "tokens"
    return base.Prepared(
        model=step.eval(),
        inputs={} if task.kind == "decode" else {"input_ids": tokens},
        compile_regions=base.upstream_regions(case, base.accelerated_inside),
        reset=step.reset,
        reference=reference,
        reference_dtype="float32",
        bytes=llm_arms.bytes_moved(config, task, dtype.itemsize) - saved,
        bytes_formula=llm_arms.BYTES_FORMULA,
        flops=llm_arms.flops(config, task),
        data=f"generated ({'cache half to wholly full' if task.kind == 'decode' else f'keys and values {kept}kept'})",
        sizes={"batch": task.batch, length: task.length, **base.encoder_sizes(LLM, config)},
        count=task.batch * task.tokens,
        unit="tokens",
    )


def _step(
    case: Case, config: LLMConfig, task: Task, weights: base.SeededWeights, tokens: Tensor, past: llm_arms.Past
) -> llm_arms.Step:
    assert task.kind is not None, "an input of inference"
    held = past if task.kind == "decode" else None
    if case.impl == "zoo":
        model = base.zoo_model(LLM, config, weights, WEIGHTS.placements(config))
        if (kind := quantized(case)) is not None:
            quantize(model, QUANTIZED[kind])
        return llm_arms.ZOO[task.kind](model, task, tokens, held)
    theirs = llm_arms.build(config, weights)
    if case.impl == "upstream-tuned" and task.kind == "prefill":
        llm_arms.without_mask(theirs)
    return llm_arms.UPSTREAM[task.kind](theirs, task, tokens, held)


# --- training ---


def prepare_training(case: Case, config: LLMConfig, *, seed: int) -> base.Prepared:
    rows = task_of(case.input)
    device, dtype = torch.device(case.device), base.dtype_of(case)
    weights = base.SeededWeights(llm_arms.skeleton(config), seed=seed, dtype=dtype, device=device)
    words = llm_arms.Words(config.vocab_size, seed=seed)
    checkpointed = case.model.endswith(CHECKPOINTED)

    def batch(index: int) -> dict[str, Tensor]:
        ids = words.draw(rows, seed=(seed << 20) + index)
        # Each token's label is the next one; the last of a row has none.
        return {"input_ids": ids.to(device), "labels": F.pad(ids[:, 1:], (0, 1), value=-100).to(device)}

    model: nn.Module
    loss_module: LinearCrossEntropy | None = None
    after_compile: Callable[[nn.Module], Any] | None = None
    if case.impl == "zoo":
        loss_module = LinearCrossEntropy()
        model = Features(base.zoo_model(LLM, config, weights, WEIGHTS.placements(config)).requires_grad_(True))
        if quantized(case):
            float8_products(model, LLMLayer)
        if checkpointed:  # nothing in a layer is random
            after_compile = functools.partial(checkpoint_regions, cls=LLMLayer, preserve_rng_state=False)
    else:
        model = llm_arms.build(config, weights).requires_grad_(True)
        if checkpointed:
            checkpoint_upstream(model)
        if case.impl == "upstream-tuned":
            llm_arms.without_mask(model)

    learning_rate = _RATE_TIMES_WIDTH / config.hidden_size
    checked = 6 if rows.length <= _LONG else 2

    def reference() -> Tensor:
        # In float32, saving only the layers' inputs: float64 with all activations would not fit.
        theirs = llm_arms.build(config, weights).requires_grad_(True).train()
        llm_arms.without_scores(theirs)
        checkpoint_upstream(theirs)
        training = base.Training(loss=loss_in_parts, batch=batch, learning_rate=learning_rate, checked=checked)
        return reference_losses(theirs, training, torch.float32)

    parameters = base.parameters_of(LLM, config)
    flops = llm_arms.flops(config, rows)
    if case.impl == "zoo" and quantized(case):
        # The floor is at bfloat16's peak rate. Float8 has twice that rate, so half of these products' FLOPs count.
        flops -= rows.batch * rows.length * config.num_hidden_layers * llm_arms.layer_matrices(config)
    return base.Prepared(
        model=model.train(),
        inputs={},
        compile_regions=base.upstream_regions(case, base.accelerated),
        reference=reference,
        reference_dtype="float32",
        # Three reads of the weight; a write and a read of the gradient; reads and writes of weight and two moments.
        bytes=parameters * dtype.itemsize * (3 + 2 + 6),
        bytes_formula=TRAINING_BYTES_FORMULA,
        flops=3 * flops,
        data=f"generated ({llm_arms.WORDS} words, each followed by one other in {llm_arms.FOLLOWED:.0%})",
        sizes={"batch": rows.batch, "length": rows.length, **base.encoder_sizes(LLM, config)},
        count=rows.batch * rows.length,
        unit="tokens",
        training=base.Training(
            loss=upstream_loss if loss_module is None else functools.partial(chunked_loss, loss_module),
            batch=batch,
            learning_rate=learning_rate,
            checked=checked,
            loss_module=loss_module,
            after_compile=after_compile,
        ),
    )


def training_memory(case: Case, config: LLMConfig, *, reference: bool) -> int:
    """Estimated peak: weights, gradients, two moments, saved activations, and logits if they are materialised."""
    rows, itemsize, parameters = task_of(case.input), base.dtype_of(case).itemsize, base.parameters_of(LLM, config)
    fed, layers = rows.batch * rows.length, config.num_hidden_layers
    alive = 6 * config.hidden_size + 4 * config.intermediate_size + 4 * config.num_attention_heads * config.head_dim
    checkpointed = case.model.endswith(CHECKPOINTED)
    kept = fed * (layers * config.hidden_size + alive if checkpointed else layers * alive)
    logits = fed * config.vocab_size * (2 * itemsize + 8)
    ours = 2 * 2048 * config.vocab_size * 4 + parameters * itemsize
    running = 4 * parameters * itemsize + kept * itemsize + (ours if case.impl == "zoo" else logits)
    alone = fed * (layers * config.hidden_size + alive) + 4 * REFERENCE_ROWS * config.vocab_size
    exact = 4 * (4 * parameters + alone)
    return max(running, 4 * parameters * itemsize + exact) if reference else running


class Features(nn.Module):
    """Both factors of the output product of the zoo's model, for a loss that computes the product itself."""

    regions = LLM.regions

    def __init__(self, model: LLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [B, T] -> [B, T, C] and [V, C]."""
        return self.model.output_product(input_ids)


def chunked_loss(product: LinearCrossEntropy, call: Any, batch: dict[str, Tensor]) -> Tensor:
    return product(*call(batch["input_ids"]), batch["labels"])


def upstream_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The library's own loss, which shifts the labels itself."""
    loss: Tensor = model(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss
    return loss


def loss_in_parts(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """:func:`upstream_loss` with the logits of some rows at a time, recomputed in the backward."""
    x = model.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state.flatten(0, 1)
    labels = batch["labels"].flatten()

    def part(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, model.lm_head.weight), labels, reduction="sum")

    parts = zip(x.split(REFERENCE_ROWS), labels.split(REFERENCE_ROWS), strict=True)
    total = torch.stack([checkpoint(part, *pair, use_reentrant=False) for pair in parts]).sum()
    return total / (labels != -100).sum()


def checkpoint_upstream(model: Any) -> None:
    """Activation checkpointing of every layer by the library's own switch."""
    # Newer releases deprecate the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


WORKLOAD = LlmWorkload()
