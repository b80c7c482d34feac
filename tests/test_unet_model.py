"""The regions in every mode, size and cut; channels_last wherever weights come from; every bad input and its error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from zoo.unet import ResnetBlock, TextKeysValues, TimeShifts, TransformerBlock, UNet
from zoo.unet.blocks import sinusoids
from zoo.unet.config import PRESETS


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


def changed(key: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda inputs: {**inputs, key: change(inputs[key])}


def added(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda inputs: {**inputs, **values}


def nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, 0, 0] = float("nan")
    return x


BAD: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = {
    "integers": (changed("sample", lambda x: x.long()), TypeError, r"torch\.int64 and the weights torch\.float32"),
    "half": (changed("sample", lambda x: x.half()), TypeError, r"use sample\.to\(torch\.float32\), or torch\.autocast"),
    "one sample": (changed("sample", lambda x: x[0]), ValueError, r"use sample\[None\] for one sample"),
    "channels": (changed("sample", lambda x: x[:, :3]), ValueError, r"\[2, 3, 16, 16\], expected \[B, 4, H, W\]$"),
    "channels last": (changed("sample", lambda x: x.permute(0, 2, 3, 1)), ValueError, r"permute\(0, 3, 1, 2\)"),
    "empty": (changed("sample", lambda x: x[:0]), ValueError, r"expected \[B, 4, H, W\], none of them 0"),
    "odd": (
        changed("sample", lambda x: x[..., :14, :15]),
        ValueError,
        r"sample is 14 × 15, which 3 levels cannot halve evenly: both sides must be divisible by 4; crop or pad, to "
        "12 × 12",
    ),
    "small": (changed("sample", lambda x: x[..., :2, :2]), ValueError, "to 4 × 4"),
    "device": (changed("sample", lambda x: x.to("meta")), ValueError, "sample is on meta and the weights on cpu"),
    "nan": (changed("sample", nan), ValueError, r"sample has 16 value\(s\) that are not finite, of 2048"),
    "no text": (changed("encoder_hidden_states", lambda x: None), TypeError, "encoder_hidden_states is a NoneType"),
    "text width": (
        changed("encoder_hidden_states", lambda x: x[..., :20]),
        ValueError,
        r"\[2, 7, 20\], expected \[B, L, 24\]: the text encoder must be the one",
    ),
    "text batch": (
        changed("encoder_hidden_states", lambda x: x[:1]),
        ValueError,
        r"encoder_hidden_states has 1 row\(s\) and sample 2; repeat the text, or with guidance double the sample",
    ),
    "text nan": (
        changed("encoder_hidden_states", lambda x: x / 0),
        ValueError,
        r"encoder_hidden_states has 336 value\(s\) that are not finite.*run that in float32",
    ),
    "text of another model": (
        added(encoder_hidden_states=TextKeysValues(torch.zeros(2, 7, 9))),
        ValueError,
        r"\[2, 7, 9\], expected \[B, L, 352\]; make keys and values with this model's text_keys_values",
    ),
    "flag": (added(timestep=True), TypeError, "timestep is True, expected a number"),
    "word": (added(timestep="last"), TypeError, "timestep is 'last'"),
    "times": (added(timestep=torch.arange(3)), ValueError, r"timestep has shape \[3\], expected \[\], \[1\] or \[2\]"),
    "times of flags": (added(timestep=torch.tensor([True, False])), TypeError, r"timesteps is torch\.bool"),
    "shifts of a whole run": (
        added(timestep=TimeShifts(torch.zeros(5, 1, 304))),
        ValueError,
        r"\[5, 1, 304\], expected \[2, 304\] or \[1, 304\].*take one step's of a whole run",
    ),
    "time condition": (added(timestep_cond=torch.zeros(2, 8)), ValueError, "has no time_cond_proj_dim: leave it out"),
    "added": (
        added(added_cond_kwargs={"image_embeds": torch.zeros(2, 8)}),
        ValueError,
        "added_cond_kwargs has image_embeds, but this model has no added conditions",
    ),
    "text mask": (
        added(encoder_attention_mask=torch.ones(2, 8)),
        ValueError,
        r"encoder_attention_mask has shape \[2, 8\], expected \[2, 7\]: 1 is seen",
    ),
    "pixel mask": (
        added(attention_mask=torch.ones(2, 256)),
        ValueError,
        r"self-attention runs over \[16, 64, 256\] pixels: a mask fits one of them",
    ),
    "labels": (added(class_labels=torch.zeros(2)), ValueError, "class_labels is given"),
    "adapter": (added(down_intrablock_additional_residuals=[]), ValueError, "adapters are not supported"),
    "attention arguments": (
        added(cross_attention_kwargs={"gligen": {}}),
        ValueError,
        "cross_attention_kwargs has gligen={}, which is not supported",
    ),
    "half a controlnet": (
        added(down_block_additional_residuals=()),
        ValueError,
        "mid_block_additional_residual is missing",
    ),
    "other half": (
        added(mid_block_additional_residual=torch.zeros(1)),
        ValueError,
        "down_block_additional_residuals is missing",
    ),
    "too few residuals": (
        added(down_block_additional_residuals=(), mid_block_additional_residual=torch.zeros(1)),
        ValueError,
        "has 0 tensors, expected 6",
    ),
}


class _Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("name", ["qkv", "query", "text_out", "mlp_in", "mlp_out", "self_out"])
def test_a_replaced_product_is_called(name: str) -> None:
    torch.manual_seed(0)
    block = TransformerBlock(8, 2)
    x, key = torch.randn(6, 8), torch.randn(2, 5, 16)
    plain = getattr(block, name)
    heard: list[int] = []
    with torch.inference_mode():
        before = block(x.clone(), key, None, None)
        handle = plain.register_forward_hook(lambda *_: heard.append(1))
        torch.testing.assert_close(block(x.clone(), key, None, None), before)
        assert heard == [1]
        handle.remove()
        adapted = _Doubled(plain.in_features, plain.out_features, plain.bias is not None)
        adapted.load_state_dict(plain.state_dict())
        setattr(block, name, adapted)
        found = block(x.clone(), key, None, None)
        twice = nn.Linear(plain.in_features, plain.out_features, plain.bias is not None)
        twice.load_state_dict({key: 2 * value for key, value in plain.state_dict().items()})
        setattr(block, name, twice)
        torch.testing.assert_close(found, block(x.clone(), key, None, None))
        assert not torch.allclose(found, before)
