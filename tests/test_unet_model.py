"""The regions in every mode, size and cut; channels_last wherever weights come from; every bad input and its error."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from tests.blocks import Doubled
from zoo.engine.captured import side_stream
from zoo.unet import ResnetBlock, TransformerBlock, UNet
from zoo.unet.blocks import PRESETS
from zoo.unet.model import sinusoids


def make(name: str, **changes: Any) -> UNet:
    return zoo.create(name, **changes)


@pytest.mark.parametrize(("name", "resnets", "transformers"), [("sd15", 14, 4), ("sd21", 14, 4), ("sdxl", 12, 2)])
def test_regions_of_full_size_models_take_few_graphs(name: str, resnets: int, transformers: int) -> None:
    with torch.device("meta"):
        model = UNet(PRESETS[name])
    report = zoo.find_regions(model)
    parts = [model.get_submodule(part) for found in report.regions for part in found.modules]
    assert sum(found.budget for found in report.regions) <= 20
    # The layout of what a convolution gives is not known on this device, so that shapes are counted.
    shapes: dict[type, set[Any]] = {ResnetBlock: set(), TransformerBlock: set()}
    for part in parts:
        if type(part) in shapes:
            part.register_forward_pre_hook(lambda block, given: shapes[type(block)].add(_shapes_of(given, block)))
    inputs = torch.utils._pytree.tree_map(lambda x: x.to("meta"), zoo.example_inputs(model))
    with torch.inference_mode():
        model(**inputs)
    assert [len(each) for each in shapes.values()] == [resnets, transformers]


def _shapes_of(given: Any, block: nn.Module) -> Any:
    tensors = (*given, *block.parameters())
    return tuple(tuple(each.shape) if isinstance(each, Tensor) else None for each in tensors)


class Dispatched(TorchDispatchMode):
    """Inside of it operators are counted by their names: ``aten::add``."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def test_a_backward_fills_nothing_with_zeros() -> None:
    model = make("unet-debug").train()
    loss = model(**zoo.example_inputs(model)).sample.square().mean()
    with Dispatched() as dispatched:
        loss.backward()
    # Of queries, keys and values cut out one by one each would fill a gradient of all three, which are added up.
    attended = sum(isinstance(module, TransformerBlock) for module in model.modules())
    assert dispatched.ran["aten::stack"] == 2 * attended > 0
    assert not any("zero" in name or "select_backward" in name for name in dispatched.ran)


# --- channels_last ---


@pytest.mark.parametrize("freq_shift", [0, 1])
@pytest.mark.parametrize("cosines_first", [False, True])
def test_sines_of_timesteps_are_diffusers_to_the_bit(cosines_first: bool, freq_shift: int) -> None:
    from diffusers.models.embeddings import get_timestep_embedding

    timesteps = torch.tensor([0, 1, 803, 999])
    for width in (6, 7, 320):
        expected = get_timestep_embedding(timesteps, width, cosines_first, freq_shift)
        assert torch.equal(sinusoids(timesteps, width, cosines_first, freq_shift), expected)


# --- what is refused ---


@pytest.mark.parametrize("name", ["qkv", "query", "text_out", "mlp_in", "mlp_out", "self_out"])
def test_a_replaced_product_is_called(name: str) -> None:
    torch.manual_seed(0)
    block = TransformerBlock(8, 2)
    x, key = torch.randn(6, 8), torch.randn(2, 5, 16)
    plain = getattr(block, name)
    heard: list[int] = []
    with torch.inference_mode():
        before = block(x.clone(), key)
        handle = plain.register_forward_hook(lambda *_: heard.append(1))
        torch.testing.assert_close(block(x.clone(), key), before)
        assert heard == [1]
        handle.remove()
        adapted = Doubled(plain.in_features, plain.out_features, plain.bias is not None)
        adapted.load_state_dict(plain.state_dict())
        setattr(block, name, adapted)
        found = block(x.clone(), key)
        twice = nn.Linear(plain.in_features, plain.out_features, plain.bias is not None)
        twice.load_state_dict({key: 2 * value for key, value in plain.state_dict().items()})
        setattr(block, name, twice)
        torch.testing.assert_close(found, block(x.clone(), key))
        assert not torch.allclose(found, before)


@pytest.mark.gpu
def test_a_branch_runs_beside_and_is_waited_for() -> None:
    x = torch.randn(512, 512, device="cuda")
    streams = []

    def step(x: torch.Tensor) -> torch.Tensor:
        with side_stream(x.device) as wait:
            beside = x
            for _ in range(20):
                beside = (beside @ x).tanh()
            streams.append(torch.cuda.current_stream())
        other = x.cos()
        streams.append(torch.cuda.current_stream())
        if wait is not None:
            wait()
        return beside + other

    expected = step(x)
    assert streams[0] == streams[1]
    graphed = zoo.cuda_graph(step, (x,))
    assert streams[-2] != streams[-1]
    for _ in range(3):
        torch.testing.assert_close(graphed(x), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_unet_waits_before_it_reads_what_the_branch_computes(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.create("unet-debug")
    inputs = zoo.example_inputs(model)
    with torch.inference_mode():
        expected = model(**inputs).sample
    happened: list[str] = []

    @contextmanager
    def noting(_: torch.device) -> Iterator[Any]:
        happened.append("side_stream")
        yield lambda: happened.append("wait")
        happened.append("left")

    def read(*_: Any) -> None:
        happened.append("read")

    monkeypatch.setattr("zoo.unet.model.side_stream", noting)
    if compiled:
        zoo.compile_regions(model, backend="eager")
    for block in model.modules():
        if isinstance(block, ResnetBlock):
            block.register_forward_pre_hook(read)
    with torch.inference_mode(), zoo.enforce_budget(model) if compiled else nullcontext():
        torch.testing.assert_close(model(**inputs).sample, expected)
    assert happened[:3] == ["side_stream", "left", "wait"] and set(happened[3:]) == {"read"}
