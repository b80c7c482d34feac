"""Activation checkpointing of compiled blocks: less is kept, nothing else changes, no graph is added."""

import copy

import pytest
import torch
from blocks import Block, Stack
from torch import Tensor, nn

import zoo
from zoo.training import TrainingStep, capture_obstacles, checkpoint_regions
from zoo.training.checkpointing import restores_random_state


class DroppingBlock(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.linear(x)))


def compiled(device: str = "cpu", block: type[nn.Module] = Block) -> nn.Module:
    torch.manual_seed(0)
    model = Stack(depth=4)
    if block is not Block:
        model.blocks = nn.ModuleList(block() for _ in range(4))
    return zoo.compile_regions(model.to(device).train(), regions=[block], backend="aot_eager")


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


def kept_bytes(model: nn.Module, *args: Tensor, **inputs: Tensor) -> int:
    """What the forward keeps for the backward, weights apart."""
    weights = {p.data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*args, **inputs)
    del output
    return sum(kept.values())


@pytest.mark.parametrize("every", [1, 2, 3, 9])
@pytest.mark.parametrize("block", [Block, DroppingBlock])
def test_gradients_do_not_change(device: str, every: int, block: type[nn.Module]):
    x = torch.randn(2, 4, device=device)
    model = compiled(device, block)
    expected = gradients(model, x)
    checkpoint_regions(model, block, every=every)
    torch.testing.assert_close(gradients(model, x), expected)


BLOCKS = {
    "bert-debug": "BertLayer", "llm-debug": "LLMLayer", "gcn-debug": "GNNLayer", "gat-debug": "GNNLayer",
    "resnet-debug": "Bottleneck", "unet-debug": "TransformerBlock", "unet-xl-debug": "ResnetBlock",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "block"), BLOCKS.items())
def test_blocks_of_every_family_are_checkpointed_whether_regions_or_around_some(name: str, block: str) -> None:
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = zoo.create(name).train().requires_grad_(True)
        inputs = zoo.example_inputs(model)
        zoo.compile_regions(model, backend="aot_eager")
        if checkpointed:
            cls = next(type(module) for module in model.modules() if type(module).__name__ == block)
            assert checkpoint_regions(model, cls) is model
        for _ in range(2):
            torch.manual_seed(1)
            with zoo.enforce_budget(model):
                output = model(**inputs)
                output = output if isinstance(output, Tensor) else output[0]
                output.float().square().mean().backward()
        found.append(([p.grad for p in model.parameters()], {n: b.clone() for n, b in model.named_buffers()}))
        torch.compiler.reset()
    torch.testing.assert_close(found[1], found[0])


def test_running_statistics_are_moved_once_and_where_they_are() -> None:
    model = zoo.create("resnet-debug").train().requires_grad_(True)
    inputs, reference = zoo.example_inputs(model), copy.deepcopy(model)
    zoo.compile_regions(model, backend="aot_eager")
    regions = {type(module) for module in model.modules() if module._compiled_call_impl is not None}
    assert len(regions) > 2
    for cls in regions:
        checkpoint_regions(model, cls, preserve_rng_state=False)
    before = [buffer.data_ptr() for buffer in model.buffers()]
    for each in (model, reference):
        loss = each(**inputs).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))
    assert [buffer.data_ptr() for buffer in model.buffers()] == before


def test_less_is_kept():
    x = torch.randn(64, 4)
    model = compiled()
    all_kept = kept_bytes(model, x)
    checkpoint_regions(model, Block, every=2)
    half = kept_bytes(model, x)
    zoo.uncompile(model)
    zoo.compile_regions(model, backend="aot_eager")
    checkpoint_regions(model, Block)
    assert kept_bytes(model, x) < half < all_kept


def test_uncompile_undoes_it():
    model = checkpoint_regions(compiled(), Block)
    assert restores_random_state(model)
    with zoo.enforce_budget(model):
        assert restores_random_state(model)
        model(torch.randn(2, 4))
    zoo.uncompile(model)
    assert not any(module._compiled_call_impl for module in model.modules())
    assert not restores_random_state(model)


@pytest.mark.gpu
@pytest.mark.parametrize("preserves", [True, False])
def test_random_state_that_is_restored_stands_in_the_way_of_a_capture(preserves: bool):
    model = checkpoint_regions(compiled("cuda"), Block, preserve_rng_state=preserves)
    rate = torch.tensor(1e-3, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    obstacles = capture_obstacles(model, optimizer)
    assert any("preserve_rng_state=False" in obstacle for obstacle in obstacles) == preserves
    if not preserves:
        step = TrainingStep(model, lambda m, x: m(x).square().mean(), optimizer, cuda_graph=True)
        losses = [step(torch.randn(2, 4, device="cuda")).item() for _ in range(8)]
        assert step.captured and all(loss > 0 for loss in losses)
