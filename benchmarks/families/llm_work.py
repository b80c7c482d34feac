"""What a decoder must do and hold, as formulas: floating-point operations, bytes moved, memory.

Legend: B batch, T tokens of a prompt, S slots of a cache, C width, I width inside the MLP, H query heads, K key and
value heads, D width of a head, V vocabulary, L layers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from zoo.llm import LLMConfig

BYTES_FORMULA = (
    "Every weight is read once, the embedding only where the output product shares it, since of its own only the rows "
    "of the tokens are read, which are left out; a decoding step reads the keys and values of the slots before its "
    "position, three quarters of the cache on average, and writes those of its token; a prefill writes those of its "
    "prompt; an answer is both, one after the other; the logits of last tokens are written. Activations are taken to "
    "stay in the caches of the chip."
)
# Where a call's CUDA context, its libraries' work space and the compiler's buffers go.
_PROCESS_BYTES = 1 << 30

_INPUT = re.compile(r"(?P<kind>decode|prefill|answer)-(?P<batch>\d+)x(?P<length>\d+)")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one call does.

    Args:
        kind: ``decode``: one token for each row, over a cache that is half full at least. ``prefill``: a prompt from
            its first token on. ``answer``: a prompt, and one token more over the cache that it left.
        batch: Rows.
        length: Slots of the cache (decode) or tokens of the prompt (prefill, answer).
    """

    kind: str
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens that one call feeds in each row."""
        return {"decode": 1, "prefill": self.length, "answer": self.length + 1}[self.kind]

    @property
    def slots(self) -> int:
        """Slots of the cache: a prompt leaves as much room for an answer as it takes."""
        return self.length if self.kind == "decode" else 2 * self.length

    @property
    def first(self) -> int:
        """Position of the first token that is fed."""
        return self.length // 2 if self.kind == "decode" else 0

    @property
    def stride(self) -> int:
        """How far a decoding step moves on in the upper half of the cache, round and round.

        Near the golden section and without a common divisor, so that all positions are met, and any few steps on end
        meet early and late ones alike: rounds of a race then hold equal work.
        """
        half = self.length - self.first
        steps = (step for step in range(1, half) if math.gcd(step, half) == 1)
        return min(steps, key=lambda step: abs(step - 0.618 * half))

    @property
    def seen(self) -> float:
        """Tokens that a token attends to, itself included, on average over the tokens of all calls."""
        last = self.length if self.kind == "answer" else self.length - 1
        return (self.first + last) / 2 + 1

    @property
    def passes(self) -> int:
        """How often a call goes through the model."""
        return 2 if self.kind == "answer" else 1


def task(name: str) -> Task:
    """The task called ``decode-BxS``, ``prefill-BxT`` or ``answer-BxT``.

    Raises:
        ValueError: If the name is none of them.
    """
    found = _INPUT.fullmatch(name)
    if found is None or int(found["batch"]) < 1 or int(found["length"]) < 4:
        raise ValueError(
            f"input {name!r} is none of decode-BATCHxSLOTS, prefill-BATCHxTOKENS and answer-BATCHxTOKENS (4 or more)"
        )
    return Task(kind=found["kind"], batch=int(found["batch"]), length=int(found["length"]))


def layer_matrices(config: LLMConfig) -> int:
    """Weights of one layer's products."""
    attention = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    return config.hidden_size * (attention + 3 * config.intermediate_size)


def vocabulary(config: LLMConfig) -> int:
    """Weights of the output product."""
    return config.vocab_size * config.hidden_size


def parameters(config: LLMConfig) -> int:
    """All weights; tied ones once."""
    norms = 2 * config.hidden_size + (2 * config.head_dim if config.qk_norm else 0)
    biases = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim if config.qkv_bias else 0
    layers = config.num_hidden_layers * (layer_matrices(config) + norms + biases)
    tables = vocabulary(config) * (1 if config.tie_word_embeddings else 2)
    return layers + config.hidden_size + tables


def flops(config: LLMConfig, task: Task) -> int:
    """Multiply-adds counted as two: products of every token, the output product of the last, scores and their sums.

    Attention counts the pairs that are seen: of a prompt half of all. Element-wise work is not counted, as torch's own
    counter does not.
    """
    fed = task.batch * task.tokens
    outputs = task.passes * task.batch
    products = 2 * fed * config.num_hidden_layers * layer_matrices(config) + 2 * outputs * vocabulary(config)
    pairs = round(fed * task.seen)
    return products + 4 * pairs * config.num_hidden_layers * config.num_attention_heads * config.head_dim


def bytes_moved(config: LLMConfig, task: Task, itemsize: int) -> int:
    """Fewest bytes that one call moves through device memory, as :data:`BYTES_FORMULA` says."""
    weights = parameters(config) - (0 if config.tie_word_embeddings else vocabulary(config))
    # A decoding step reads what lies before its token and writes its own; a prefill reads its own from the chip.
    slots = {"decode": task.seen, "prefill": task.length, "answer": 2 * task.length + 1}[task.kind]
    logits = task.batch * config.vocab_size
    return round((task.passes * (weights + logits) + task.batch * slots * slot_values(config)) * itemsize)


def slot_values(config: LLMConfig) -> int:
    """Keys and values of one token, of all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def memory(config: LLMConfig, task: Task, itemsize: int, *, cached: bool, mask: bool) -> int:
    """Peak memory of an arm: weights, cache, and what is alive at once around a layer or the output product.

    Args:
        config: The model.
        task: What a call does.
        itemsize: Bytes a value.
        cached: Whether there is a cache.
        mask: Whether attention gets a mask as wide as the cache, which torch turns into numbers.
    """
    fed = task.batch * task.tokens
    wide = 3 * config.hidden_size + 4 * config.intermediate_size
    wide += 4 * config.num_attention_heads * config.head_dim
    alive = fed * wide + 3 * task.batch * config.vocab_size
    held = parameters(config) + (task.batch * task.slots * slot_values(config) if cached else 0)
    masks = 0
    if mask:
        groups = config.num_attention_heads // config.num_key_value_heads
        masks = fed * groups * task.slots * (1 + itemsize)
    return (held + alive) * itemsize + masks + _PROCESS_BYTES


def reference_memory(config: LLMConfig, task: Task) -> int:
    """Peak memory of the float32 reference, which holds one layer, or the output product, at a time."""
    fed = task.batch * task.tokens
    largest = max(layer_matrices(config), 2 * vocabulary(config))
    past = 2 * 2 * task.batch * task.slots * config.num_key_value_heads * config.head_dim
    return 4 * (largest + past + fed * (4 * config.hidden_size + 4 * config.intermediate_size))
