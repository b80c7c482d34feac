"""In diffusers' pipelines and by our sampler: the same images and latents with every solver, and bad input named."""

import copy
import inspect
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import zoo
from tests import unet_reference as reference
from zoo.engine.graphed_step import synchronising_raises
from zoo.unet import Sampler, Schedule, UNet, make_schedule

with warnings.catch_warnings():
    # What diffusers imports warns of what it imports.
    warnings.simplefilter("ignore")
    import transformers
    from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline

NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def scheduler(name: str, **options: Any) -> Any:
    needed = {"DDIMScheduler": {"clip_sample": False}, "PNDMScheduler": {"skip_prk_steps": True}}
    return getattr(diffusers, name)(**{**NOISE, **needed.get(name, {}), **options})


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
        "scheduler": scheduler(name, steps_offset=1),
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
        "prompt": ["a cat", "a dog"], "negative_prompt": ["fog", "rain"], "num_inference_steps": 4,
        "guidance_scale": 5.0, "height": 32, "width": 48, "generator": torch.Generator().manual_seed(0),
        "output_type": "np", **options,
    }  # fmt: skip
    result: np.ndarray = pipe(**call).images
    assert result.shape == (2, call["height"], call["width"], 3) and np.isfinite(result).all() and result.std() > 0.01
    return result


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
        assert set(converted.state_dict()) == set(zoo.create("unet-debug", **vars(converted.config)).state_dict())
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


def test_the_signature_is_that_of_diffusers() -> None:
    theirs = inspect.signature(inspect.unwrap(diffusers.UNet2DConditionModel.forward)).parameters
    assert list(inspect.signature(UNet.forward).parameters) == list(theirs)


pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (2, 4, 8, 12)
NAMES = ["DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "PNDMScheduler"]
EULER = diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear", beta_end=0.012)
DPM = diffusers.DPMSolverMultistepScheduler(beta_schedule="scaled_linear", beta_end=0.012)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TEXT, NEGATIVE = drawn(2, 7, 24), drawn(2, 7, 24, seed=1)


def model(case: str = "sd", **options: Any) -> UNet:
    return zoo.from_upstream(reference.make(case, **options))


def encoded(pipe: Any, prompt: list[str], negative: list[str] | None) -> dict[str, Any]:
    """What the pipeline makes of prompts, as arguments of a sampler."""
    if type(pipe).__name__ == "StableDiffusionPipeline":
        text, away = pipe.encode_prompt(prompt, "cpu", 1, True, negative)
        return {"text": text, "negative": away}
    text, away, pooled, pooled_away = pipe.encode_prompt(prompt, device="cpu", negative_prompt=negative)
    sizes = torch.tensor([[16.0, 24.0, 0.0, 0.0, 16.0, 24.0]])
    added, away_added = ({"text_embeds": each, "time_ids": sizes} for each in (pooled, pooled_away))
    return {"text": text, "negative": away, "added": added, "negative_added": away_added}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["sd", "xl"])
def test_the_latents_of_diffusers_pipelines(kind: str, name: str, tmp_path: Path) -> None:
    pipe = pipeline(kind, tmp_path, name)
    prompt, negative, latents = ["a cat", "a dog"], ["fog", "rain"], drawn(*SHAPE)
    sampler = Sampler(zoo.from_upstream(pipe.unet), make_schedule(pipe.scheduler, 6), shape=SHAPE)
    for away, scale in ((negative, 5.0), (None, 1.0)):  # guided, and on the text alone
        expected = pipe(
            prompt=prompt, negative_prompt=away, num_inference_steps=6, guidance_scale=scale, height=16, width=24,
            latents=latents, output_type="latent",
        ).images  # fmt: skip
        with torch.no_grad():
            given = encoded(pipe, prompt, away)
        found = sampler(**given, latents=latents, guidance_scale=scale)
        assert reference.relative_error(found, expected) < 1e-4
    assert not found.is_inference() and not found.requires_grad


@pytest.mark.parametrize("case", ["sd", "xl"])
def test_a_step_is_captured_once_for_all_prompts_seeds_and_schedules(case: str) -> None:
    unet = model(case)
    captured = Sampler(unet, make_schedule(DPM, 8), shape=SHAPE, cuda_graph=True)
    eager = Sampler(unet, make_schedule(DPM, 8), shape=SHAPE, cuda_graph=False)
    different = []
    for seed, options in enumerate(
        [
            {},
            {"guidance_scale": 3.0},
            {"schedule": make_schedule(DPM, 5)},
            # Has other tables and timesteps.
            {"schedule": make_schedule(type(DPM).from_config(DPM.config, use_karras_sigmas=True), 7)},
            {},
        ]
    ):
        given: dict[str, Any] = {"text": drawn(2, 7, 24, seed=seed), "negative": drawn(1, 7, 24, seed=9), "seed": seed}
        if case == "xl":
            sizes = torch.tensor([[128.0, 192.0, 0.0, 0.0, 128.0, 192.0]])
            given["added"] = {"text_embeds": drawn(2, 12, seed=seed), "time_ids": sizes}
            given["negative_added"] = {"text_embeds": drawn(1, 12, seed=9), "time_ids": sizes}
        found = captured(**given, **options)
        torch.testing.assert_close(found, eager(**given, **options), rtol=1e-5, atol=1e-5)
        different.append(found)
    assert captured.captures == 1 and eager.captures == 0
    # Tensors of their own, which later runs leave alone.
    assert len({float(latents.sum()) for latents in different}) == len(different)


def test_what_changes_a_shape_is_captured_again() -> None:
    sampler = Sampler(model(), make_schedule(EULER, 3), shape=SHAPE, cuda_graph=True)
    text, negative = TEXT, NEGATIVE
    sampler(text, negative)
    sampler(text, negative, schedule=make_schedule(EULER, 2))
    assert sampler.captures == 1
    longer = sampler(text, negative, schedule=make_schedule(EULER, 6))
    assert sampler.captures == 2
    sampler(drawn(2, 9, 24), drawn(2, 9, 24, seed=1))
    assert sampler.captures == 3
    sampler(text, guidance_scale=1.0)
    assert sampler.captures == 4
    again = sampler(text, negative, schedule=make_schedule(EULER, 6))
    assert sampler.captures == 5
    torch.testing.assert_close(again, longer)
    # A solver that remembers more, with fewer steps.
    sampler(text, negative, schedule=make_schedule(DPM, 4))
    sampler(text, negative, schedule=make_schedule(DPM, 6))
    assert sampler.captures == 6


def test_compiled_regions_stay_within_their_budget() -> None:
    unet = model()
    expected = Sampler(unet, make_schedule(DPM, 4), shape=SHAPE)(TEXT, NEGATIVE)
    zoo.compile_regions(unet, backend="aot_eager")
    with zoo.enforce_budget(unet):
        for captured in (False, True):
            sampler = Sampler(unet, make_schedule(DPM, 4), shape=SHAPE, cuda_graph=captured)
            for prompt in (TEXT, drawn(2, 7, 24, seed=3)):
                sampler(prompt, NEGATIVE)
            torch.testing.assert_close(sampler(TEXT, NEGATIVE), expected, rtol=1e-4, atol=1e-5)


def test_text_and_timesteps_are_projected_once_a_run() -> None:
    unet = model()
    counts: Counter[str] = Counter()
    for name in ("conditions", "text_projections", "conv_in"):
        getattr(unet, name).register_forward_pre_hook(lambda *_, name=name: counts.update([name]))
    Sampler(unet, make_schedule(EULER, 6), shape=SHAPE)(TEXT, NEGATIVE)
    assert counts == {"conditions": 1, "text_projections": 1, "conv_in": 6}


def test_seeds_reproduce_and_leave_the_global_state_alone() -> None:
    sampler = Sampler(model(), make_schedule(EULER, 3), shape=SHAPE, cuda_graph=False)
    text, negative = TEXT, NEGATIVE
    before = torch.get_rng_state()
    first = sampler(text, negative, seed=4)
    torch.manual_seed(99)
    torch.testing.assert_close(sampler(text, negative, seed=4), first, rtol=0, atol=0)
    torch.testing.assert_close(sampler(text, negative, latents=drawn(*SHAPE, seed=4)), first, rtol=0, atol=0)
    other = sampler(text, negative, seed=5)
    assert reference.relative_error(other, first) > 0.1
    torch.set_rng_state(before)
    torch.testing.assert_close(sampler(text, negative), sampler(text, negative, seed=0), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)
    # Images of a batch do not see each other.
    alone = Sampler(sampler.model, sampler.schedule, shape=(1, *SHAPE[1:]))
    noise = drawn(*SHAPE, seed=4)
    torch.testing.assert_close(alone(text[1:], negative[1:], latents=noise[1:]), first[1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_arithmetic_between_steps_is_not_rounded_to_the_models_dtype(dtype: torch.dtype) -> None:
    unet = model()
    expected = Sampler(unet, make_schedule(DPM, 4), shape=SHAPE)(TEXT, NEGATIVE)
    other = copy.deepcopy(unet).to(dtype)
    found = Sampler(other, make_schedule(DPM, 4), shape=SHAPE)(TEXT.to(dtype), NEGATIVE.to(dtype))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert reference.relative_error(found.float(), expected) < (0.1 if dtype == torch.bfloat16 else 1e-4)


SIZES = torch.zeros(2, 6)
CONDITIONS, WIDER = ({"text_embeds": drawn(2, width), "time_ids": SIZES} for width in (12, 13))


@pytest.mark.parametrize(
    ("case", "options", "error", "words"),
    [
        ("sd", {"text": None}, TypeError, "text is a NoneType, expected a dense tensor"),
        ("sd", {"text": drawn(2, 7, 23)}, ValueError, r"text has shape \[2, 7, 23\], expected \[2, 7, 24\]"),
        ("sd", {"text": drawn(3, 7, 24)}, ValueError, r"text has shape \[3, 7, 24\], .* one row stands for all images"),
        ("sd", {"text": TEXT.double()}, TypeError, "is torch.float64 and the weights torch.float32"),
        ("sd", {"negative": None}, ValueError, "negative is missing: .* or pass guidance_scale=1"),
        ("sd", {"negative": drawn(2, 8, 24)}, ValueError, r"text has .*expected \[2, 8, 24\].*, as negative has"),
        ("sd", {"latents": drawn(2, 4, 16, 16)}, ValueError, r"latents has shape .*, expected \[2, 4, 8, 12\]"),
        ("sd", {"seed": 1.5}, TypeError, "seed is 1.5"),
        ("sd", {"added": CONDITIONS, "negative_added": CONDITIONS}, ValueError, r"has .*, and this model takes \[\]"),
        ("xl", {}, ValueError, r"has \[\], and this model takes \['text_embeds', 'time_ids'\].* as added"),
        ("xl", {"added": CONDITIONS}, TypeError, r"negative_added\['text_embeds'\] is a NoneType, expected .*\[2, X\]"),
        ("xl", {"negative_added": CONDITIONS, "added": WIDER}, ValueError, r"\[2, 13\], expected \[2, 12\] or"),
        (
            "xl", {"guidance_scale": 1.0, "added": {**CONDITIONS, "image_embeds": SIZES}},
            ValueError, r"has \['image_embeds', .*, and this model takes",
        ),
    ],
)  # fmt: skip
def test_bad_calls_are_refused_before_a_step_runs(case, options, error, words):
    unet = model(case)
    unet.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    sampler = Sampler(unet, make_schedule(EULER, 3), shape=SHAPE)
    with pytest.raises(error, match=words):
        sampler(**{"text": TEXT, "negative": TEXT, **options})


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["sd", "xl"])
def test_on_a_gpu_the_host_waits_for_no_step(case: str) -> None:
    unet = model(case)
    given: dict[str, Any] = {"text": TEXT, "negative": NEGATIVE}
    if case == "xl":
        beside = {"text_embeds": drawn(2, 12), "time_ids": SIZES + 128}
        given |= {"added": beside, "negative_added": beside}
    on_host = Sampler(unet, make_schedule(DPM, 8), shape=SHAPE)(**given)
    unet.cuda()
    on_gpu = pytree.tree_map(lambda leaf: leaf.cuda(), given)
    eager = Sampler(unet, make_schedule(DPM, 8), shape=SHAPE, cuda_graph=False)(**on_gpu)
    zoo.compile_regions(unet)
    sampler = Sampler(unet, make_schedule(DPM, 8), shape=SHAPE)
    found = sampler(**on_gpu)
    assert sampler.captures == 1
    assert reference.relative_error(found, eager) < 1e-3
    # The same noise; convolutions are in TF32 there.
    assert reference.relative_error(found.cpu(), on_host) < 0.05
    state, step = sampler._state, sampler._step
    assert step is not None
    with synchronising_raises():
        for _ in range(8):
            step(unet, state, True)
    torch.testing.assert_close(sampler(**on_gpu), found)
    assert sampler.captures == 1


EULER_NAME, DPM_NAME = "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"
ZERO = {"rescale_betas_zero_snr": True}
# One step, one of two orders, the ends of lower order (under 15 steps), and where a timestep falls on a half.
COUNTS = (1, 2, 3, 5, 14, 15, 30, 48)


def denoise(x: Tensor, timestep: Tensor) -> Tensor:
    """In place of one: not linear, and different at every timestep."""
    return 0.9 * torch.sin(3 * x + float(timestep) / 300) + 0.2 * x


def noise() -> Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def run(schedule: Schedule) -> Tensor:
    tracks = torch.zeros(schedule.kept, 12, dtype=torch.float64)
    tracks[0] = noise() * schedule.noise_scale
    for step, timestep in enumerate(schedule.timesteps):
        output = denoise(tracks[0] * schedule.input_scales[step], timestep)
        tracks = schedule.transitions[step] @ torch.cat([tracks, output[None]])
    return tracks[0]


def run_theirs(theirs: Any, steps: int) -> Tensor:
    theirs.set_timesteps(steps)
    if hasattr(theirs, "set_begin_index"):
        theirs.set_begin_index(0)
    x = noise() * theirs.init_noise_sigma
    for timestep in theirs.timesteps:
        output = denoise(theirs.scale_model_input(x, timestep), timestep)
        x = theirs.step(output, timestep, x).prev_sample.double()
    return x


def assert_same(theirs: Any, steps: int) -> None:
    expected = run_theirs(theirs, steps)
    ours = make_schedule(theirs, steps)
    assert ours.steps == len(theirs.timesteps)
    # What they compute in float32 is here a table made in float64; their sigmas go up to 4096.
    torch.testing.assert_close(ours.timesteps, theirs.timesteps.float(), rtol=1e-6, atol=1e-3)
    found = run(ours)
    assert expected.isfinite().all()
    assert float((found - expected).norm() / expected.norm()) < 5e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_the_same_steps(name: str, spacing: str, prediction: str) -> None:
    for steps in COUNTS:
        assert_same(scheduler(name, timestep_spacing=spacing, prediction_type=prediction, steps_offset=1), steps)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("DDIMScheduler", {"beta_schedule": "linear", "num_train_timesteps": 600, "set_alpha_to_one": False}),
        ("DDIMScheduler", {"trained_betas": [0.001 + 0.00001 * step for step in range(1000)]}),
        ("PNDMScheduler", {"skip_prk_steps": False}),
        (EULER_NAME, {"use_karras_sigmas": True, "sigma_min": 0.03, "sigma_max": 12.0, "timestep_spacing": "leading"}),
        (EULER_NAME, {**ZERO, "prediction_type": "v_prediction", "timestep_spacing": "trailing"}),
        (DPM_NAME, {"solver_order": 3, "final_sigmas_type": "sigma_min", "lower_order_final": False}),
        (DPM_NAME, {"solver_type": "heun"}),
        (
            DPM_NAME,
            {"use_karras_sigmas": True, "beta_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction"},
        ),
        (DPM_NAME, {"euler_at_final": True, "prediction_type": "sample"}),
        ("DDIMScheduler", {**ZERO, "prediction_type": "v_prediction", "timestep_spacing": "trailing"}),
        ("HeunDiscreteScheduler", {"use_karras_sigmas": True}),
        ("LMSDiscreteScheduler", {}),
    ],
    ids=str,
)
def test_the_same_with_options(name: str, options: dict[str, Any]) -> None:
    theirs = scheduler(name, **options)
    for steps in COUNTS[3:]:
        assert_same(theirs, steps)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("DDIMScheduler", {"clip_sample": True}, "DDIMScheduler with clip_sample=True is not .* its steps clip values"),
        (DPM_NAME, {"thresholding": True}, "DPMSolverMultistepScheduler with thresholding=True"),
        (DPM_NAME, {"algorithm_type": "sde-dpmsolver++"}, "algorithm_type='sde-dpmsolver\\+\\+'.* is not"),
        ("EulerAncestralDiscreteScheduler", {}, "its steps clip values, draw noise or divide by zero"),
        ("UniPCMultistepScheduler", {}, "remembers 17 tensors in 10 steps, and at most 16 are supported"),
        (EULER_NAME, {"prediction_type": "flow"}, "prediction_type given as flow must be one of"),
        (
            "DDIMScheduler",
            {"timestep_spacing": "trailing", **ZERO},
            "with rescale_betas_zero_snr=True is not supported: .* divide by zero",
        ),
    ],
)
def test_what_is_not_supported_is_named(name: str, options: dict[str, Any], words: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        make_schedule(scheduler(name, **options), 10)
    assert torch.equal(torch.get_rng_state(), before)
    for other in (diffusers.FlowMatchEulerDiscreteScheduler(), "euler"):
        with pytest.raises(TypeError, match=f"scheduler is a {type(other).__name__}; the zoo takes"):
            make_schedule(other, 10)


def test_timesteps_that_were_not_trained_are_refused() -> None:
    shifted = diffusers.EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1)
    assert float(make_schedule(shifted, 999).timesteps[0]) == 999
    with pytest.raises(ValueError, match="1000 steps with steps_offset=1 have timesteps 1 to 1000, and 0 to 999 were"):
        make_schedule(shifted, 1000)
