"""transformers' arms: as its users would run it, at its documented best, and as the reference for correctness."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zoo.bert import BertConfig

# Rows that the reference takes at once: it writes scores out.
REFERENCE_ROWS = 16


def shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Of all weights under transformers' names."""
    from zoo.bert.convert import skeleton

    return {name: tuple(parameter.shape) for name, parameter in skeleton(config).named_parameters()}


def build(config: BertConfig, weights: Mapping[str, Tensor]) -> Any:
    """The library's model, ``BertModel`` or with a head, in eval mode with these weights, which become its own."""
    from zoo.bert.convert import reset_buffers, skeleton

    model = skeleton(config)
    model.load_state_dict(dict(weights), strict=True, assign=True)
    reset_buffers(model)
    return model.requires_grad_(False).eval()


class UpstreamStep(nn.Module):
    """One call of the library's model: of full rows all that it returns, of others what is pooled.

    Args:
        model: A model of :func:`build`.
        ready_mask: Hand over the mask as attention takes it, which the library documents. By its own means it looks
            at the mask in every call, and waits for the GPU, to find out whether it is needed.
    """

    def __init__(self, model: nn.Module, *, ready_mask: bool) -> None:
        super().__init__()
        self.model, self.ready_mask = model, ready_mask

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Ids and mask [B, T] -> hidden states [B, T, C] and pooled [B, C], or these alone."""
        if attention_mask is not None and self.ready_mask:
            output = self.model(input_ids, attention_mask=attention_mask.bool()[:, None, None])
        else:
            output = self.model(input_ids, attention_mask=attention_mask)
        pooled: Tensor = output.pooler_output
        return pooled if attention_mask is not None else (output.last_hidden_state, pooled)


@torch.no_grad()
def reference_output(
    config: BertConfig, weights: Mapping[str, Tensor], input_ids: Tensor, mask: Tensor | None
) -> Tensor:
    """What a step returns, as one vector: eager upstream in float64 on these weights, some rows at a time."""
    step = UpstreamStep(build(config, weights).double(), ready_mask=False)
    blocks = []
    for start in range(0, input_ids.shape[0], REFERENCE_ROWS):
        rows = slice(start, start + REFERENCE_ROWS)
        output = step(input_ids[rows], None if mask is None else mask[rows])
        blocks.append(output if isinstance(output, tuple) else (output,))
    return torch.cat([torch.cat(parts).flatten() for parts in zip(*blocks, strict=True)])
