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
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    import tests.interpreter  # noqa: F401
    from tests.fake_gpu import in_place, let_dynamo_see_triton
    from zoo.engine.kernel import Kernel

    next(in_place(patch))

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
    let_dynamo_see_triton(patch)


def foreign(name: str) -> tuple[Any, dict[str, Any]]:
    from benchmarks.conformance import MODELS

    return MODELS[name].make(), MODELS[name].inputs(MODELS[name].sizes[0])


def bert() -> tuple[Any, dict[str, Any]]:
    model, inputs = foreign("transformers Bert")
    return model, {**inputs, "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])}


def llama() -> tuple[Any, dict[str, Any]]:
    model, inputs = foreign("transformers Llama")
    return model, {**inputs, "use_cache": False}


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


FOREIGN = {
    **{each.__name__: each for each in (bert, llama, llama_dynamic, llama_decode)},
    "vit": functools.partial(foreign, "torchvision VisionTransformer"),
    "unet": functools.partial(foreign, "diffusers UNet2DConditionModel"),
    "flux": functools.partial(foreign, "diffusers FluxTransformer2DModel"),
}


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
