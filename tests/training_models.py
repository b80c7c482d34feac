"""A small model, its batches and a plain training loop, for the tests of the training step."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def build(device: str = "cpu", dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4)).to(device).train()


def optimizer_of(model: nn.Module, kind: str = "adamw", rate: float = 1e-2) -> torch.optim.Optimizer:
    device = next(model.parameters()).device.type
    # As a CUDA graph wants them; on a CPU a plain number is as good.
    tensor_rate = torch.tensor(rate, device=device) if device == "cuda" else rate
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=tensor_rate, fused=True, capturable=device == "cuda")
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=tensor_rate, momentum=0.9, fused=True)
    assert kind == "plain"
    return torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def draw(count: int, rows: int = 6, seed: int = 0, device: str = "cpu") -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows, 8, generator=generator).to(device),
            torch.randint(4, (rows,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def plain_losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, updates: list[list[Batch]], clip_norm: float | None = None
) -> list[float]:
    losses = []
    for batches in updates:
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = loss_of(model, batch) / len(batches)
            loss.backward()
            total += loss.item()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(total)
    return losses


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(model, batch) * self.factor.exp() - self.factor
