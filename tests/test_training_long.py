"""Training on the longest sequence that a language model has positions for: what it takes, and that it is right."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from zoo.llm import LLMLayer
from zoo.training import LinearCrossEntropy, TrainingStep, checkpoint_regions

SHORT = 256
# Of the model: weights, gradients and two moments in bfloat16, 10 GB; the rest is of 131,072 tokens.
MOST_BYTES = 40 << 30

CASES = [
    pytest.param("llm-debug", "cpu", "aot_eager"),
    pytest.param("llama-3.2-1b", "cuda", "inductor", marks=[pytest.mark.gpu, pytest.mark.slow]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "device", "backend"), CASES)
def test_all_positions_are_trained_on_and_no_token_sees_a_later_one(name: str, device: str, backend: str) -> None:
    torch.manual_seed(0)
    model = zoo.create(name, device=device, dtype=torch.bfloat16).train().requires_grad_(True)
    loss = LinearCrossEntropy()
    for module in (model, loss):
        zoo.compile_regions(module, backend=backend)
    checkpoint_regions(model, LLMLayer, preserve_rng_state=False)
    length = model.config.max_position_embeddings
    ids = torch.randint(64, (1, length), device=device)

    def loss_of(call: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(*call.output_product(batch[0]), batch[1])

    # Labels at the start alone: the rest of the sequence may be there or not.
    found = []
    for tokens in (SHORT, length):
        labels = F.pad(ids[:, 1:SHORT], (0, tokens - SHORT + 1), value=-100)
        loss_of(model, (ids[:, :tokens], labels)).backward()
        found.append({n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    short, long = found
    assert short.keys() == long.keys() == {n for n, _ in model.named_parameters()}
    for parameter, gradient in short.items():
        difference = (long[parameter] - gradient).norm() / gradient.norm()
        assert difference < 0.03, f"{parameter}: {difference:.3f}"
    del found, short, long

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rate = torch.tensor(1e-4, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=device == "cuda")
    step = TrainingStep(model, loss_of, optimizer, warmup=2, cuda_graph=True)
    batch = (ids, F.pad(ids[:, 1:], (0, 1), value=-100))
    losses = [step(batch).item() for _ in range(4)]
    assert losses[0] == pytest.approx(math.log(model.config.vocab_size), rel=0.1)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.01
    if device == "cuda":
        assert step.captured
        assert torch.cuda.max_memory_reserved() < MOST_BYTES, f"{torch.cuda.max_memory_reserved() / 2**30:.1f} GiB"
