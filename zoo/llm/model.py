"""A decoder-only language model: Llama, Mistral, Qwen2 and Qwen3.

    tokens [B, T] ─ embedding ─ layer ─ layer ─ ... ─ head ─▶ logits [B, T, V]
    positions [B, T] ─ rotary rows ─┴─ to every layer
    cache ── a tensor a layer ──────┘

What depends on positions and padding alone (rotary rows, masks) is done outside the regions, once a step. All layers
are one graph, whatever their number: what differs between them is weights and a tensor of the cache.

Shapes: B batch, T tokens, S slots of the cache, V vocabulary, C width, D width of a head.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo.engine.discover import Region
from zoo.llm.cache import KVCache, make_cache
from zoo.llm.checks import check_cache_size, check_call
from zoo.llm.config import LLMConfig
from zoo.llm.layer import LLMHead, LLMLayer
from zoo.llm.rope import RotaryTable
from zoo.modules import initialise

REGIONS = (
    Region(
        LLMLayer,
        graphs=1,
        why="equal blocks: one graph for prefill, one for a decode step, one for scoring, any depth",
    ),
    Region(
        LLMHead,
        graphs=1,
        why="the last norm and the widest product, on the positions that are kept",
    ),
)


class LLM(nn.Module):
    """A decoder-only language model.

    Args:
        config: An ``LLMConfig``.
    """

    regions: ClassVar[tuple[Region, ...]] = REGIONS
    static_arguments: ClassVar[tuple[str, ...]] = ("cache",)

    def __init__(self, config: LLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.rotary = RotaryTable(config)
        self.layers = nn.ModuleList(LLMLayer(config) for _ in range(config.num_hidden_layers))
        self.head = LLMHead(config)
        # Tied weights exist once: the head is handed the embedding's. No second name can come loose.
        self.lm_head = (
            None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.apply(initialise)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> Tensor:
        """Logits of the next token.

        Without a cache: scoring and training. With one: keys and values of the tokens are written into the slots of
        their positions, and each token sees the slots up to its own. Nothing waits for the device.

        Args:
            input_ids: [B, T] integers.
            attention_mask: [B, T], 0 where a token is padding, on either side; not with a cache.
            position_ids: [B, T] or [1, T] int64, each below ``max_position_embeddings`` and the cache's slots;
                0 to T - 1 when left out, which is the fastest way to start a prompt.
            cache: From ``make_cache``; needs ``no_grad`` or ``inference_mode``.
            logits_to_keep: Which positions get logits: 0 for all, n for the last n, a tensor of indices [L] for the
                same in all rows (these as in transformers), or [B, L] for each row's own.

        Returns:
            [B, T or L, V].

        Raises:
            TypeError, ValueError: If an input does not fit, before anything runs.
        """
        check_call(self, input_ids, attention_mask, position_ids, cache, logits_to_keep)
        x = self._run_layers(input_ids, attention_mask, position_ids, cache)
        return self.head(_kept(x, logits_to_keep), self.output_weight)

    def features(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """What the output product is taken of: ``F.linear(model.features(ids), model.output_weight)`` are the logits.

        For a loss that never holds all of them, as ``zoo.training.LinearCrossEntropy``.

        Args:
            input_ids: As ``forward`` takes them, without a cache.
            attention_mask: The same.
            position_ids: The same.

        Returns:
            [B, T, C].

        Raises:
            TypeError, ValueError: If an input does not fit, before anything runs.
        """
        check_call(self, input_ids, attention_mask, position_ids, None, 0)
        return self.head(self._run_layers(input_ids, attention_mask, position_ids, None), None)

    def output_product(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both sides of the output product: ``F.linear(*model.output_product(ids))`` are the logits.

        Takes and returns what ``features`` does, and ``output_weight`` [V, C] beside.
        """
        weight = self.output_weight
        # A reentrant checkpoint would make the parameter itself an output of its own.
        weight = weight if torch.is_grad_enabled() else weight.detach()
        return self.features(input_ids, attention_mask, position_ids), weight

    def _run_layers(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: KVCache | None,
    ) -> Tensor:
        """All before the head: [B, T] -> [B, T, C]."""
        x = self.embed_tokens(input_ids)
        batch, tokens = input_ids.shape
        if cache is not None and x.requires_grad:
            raise ValueError(
                "a cache is written in place and passes no gradients on: call the model under torch.inference_mode() "
                "or torch.no_grad(), or leave out the cache"
            )
        positions = position_ids
        if positions is None:
            positions = torch.arange(tokens, device=x.device)[None]
        mask = None
        if cache is None:
            mask = token_mask(tokens, attention_mask, self.config.sliding_window, x.device)
        else:
            positions = positions.expand(batch, tokens).long().contiguous()
        rotary = self.rotary(positions)
        window = self.config.sliding_window
        from_start = position_ids is None and tokens > 1 and (window is None or tokens <= window)
        for index, layer in enumerate(self.layers):
            if cache is None:
                x = layer(x, rotary, mask)
            else:
                held = cache.layers[index]
                x = layer(x, rotary, None, positions, held, from_start and held.dtype == x.dtype)
        return x

    @property
    def output_weight(self) -> Tensor:
        """Vectors of the vocabulary in the output product, [V, C]: the embedding's where they are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def make_cache(
        self,
        batch: int,
        slots: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """An empty cache for this model.

        Args:
            batch: Rows.
            slots: Tokens a row, at most ``max_position_embeddings``.
            dtype: Of keys and values; the weights' when left out.
            device: The weights' when left out.

        Raises:
            ValueError: If a size is not positive or ``slots`` is more than the model has positions.
        """
        check_cache_size(self.config, batch, slots)
        weight = self.embed_tokens.weight
        return make_cache(
            layers=self.config.num_hidden_layers,
            batch=batch,
            key_heads=self.config.num_key_value_heads,
            slots=slots,
            width=self.config.head_dim,
            dtype=dtype or weight.dtype,
            device=torch.device(device) if device is not None else weight.device,
        )


def _kept(x: Tensor, which: int | Tensor) -> Tensor:
    """The positions of x [B, T, C] that get logits, laid out anew: prefill and decoding share the head's graph."""
    if isinstance(which, int):
        # Not contiguous(): of one row the last position is, with the strides of the whole.
        return x if which in (0, x.shape[1]) else x[:, -which:].clone(memory_format=torch.contiguous_format)
    if which.dim() == 1:
        return x[:, which]
    return x.gather(1, which[..., None].expand(-1, -1, x.shape[-1]))


def token_mask(tokens: int, attention_mask: Tensor | None, window: int | None, device: torch.device) -> Tensor | None:
    """The mask of ``attend_tokens``; None where plain causal attention is meant.

    Args:
        tokens: T.
        attention_mask: [B, T], 0 where a token is padding; or None.
        window: How many last tokens are seen; None for all.
        device: Where.
    """
    if window is not None and window >= tokens:
        window = None
    if attention_mask is None and window is None:
        return None
    index = torch.arange(tokens, device=device)
    distance = index[:, None] - index
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    mask = mask[None, None]
    if attention_mask is not None:
        # Padding sees itself: a row that sees nothing would be NaN, and poison all rows through its value.
        mask = (mask & attention_mask.bool()[:, None, None]) | (distance == 0)
    return mask
