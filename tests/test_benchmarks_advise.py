"""Advice: which way to run a model for so many calls, for the zoo's models and for anybody's."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import advised
from benchmarks.advise import cases_of, main
from benchmarks.advised import WORKLOAD, load, sizes_in
from benchmarks.cli import run_command
from benchmarks.process import ROOT
from benchmarks.record import Result, Store
from benchmarks.record import load as load_rows
from benchmarks.report import advice, cells, html
from benchmarks.report.model import MeasuredRace, races
from benchmarks.report.terminal import Regions, render_advice
from tests.rows import ENVIRONMENTS, failure, row, shown
from tests.runs import LIGHT, told

MODELS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.linear, self.index = nn.Linear(8, 8), index
    def forward(self, x):
        return x + torch.relu(self.linear(x))

class Indexed(Block):
    def forward(self, x):
        return x + torch.relu(self.linear(x)) * self.index

class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList(block(index) for index in range(3))
    def forward(self, x, scale=None):
        x = x + 0.0
        for block in self.blocks:
            x = block(x)
        return {"out": x if scale is None else x * scale, "rows": len(x)}

class Variadic(Model):
    def forward(self, *xs):
        return xs[0]

class Silent(Model):
    def forward(self, x):
        return len(x)

NUMBER = 3
def x(width=8): return torch.randn(4, width)
def make(): return Model(), {"x": x()}
def positional(): return Model(), (x(), 2.0)
def double(): return Model().double(), (x().double(),)
def indexed(): return Model(Indexed), {"x": x()}
def lonely(): return nn.Sequential(nn.Linear(8, 8), nn.ReLU()), x()
def of_torch(): return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), x()
def broken(): return Model(), {"x": x(9)}
def raises(): raise RuntimeError("the weights are gone")
def silent(): return Silent(), (x(),)
def variadic(): return Variadic(), (x(),)
def too_many(): return Model(), (x(), None, 1)
def alone(): return Model()
def no_module(): return make, {"x": x()}
def no_inputs(): return Model(), 3
def strange_input(): return Model(), {"x": [x()]}
def no_tensor(): return Model(), {"x": 1}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A user's file of models, as ``file.py``."""
    path = tmp_path_factory.mktemp("user") / "mine.py"
    path.write_text(MODELS)
    return str(path)


def look(name: str, **question: Any) -> dict[str, Any]:
    asked = {"device": "cpu", "dtype": None, "seed": 0, "sizes": {}} | question
    return WORKLOAD.look(model=name, **asked)


# What is named


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gcn-debugg", "--calls", "5"), "did you mean 'gcn-debug'?"),
        (("gcn-debug", "--calls", "0"), "--calls is 0, expected at least 1"),
        (("gcn-debug",), "--calls"),
        ((), "Missing argument"),
        (("gcn-debug", "--calls", "many"), "Invalid value for '--calls'"),
        (("gcn-debug", "--calls", "5", "--dtype", "float23"), "did you mean"),
        (("gcn-debug", "--calls", "5", "--device", "gpu"), "did you mean 'cpu'?"),
        (("gcn-debug", "--calls", "5", "--size", "batch"), "'batch' is not name=number"),
        (("mine:make", "--calls", "5", "--size", "batch=3"), "a function of your own returns them"),
        (("gcn-debug", "--calls", "5", "--timeout", "0"), "--timeout is 0"),
        (("gcn-debug", "--calls", "5", "--resume"), "name its folder"),
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    assert run_command(main, "advise", arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mke", "has no function 'mke'; did you mean 'make'?"),
        ("", "names no function; write module:function"),
        ("NUMBER", "is an int, expected a function"),
        ("raises", "failed: RuntimeError: the weights are gone"),
        ("alone", "returned a Model, expected (model, inputs)"),
        ("no_module", "returned a function as the model, expected an nn.Module"),
        ("no_inputs", "returned an int as inputs, expected a dict or a tuple of tensors"),
        ("strange_input", "returned a list of 1 as input 'x', expected a tensor"),
        ("no_tensor", "returned inputs without a tensor"),
        ("variadic", "Variadic.forward takes *args; return the inputs by name"),
        ("too_many", "Model.forward does not take 3 input(s): too many positional arguments"),
        ("broken", "the model does not run on its inputs: RuntimeError"),
        ("silent", "the model returns an int without a tensor in it"),
        ("double", "computes in float64; give --dtype, one of float32, bfloat16, float16"),
    ],
)
def test_a_function_that_cannot_be_measured_is_named_with_the_reason(models: str, function: str, message: str) -> None:
    refused = look(f"{models}:{function}")["refused"]
    assert message in refused and "\n" not in refused


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:make", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("folder/none.py:make", "there is no file folder/none.py"),
        ("folder/none.py", "names no function"),
        ("lm-debug", "the zoo has no model 'lm-debug'; did you mean 'llm-debug'?"),
    ],
)
def test_a_name_that_leads_nowhere(name: str, message: str) -> None:
    assert message in look(name)["refused"]


def test_a_size_that_a_preset_does_not_have() -> None:
    assert "no_such_size" in look("gcn-debug", sizes={"no_such_size": 3})["refused"]


# What is measured


def test_a_look_finds_dtype_memory_and_regions(models: str) -> None:
    facts = look(f"{models}:make")
    assert facts["refused"] is None and facts["dtype"] == "float32"
    assert facts["memory"] == 2 * 3 * (8 * 8 + 8) * 4
    assert facts["found"] == ["Block: 3 module(s), 1 graph(s)"] and not facts["declared"]
    assert facts["obstacles"] == [] and facts["none"] is None
    assert look(f"{models}:double", dtype="bfloat16")["dtype"] == "bfloat16"
    assert look("bert-debug")["declared"]


def test_a_look_says_what_stands_in_the_way(models: str) -> None:
    assert look(f"{models}:indexed")["obstacles"] == []  # a number by layer is a symbol
    assert "occurs twice" in look(f"{models}:lonely")["none"]
    assert "but layers of torch.nn occurs twice" in look(f"{models}:of_torch")["none"]


def test_positional_inputs_get_their_names_and_plain_values_stay(models: str) -> None:
    loaded = load(f"{models}:positional", device="cpu", dtype=torch.bfloat16, seed=0, sizes={})
    assert list(loaded.inputs) == ["x", "scale"] and loaded.inputs["scale"] == 2.0
    assert loaded.inputs["x"].dtype == loaded.dtype == torch.bfloat16
    assert not loaded.model.training


def test_the_seed_gives_the_same_weights_in_every_process(models: str) -> None:
    first, same, other = (load(f"{models}:make", device="cpu", dtype=None, seed=s, sizes={}) for s in (0, 0, 1))
    weights = [next(loaded.model.parameters()) for loaded in (first, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_graph_is_prepared_once_and_its_time_is_a_figure() -> None:
    loaded = load("gcn-debug", device="cpu", dtype=torch.float32, seed=0, sizes={"num_nodes": 20})
    assert loaded.inputs["x"].size(0) == 20 and loaded.static == ("edge_index",)
    assert not isinstance(loaded.inputs["edge_index"], torch.Tensor) and loaded.preparation["CSRGraph"] > 0


def test_the_arms_of_a_device() -> None:
    cpu = cases_of("bert-debug", "cpu", "float32", cast=False, sizes={"batch": 3, "tokens": 8})
    assert [case.arm for case in cpu] == ["zoo eager", "zoo full", "zoo regional", "zoo eager (A/A)"]
    assert sizes_in(cpu[0].input) == {"batch": 3, "tokens": 8}
    gpu = cases_of("mine:make", "cuda", "bfloat16", cast=True, sizes={})
    assert [case.arm for case in gpu] == [
        "own eager", "own full", "own regional", "own regional + CUDA graph", "own full reduce-overhead",
        "own eager (A/A)",
    ]  # fmt: skip
    assert {case.input for case in gpu} == {"given, cast"}
    assert {case.input for case in cases_of("mine:make", "cpu", "float32", cast=False, sizes={})} == {"given"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy", "graphs"),
    [("make", "regional", 1), ("make", "full", 1), ("bert-debug", "regional", 1), ("gcn-debug", "full", 1)],
)
def test_an_arm_from_its_case_to_its_error(
    models: str, name: str, strategy: str, graphs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCHMARKS_BACKEND", "eager")
    model = f"{models}:{name}" if name == "make" else name
    (case,) = [c for c in cases_of(model, "cpu", "float32", cast=False, sizes={}) if c.strategy == strategy]
    by_op = told(
        case,
        {"op": "look", "model": model, "device": "cpu", "dtype": None, "seed": 0, "sizes": {}},
        {"op": "start_up", "folder": str(tmp_path / "start-up")},
        {"op": "first_call"},
        {"op": "check", "reference": str(tmp_path / "reference.pt")},
        family="benchmarks.advised",
    )
    assert by_op["look"]["dtype"] == "float32"
    assert by_op["first_call"]["graphs"] == graphs and by_op["first_call"]["breaks"] == []
    assert by_op["check"]["reference_dtype"] == "float64"
    assert by_op["check"]["error"] < 1e-5 and by_op["check"]["eager_error"] < 1e-5


def test_a_reference_falls_back_to_what_the_model_runs_in(models: str) -> None:
    (case, *_) = cases_of(f"{models}:make", "cpu", "float32", cast=False, sizes={})
    prepared = WORKLOAD.prepare(case, data_root=None, seed=0)
    eager = prepared.model(**prepared.inputs)["out"]

    class Stubborn(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype == torch.float64:
                raise TypeError("float32 only")
            return x

    torch.testing.assert_close(prepared.reference()["out"].float(), eager)
    assert prepared.reference_dtype == "float64"
    prepared.model.blocks.append(Stubborn())
    prepared.reference()
    assert prepared.reference_dtype == "float32"


# What is said


def own(milliseconds: float, seed: int, **case: Any) -> Result:
    cold = case.pop("cold", 0.0)
    made = row(
        milliseconds,
        cold=cold,
        warm=case.pop("warm", cold / 2),
        graphs=1,
        seed=seed,
        **{"family": "advise", "model": "mine:make", "input": "given", "impl": "own", **case},
    )
    for figures in (made.cold, made.warm):
        if figures is not None:
            figures.start_up = 2.0
            figures.time_to_first_result = None
    return made


def measured() -> list[Result]:
    """Regional is ready soonest, full is faster, reduce-overhead is not faster than full."""
    return [
        own(10.0, 1, strategy="eager"),
        own(5.0, 2, strategy="regional", cold=1.0),
        own(4.0, 3, strategy="full", cold=11.0, warm=9.0),
        own(9.0, 4, strategy="regional", cuda_graph=True, cold=1.0),
        own(10.0, 5, strategy="eager", control=True),
    ]


# 2 s of start-up and 1 s of compiling at 5 ms saved a call, both times 1.02 by the rows' drift: 590 calls.
@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (100, r"do not compile\..* 10\.\d ms a call, 1\.0\d s in all; regional .* only from 5[89]\d calls on"),
        (2000, r"regional: 2\.00 s .* 1\.00 s .* 13\.\d s in all .* 20\.\d s\. .* after 5[89]\d calls\."),
        (50_000, r"full: 2\.00 s .* 11\.0 s .* 4\.\d\d ms a call, 2\d\d s in all .* after 2,\d\d\d calls\."),
    ],
)
def test_the_verdict_depends_on_the_calls(calls: int, said: str) -> None:
    first, later, warm = advice.verdict(shown(measured()), calls)
    assert re.match(f"For {calls:,} calls: {said}", first), first
    assert re.search(r"eager finishes first, from 5\d\d calls on regional, from 9,\d\d\d calls on full", later)
    assert "With warm caches" in warm


def test_totals_agree_with_the_choice_at_every_number_of_calls() -> None:
    race = shown(measured())
    for calls in (1, 100, 580, 600, 5000, 9500, 10_500, 1_000_000):
        picked = advice.choose(race, calls, "cold")
        totals = {arm.name: race.total(arm, calls, "cold") for arm in race.arms}
        assert picked.arm.name == min(totals, key=lambda name: totals[name] or 0.0), calls


def _agree(race: MeasuredRace) -> int:
    """Every number of calls that advise names for a new process stands in the report's sentence; how many there are."""
    lead = advice.lead(race)
    new = advice.choose(race, 10**12, "cold")
    if new is None or "not measured here" in lead:  # the fastest has no compile figures: steady state alone
        return 0
    said = [cells.calls(step.calls) for step in new.steps[1:]]
    for calls in said:
        assert re.search(rf"(?<![\d.,]){re.escape(calls)}(?![\d.])", lead), f"{calls} calls: {lead}"
        assert "in a new process" in lead.lower(), lead
    return len(said)


def test_sentence_and_advice_agree_on_the_committed_rows() -> None:
    rows = load_rows(ROOT / "benchmarks" / "results")
    found = [_agree(race) for race in races(rows.results, rows.environments) if race.reference is not None]
    assert not found or sum(found) > 10


def test_a_capture_is_paid_too_and_named() -> None:
    results = [own(10.0, 1), own(1.0, 2, strategy="regional", cuda_graph=True, cold=1.0), own(10.0, 5, control=True)]
    line = advice.verdict(shown(results), 10_000)[0]
    assert "regional + CUDA graph: 2.00 s to start the compiler + 1.00 s to compile + 0.0310 s to capture first" in line


def test_compiling_that_brings_nothing_is_said_plainly() -> None:
    results = [own(5.0, 1), own(6.0, 2, strategy="full", cold=9.0), own(5.0, 3, control=True)]
    race = shown(results)
    lines = advice.verdict(race, 10**9)
    assert "do not compile." in lines[0] and lines[0].endswith("and no compiled arm is measurably faster.")
    assert advice.how_to(race, 10**9) == []


def test_a_machine_too_loud_to_tell_is_named() -> None:
    def lines(noise: float) -> str:
        results = [own(5.0, 1), own(4.9, 2, strategy="full", cold=1.0), own(5.0 * (1 + noise), 3, control=True)]
        return " ".join(advice.verdict(shown(results), 10**6))

    assert "do not compile." in lines(0.5) and "No measurable difference to eager: full." in lines(0.5)
    assert "Two copies of eager differ by 50" in lines(0.5) and "measure again on an idle machine" in lines(0.5)
    assert "Two copies" not in lines(0.04)


def test_the_compilers_start_counts_as_little_as_was_measured_of_it() -> None:
    results = measured()
    race = shown(results)
    assert race.start_up == 2.0
    results[1].cold.time_to_first_result = 1.5  # compiled in 1 s, one call in 5 ms
    assert shown(results).start_up == pytest.approx(0.495, abs=0.002)


def test_without_warm_figures_it_says_so() -> None:
    results = measured()
    for result in results:
        result.warm = None
    assert advice.verdict(shown(results), 2000)[-1] == "Warm starts were not measured."


@pytest.mark.parametrize(
    ("results", "said"),
    [
        (lambda: [failure("crashed", "signal 11", family="advise", impl="own")], "no advice is possible"),
        (lambda: [own(1.0, 1)], "no other arm to compare it with"),
        (lambda: [own(1.0, 1, rounds=4), own(0.5, 2, rounds=4, strategy="full", cold=1.0)], "Too few rounds"),
        (
            lambda: [own(1.0, 1, strategy="regional", cold=1.0), own(0.5, 2, strategy="full", cold=1.0)],
            "eager did not run",
        ),
    ],
)
def test_what_cannot_be_advised_is_said(results: Callable[[], list[Result]], said: str) -> None:
    assert said in " ".join(advice.verdict(shown(results()), 1000))


def printed(results: list[Result], calls: int, regions: Regions) -> str:
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    render_advice(shown(results), calls, regions, console)
    return console.file.getvalue()


FOUND = Regions(found=["Block: 3 module(s), 1 graph(s)"], declared=False, obstacles=[], none=None)


def test_the_page_fits_80_columns_and_begins_with_the_verdict() -> None:
    results = [*measured(), failure("out-of-memory", "7 GiB", family="advise", model="mine:make", input="given",
                                    impl="own", strategy="full", mode="reduce-overhead")]  # fmt: skip
    text = printed(results, 12_345_678, FOUND)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.lstrip().startswith("For 12,345,678 calls: full: 2.00 s to start the compiler")
    assert "model = torch.compile(model, dynamic=False)" in text
    assert "Total seconds for 12,345,678 calls" in text and "full reduce-overhead: out-of-memory: 7 GiB" in text
    assert "own full" not in text and "own regional" not in text
    head = next(line for line in text.splitlines() if line.startswith("arm") and "start-up" in line)
    assert head.split() == ["arm", "start-up", "cold", "s", "warm", "s", "capture", "g/b/r", "MiB", "error"]


def test_the_page_says_what_stands_in_the_way_of_regions() -> None:
    assert "No obstacle to regional compilation was found." in printed(measured(), 10, FOUND)
    results = measured()
    results[1].cold.recompiles = ["forward: tensor 'x' dispatch key set mismatch"]
    text = " ".join(printed(results, 10, FOUND).split())
    assert (
        "- recompile: forward: tensor 'x' dispatch key set mismatch (the first block gets a tensor made outside" in text
    )
    text = printed(results, 10, Regions(found=[], declared=False, obstacles=[], none="no class occurs twice"))
    assert "No regions: no class occurs twice." in text
    failed = [own(1.0, 1), own(0.5, 2, strategy="full", cold=1.0),
              failure("failed", "graph break in Block", family="advise", model="mine:make", input="given", impl="own",
                      strategy="regional")]  # fmt: skip
    text = printed(failed, 10, Regions(FOUND.found, False, ["Block: forward reads index"], None))
    assert "- Block: forward reads index" in text and "- regional: failed: graph break in Block" in text


@pytest.mark.parametrize(
    ("faster", "lines"),
    [
        ({"strategy": "regional"}, ["zoo.compile_regions(model)"]),
        (
            {"strategy": "regional", "cuda_graph": True},
            ["zoo.compile_regions(model)", "step = zoo.cuda_graph(model, kwargs=inputs)"],
        ),
        (
            {"strategy": "full", "mode": "reduce-overhead"},
            ['model = torch.compile(model, dynamic=False, mode="reduce-overhead")'],
        ),
    ],
)
def test_how_to_run_what_was_chosen(faster: dict[str, Any], lines: list[str]) -> None:
    race = shown([own(10.0, 1), own(1.0, 2, cold=1.0, **faster), own(10.0, 3, control=True)])
    assert advice.how_to(race, 10**6) == lines


def test_weights_that_differ_from_process_to_process_are_noticed() -> None:
    assert "differ between processes" not in " ".join(printed(measured(), 10, FOUND).split())
    results = measured()
    for result in results[1:]:
        result.check.error, result.check.eager_error = 1.3, 1.3
    assert "outputs of the model differ between processes" in " ".join(printed(results, 10, FOUND).split())


def test_the_html_report_takes_a_users_model() -> None:
    page = html.report(measured(), ENVIRONMENTS)
    assert "own regional" in page and "to hold it against" not in page


def test_the_names_that_are_somebodys_own() -> None:
    assert [advised.is_own(name) for name in ("mine:make", "a/b.py", "bert-base", "unet")] == [True, True, False, False]


@pytest.mark.slow
def test_a_users_model_from_the_command_to_the_verdict(models: str, tmp_path: Path) -> None:
    def advise(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "benchmarks.advise", f"{models}:make", "--device", "cpu", "--quick", *arguments],
            cwd=ROOT,
            env=os.environ | LIGHT,
            capture_output=True,
            text=True,
            timeout=280,
        )

    out = tmp_path / "advice"
    done = advise("--calls", "1000", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nFor 1,000 calls: " in done.stdout
    assert "Regions, discovered: Block: 3 module(s), 1 graph(s)." in done.stdout
    rows = {result.case.arm: result for result in Store(out / "advise-inference-float32.jsonl").results()}
    assert {name: result.status for name, result in rows.items()} == dict.fromkeys(
        ("own eager", "own full", "own regional", "own eager (A/A)"), "ok"
    )
    command = rows["own regional"].command
    assert command is not None and "benchmarks.advise" in command and "--calls 1000" in command
    assert (out / "report.html").exists()
    # Other calls need no other measurement.
    again = advise("--calls", "7", "--out", str(out), "--resume")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "0 races, 0 arms, 4 done before" in again.stdout and "\nFor 7 calls: " in again.stdout
