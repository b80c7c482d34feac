"""One process of ``test_artifacts.py``: it saves a model's compiled regions, or loads them and must compile nothing.

    python -m tests.artifact_process save|load NAME FOLDER [train] [kernels]

NAME is a preset of the zoo, or a model of another library in FOREIGN.
With ``kernels`` a GPU is said to be there, and Triton's interpreter computes each launch on the CPU.
"""

import functools
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import zoo


def run_kernels(patch: pytest.MonkeyPatch) -> None:
    """Launches of kernels of the zoo are computed by Triton's interpreter."""
    from torch.utils import _triton
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    import tests.interpreter  # noqa: F401
    from tests.fake_gpu import in_place
    from zoo.engine.kernel import Kernel

    gpu = next(in_place(patch))

    @functools.cache
    def interpreted(function: Any) -> Any:
        return InterpretedFunction(function)

    def launch(kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
        options = {name: each for name, each in options.items() if name in kernel.arg_names}
        plain = [each.detach() if isinstance(each, Tensor) else each for each in arguments]
        with torch.no_grad():
            interpreted(kernel.fn)[grid](*plain, **options)

    patch.setattr(Kernel, "launch", launch)
    patch.setattr(JITFunction, "__call__", lambda kernel, *args, **options: interpreted(kernel.fn)(*args, **options))
    for name in ("has_triton", "has_triton_package"):
        patch.setattr(_triton, name, lambda *_, **__: True)
    patch.setattr(gpu, "get_active_torch_device", lambda: torch.device("cuda", 0), raising=False)


def bert() -> tuple[Any, dict[str, Any]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    return BertModel(config), {"input_ids": torch.arange(12).view(2, 6), "attention_mask": mask}


def llama() -> tuple[Any, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": torch.arange(12).view(2, 6), "use_cache": False}


def llama_dynamic() -> tuple[Any, dict[str, Any]]:
    """A prompt into the cache that grows, which each call makes anew."""
    model, inputs = llama()
    return model, {**inputs, "use_cache": True}


def llama_decode() -> tuple[Any, dict[str, Any]]:
    from transformers import StaticCache

    model, inputs = llama()
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.inference_mode():
        model.eval()(input_ids=inputs["input_ids"], past_key_values=cache, use_cache=True)
    token, position = torch.ones(2, 1, dtype=torch.int64), torch.full((2, 1), 6)
    return model, {"input_ids": token, "past_key_values": cache, "use_cache": True, "position_ids": position}


def vit() -> tuple[Any, dict[str, Any]]:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(image_size=32, patch_size=8, num_layers=4, num_heads=2, hidden_dim=16, mlp_dim=32)
    return model, {"x": torch.randn(2, 3, 32, 32)}


def unet() -> tuple[Any, dict[str, Any]]:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(16,), layers_per_block=1, cross_attention_dim=8, attention_head_dim=4,
        norm_num_groups=4, down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
        mid_block_scale_factor=1.0,  # the default is an integer, and other blocks have a float: a graph more
    )  # fmt: skip
    noise, text = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 8)
    return model, {"sample": noise, "timestep": torch.tensor(3), "encoder_hidden_states": text}


FOREIGN = {each.__name__: each for each in (bert, llama, llama_dynamic, llama_decode, vit, unet)}


def step(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    with torch.inference_mode(not model.training):
        outputs = [each for each in pytree.tree_leaves(model(**inputs)) if isinstance(each, Tensor)]
        if model.training:
            sum(each.square().sum() for each in outputs if each.requires_grad).backward()
            outputs += [each.grad for each in model.parameters() if each.grad is not None]
    return [each.detach() for each in outputs]


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("something is compiled")


def main(what: str, name: str, folder: str, *how: str) -> None:
    patch = pytest.MonkeyPatch()
    if "kernels" in how:
        run_kernels(patch)
    torch.manual_seed(0)
    if name in FOREIGN:
        model, inputs = FOREIGN[name]()
    else:
        model = zoo.create(name)
        inputs = zoo.example_inputs(model)
    model.train("train" in how)
    if what == "save":
        zoo.compile_regions(model)
        for _ in range(2):
            outputs = step(model, inputs)
        saved = zoo.save_compiled(model, folder)
        assert saved.entries and not saved.skipped, saved
        if "kernels" in how:
            assert {each["kind"] for each in saved.entries} == {"direct"}, saved
        torch.save(outputs, folder + ".pt")
        return
    warnings.simplefilter("error", zoo.RegionWarning)
    zoo.load_compiled(model, folder, strict=True)
    if "kernels" in how:
        assert "torch._dynamo" not in sys.modules
    else:
        from torch._inductor import cpp_builder

        patch.setattr(cpp_builder, "run_compile_cmd", refuse)
    with zoo.enforce_budget(model):
        for _ in range(2):
            outputs = step(model, inputs)
    assert all(map(torch.equal, outputs, torch.load(folder + ".pt"))), "results differ"
    if "kernels" in how:
        assert "torch._dynamo" not in sys.modules
        return
    from torch._dynamo.utils import counters

    assert not counters["frames"] and not counters["stats"], counters
    assert not any(name.startswith(("fxgraph_cache_", "aot")) for name in counters["inductor"]), counters
    calls = [each._compiled_call_impl for each in model.modules() if each._compiled_call_impl is not None]
    assert calls and not any("compiled" in vars(call) for call in calls)


if __name__ == "__main__":
    main(*sys.argv[1:])
