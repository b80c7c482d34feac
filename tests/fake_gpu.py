"""A GPU that is not there: Triton compiles for one, or is said to have, and launches are counted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zoo.ops.common

LAUNCH = "triton_kernel_wrapper_functional"  # a kernel's node in a graph


class Gpu:
    """What Triton asks of a driver, and what it did with it."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.compiled: list[str] = []
        self.sources: dict[str, tuple[Any, Any]] = {}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 18},
            load_binary=lambda *_: (1, 2, 3, 4, 1024),
            unload_module=lambda module: None,
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_: self.launches.append(source.fn.fn.__name__)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def set_current_device(self, device: int) -> None:
        assert device == 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def compile(self, source: Any, options: Any = None, **_: Any) -> Any:
        name = source.fn.fn.__name__
        self.compiled.append(name)
        self.sources[source.hash()] = source, options
        return SimpleNamespace(
            src=source, hash=source.hash(), metadata=None, packed_metadata=None, function=None,
            launch_metadata=lambda *_: None, run=self.launcher_cls(source, None),
        )  # fmt: skip


def lower(source: Any, options: Any) -> None:
    """The first stage of Triton's compiler, which the interpreter leaves out: names keep their types, for one."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    target = Gpu().get_current_target()
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options({**(options or {}), **source.parse_options()})
    functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    source.make_ir(target, parsed, functions, modules, context)


def kernels() -> list[Any]:
    from zoo.engine.kernel import Kernel

    found = [
        module
        for name, module in sys.modules.items()
        if name.startswith("zoo.") and (".kernels" in name or ".triton" in name)
    ]
    return [value for module in found for value in vars(module).values() if isinstance(value, Kernel)]


def forget_compiled() -> None:
    for kernel in kernels():
        kernel.device_caches.clear()


def in_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """The fixture ``gpu`` of conftest.py."""
    import triton
    from triton.runtime import driver

    found = Gpu()
    monkeypatch.setattr(driver, "_active", found)
    monkeypatch.setattr(triton.compiler, "compile", found.compile)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for module in (torch.cuda, torch.cuda.graphs):
        monkeypatch.setattr(module, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(zoo.ops.common, "triton_runs_on", lambda device: True)
    monkeypatch.setattr(zoo.ops.common, "has_tma", lambda device: True)
    forget_compiled()
    yield found
    forget_compiled()


def let_dynamo_see_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import _triton

    for name in ("has_triton", "has_triton_package", "has_triton_tensor_descriptor_host_tma"):
        monkeypatch.setattr(_triton, name, lambda *_, **__: True)


def traced(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], *arguments: Any,
    look: Callable[[torch.fx.GraphModule], None] = lambda graph: None,
) -> list[list[str]]:  # fmt: skip
    """The nodes of each graph that torch's compiler makes of a call; tensors lie on the CPU, and no kernel runs.

    The call must be one graph, which ``look`` is given. Use with ``gpu``.
    """
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    from zoo.engine.kernel import Kernel

    graphs: list[list[str]] = []

    def noted(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op not in ("placeholder", "output")])
        return make_boxed_func(graph.forward)

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        look(graph)
        return aot_module_simplified(
            graph, examples, fw_compiler=noted, bw_compiler=noted, partition_fn=min_cut_rematerialization_partition
        )

    let_dynamo_see_triton(monkeypatch)
    monkeypatch.setattr(Kernel, "launch", lambda *_, **__: None)
    torch._dynamo.reset()
    out = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*arguments)
    tensors = [out] if isinstance(out, torch.Tensor) else [each for each in out if isinstance(each, torch.Tensor)]
    learn = [each for each in tensors if each.requires_grad]
    if learn:
        torch.autograd.backward(learn, [torch.empty_like(each) for each in learn])
    torch._dynamo.reset()
    return graphs
