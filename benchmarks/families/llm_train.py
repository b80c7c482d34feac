"""Training of decoder language models: next tokens of sequences that can be learnt, in the weights' own dtype.

Shapes: B rows, T tokens, C width, V vocabulary.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.families import llm_arms
from benchmarks.families.base import Prepared, SeededWeights, Training, accelerated, dtype_of, zoo_model
from benchmarks.plan import Case
from benchmarks.training import reference_losses
from zoo.llm import LLM, LLMConfig, LLMLayer
from zoo.llm.convert import placements
from zoo.training import LinearCrossEntropy, checkpoint_regions

BYTES_FORMULA = (
    "Every weight is read in the forward and twice in the backward, its gradient written and read, and the optimizer "
    "reads and writes the weight and two moments. Left out, so that it is a lower bound: activations and logits."
)
# Times the width: wide models take smaller steps. 1e-4 at 2,048.
_RATE_TIMES_WIDTH = 0.2
CHECKPOINTED = "-checkpointed"
# Rows of more tokens are checked by two steps: the reference takes minutes for each.
_LONG = 16384
# The reference takes so many rows of logits at a time.
REFERENCE_ROWS = 4096
# So many tokens of the vocabulary occur, and each is followed by one other nine times out of ten.
_WORDS, _FOLLOWED = 512, 0.9

_INPUT = re.compile(r"(?P<batch>\d+)x(?P<length>\d+)")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What one step is given: B rows of T tokens."""

    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.batch * self.length


def rows_of(name: str) -> Rows | None:
    """The rows called ``BxT``; None if the name is another's."""
    found = _INPUT.fullmatch(name)
    if found is None or int(found["batch"]) < 1 or int(found["length"]) < 2:
        return None
    return Rows(batch=int(found["batch"]), length=int(found["length"]))


def cannot(case: Case, config: LLMConfig) -> str | None:
    """Why there is no such training, names that exist taken for granted; or None."""
    rows = rows_of(case.input)
    if rows is None:
        return f"{case.input} is an input of inference; training takes BxT: 4x2048"
    if rows.length > config.max_position_embeddings:
        return f"{case.input} needs {rows.length} positions, and {case.model} has {config.max_position_embeddings}"
    if case.model.endswith(CHECKPOINTED) and case.impl == "zoo" and case.strategy != "regional":
        return "activation checkpointing of the zoo is one of compiled regions; for others see upstream's"
    return None


def prepare(case: Case, config: LLMConfig, *, seed: int) -> Prepared:
    """Build model and batches on the device."""
    rows = rows_of(case.input)
    assert rows is not None
    device = torch.device(case.device)
    dtype = dtype_of(case)
    weights = SeededWeights(llm_arms.shapes(config), seed=seed, dtype=dtype, device=device)
    words = _Words(config.vocab_size, seed=seed)
    checkpointed = case.model.endswith(CHECKPOINTED)

    def batch(index: int) -> dict[str, Tensor]:
        ids = words.draw(rows, seed=(seed << 20) + index)
        # Each token's label is the next one; the last of a row has none.
        return {"input_ids": ids.to(device), "labels": F.pad(ids[:, 1:], (0, 1), value=-100).to(device)}

    model: nn.Module
    loss_module: LinearCrossEntropy | None = None
    compile_layers: Callable[..., nn.Module] | None = None
    after_compile: Callable[[nn.Module], Any] | None = None
    if case.impl == "zoo":
        loss_module = LinearCrossEntropy()
        model = Features(zoo_model(LLM, config, weights, placements(config)).requires_grad_(True))
        if checkpointed:
            after_compile = _checkpoint
    else:
        model = upstream(config, weights)
        if checkpointed:
            checkpoint_upstream(model)
        if case.impl == "upstream-tuned":
            llm_arms.without_mask(model)
        compile_layers = functools.partial(accelerated, raised_limit=case.impl == "upstream-tuned")

    learning_rate = _RATE_TIMES_WIDTH / config.hidden_size
    checked = 6 if rows.length <= _LONG else 2

    def reference() -> Tensor:
        # In float32, and with nothing but the layers' inputs kept: float64 and all activations would not fit.
        theirs = upstream(config, weights)
        llm_arms.without_scores(theirs)
        checkpoint_upstream(theirs)
        training = Training(loss=loss_in_parts, batch=batch, learning_rate=learning_rate, checked=checked)
        return reference_losses(theirs, training, torch.float32)

    parameters = llm_arms.parameters(config)
    return Prepared(
        model=model.train(),
        inputs={},
        compile_regions=compile_layers,
        reference=reference,
        reference_dtype="float32",
        # Weight, gradient and two moments: three reads of the weight, gradient written and read, all updated.
        bytes=parameters * dtype.itemsize * (3 + 2 + 6),
        bytes_formula=BYTES_FORMULA,
        flops=flops(config, rows),
        data=f"generated ({_WORDS} words, each followed by one other in {_FOLLOWED:.0%})",
        sizes={
            "batch": rows.batch,
            "length": rows.length,
            "layers": config.num_hidden_layers,
            "width": config.hidden_size,
            "parameters": parameters,
        },
        count=rows.tokens,
        unit="tokens",
        training=Training(
            loss=upstream_loss if loss_module is None else functools.partial(chunked_loss, loss_module),
            batch=batch,
            learning_rate=learning_rate,
            checked=checked,
            loss_module=loss_module,
            after_compile=after_compile,
        ),
    )


def flops(config: LLMConfig, rows: Rows) -> int:
    """Three times the forward: products of every token, logits of all of them, and the causal half of attention."""
    products = 2 * rows.tokens * (config.num_hidden_layers * llm_arms.layer_matrices(config))
    logits = 2 * rows.tokens * llm_arms.vocabulary(config)
    pairs = rows.tokens * (rows.length + 1) // 2
    attention = 4 * pairs * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 3 * (products + logits + attention)


def memory(case: Case, config: LLMConfig, *, reference: bool) -> int:
    """Estimated peak: weights, gradients, two moments, what layers keep, and the logits where they are held at all.

    The reference adds its own, in float32 with checkpointed layers, if it is asked for: any arm may compute it.
    """
    rows = rows_of(case.input)
    assert rows is not None
    itemsize = dtype_of(case).itemsize
    parameters = llm_arms.parameters(config)
    heads = config.num_attention_heads * config.head_dim
    alive = 6 * config.hidden_size + 4 * config.intermediate_size + 4 * heads
    layers = config.num_hidden_layers
    checkpointed = case.model.endswith(CHECKPOINTED)
    kept = rows.tokens * (layers * config.hidden_size + alive if checkpointed else layers * alive)
    logits = rows.tokens * config.vocab_size * (2 * itemsize + 8)
    ours = 2 * 2048 * config.vocab_size * 4 + parameters * itemsize
    running = 4 * parameters * itemsize + kept * itemsize + (ours if case.impl == "zoo" else logits)
    alone = rows.tokens * (layers * config.hidden_size + alive) + 4 * REFERENCE_ROWS * config.vocab_size
    exact = 4 * (4 * parameters + alone)
    return max(running, 4 * parameters * itemsize + exact) if reference else running


class Features(nn.Module):
    """What the zoo's model gives to a loss that takes the output product itself: both sides of it."""

    regions = LLM.regions

    def __init__(self, model: LLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [B, T] -> [B, T, C] and [V, C]."""
        return self.model.output_product(input_ids)


def chunked_loss(product: LinearCrossEntropy, call: Any, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next tokens, without all the logits."""
    loss: Tensor = product(*call(batch["input_ids"]), batch["labels"])
    return loss


def upstream(config: LLMConfig, weights: SeededWeights) -> nn.Module:
    """The library's model in training mode."""
    return llm_arms.build(config, weights).requires_grad_(True).train()


def upstream_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The library's own loss, which shifts the labels itself."""
    loss: Tensor = model(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss
    return loss


def loss_in_parts(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """What :func:`upstream_loss` gives, with the logits of some rows at a time, computed again in the backward."""
    x = model.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state.flatten(0, 1)
    labels = batch["labels"].flatten()

    def part(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, model.lm_head.weight), labels, reduction="sum")

    parts = zip(x.split(REFERENCE_ROWS), labels.split(REFERENCE_ROWS), strict=True)
    total = torch.stack([checkpoint(part, *pair, use_reentrant=False) for pair in parts]).sum()
    return total / (labels != -100).sum()


def checkpoint_upstream(model: Any) -> None:
    """Activation checkpointing by the library's own switch: every layer."""
    # The older name of it says in newer releases that it will go.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _checkpoint(model: nn.Module) -> None:
    # Nothing in a layer is random.
    checkpoint_regions(model, LLMLayer, preserve_rng_state=False)


class _Words:
    """Sequences with something to learn: few words of the vocabulary, most of them followed by one certain other."""

    def __init__(self, vocabulary: int, *, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = min(_WORDS, vocabulary)
        self.words = torch.randperm(vocabulary, generator=generator)[:count]
        self.next = torch.randperm(count, generator=generator)

    def draw(self, rows: Rows, *, seed: int) -> Tensor:
        """[B, T] int64 on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        count = len(self.words)
        drawn = torch.randint(count, (rows.batch, rows.length), generator=generator)
        follows = torch.rand(rows.batch, rows.length, generator=generator) < _FOLLOWED
        follows[:, 0] = False
        # Each token is so many steps behind the last one that was drawn freely; they are taken in powers of two.
        places = torch.arange(rows.length).expand(rows.batch, -1)
        free = places.masked_fill(follows, 0).cummax(1).values
        words, steps, jump = drawn.gather(1, free), places - free, self.next
        for bit in range(int(steps.max()).bit_length()):
            words = torch.where((steps >> bit) % 2 == 1, jump[words], words)
            jump = jump[jump]
        return self.words[words]
