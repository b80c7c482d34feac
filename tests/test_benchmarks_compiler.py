"""What the compiler did, recompiles told from graphs that are needed; what the machine is, and its peaks."""

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import machine
from benchmarks.compiler import Recorder, _breaks, _phases, other_cache
from benchmarks.machine import Monitor, cache_contents, cache_environment, device_facts, free_memory


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Stages(nn.Module):
    """Two widths of one class, two layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for width in (4, 4, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.repeat(1, 2) if x.size(1) < layer.linear.in_features else x)
        return x


def test_folders_are_switched_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in cache_environment(tmp_path / "case").items():
        monkeypatch.setenv(name, value)
    assert not cache_contents()
    with other_cache(tmp_path / "other"):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "other")
        (tmp_path / "other" / "triton").mkdir(parents=True)
        (tmp_path / "other" / "triton" / "kernel").touch()
        assert len(cache_contents()) == 1
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "case" / "triton")
    assert not cache_contents()


def test_kernels_compiled_elsewhere_are_forgotten(tmp_path: Path):
    triton = pytest.importorskip("triton")

    def kernel(x):
        return x

    function = triton.runtime.jit.JITFunction(kernel)
    with other_cache(tmp_path):
        function.device_caches[0] = "compiled by an eager call"
    assert not function.device_caches, "the case would not pay for its own kernels"


def compiled(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Layer):
            module.compile(backend="eager", dynamic=False)
    return model


@pytest.mark.parametrize("changed", [False, True])
def test_a_graph_for_each_width_is_no_recompile_and_another_shape_is(changed: bool):
    model, x = Stages(), torch.randn(2, 4)
    recorder = Recorder(model)
    with torch.no_grad():
        with recorder.watching_signatures():
            model(x)
        assert not any(module._forward_pre_hooks for module in model.modules()), "hooks do not stay"
        compiled(model)(x)
        if changed:
            model(torch.randn(3, 4))
    facts = recorder.facts()
    assert (facts.graphs, len(facts.recompiles), facts.breaks) == ((4, 2, []) if changed else (2, 0, []))
    assert all("size mismatch" in reason for reason in facts.recompiles)


def test_late_compilations_are_found_after_a_restart():
    model = Stages()
    recorder = Recorder(model)
    with torch.no_grad():
        compiled(model)(torch.randn(2, 4))
        recorder.restart()
        model(torch.randn(2, 4))
        assert recorder.late() == []
        assert recorder.facts().graphs == 0
        model(torch.randn(5, 4))
    assert len(recorder.late()) == 2
    assert "size mismatch" in recorder.late()[0]


def test_phases_are_differences_of_nested_figures():
    class Record:
        dynamo_cumulative_compile_time_us = 10_000_000
        aot_autograd_cumulative_compile_time_us = 7_000_000
        inductor_cumulative_compile_time_us = 5_000_000
        inductor_code_gen_cumulative_compile_time_us = 4_000_000
        triton_compile_time_us = 1_000_000

    assert _phases([Record()]) == {"dynamo": 3.0, "aot": 2.0, "inductor": 1.0, "codegen": 3.0, "kernels": 1.0}
    assert sum(_phases([Record(), Record()]).values()) == 20.0


def test_a_branch_on_a_tensor_is_a_break_with_a_reason():
    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            return x + 1 if x.sum() > 0 else x - 1

    class Prints(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            torch._dynamo.graph_break()
            return x + 1

    for model in (Branches(), Prints()):
        recorder = Recorder(model)
        torch.compile(model, backend="eager")(torch.ones(3))
        breaks = recorder.facts().breaks
        assert len(breaks) == 1 and breaks[0], breaks


def test_a_second_frame_of_a_whole_call_is_a_break():
    frames = [SimpleNamespace(co_name=name) for name in ("forward", "forward", "move_on")]
    assert _breaks(Counter(), frames, whole=True) == ["move_on: compiled by itself, so forward ended before it"]
    backward = SimpleNamespace(co_name=None)
    assert _breaks(Counter(), [*frames[:2], backward], whole=True) == []
    assert _breaks(Counter(), frames) == [], "regions are frames of their own"
    assert _breaks(Counter({"print": 1}), frames, whole=True) == ["print"]


def test_without_a_driver_a_monitor_knows_nothing(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("benchmarks.machine.ctypes.CDLL", missing)
    monitor = Monitor()
    assert (monitor.sm_clock(), monitor.power(), monitor.memory(), monitor.driver()) == (None,) * 4
    assert free_memory("cuda", monitor) is None and free_memory("cpu", monitor) > 1 << 20


@pytest.mark.gpu
def test_a_gpu_is_described_and_watched():
    facts = device_facts("cuda")
    monitor = Monitor(facts["gpu_uuid"])
    assert facts["driver"] and facts["gpu_memory"] > 0
    assert monitor.sm_clock() and monitor.power()
    used, free = monitor.memory() or (0, 0)
    assert used > 0 and used + free <= facts["gpu_memory"] * 1.1
    assert facts["gpu"] == torch.cuda.get_device_name()


def test_a_copy_without_history_is_told_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine._commit() == {"commit": None, "dirty": None}
    for told, expected in (("abc", ("abc", False)), ("abc-dirty", ("abc", True))):
        monkeypatch.setenv("BENCHMARKS_COMMIT", told)
        assert tuple(machine._commit().values()) == expected
