"""One process of ``test_artifacts.py``: it saves a model's compiled regions, or loads them and must compile nothing.

    python -m tests.artifact_process save|load NAME FOLDER [train] [kernels]

With ``kernels`` a GPU is said to be there, and Triton's interpreter computes each launch on the CPU.
"""

from __future__ import annotations

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


def step(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Outputs of a call, and in training the gradients."""
    torch.manual_seed(1)
    model.zero_grad()
    with torch.inference_mode(not model.training):
        outputs = [each for each in pytree.tree_leaves(model(**inputs)) if isinstance(each, Tensor)]
        if model.training:
            sum(each.square().sum() for each in outputs if each.requires_grad).backward()  # type: ignore[union-attr]
            outputs += [each.grad for each in model.parameters() if each.grad is not None]
    return [each.detach() for each in outputs]


def refuse(*_: Any, **__: Any) -> Any:
    """In place of a compiler."""
    raise AssertionError("something is compiled")


def main(what: str, name: str, folder: str, *how: str) -> None:
    patch = pytest.MonkeyPatch()
    if "kernels" in how:
        run_kernels(patch)
    torch.manual_seed(0)
    model = zoo.create(name).train("train" in how)
    inputs = zoo.example_inputs(model)
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
