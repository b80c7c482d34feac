"""Kernels of a profile: their names made short, merged, and the longest of them in the row."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import harness, startup, timing, worker
from benchmarks.process import WorkerFailure
from benchmarks.record import Kernel
from benchmarks.report.cells import race_notes
from tests.rows import row, shown


def event(name: str, microseconds: float = 1.0, *, device: str = "CUDA", **more: Any) -> SimpleNamespace:
    """What the profiler gives for one launch."""
    interval = SimpleNamespace(elapsed_us=lambda: microseconds)
    return SimpleNamespace(name=name, device_type=SimpleNamespace(name=device), time_range=interval, **more)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("triton_poi_fused_addmm_gelu_view_2", "triton_poi_fused_addmm_gelu_view_2"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::Gelu(at::Base&)::{lambda()#2}::operator()() "
            "const::{lambda(c10::BFloat16)#1}, std::array<char*, 2ul> >(int, std::array<char*, 2ul>)",
            "at::native::vectorized_elementwise_kernel",
        ),
        ("void (anonymous namespace)::softmax<float, 5, (anonymous namespace)::Sum<float> >(float*, int)", "softmax"),
        ("fmha_bf16_64x64_rf_sm80(Attention<cutlass::bfloat16_t>::Params)", "fmha_bf16_64x64_rf_sm80"),
        # A return type with templates of its own, and one with comparisons in it.
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(P<int>)", "internal::gemvx::kernel"),
        ("std::enable_if<((5)>=(3)), void>::type some::kernel<1>(int)", "some::kernel"),
        # The kernel is what the template is given.
        (
            "void cutlass::Kernel2<cutlass_80_bf16_gemm_align8>(cutlass_80_bf16_gemm_align8::P)",
            "cutlass_80_bf16_gemm_align8",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Main<2, int>, "
            "flash::Epilogue<1> > > >(flash::Params)",
            "flash::FlashAttnFwdSm90",
        ),
        ("void cutlass::Kernel2<>(int)", "cutlass::Kernel2"),
        ("<>", "<>"),
    ],
)
def test_names_are_shortened(name: str, short: str) -> None:
    assert timing.short_name(name) == short


def test_copies_fills_annotations_and_the_host_are_no_kernels() -> None:
    kept = event("product", is_user_annotation=False)
    others = [event("Memcpy DtoD (Device -> Device)"), event("Memset (Device)"), event("aten::mm", device="CPU")]
    assert timing.gpu_kernels([kept, *others, event("## a call ##", is_user_annotation=True)]) == [kept]


def test_equal_names_are_one_entry_and_what_is_beyond_the_longest_is_another() -> None:
    a_call = [event("norm", 2.0), event("void gemm<float, 1>(int)", 5.0), event("void gemm<float, 2>(int)", 7.0)]
    found, others = timing.longest_kernels([*a_call, *a_call, event("norm", 2.0)], 2)
    assert found == [
        Kernel(name="gemm", launches=2.0, microseconds=12.0),
        Kernel(name="norm", launches=1.5, microseconds=3.0),
    ]
    assert others is None and timing.longest_kernels([], 2) == ([], None)
    for more, called in ((1, "1 other"), (3, "3 others")):
        events = [event(f"{index}", 100.0 - index) for index in range(timing.MOST_KERNELS + more) for _ in range(2)]
        found, others = timing.longest_kernels(events[::-1], 2)
        assert [kernel.name for kernel in found] == [str(index) for index in range(timing.MOST_KERNELS)]
        assert (others.name, others.launches) == (called, more)
        assert others.microseconds == sum(100.0 - timing.MOST_KERNELS - index for index in range(more))


def test_a_worker_counts_and_names_kernels_by_one_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = worker.Handler()
    arm.device = "cuda"
    asked: list[int] = []

    def profile(*, calls: int) -> SimpleNamespace:
        asked.append(calls)
        return SimpleNamespace(events=lambda: [event("norm", 2.0), event("gemm", 9.0), event("Memset (x)")] * calls)

    monkeypatch.setattr(arm, "_late", lambda: [])
    monkeypatch.setattr(arm, "_profile", profile)
    reply = arm.kernels()
    assert len(asked) == 1 and asked[0] > 1
    longest = [asdict(Kernel(name=name, launches=1.0, microseconds=us)) for name, us in (("gemm", 9), ("norm", 2))]
    assert reply == {"kernels": 2, "longest": longest, "others": None, "recompiles": []}
    arm.device = "cpu"
    assert arm.kernels() == {"kernels": None, "longest": None, "others": None, "recompiles": []}
    assert len(asked) == 1


@pytest.mark.parametrize("others", [None, Kernel(name="3 others", launches=4.0, microseconds=1.5)])
def test_what_a_worker_replies_is_in_the_row(others: Kernel | None) -> None:
    gemm = Kernel(name="gemm", launches=1.0, microseconds=9.0)
    reply = {"kernels": 2, "longest": [asdict(gemm)], "others": others and asdict(others), "recompiles": []}
    result = row(1.0)
    harness._count(cast(startup.ArmRun, SimpleNamespace(ok=True, result=result, ask=lambda operation: reply)))
    assert (result.work.kernels, result.work.longest, result.work.others) == (2, [gemm], others)


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
