"""The command: options and the cases they become, rows of a real run, typed failures, resuming."""

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cli import run_command
from benchmarks.measure import Run, command_of
from benchmarks.plan import Case, expand, refusal
from benchmarks.process import ROOT
from benchmarks.record import Store
from benchmarks.run import main
from tests.runs import FAKE, LIGHT, settings_in


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.run", "--family", FAKE, "--device", "cpu", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=ROOT, env=os.environ | LIGHT, capture_output=True, text=True)


def wrong(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_command(main, "run", arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--family gn", "did you mean 'gnn'?"),
        ("", "--family is missing"),
        ("--famly FAKE", "--family"),
        ("--family FAKE --strategy regonal", "did you mean 'regional'?"),
        ("--family FAKE --strategy full,regional+cudagrph", "did you mean 'regional+cudagraph'?"),
        ("--family FAKE --mode reduce_overhead", "did you mean 'reduce-overhead'?"),
        ("--family FAKE --model god", "did you mean 'good'?"),
        ("--family FAKE --dtype float23", "did you mean"),
        ("--family FAKE --dtype float16", "available: float32, bfloat16"),
        ("--family FAKE --device gpu", "did you mean 'cpu'?"),
        ("--family FAKE --rounds 0", "--rounds is 0"),
        ("--family FAKE --rounds 1001", "--rounds is 1001, expected 1 to 1000"),
        ("--family FAKE --rounds many", "Invalid value for '--rounds'"),
        ("--family FAKE --timeout -1", "--timeout is -1"),
        ("--family FAKE --data-root /no/such/folder", "is not a folder"),
        ("--family FAKE --impl upstream-tuned", "tuning a fake is pointless"),
        ("--family FAKE --strategy regional --mode reduce-overhead", "full alone"),
        ("--family FAKE --strategy eager --arm zoo* --arm *dynamic", "no arm matches '*dynamic'"),
    ],
)
def test_a_wrong_option_is_one_line_with_a_suggestion(capsys: pytest.CaptureFixture[str], arguments: str, message: str):
    words = arguments.replace("FAKE", FAKE).split()
    assert message in wrong(capsys, *words, *(["--device", "cpu"] if "--device" not in words else []))


def test_rows_are_never_added_unasked_and_a_broken_one_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (file := tmp_path / "fake-inference-float32.jsonl").touch()
    arguments = "--family", FAKE, "--device", "cpu", "--out", str(tmp_path)
    assert "add --resume" in wrong(capsys, *arguments)
    file.write_text('{"kind":"environment","id":"e1"}\n{broken\n')
    said = wrong(capsys, *arguments, "--resume")
    assert f"{file}:2 is not a JSON row" in said and "repair or delete that line" in said


LISTED = f"run_command(main, 'run', ['--family', {FAKE!r}, '--list'])"


@pytest.mark.slow
@pytest.mark.parametrize(("program", "more"), [("", {"torch", "numpy", "benchmarks.stats"}), (LISTED, {"jinja2"})])
def test_nothing_is_imported_that_measuring_does_not_need(program: str, more: set[str]):
    absent = more | {"matplotlib", "benchmarks.report"}
    code = f"import sys; from benchmarks.run import main, run_command\n{program}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not absent & set(done.stdout.split())


def test_without_its_packages_the_harness_names_the_extra() -> None:
    code = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "typer" else find(name, *rest)
import benchmarks
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and 'pip install -e ".[bench]"' in done.stderr


def test_list_measures_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = tmp_path / "run"
    assert run_command(main, "run", ["--family", FAKE, "--device", "cpu", "--list", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"models:", "  upstream-crash", "inputs:", "  large", "arms:", "  zoo regional (A/A)"} <= set(lines)
    assert all(len(line) <= 80 for line in lines)
    assert not out.exists()


def planned(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Run:
    """What such a run would measure, wherever it is planned."""
    plans: list[Run] = []

    def keep(plan: Run, *_: object) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr("benchmarks.run.device_of", str)
    monkeypatch.setattr("benchmarks.run.measure", keep)
    assert run_command(main, "run", arguments) == 0
    (plan,) = plans
    return plan


DYNAMIC = [
    "cuda --impl zoo,zoo-library --strategy full,full+dynamic --arm *dynamic",
    "cuda --strategy full+dynamic --mode max-autotune-no-cudagraphs",
]


@pytest.mark.parametrize("options", ["cpu", "cuda", *DYNAMIC])
def test_a_rows_command_measures_that_row_and_no_other(monkeypatch, tmp_path, options):
    plan = planned(monkeypatch, "--family", FAKE, "--out", str(tmp_path / "run"), "--device", *options.split())
    settings = settings_in(tmp_path)
    for case in plan.cases:
        words = shlex.split(command_of(case, settings))
        assert words[:3] == ["python", "-m", "benchmarks.run"]
        assert planned(monkeypatch, *words[3:]).cases == [replace(case, control=False)]


def test_resume_alone_continues_the_run_that_wrote_rows_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("benchmarks.run.RUNS", tmp_path)
    for age, name in enumerate(("20260102-120000", "mine", "20260101-120000")):
        rows = tmp_path / name / "fake-inference-float32.jsonl"
        rows.parent.mkdir()
        rows.touch()
        os.utime(rows, (1e9 - age, 1e9 - age))
    (tmp_path / "stopped-before-its-first-row").mkdir()
    assert planned(monkeypatch, "--family", FAKE, "--device", "cpu", "--resume").out == tmp_path / "20260102-120000"


@pytest.mark.slow
def test_a_run_types_its_failures_and_goes_on_then_resumes(tmp_path: Path):
    options = ["--model", "upstream-crash", "--strategy", "eager,regional", "--quick", "--rounds", "6"]
    done = run(*options, "--out", str(tmp_path))
    # Only upstream's arms crash: nothing of ours is broken.
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if line.startswith("  ["))
    assert lines[1] == "each arm starts once, then all race for 6 rounds"
    # Upstream has no times here, so nothing was gained over it.
    assert not any("Ours against each upstream arm:" in line for line in lines)
    store = Store(tmp_path / "fake-inference-float32.jsonl")
    kinds = [row["kind"] for row in store.rows()]
    assert kinds[0] == "environment" and kinds.count("environment") == 1
    rows = {result.case.arm: result for result in store.results()}
    assert [arm for arm, row in rows.items() if row.status == "ok"] == [arm for arm in rows if "zoo" in arm]
    assert sorted(rows) == ["upstream eager", "upstream regional", "zoo eager", "zoo regional", "zoo regional (A/A)"]
    assert {row.status for arm, row in rows.items() if "zoo" not in arm} == {"crashed"}
    crashed = rows["upstream eager"]
    assert "SIGABRT" in (crashed.reason or "") and "about to abort" in (crashed.reason or "")
    regional = rows["zoo regional"]
    assert len(regional.steady.wall_ms) == 6
    assert regional.cold.graphs == 1
    assert "--strategy regional" in regional.command and "--model upstream-crash" in regional.command
    environment = store.environments()[regional.environment or ""]
    assert {"cpu", "cpu_count", "python", "libraries", "commit", "dirty", "torch", "gpu"} < set(environment)
    rates = (environment["peaks"]["copy_bandwidth"], environment["peaks"]["read_bandwidth"])
    assert all(1e8 < rate < 1e15 for rate in (*rates, environment["peaks"]["matmul_flops"]["float32"]))

    assert f"report: {tmp_path / 'report.html'}" in done.stdout.replace("\n", "")
    page = (tmp_path / "report.html").read_text()
    assert "zoo regional" in page and "upstream regional: crashed" in page

    again = run(*options, "--out", str(tmp_path), "--resume")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "2 arms, 3 done before" in again.stdout
    assert [row["kind"] for row in store.rows()].count("result") == 7


def test_a_failure_of_ours_makes_the_exit_code_1(tmp_path: Path):
    done = run("--model", "raise", "--strategy", "eager", "--impl", "zoo", "--quick", "--out", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    (result,) = Store(tmp_path / "fake-inference-float32.jsonl").results()
    assert result.status == "failed"
    assert "this model does not like its input" in done.stdout.replace("\n", " ")
    assert "this model does not like its input" in (tmp_path / "report.html").read_text()  # of a failure alone


CPU = Case(family="gnn", model="gcn", input="karate")
GPU = replace(CPU, device="cuda")


GPU_ARMS = ["zoo eager", "zoo full", "zoo regional", "zoo regional + CUDA graph"]
THEIR_ARMS = ["upstream eager", "upstream full", "upstream regional"]
CONTROLS = ["zoo regional + CUDA graph (A/A)", "zoo regional (A/A)"]
NAMES: list[tuple[Case, dict[str, Any], list[str]]] = [
    (GPU, {}, [*GPU_ARMS, *THEIR_ARMS[:2], "upstream full reduce-overhead", "upstream regional", *CONTROLS]),
    (CPU, {}, [*GPU_ARMS[:3], *THEIR_ARMS, "zoo regional (A/A)"]),
    (
        GPU, {"impls": ["zoo", "upstream-tuned"], "strategies": ["full", "full+cudagraph"]},
        [
            "zoo full", "zoo full + CUDA graph", "upstream-tuned full", "upstream-tuned full + CUDA graph",
            "zoo full + CUDA graph (A/A)", "zoo full (A/A)",
        ],
    ),
    (CPU, {"impls": ["upstream"]}, [*THEIR_ARMS, "upstream regional (A/A)"]),
    (CPU, {"impls": ["zoo"], "strategies": ["eager"]}, ["zoo eager"]),  # one arm alone has no control
    (
        GPU, {"impls": ["zoo"], "strategies": ["eager", "full", "full+dynamic"]},
        ["zoo eager", "zoo full", "zoo full dynamic", "zoo full (A/A)"],  # the control is a static one's
    ),
    (CPU, {"impls": ["zoo"], "strategies": ["full+dynamic"]}, ["zoo full dynamic"]),
    (GPU, {"only": ["zoo regional*", "upstream eager"]}, [*GPU_ARMS[2:], "upstream eager", *CONTROLS]),
]  # fmt: skip


@pytest.mark.parametrize(("base", "options", "arms"), NAMES)
def test_options_and_their_arms(base: Case, options: dict[str, Any], arms: list[str]):
    cases, _ = expand([base], lambda case: None, **options)
    assert [case.arm for case in cases] == arms


def test_the_zoo_without_its_kernels_is_an_arm_to_ask_for_and_what_cannot_be_is_left_out_with_the_reason() -> None:
    cases, _ = expand(
        [GPU], lambda case: None, impls=["zoo", "zoo-library"], strategies=["eager", "regional+cudagraph"]
    )
    captured = " regional + CUDA graph"
    assert [case.arm for case in cases] == [
        "zoo eager", f"zoo{captured}", "zoo-library eager", f"zoo-library{captured}", f"zoo{captured} (A/A)",
        "zoo eager (A/A)",
    ]  # fmt: skip
    assert {case.impl for case in cases} == {"zoo"} and len({case.key for case in cases}) == 6
    assert [case.kernels for case in cases] == [True, True, False, False, True, True]
    assert "the zoo runs no kernels of its own" in str(refusal(replace(CPU, kernels=False)))
    assert refusal(replace(GPU, kernels=False)) is None
    cases, refused = expand([GPU], declared, strategies=["full+dynamic", "eager"])
    assert [case.arm for case in cases] == ["zoo eager", "upstream full dynamic", "upstream eager", "zoo eager (A/A)"]
    assert {key.rpartition(" / ")[2]: why for key, why in refused.items()} == {"zoo full dynamic": "declared shapes"}


def declared(case: Case) -> str | None:
    return "declared shapes" if case.dynamic and case.impl == "zoo" else None


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"strategy": "eager", "mode": "reduce-overhead", "device": "cuda"}, "not compiled"),
        ({"strategy": "regional", "mode": "reduce-overhead", "device": "cuda"}, "full alone"),
        ({"strategy": "full", "mode": "reduce-overhead", "device": "cuda", "cuda_graph": True}, "itself"),
        ({"strategy": "full", "mode": "reduce-overhead"}, "GPU"),
        ({"strategy": "eager", "dynamic": True}, "dynamic shapes do not apply"),
        ({"strategy": "full", "cuda_graph": True}, "a CPU has no CUDA graphs"),
        ({"strategy": "full", "cuda_graph": True, "dynamic": True, "device": "cuda"}, "fixed shapes"),
        ({"strategy": "hierarchical", "impl": "upstream"}, "zoo model"),
    ],
)
def test_arms_that_cannot_exist(fields: dict[str, object], word: str):
    assert word in (refusal(replace(CPU, **fields)) or "")
