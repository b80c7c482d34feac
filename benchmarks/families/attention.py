"""Attention alone, written in several ways, each a model of this family: what stands behind the choice of the zoo.

Shapes: as in attention_choices.py, and L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.families import bert_arms
from benchmarks.families.attention_choices import CHOICES, DECODE, PACKED, Choice, offsets_of
from benchmarks.families.base import Prepared, Workload, dtype_of
from benchmarks.plan import Case
from zoo.engine.region import Region

DECODE_BYTES_FORMULA = (
    "Of every layer the new tokens are read, keys and values of the slots that are seen are read once, and mixed "
    "values are written."
)
PACKED_BYTES_FORMULA = "Of every layer queries, keys and values are read once and mixed values written, of no padding."


@dataclass(frozen=True, kw_only=True)
class Decode:
    """One new token a row; half of the slots are filled on average, rows evenly spread from a quarter to three."""

    rows: int
    slots: int
    layers: int
    heads: int
    key_heads: int
    width: int

    def positions(self) -> Tensor:
        """[B] int64."""
        share = (torch.arange(self.rows) + 0.5) / self.rows
        return ((0.25 + 0.5 * share) * self.slots).long() - 1

    @property
    def seen(self) -> int:
        """Slots that are read, of all rows."""
        return int(self.positions().sum()) + self.rows


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Rows of unequal lengths, as BERT's benchmark draws them."""

    input: str
    layers: int
    heads: int
    width: int

    def lengths(self) -> Tensor:
        """[B] int64, in an order that is random and always the same."""
        lengths = torch.tensor(bert_arms.task(self.input).lengths())
        return lengths[torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))]


DECODE_INPUTS = {
    "1b-1x1024": Decode(rows=1, slots=1024, layers=16, heads=32, key_heads=8, width=64),
    "1b-32x1024": Decode(rows=32, slots=1024, layers=16, heads=32, key_heads=8, width=64),
    "8b-1x1024": Decode(rows=1, slots=1024, layers=32, heads=32, key_heads=8, width=128),
    "8b-32x1024": Decode(rows=32, slots=1024, layers=32, heads=32, key_heads=8, width=128),
    "small-3x256": Decode(rows=3, slots=256, layers=2, heads=4, key_heads=2, width=32),
}
PACKED_INPUTS = {
    "skewed-64x512": Packed(input="skewed-64x512", layers=12, heads=12, width=64),
    "skewed-4x32": Packed(input="skewed-4x32", layers=2, heads=2, width=16),
}
_ONE_BUFFER = "the compiler's flex_attention takes no queries, keys and values that are parts of one tensor"
_NOT_COMPILED_ON_A_CPU = {
    "decode-flex": _ONE_BUFFER,
    "packed-flex": _ONE_BUFFER,
    "packed-nested": "torch splits nested tensors by their lengths, which it cannot trace",
}
_FOR_CPU = ("small-3x256", "skewed-4x32")


class Attention(nn.Module):
    """The attention of one layer."""

    def __init__(self, choice: Choice, heads: int) -> None:
        super().__init__()
        self.attend, self.heads = choice.attend, heads

    def forward(self, tokens: Tensor, cache: Tensor | None, ready: Any) -> Tensor:
        """What the layer holds, and what all layers share -> mixed values."""
        return self.attend(self.heads, tokens, cache, ready)


class Layers(nn.Module):
    """The attentions of all layers of a model, each with tokens of its own, so that no cache of the chip holds them."""

    regions: ClassVar[tuple[Region, ...]] = (Region(Attention, graphs=1, why="one attention, the same in all layers"),)

    def __init__(
        self, choice: Choice, heads: int, tokens: list[Tensor], caches: list[Tensor | None], lengths: Tensor
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(choice, heads) for _ in tokens)
        self.tokens, self.caches = tokens, caches
        # As buffers of the model they say which device it is on: the outer CUDA graph asks.
        for index, held in enumerate(zip(tokens, caches, strict=True)):
            self.register_buffer(f"tokens_{index}", held[0], persistent=False)
            self.register_buffer(f"cache_{index}", held[1], persistent=False)
        self.ready = choice.ready(lengths, tokens[0], caches[0])

    def forward(self) -> tuple[Tensor, ...]:
        """Mixed values of each layer."""
        held = zip(self.layers, self.tokens, self.caches, strict=True)
        return tuple(layer(tokens, cache, self.ready) for layer, tokens, cache in held)


class AttentionWorkload(Workload):
    """Inference on random queries, keys and values; a call is the attention of all layers of a model.

    ``decode-*`` models on ``1b-BxS`` and ``8b-BxS``, the heads and layers of Llama of that size: one new token for each
    of B rows over a cache of S slots. ``packed-*`` models on ``skewed-BxT``: BERT-base's heads and layers. What a
    choice needs once a step for all layers, a mask or a block mask, is made before, and is not in the time.
    """

    family = "attention"
    models = tuple(CHOICES)
    inputs = (*DECODE_INPUTS, *PACKED_INPUTS)
    cpu_race = ("decode-sdpa-gqa", "small-3x256")
    gpu_races = (
        *((model, name) for name in DECODE_INPUTS if name not in _FOR_CPU for model in DECODE),
        *((model, "skewed-64x512") for model in PACKED),
    )

    def cannot(self, case: Case) -> str | None:
        if case.implementation != "zoo":
            return "each choice is a model of this family, and has no other implementation"
        if case.strategy in ("full", "hierarchical"):
            return f"nothing stands between two attentions that {case.strategy} could compile with them"
        known = DECODE_INPUTS if case.model in DECODE else PACKED_INPUTS
        if case.input not in known:
            return f"{case.model} has the inputs {', '.join(known)}"
        if case.model == "packed-varlen" and (case.device == "cpu" or case.dtype == "float32"):
            return "torch's variable-length attention takes half precision on a GPU"
        if case.device == "cpu" and case.strategy != "eager" and case.model in _NOT_COMPILED_ON_A_CPU:
            return f"on a CPU {_NOT_COMPILED_ON_A_CPU[case.model]}"
        return None

    def estimate(self, case: Case, *, reference: bool) -> int:
        """Estimated peak device memory of the case in bytes, the float64 reference of a layer included."""
        itemsize = dtype_of(case).itemsize
        if case.input in DECODE_INPUTS:
            task = DECODE_INPUTS[case.input]
            cache = 2 * task.rows * task.key_heads * task.slots * task.width
            repeated = cache * task.heads // task.key_heads
            return (task.layers + 1) * cache * itemsize + 2 * repeated * itemsize + 4 * 8 * cache
        packed, rows = PACKED_INPUTS[case.input], bert_arms.task(case.input)
        values = 4 * rows.batch * rows.length * packed.heads * packed.width
        # A block mask is made of a mask of all tokens with all.
        mask = 8 * rows.tokens**2 if case.model == "packed-flex" else 0
        return (packed.layers + 1) * values * itemsize + 2 * packed.layers * values * 8 // 4 + mask

    def build(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        if case.input in DECODE_INPUTS:
            return _decode(case, DECODE_INPUTS[case.input], seed)
        return _packed(case, PACKED_INPUTS[case.input], seed)


def _decode(case: Case, task: Decode, seed: int) -> Prepared:
    device, dtype = torch.device(case.device), dtype_of(case)
    generator = torch.Generator(device).manual_seed(seed)
    positions = task.positions().to(device)
    row = torch.arange(task.rows, device=device)
    tokens: list[Tensor] = []
    caches: list[Tensor | None] = []
    for _ in range(task.layers):
        shape = (2, task.rows, task.key_heads, task.slots, task.width)
        cache = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        query = torch.randn(task.rows, task.heads, task.width, generator=generator, device=device, dtype=dtype)
        tokens.append(torch.cat([query, *cache[:, row, :, positions].unbind(1)], dim=1).flatten(1))
        caches.append(cache)
    layers = Layers(CHOICES[case.model], task.heads, tokens, caches, positions)

    def reference() -> Tensor:
        return torch.stack([_decoded(task, *held, positions) for held in zip(tokens, caches, strict=True)])

    written = task.rows * task.heads * task.width
    read = written + 2 * task.rows * task.key_heads * task.width + 2 * task.seen * task.key_heads * task.width
    return Prepared(
        model=layers.eval(),
        inputs={},
        reference=reference,
        bytes=task.layers * (read + written) * dtype.itemsize,
        bytes_formula=DECODE_BYTES_FORMULA,
        flops=task.layers * 4 * task.seen * task.heads * task.width,
        data="generated (normal, half of the slots filled)",
        sizes={
            "rows": task.rows,
            "slots": task.slots,
            "filled": task.seen,
            "layers": task.layers,
            "heads": task.heads,
            "key_heads": task.key_heads,
            "width": task.width,
        },
    )


def _decoded(task: Decode, tokens: Tensor, cache: Tensor | None, positions: Tensor) -> Tensor:
    """A layer in float64: [B, H D]."""
    assert cache is not None
    query = tokens.double().unflatten(1, (-1, task.width))[:, : task.heads].unflatten(1, (task.key_heads, -1))
    key, value = cache.double()
    scores = torch.einsum("bkgd,bksd->bkgs", query, key) * task.width**-0.5
    hidden = torch.arange(task.slots, device=positions.device) > positions[:, None]
    share = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("bkgs,bksd->bkgd", share, value).flatten(1)


def _packed(case: Case, task: Packed, seed: int) -> Prepared:
    device, dtype = torch.device(case.device), dtype_of(case)
    generator = torch.Generator(device).manual_seed(seed)
    choice, lengths = CHOICES[case.model], task.lengths().to(device)
    columns, longest = task.heads * task.width, bert_arms.task(task.input).length
    there = torch.arange(longest, device=device) < lengths[:, None]
    tokens: list[Tensor] = []
    # As a product leaves them in this mode: torch makes no nested view of another mode's tensor.
    with torch.inference_mode():
        for _ in range(task.layers):
            shape = (int(lengths.sum()), 3 * columns)
            drawn = torch.randn(shape, generator=generator, device=device, dtype=dtype)
            tokens.append(_arranged(drawn, choice, there))
    layers = Layers(choice, task.heads, tokens, [None] * task.layers, lengths)

    def reference() -> Tensor:
        outputs = []
        for given in tokens:
            if choice.layout == "padded":
                # What stands where no token is has zeros for queries: the mean of its row.
                means = given.double()[..., 2 * columns :].sum(1) / lengths[:, None]
                packed = _padded(_attended(task, given[there], lengths), there)
                outputs.append(torch.where(there[..., None], packed, means[:, None]))
            else:
                plain = given.transpose(0, 1).flatten(1) if choice.layout == "apart" else given
                outputs.append(_attended(task, plain, lengths))
        return torch.stack(outputs)

    return Prepared(
        model=layers.eval(),
        inputs={},
        reference=reference,
        bytes=task.layers * 4 * int(lengths.sum()) * columns * dtype.itemsize,
        bytes_formula=PACKED_BYTES_FORMULA,
        flops=task.layers * 4 * columns * int((lengths**2).sum()),
        data="generated (normal, skewed lengths)",
        sizes={
            "rows": len(lengths),
            "length": longest,
            "tokens": int(lengths.sum()),
            "layers": task.layers,
            "heads": task.heads,
            "width": task.width,
        },
    )


def _arranged(packed: Tensor, choice: Choice, there: Tensor) -> Tensor:
    """Queries, keys and values [N, 3 C] as the choice is given them."""
    if choice.layout == "apart":
        return packed.unflatten(1, (3, -1)).transpose(0, 1).contiguous()
    return _padded(packed, there) if choice.layout == "padded" else packed


def _padded(packed: Tensor, there: Tensor) -> Tensor:
    """[N, ...] to [B, T, ...], zeros where no token is."""
    padded = packed.new_zeros(*there.shape, *packed.shape[1:])
    padded[there] = packed
    return padded


def _attended(task: Packed, tokens: Tensor, lengths: Tensor) -> Tensor:
    """A layer in float64, row by row: [N, 3 C] -> [N, C]."""
    rows = []
    for begin, end in pairwise(offsets_of(lengths).tolist()):
        query, key, value = tokens[begin:end].double().unflatten(1, (3, task.heads, task.width)).permute(1, 2, 0, 3)
        share = (query @ key.transpose(1, 2) * task.width**-0.5).softmax(-1)
        rows.append((share @ value).transpose(0, 1).flatten(1))
    return torch.cat(rows)


WORKLOAD = AttentionWorkload()
