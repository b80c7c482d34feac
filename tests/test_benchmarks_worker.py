"""The worker: its messages, what it measures, what the compiler and the machine did, failures with a reason."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks import harness, machine, startup, timing
from benchmarks.compiler import Recorder, _breaks, _phases, other_cache
from benchmarks.machine import Monitor, cache_contents, cache_environment, device_facts, free_memory, python_environment
from benchmarks.process import ROOT, Worker, WorkerFailure
from benchmarks.record import KernelTime
from benchmarks.report.cells import race_notes
from benchmarks.worker import Handler, _relative_error
from tests.blocks import Block, Sequence
from tests.rows import row, shown
from tests.runs import CASE, EAGER, handler, preparation, talk, told
from zoo.ops import common as operators

pytestmark = pytest.mark.usefixtures("eager_backend")


@pytest.mark.parametrize("kernels", [True, False])
def test_own_kernels_are_left_out_where_the_case_says_so(kernels: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(operators, "ENABLED", True)
    handler(replace(CASE, kernels=kernels))
    assert operators.ENABLED is kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("impl", "strategy", "graphs"),
    [("zoo", "regional", 1), ("zoo", "full", 1), ("zoo", "hierarchical", 1), ("upstream", "regional", 2)],
)
def test_a_compiled_arm_from_start_to_kernels(tmp_path: Path, impl: str, strategy: str, graphs: int):
    by_op = told(
        replace(CASE, impl=impl, strategy=strategy), {"op": "start_up", "folder": str(tmp_path / "start-up")},
        {"op": "first_call"}, {"op": "memory"}, {"op": "check", "reference": str(tmp_path / "reference.pt")},
        {"op": "calibrate", "milliseconds": 1.0}, {"op": "round", "calls": 3}, {"op": "kernels"}, {"op": "stop"},
    )  # fmt: skip
    assert by_op["prepare"]["model_bytes"] == 3 * (8 * 8 + 8) * 4
    assert by_op["start_up"]["flops"] == 3 * 2 * 16 * 8 * 8 and by_op["start_up"]["seconds"] > 0
    assert by_op["first_call"]["graphs"] == graphs and by_op["first_call"]["breaks"] == []
    assert 1 <= len(by_op["first_call"]["later_calls"]) <= 5 and min(by_op["first_call"]["later_calls"]) > 0
    # Upstream hands its first block a tensor from outside of inference mode, the others one from inside.
    assert len(by_op["first_call"]["recompiles"]) == graphs - 1
    assert max(by_op["check"]["error"], by_op["check"]["eager_error"]) < 1e-6
    assert by_op["check"]["reference_dtype"] == "float64"
    assert [by_op["kernels"][name] for name in ("kernels", "longest", "others")] == [None] * 3, "of a CPU"
    assert by_op["kernels"]["recompiles"] == [], "the reference, computed in between, must change nothing"
    assert by_op["round"]["calls"] == 3 and by_op["round"]["host_ms"] is None, "of a CPU"
    assert by_op["memory"]["allocated"] is None
    assert all(reply["began"] <= reply["ended"] for reply in by_op.values())


START, FIRST = {"op": "start_up", "folder": None}, {"op": "first_call"}


def test_first_result_counts_everything_from_nothing():
    assert told(replace(CASE, cuda_graph=True), {"op": "first_result"})["first_result"]["seconds"] > 0


@pytest.mark.slow
def test_a_graph_break_and_its_reason_are_reported(tmp_path: Path):
    case = replace(CASE, model="print", strategy="full")
    (reason, *_) = told(case, {"op": "start_up", "folder": str(tmp_path)}, FIRST)["first_call"]["breaks"]
    assert "misbehave" in reason and len(reason) <= 400


def test_arms_share_one_reference_and_an_output_that_is_not_finite_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "reference.pt"
    torch.save({"output": torch.zeros(16 * 8, dtype=torch.float64) + 1, "dtype": "float64"}, path)
    assert told(EAGER, START, FIRST, {"op": "check", "reference": str(path)})["check"]["error"] > 0.1
    check = {"op": "check", "reference": str(tmp_path / "reference.pt")}
    *_, checked = talk(*preparation(replace(EAGER, model="nan")), START, FIRST, check)
    assert not checked["ok"] and "not finite" in checked["reason"]


def test_a_complex_output_is_compared_with_its_imaginary_part_and_one_of_another_size_with_nothing():
    expected = torch.tensor([3 + 4j, 0j], dtype=torch.complex128)
    assert _relative_error(expected.to(torch.complex64), expected, "the output") < 1e-7
    assert _relative_error(expected.conj(), expected, "the output") == pytest.approx(8 / 5)
    assert _relative_error(expected.real.float(), expected, "the output") == pytest.approx(4 / 5)
    with pytest.raises(ValueError, match="4 values, the reference 3"):
        _relative_error(torch.zeros(4), torch.zeros(3), "the output")


def test_memory_of_a_modes_own_cuda_graph_is_that_of_its_recording(monkeypatch: pytest.MonkeyPatch):
    # A replay allocates nothing: what the graph holds was allocated while it was recorded.
    arm = handler(replace(CASE, strategy="full"))
    steps: list[str] = []
    monkeypatch.setattr(arm, "_reset_peak", lambda: steps.append("forget"))
    monkeypatch.setattr(arm, "_peaks", lambda: (steps.append("peaks"), {"allocated": 900, "reserved": 950})[1])
    arm.case = replace(CASE, strategy="full", mode="reduce-overhead")
    monkeypatch.setattr("benchmarks.strategies.apply", lambda case, prepared: prepared.model)
    arm.first_call()
    assert steps == ["forget", "peaks"]
    monkeypatch.setattr(arm, "_peaks", lambda: {"allocated": 20, "reserved": 2000})
    monkeypatch.setattr(arm, "_reset_peak", lambda: None)
    assert arm.memory() == {"allocated": 900, "reserved": 2000}


def start(model: str) -> Worker:
    worker = Worker({"OMP_NUM_THREADS": "1"}, timeout=120.0)
    for message in preparation(replace(EAGER, model=model)):
        worker.ask(message.pop("op"), **message)
    return worker


@pytest.mark.slow
@pytest.mark.usefixtures("no_worker_stays")
def test_stray_prints_do_not_reach_the_replies_and_a_timeout_kills_the_process() -> None:
    worker = start("print")
    assert worker.ask("start_up", folder=None)["ok"]
    assert worker.ask("first_call")["ok"]
    core = min(os.sched_getaffinity(pid := worker._process.pid))
    assert worker.ask("round", calls=2, core=core)["calls"] == 2 and os.sched_getaffinity(pid) == {core}
    worker.stop()
    assert not worker.alive
    assert "a stray print" in "\n".join(worker._stderr)
    worker = start("sleep")
    worker.timeout = 0.5
    with pytest.raises(WorkerFailure, match="start_up took longer than 0.5 s") as caught:
        worker.ask("start_up", folder=None)
    assert caught.value.status == "timeout"
    assert str(ROOT) not in caught.value.reason
    assert not worker.alive


def event(name: str, microseconds: float = 1.0, *, device: str = "CUDA", **more: Any) -> SimpleNamespace:
    interval = SimpleNamespace(elapsed_us=lambda: microseconds)
    return SimpleNamespace(name=name, device_type=SimpleNamespace(name=device), time_range=interval, **more)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("triton_poi_fused_addmm_gelu_view_2", "triton_poi_fused_addmm_gelu_view_2"),
        ("void (anonymous namespace)::softmax<float, 5, (anonymous namespace)::Sum<float> >(float*, int)", "softmax"),
        ("fmha_bf16_64x64_rf_sm80(Attention<cutlass::bfloat16_t>::Params)", "fmha_bf16_64x64_rf_sm80"),
        # A return type with templates of its own, and one with comparisons in it.
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(P<int>)", "internal::gemvx::kernel"),
        ("std::enable_if<((5)>=(3)), void>::type some::kernel<1>(int)", "some::kernel"),
        # The kernel is what the template is given.
        ("void cutlass::Kernel2<cutlass_80_gemm>(cutlass_80_gemm::P)", "cutlass_80_gemm"),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Main<2, int>, "
            "flash::Epilogue<1> > > >(flash::Params)",
            "flash::FlashAttnFwdSm90",
        ),
    ],
)
def test_names_are_shortened(name: str, short: str) -> None:
    assert timing.short_name(name) == short


def test_copies_and_the_host_are_no_kernels_and_equal_names_are_one_entry() -> None:
    kept = event("product", is_user_annotation=False)
    others = [event("Memcpy DtoD (Device -> Device)"), event("Memset (Device)"), event("aten::mm", device="CPU")]
    assert timing.gpu_kernels([kept, *others, event("## a call ##", is_user_annotation=True)]) == [kept]
    a_call = [event("norm", 2.0), event("void gemm<float, 1>(int)", 5.0), event("void gemm<float, 2>(int)", 7.0)]
    found, others = timing.longest_kernels([*a_call, *a_call, event("norm", 2.0)], 2)
    assert found == [
        KernelTime(name="gemm", launches=2.0, microseconds=12.0),
        KernelTime(name="norm", launches=1.5, microseconds=3.0),
    ]
    assert others is None and timing.longest_kernels([], 2) == ([], None)
    for more, called in ((1, "1 other"), (3, "3 others")):
        events = [event(f"{index}", 100.0 - index) for index in range(timing.MOST_KERNELS + more) for _ in range(2)]
        found, others = timing.longest_kernels(events[::-1], 2)
        assert [kernel.name for kernel in found] == [str(index) for index in range(timing.MOST_KERNELS)]
        assert (others.name, others.launches) == (called, more)
        assert others.microseconds == sum(100.0 - timing.MOST_KERNELS - index for index in range(more))


def test_a_worker_counts_and_names_kernels_by_one_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = Handler()
    arm.device = "cuda"
    asked: list[int] = []

    def profile(*, calls: int) -> SimpleNamespace:
        asked.append(calls)
        return SimpleNamespace(events=lambda: [event("norm", 2.0), event("gemm", 9.0), event("Memset (x)")] * calls)

    monkeypatch.setattr(arm, "_late", lambda: [])
    monkeypatch.setattr(arm, "_profile", profile)
    reply = arm.kernels()
    assert len(asked) == 1 and asked[0] > 1
    longest = [asdict(KernelTime(name=name, launches=1.0, microseconds=us)) for name, us in (("gemm", 9), ("norm", 2))]
    assert reply == {"kernels": 2, "longest": longest, "others": None, "recompiles": []}
    arm.device = "cpu"
    assert arm.kernels() == {"kernels": None, "longest": None, "others": None, "recompiles": []}
    assert len(asked) == 1


def test_a_profile_that_fails_leaves_the_row_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(operation: str) -> None:
        raise WorkerFailure("timeout", "no answer in 600 s", operation)

    result = row(1.0, strategy="regional", impl="zoo")
    result.work.kernels, times = None, list(result.steady.wall_ms)
    dead = SimpleNamespace(alive=False)
    arm = cast(startup.ArmRun, SimpleNamespace(ok=True, result=result, ask=ask, worker=dead))
    harness._count(arm)
    harness._draw(arm, 200)  # nobody is asked again
    assert (result.status, result.steady.wall_ms, result.work.kernels) == ("ok", times, None)
    assert result.reason == "its kernels, and what it compiled in the race, were not counted: no answer in 600 s"
    race = shown([row(2.0, impl="upstream"), result])
    assert f"! zoo regional: {result.reason}." in race_notes(race)


class Stages(Sequence):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x.repeat(1, 2) if x.size(1) < block.linear.in_features else x)
        return x


def test_processes_cache_bytecode_where_the_environment_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    done = subprocess.run(
        [sys.executable, "-c", "import benchmarks, sys; print(sys.dont_write_bytecode)"],
        env={**os.environ, **python_environment()}, cwd="/", capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["False"]


def test_folders_are_switched_for_a_while_and_kernels_compiled_elsewhere_are_forgotten(tmp_path, monkeypatch):
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
    triton = pytest.importorskip("triton")

    def kernel(x):
        return x

    function = triton.runtime.jit.JITFunction(kernel)
    with other_cache(tmp_path):
        function.device_caches[0] = "compiled by an eager call"
    assert not function.device_caches, "the case would not pay for its own kernels"


@pytest.mark.parametrize("changed", [False, True])
def test_a_graph_for_each_width_is_no_recompile_and_another_shape_is(changed: bool):
    model, x = Stages(*map(Block, (4, 4, 8, 8))), torch.randn(2, 4)
    recorder = Recorder(model)
    with torch.no_grad():
        with recorder.watching_signatures():
            model(x)
        assert not any(module._forward_pre_hooks for module in model.modules()), "hooks do not stay"
        for block in model.blocks:
            block.compile(backend="eager", dynamic=False)
        model(x)
        if changed:
            model(torch.randn(3, 4))
    facts = recorder.facts()
    assert (facts.graphs, len(facts.recompiles), facts.breaks) == ((4, 2, []) if changed else (2, 0, []))
    assert all("size mismatch" in reason for reason in facts.recompiles)


def test_phases_are_differences_of_nested_figures_and_a_second_frame_is_a_break() -> None:
    class Record:
        dynamo_cumulative_compile_time_us = 10_000_000
        aot_autograd_cumulative_compile_time_us = 7_000_000
        inductor_cumulative_compile_time_us = 5_000_000
        inductor_code_gen_cumulative_compile_time_us = 4_000_000
        triton_compile_time_us = 1_000_000

    assert _phases([Record()]) == {"dynamo": 3.0, "aot": 2.0, "inductor": 1.0, "codegen": 3.0, "kernels": 1.0}
    assert sum(_phases([Record(), Record()]).values()) == 20.0
    frames = [SimpleNamespace(co_name=name) for name in ("forward", "forward", "move_on")]
    assert _breaks(Counter(), frames, whole=True) == ["move_on: compiled by itself, so forward ended before it"]
    backward = SimpleNamespace(co_name=None)
    assert _breaks(Counter(), [*frames[:2], backward], whole=True) == []
    assert _breaks(Counter(), frames) == [], "regions are frames of their own"
    assert _breaks(Counter({"print": 1}), frames, whole=True) == ["print"]


def test_without_a_driver_a_monitor_knows_nothing_and_a_copy_is_told_its_commit(monkeypatch, tmp_path):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("benchmarks.machine.ctypes.CDLL", missing)
    monitor = Monitor()
    assert (monitor.sm_clock(), monitor.power(), monitor.memory(), monitor.driver()) == (None,) * 4
    assert free_memory("cuda", monitor) is None and free_memory("cpu", monitor) > 1 << 20
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine._commit() == {"commit": None, "dirty": None}
    for given, expected in (("abc", ("abc", False)), ("abc-dirty", ("abc", True))):
        monkeypatch.setenv("BENCHMARKS_COMMIT", given)
        assert tuple(machine._commit().values()) == expected


@pytest.mark.gpu
def test_a_gpu_is_described_and_watched():
    facts = device_facts("cuda")
    monitor = Monitor(facts["gpu_uuid"])
    assert facts["driver"] and facts["gpu_memory"] > 0
    assert monitor.sm_clock() and monitor.power()
    used, free = monitor.memory() or (0, 0)
    assert used > 0 and used + free <= facts["gpu_memory"] * 1.1
    assert facts["gpu"] == torch.cuda.get_device_name()
