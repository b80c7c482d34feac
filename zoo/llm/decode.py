"""One step of decoding, all of it on the device: what a CUDA graph is captured around.

Shapes: B batch, V vocabulary, S slots of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.llm.cache import KVCache
from zoo.llm.model import LLM
from zoo.llm.sampling import Sampling, sample
from zoo.ops.common import kernels_run

MOST_ENDS = 16


class DecodeState:
    """What a step reads and writes, in memory that never moves.

    Attributes:
        tokens: [B, 1], fed next.
        positions: [B, 1], theirs.
        finished: [B] bool, rows that have met an end token.
        step: [1], how many tokens were chosen.
        output: [S, B], the tokens chosen, by step.
        noise: [S, B], a uniform number for each draw.
        ends: [16], tokens that end a row; -1 where there are fewer.
        pad, temperature, top_k, top_p: scalars.
    """

    def __init__(self, batch: int, slots: int, device: torch.device) -> None:
        # Ordinary tensors whatever the caller's mode: see the cache.
        with torch.inference_mode(False), device:
            self.tokens = torch.zeros(batch, 1, dtype=torch.int64)
            self.positions = torch.zeros(batch, 1, dtype=torch.int64)
            self.finished = torch.zeros(batch, dtype=torch.bool)
            self.step = torch.zeros(1, dtype=torch.int64)
            self.output = torch.zeros(slots, batch, dtype=torch.int64)
            self.noise = torch.zeros(slots, batch)
            self.ends = torch.full((MOST_ENDS,), -1, dtype=torch.int64)
            self.pad = torch.zeros((), dtype=torch.int64)
            self.temperature = torch.ones(())
            self.top_k = torch.ones((), dtype=torch.int64)
            self.top_p = torch.ones(())

    def begin(self, sampling: Sampling, ends: tuple[int, ...], pad: int, noise: Tensor | None, vocab_size: int) -> None:
        """Set up a generation. No value of the settings is baked into a captured step."""
        self.finished.fill_(False)
        self.step.zero_()
        self.ends.copy_(torch.tensor([*ends, *([-1] * (MOST_ENDS - len(ends)))]))
        self.pad.fill_(pad)
        if noise is not None:
            self.temperature.fill_(sampling.temperature)
            self.top_k.fill_(sampling.top_k or vocab_size)
            # Rounding must not cut the tail off where all tokens are wanted.
            self.top_p.fill_(2.0 if sampling.top_p in (None, 1) else sampling.top_p)  # type: ignore[arg-type]
            self.noise[: noise.shape[0]].copy_(noise)

    def idle(self, positions: Tensor) -> None:
        """Let steps run without effect: rows that have ended write to the one slot given, [B, 1], and stay there."""
        self.finished.fill_(True)
        self.step.zero_()
        self.positions.copy_(positions)


def decode_step(model: LLM, cache: KVCache, state: DecodeState, greedy: bool) -> None:
    """Feed each row's last token and choose the next."""
    logits = model(state.tokens, position_ids=state.positions, cache=cache, logits_to_keep=1)
    accept(state, logits[:, -1], greedy)


def accept(state: DecodeState, logits: Tensor, greedy: bool) -> None:
    """Choose a token a row from logits [B, V], note it, and move on; rows that have ended get padding and stay.

    The greedy choice is the most likely token, the first of equals.
    """
    if greedy and kernels_run(logits):
        from zoo.ops.triton.greedy import accept_greedy

        accept_greedy(
            logits, state.tokens, state.positions, state.finished, state.step, state.output, state.ends, state.pad
        )
        return
    if greedy:
        token = logits.argmax(-1)
    else:
        uniform = state.noise.index_select(0, state.step)[0]
        token = sample(logits, state.temperature, state.top_k, state.top_p, uniform)
    token = torch.where(state.finished, state.pad, token)
    state.output.index_copy_(0, state.step, token[None])
    state.positions.add_((~state.finished)[:, None])
    state.finished.logical_or_((token[:, None] == state.ends).any(-1))
    state.tokens.copy_(token[:, None])
    state.step.add_(1)
