"""In diffusers' pipelines: the same images, with their schedulers, guidance and LoRA weights. Nothing is downloaded."""

import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import unet_reference as reference

import zoo
from zoo.unet import UNet

with warnings.catch_warnings():
    # What diffusers imports warns of what it imports.
    warnings.simplefilter("ignore")
    import diffusers
    import transformers
    from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline

NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def scheduler(name: str) -> Any:
    options = {"DDIMScheduler": {"clip_sample": False}, "PNDMScheduler": {"skip_prk_steps": True}}
    return getattr(diffusers, name)(**NOISE, steps_offset=1, **options.get(name, {}))


def tokenizer(folder: Path) -> Any:
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return transformers.CLIPTokenizer.from_pretrained(folder, model_max_length=16)


def text_encoder(cls: Any) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=54, hidden_size=12, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, projection_dim=12, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return cls(config).eval()


def pipeline(kind: str, folder: Path, name: str = "DDIMScheduler") -> Any:
    torch.manual_seed(0)
    parts: dict[str, Any] = {
        "vae": diffusers.AutoencoderKL(
            block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, sample_size=32,
        ).eval(),
        "scheduler": scheduler(name),
        "tokenizer": tokenizer(folder),
    }  # fmt: skip
    if kind == "xl":
        parts |= {
            "unet": reference.make("xl"),
            "text_encoder": text_encoder(transformers.CLIPTextModel),
            "text_encoder_2": text_encoder(transformers.CLIPTextModelWithProjection),
            "tokenizer_2": parts["tokenizer"],
        }
        made = StableDiffusionXLPipeline(**parts, add_watermarker=False)
    else:
        parts |= {
            "unet": reference.make("sd", cross_attention_dim=12),
            "text_encoder": text_encoder(transformers.CLIPTextModel),
            "safety_checker": None,
            "feature_extractor": None,
        }
        made = StableDiffusionPipeline(**parts, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


def images(pipe: Any, **options: Any) -> np.ndarray:
    call = {
        "prompt": ["a cat", "a dog"],
        "negative_prompt": ["fog", "rain"],
        "num_inference_steps": 4,
        "guidance_scale": 5.0,
        "height": 32,
        "width": 48,
        "generator": torch.Generator().manual_seed(0),
        "output_type": "np",
    }
    call |= options
    result: np.ndarray = pipe(**call).images
    assert result.shape == (2, call["height"], call["width"], 3) and np.isfinite(result).all() and result.std() > 0.01
    return result


@pytest.mark.parametrize("kind", ["sd", "xl"])  # fmt: skip
def test_the_same_images(kind: str, tmp_path: Path) -> None:
    pipe = pipeline(kind, tmp_path)
    expected = images(pipe)
    pipe.unet = zoo.from_upstream(pipe.unet)
    assert isinstance(pipe.unet, UNet)
    np.testing.assert_allclose(images(pipe), expected, atol=2e-4)


# --- LoRA ---


def lora(unet: Any, seed: int, convolutions: bool = True) -> dict[str, torch.Tensor]:
    """Weights as a file holds them: rank 2 on attention and, of many kinds, on convolutions."""
    generator = torch.Generator().manual_seed(seed)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj"]
    targets += ["conv1", "conv2", "conv_shortcut", "time_emb_proj", "proj_in"] if convolutions else []
    state: dict[str, torch.Tensor] = {}
    for name, module in unet.named_modules():
        if not name.endswith(tuple(targets)) or not hasattr(module, "weight"):
            continue
        outputs, inputs, *kernel = module.weight.shape
        state[f"unet.{name}.lora_A.weight"] = torch.randn(2, inputs, *kernel, generator=generator) * 0.2
        state[f"unet.{name}.lora_B.weight"] = torch.randn(outputs, 2, *[1] * len(kernel), generator=generator) * 0.2
    return state


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
@pytest.mark.parametrize("kind", ["sd", "xl"])
def test_lora_weights_are_carried_over(kind: str, tmp_path: Path) -> None:
    pipe = pipeline(kind, tmp_path)
    plain = images(pipe)
    base = pipe.unet
    with_first = lora(base, 1)
    with_second = lora(base, 2, convolutions=False)
    pipe.load_lora_weights(with_first, adapter_name="first")
    pipe.load_lora_weights(with_second, adapter_name="second")
    for names, weights in ((["first"], [1.0]), (["first", "second"], [0.6, 0.9])):
        pipe.set_adapters(names, weights)
        expected = images(pipe)
        converted = zoo.from_upstream(base)
        assert set(converted.state_dict()) == set(zoo.create("unet-debug", **_fields(converted)).state_dict())
        pipe.unet = converted
        with pytest.raises(NotImplementedError, match=r"pipe.unet = zoo.to_upstream\(pipe.unet\)"):
            pipe.load_lora_weights(with_first, adapter_name="third")
        np.testing.assert_allclose(images(pipe), expected, atol=5e-4)
        assert np.abs(expected - plain).max() > 1e-2
        pipe.unet = base
    # The model that was converted keeps its adapters apart.
    np.testing.assert_allclose(images(pipe), expected, atol=1e-5)
    pipe.disable_lora()
    pipe.unet = zoo.from_upstream(base)
    np.testing.assert_allclose(images(pipe), plain, atol=5e-4)
    pipe.unet = base
    pipe.enable_lora()
    pipe.fuse_lora()
    pipe.unet = zoo.from_upstream(base)
    np.testing.assert_allclose(images(pipe), expected, atol=5e-4)


def _fields(model: UNet) -> dict[str, Any]:
    return {name: getattr(model.config, name) for name in model.config.__dataclass_fields__}


# --- folders ---


def test_the_signature_is_that_of_diffusers() -> None:
    theirs = inspect.signature(inspect.unwrap(diffusers.UNet2DConditionModel.forward)).parameters
    assert list(inspect.signature(UNet.forward).parameters) == list(theirs)
