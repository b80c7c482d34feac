"""UNets: their regions, the operators that they need of a host, and what calls a replaced part."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from tests import fake_gpu
from tests.blocks import Doubled, doubles, outputs_and_gradients
from tests.noted import noted
from zoo.ops import images as convs
from zoo.ops import transformer as low_products
from zoo.ops.images import cat_group_norm, conv3, conv_add, group_norm, windows_run
from zoo.ops.transformer import add_norm, gated_gelu, gated_gelu_product, layer_norm, short_attention
from zoo.unet import ResnetBlock, Transformer, TransformerBlock, UNet
from zoo.unet import blocks as products
from zoo.unet.blocks import PRESETS, BlockShape
from zoo.unet.model import sinusoids


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
    model = zoo.create("unet-debug").train()
    loss = model(**zoo.example_inputs(model)).sample.square().mean()
    with Dispatched() as dispatched:
        loss.backward()
    # Of queries, keys and values cut out one by one each would fill a gradient of all three, which are added up.
    attended = sum(isinstance(module, TransformerBlock) for module in model.modules())
    assert dispatched.ran["aten::stack"] == 2 * attended > 0
    assert not any("zero" in name or "select_backward" in name for name in dispatched.ran)


def test_sines_of_timesteps_are_diffusers_to_the_bit() -> None:
    from diffusers.models.embeddings import get_timestep_embedding

    timesteps = torch.tensor([0, 1, 803, 999])
    for width in (6, 7, 320):
        expected = get_timestep_embedding(timesteps, width, flip_sin_to_cos=True, downscale_freq_shift=0)
        assert torch.equal(sinusoids(timesteps, width), expected)


@pytest.mark.parametrize("name", ["qkv", "query", "text_out", "mlp_in", "mlp_out", "self_out"])
def test_a_replaced_product_is_called(name: str) -> None:
    block = TransformerBlock(8, 2)
    x, key = torch.randn(6, 8), torch.randn(2, 5, 16)
    plain = getattr(block, name)
    with torch.inference_mode():
        doubles(lambda: block(x.clone(), key), [plain])
        before = block(x.clone(), key)
        adapted = Doubled(plain.in_features, plain.out_features, plain.bias is not None)
        adapted.load_state_dict(plain.state_dict())
        setattr(block, name, adapted)
        found = block(x.clone(), key)
        twice = nn.Linear(plain.in_features, plain.out_features, plain.bias is not None)
        twice.load_state_dict({key: 2 * value for key, value in plain.state_dict().items()})
        setattr(block, name, twice)
        torch.testing.assert_close(found, block(x.clone(), key))
        assert not torch.allclose(found, before)


@pytest.mark.parametrize("name", ["unet-debug", "unet-xl-debug"])
@pytest.mark.parametrize("end", ["proj_in", "proj_out"])
def test_a_projection_with_a_hook_is_called(name: str, end: str) -> None:
    model = zoo.create(name)
    given, layers = zoo.example_inputs(model), [part for path, part in model.named_modules() if path.endswith(end)]
    with torch.inference_mode():
        doubles(lambda: model(**given).sample, layers)


def images(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    drawn = torch.randn(*shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return drawn.requires_grad_(grad)


def learning(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.clone().requires_grad_() for each in tensors)


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    x, low, weight, bias = torch.randn(6, 8), torch.randn(6, 8).bfloat16(), torch.randn(8), torch.randn(8)
    image, large = images(2, 8, 3, 5), images(2, 8, 33, 32).bfloat16()
    product = torch.randn(2048, 8).bfloat16(), torch.randn(16, 8).bfloat16(), torch.randn(16).bfloat16()
    tail = (4, 1e-5, True)
    return {
        "gate": (gated_gelu, (low, bias)),
        "gate that learns": (gated_gelu, learning(x, bias)),
        "product and gate": (gated_gelu_product, product),
        "bias": (conv_add, (low, bias)),
        "bias and residual that learn": (conv_add, (*learning(low, bias), x)),
        "product of windows": (conv3, (images(2, 640, 3, 5).bfloat16(), images(8, 640, 3, 3).bfloat16())),
        "norm": (layer_norm, (low, weight, bias, 1e-5)),
        "norm that learns": (layer_norm, (*learning(x, weight, bias), 1e-5)),
        "sum and norm": (add_norm, (low, x, weight, bias, None, 1e-5)),
        "sum and norm that learn": (add_norm, (*learning(low, low, weight, bias), None, 1e-5)),
        "sum, shift and norm that learn": (add_norm, (*learning(x, x, weight, bias, bias), 1e-5)),
        "attention": (short_attention, torch.randn(3, 2, 5, 3, 8).bfloat16().unbind()),
        "group norm of a small image": (group_norm, (image.bfloat16(), None, weight, bias, *tail)),
        "group norm of a large image": (group_norm, (large, low[:2], weight, bias, *tail)),
        "group norm that learns": (group_norm, (*learning(image, x[:2], weight, bias), *tail)),
        "group norm of two images": (cat_group_norm, (*learning(large[:, :5], large[:, 5:], weight, bias), *tail)),
    }


def test_half_precision_is_rounded_once() -> None:
    x, shift = images(2, 12, 9, 9, dtype=torch.bfloat16), torch.randn(2, 12)
    weight, bias = torch.randn(12), torch.randn(12)
    out = group_norm(x, shift, weight, bias, 4, 1e-5, True)
    wide = F.silu(F.group_norm(x.float() + shift[:, :, None, None], 4, weight, bias, 1e-5))
    assert out.dtype == torch.bfloat16 and torch.equal(out, wide.bfloat16())


def test_convolutions_of_few_pixels_and_many_channels_are_products_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convs, "kernels_run", lambda *_: True)
    weight = torch.empty(8, 640, 3, 3, memory_format=torch.channels_last)
    for shape, stride, expected in (
        ((2, 640, 8, 8), 1, True), ((4, 640, 8, 8), 1, True), ((5, 640, 8, 8), 1, False), ((1, 640, 32, 32), 2, True),
        ((1, 640, 33, 32), 2, False), ((2, 639, 8, 8), 1, False),
    ):  # fmt: skip
        assert windows_run(torch.empty(shape), weight, stride) == expected
    narrow = torch.empty(8, 64, 3, 3, memory_format=torch.channels_last)
    assert not windows_run(torch.empty(1, 64, 8, 8).bfloat16(), narrow.bfloat16(), 1)
    monkeypatch.setattr(convs, "tma_runs", lambda *_: True)
    for shape, dtype, expected in (
        ((1, 64, 8, 8), torch.bfloat16, True), ((1, 64, 8, 9), torch.bfloat16, False),
        ((2, 64, 4, 4), torch.bfloat16, False), ((1, 48, 8, 8), torch.bfloat16, False),
        ((1, 64, 8, 8), torch.float32, False),
    ):  # fmt: skip
        assert windows_run(torch.empty(shape, dtype=dtype), narrow.to(dtype), 1) == expected
    odd = torch.empty(8, 60, 3, 3, memory_format=torch.channels_last).bfloat16()
    assert not windows_run(torch.empty(1, 60, 8, 8).bfloat16(), odd, 1)
    # Of another layout the weight would be copied in every call.
    assert not windows_run(torch.empty(2, 640, 8, 8), weight.contiguous(), 1)


def test_convolutions_of_few_pixels_are_products_in_a_graph(gpu: fake_gpu.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = BlockShape(inputs=640, skip=0, outputs=640, depth=None, heads=1)
    block = ResnetBlock(PRESETS["unet-debug"], shape).to(torch.bfloat16, memory_format=torch.channels_last)
    image, shift = images(2, 640, 4, 4, dtype=torch.bfloat16), torch.randn(2, 640).bfloat16()
    with torch.no_grad():
        (graph,) = fake_gpu.traced(monkeypatch, block, image, None, shift)
    # Two norms, two of windows, and the sum at the end.
    assert graph.count(fake_gpu.LAUNCH) == 5
    assert not any("convolution" in node or node.startswith("zoo") for node in graph)


def test_products_learn_in_float32_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "kernels_run", lambda *_: True)
    model = zoo.create("unet-debug").train()
    inputs = zoo.example_inputs(model, size=8, tokens=5)
    weights, biases = (noted(monkeypatch, low_products, name) for name in ("weight_gradient", "column_sums"))
    outputs_and_gradients(model, inputs, False)
    assert not weights and not biases, "there is nothing to lower"
    _, *found = outputs_and_gradients(model, inputs, True)
    kinds = Counter(type(each) for each in model.modules())
    shortcuts = sum(each.shortcut is not None for each in model.modules() if isinstance(each, ResnetBlock))
    # Of transformers both ends and six in each block; and those of all timesteps and of all texts.
    assert len(weights) == 2 * kinds[Transformer] + 6 * kinds[TransformerBlock] + shortcuts + 2
    assert len(biases) == 2 * kinds[Transformer] + kinds[TransformerBlock] + shortcuts + 1
    for (name, _), grad in zip(model.named_parameters(), found, strict=True):
        if name.endswith(("qkv.weight", "mlp_out.weight", "proj_in.weight", "text_projections.weight")):
            assert not torch.equal(grad, grad.bfloat16().float()), f"{name} was rounded on its way"
