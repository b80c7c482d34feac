"""``zoo advise``: which way to run a model for so many calls."""

import argparse
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from zoo import advise
from zoo.__main__ import main
from zoo.advise import Arm, ArmProcess, ArmWorker, Failed, Measured, Refused, interval, load, number, table, verdict

ROOT = Path(__file__).resolve().parent.parent
MODELS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return x + torch.relu(self.linear(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x, scale=None):
        x = x + 0.0
        for block in self.blocks:
            x = block(x)
        return {"out": x if scale is None else x * scale, "rows": len(x)}

class Variadic(Model):
    def forward(self, *xs):
        return xs[0]

class Nested(Model):
    def forward(self, batch):
        return super().forward(batch["x"][0], batch["scale"])

class Silent(Model):
    def forward(self, x):
        return len(x)

NUMBER = 3
def x(width=8): return torch.randn(4, width)
def make(): return Model(), {"x": x()}
def positional(): return Model(), (x(), 2.0)
def nested(): return Nested(), {"batch": {"x": [x()], "scale": 2.0}}
def lonely(): return nn.Sequential(nn.Linear(8, 8), nn.ReLU()), x()
def broken(): return Model(), {"x": x(9)}
def raises(): raise RuntimeError("the weights are gone")
def silent(): return Silent(), (x(),)
def variadic(): return Variadic(), (x(),)
def too_many(): return Model(), (x(), None, 1)
def alone(): return Model()
def no_module(): return make, {"x": x()}
def no_inputs(): return Model(), 3
def numbered(): return Model(), {0: x()}
def strange_input(): return Model(), {"x": [x]}
def no_tensor(): return Model(), {"x": 1}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A user's file of models."""
    path = tmp_path_factory.mktemp("user") / "models_to_advise_on.py"
    path.write_text(MODELS)
    return str(path)


def started(arm: str, name: str, tmp_path: Path) -> ArmWorker:
    worker = ArmWorker(arm, name, "cpu", "", str(tmp_path / "expected.pt"))
    worker.load()
    return worker


def look(name: str, tmp_path: Path) -> dict[str, Any]:
    return started("eager", name, tmp_path).look()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mke", "has no function 'mke', did you mean 'make'?"),
        ("", "is neither file.py:function nor module:function nor a model of the zoo"),
        ("NUMBER", "is an int, expected a function"),
        ("raises", "failed: RuntimeError: the weights are gone"),
        ("alone", "returned a Model, expected (model, inputs)"),
        ("no_module", "returned a function as the model, expected an nn.Module"),
        ("no_inputs", "returned an int as inputs, expected a dict or a tuple of tensors"),
        ("numbered", "returned an input called 0, expected names of forward's parameters"),
        ("strange_input", "returned a function as inputs['x'][0], expected a tensor or plain value"),
        ("no_tensor", "returned inputs without a tensor"),
        ("variadic", "Variadic.forward takes *args; return the inputs by name"),
        ("too_many", "Model.forward does not take 3 input(s): too many positional arguments"),
        ("broken", "the model does not run on its inputs: RuntimeError"),
        ("silent", "the model returns an int without a tensor in it"),
        ("no_such_module:make", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("folder/none.py:make", "there is no file folder/none.py"),
        ("bert-debgu", "nor a model of the zoo, did you mean 'bert-debug'?"),
    ],
)
def test_what_cannot_be_measured_is_named_with_the_reason(models, function, message, tmp_path):
    with pytest.raises(Refused) as refused:
        look(function if ":" in function or "-" in function else f"{models}:{function}", tmp_path)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--calls", "0"), "error: --calls is 0, expected at least 1"),
        (("--calls", "5", "--device", "cuda"), "--device cuda: torch finds no usable GPU here; use --device cpu"),
    ],
)
def test_wrong_usage_is_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["advise", "mine.py:make", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_the_calls_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["advise", "mine.py:make"])
    assert "--calls" in capsys.readouterr().err


def test_the_page_names_every_option_and_column() -> None:
    page = (ROOT / "docs/advise.md").read_text(encoding="utf-8")
    parser = argparse.ArgumentParser(add_help=False)
    advise.add_arguments(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    assert set(re.findall(r"^\| `(--[\w-]+)`", page, re.MULTILINE)) == options
    assert all(f"| `{name}` |" in page for name in (*advise.CODE, *advise.HEAD[1:]))


def test_positional_inputs_get_their_names_and_the_dtype_is_cast(models: str) -> None:
    model, inputs = load(f"{models}:positional", "cpu", "bfloat16")
    assert list(inputs) == ["x", "scale"] and inputs["scale"] == 2.0 and not model.training
    assert inputs["x"].dtype == next(model.parameters()).dtype == torch.bfloat16
    nested = load(f"{models}:nested", "cpu", "bfloat16")[1]["batch"]
    assert nested["x"][0].dtype == torch.bfloat16 and nested["scale"] == 2.0
    # Every process draws the same weights.
    (first, given), (second, same) = (load(f"{models}:make", "cpu", None) for _ in range(2))
    assert torch.equal(next(first.parameters()), next(second.parameters())) and torch.equal(given["x"], same["x"])


def test_a_look_says_what_there_is_to_compile_and_the_lines_that_are_printed_run(models, tmp_path, one_thread):
    facts = look(f"{models}:make", tmp_path)
    assert facts["regional"] and facts["helper"] is None
    assert "Block: 3 module(s), 1 graph(s)" in facts["report"] and "100% of the weights" in facts["report"]
    lonely = look(f"{models}:lonely", tmp_path)
    assert not lonely["regional"] and "no regions: no block repeats" in lonely["report"]
    assert look("bert-debug", tmp_path)["regional"] and look(f"{models}:nested", tmp_path)["regional"]
    look(f"{models}:make", tmp_path)
    facts = started("regional", f"{models}:make", tmp_path).compile()
    assert facts["right"] and facts["error"] < 1e-5 and (facts["graphs"], facts["breaks"]) == (1, 0)


def test_the_librarys_own_helper_is_an_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs_to_advise_on.py").write_text(
        "from benchmarks.conformance import MODELS\n"
        "def make(bert=MODELS['transformers Bert']):\n    return bert.make(), bert.inputs(5)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert look("theirs_to_advise_on.py:make", tmp_path)["helper"] == "accelerate"


def test_errors_are_relative_and_of_what_is_finite() -> None:
    expected = torch.tensor([3.0, 4.0, -math.inf])
    assert advise._error({"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([-math.inf])}, expected) == 0.1
    assert advise._error(torch.tensor([3.0, math.nan, -math.inf]), expected) == math.inf
    assert advise._error(torch.tensor([3.0]), expected) == math.inf


def test_a_process_that_dies_is_a_failure_with_its_signal(models: str, tmp_path: Path) -> None:
    process = ArmProcess("eager", tmp_path, [f"{models}:make", "cpu", ""])
    process.kill()
    with pytest.raises(Failed, match="ended with code -9, killed: memory is short"):
        process.answer()
    with pytest.raises(Failed, match="has ended"):
        process.ask("load")
    process.stop()


@pytest.mark.slow
def test_ctrl_c_ends_the_command_and_its_processes(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import os, time\ndef make():\n    open('started', 'w').write(str(os.getpid()))\n    time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "zoo", "advise", "endless.py:make", "--calls", "10"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    started = tmp_path / "started"
    while process.poll() is None and not (started.exists() and started.read_text()):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "stopped\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_users_model_from_the_command_to_the_advice(models: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zoo", "advise", f"{models}:make", "--calls", "10", "--device", "cpu", "--thorough"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    said = done.stdout
    assert done.returncode in (0, 1) and not done.stderr, done
    assert max(map(len, said.splitlines())) <= 80
    lines = [line.split() for line in said.splitlines() if line.startswith(("eager  ", "full  ", "regional  "))]
    rows = {line[0]: line for line in lines}
    assert set(rows) == {"eager", "full", "regional"}
    for arm in ("full", "regional"):
        cold, warm = map(float, rows[arm][1].split("/"))
        assert cold > 0 <= warm and float(rows[arm][5]) < 1e-5 and rows[arm][6] == "1/0"
    assert "s of them left" in said and "Block: 3 module(s)" in said
    # Ten calls of a tiny model never pay for a compiler; a loud machine says nothing.
    last = "For 10 calls run the model eagerly" if done.returncode == 0 else "makes this measurement unusable"
    assert last in said


def measured(*, noise: float = 0.02, **milliseconds: float) -> Measured:
    """Eager takes 10 ms; arms compile in 1 s, full in 11; the compiler starts in 2."""
    arms = [Arm("eager", ms=10.0, relative=[1.0] * 9)]
    for name, ms in milliseconds.items():
        paid = 11.0 if name == "full" else 1.0
        relative = [ms / 10.0 * (1 + 0.001 * (index - 4)) for index in range(9)]
        arms.append(Arm(name, paid=paid, ms=ms, relative=relative, graphs=1))
    return Measured(arms, noise=noise, start=2.0)


def test_progress_and_the_table_name_the_same_seconds_to_compile(tmp_path: Path, capsys) -> None:
    asked = advise.Measurement("bert-debug", "cpu", None, thorough=False, folder=tmp_path)
    (tmp_path / "seed").mkdir()
    arm, facts = Arm("regional", relative=[0.5] * 9), {"ms": 20.0, "paid": 3.75, "error": 0.0, "right": True}
    arm.process = mock.Mock(caches=tmp_path / "regional", ask=mock.Mock(return_value=facts))
    asked._compile(arm)
    assert capsys.readouterr().out == "regional: 3.75 s to compile\n"
    arm.ms = 900.0  # of the race
    assert list(table(Measured([*measured().arms, arm])))[2].split()[:3] == ["regional", "3.75", "900"]


def test_seconds_to_compile_are_those_of_the_first_calls_less_as_many_steady_ones(models, tmp_path, monkeypatch):
    look(f"{models}:make", tmp_path)
    worker = started("full + CUDA graph", f"{models}:make", tmp_path)
    clock = mock.Mock(perf_counter=mock.Mock(side_effect=[0.0, 10.0, 20.0, 21.0]))
    monkeypatch.setattr(advise, "time", clock)
    monkeypatch.setitem(advise.CODE, worker.arm, "")
    assert worker.compile()["paid"] == 10.0 - 3 * 1.0


def test_a_race_whose_calls_got_slower_ends_when_its_seconds_are_over(tmp_path, monkeypatch) -> None:
    asked = advise.Measurement("bert-debug", "cpu", None, thorough=False, folder=tmp_path)
    asked.found.arms.append(Arm("full"))
    for arm in asked.found.arms:
        arm.ms, arm.process = 1.0, mock.Mock(ask=mock.Mock(return_value={"ms": 1.0}))
    clock = mock.Mock(monotonic=mock.Mock(side_effect=itertools.count(step=3)))
    monkeypatch.setattr(advise, "time", clock)
    asked._race(asked.found.arms[1:])
    fewest, most, seconds = advise.QUICK
    assert fewest < len(asked.found.arms[1].relative) == seconds // 3 + fewest < most


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (100, "For 100 calls run the model eagerly: regional pays back only after 600 calls."),
        (
            2000,
            "For 2,000 calls run regional: it compiles in 1 s, then takes 5 ms a call, 2× as fast as eager (10 ms), "
            "0.8× as fast as full (11 s to compile, 4 ms), and pays back after 600 calls.",
        ),
        (
            50_000,
            "For 50,000 calls run full: it compiles in 11 s, then takes 4 ms a call, 2.5× as fast as eager (10 ms), "
            "and pays back after 2,167 calls.",
        ),
    ],
)
def test_the_verdict_depends_on_the_calls(calls: int, said: str) -> None:
    found = measured(regional=5.0, full=4.0)
    assert verdict(found, calls).startswith(said)
    totals = {arm.name: found.total(arm, calls) for arm in found.arms}
    assert found.choose(calls).name == min(totals, key=lambda name: totals[name])


def test_of_what_cannot_be_told_apart_or_is_within_the_noise_the_one_that_is_ready_soonest_is_run() -> None:
    found = measured(full=4.97, regional=5.0)
    assert found.times(found.arms[1], found.arms[2]) is None
    assert found.choose(10**9).name == "regional"
    assert "run full" in verdict(measured(full=9.0, noise=0.05), 10**6)
    assert "no compiled arm is measurably faster" in verdict(measured(full=9.0, noise=0.15), 10**6)
    said = verdict(measured(full=1.0, noise=0.45), 10**6)
    assert said == "The noise, 45%, makes this measurement unusable: measure again on an idle machine."


def test_an_arm_whose_own_rounds_differ_too_much_has_no_verdict_and_the_advice_does_not_rest_on_it() -> None:
    found = measured(full=4.0, regional=5.0)
    loud = found.arms[1]
    loud.relative = [0.1, 0.2, 0.2, 0.3, 0.4, 0.8, 0.9, 0.9, 1.0]
    assert loud.spread > 2 * advise.UNUSABLE > found.noise and not loud.usable
    assert [line.split()[4:] for line in table(found)][2:] == [
        ["?", "0e+00", "1/0", "?"],
        ["2.00×", "0e+00", "1/0", "600"],
    ]
    assert "run regional: " in verdict(found, 10**6) and "full" not in verdict(found, 10**6)
    (said,) = (
        note for note in advise.notes(found, "cpu") if note.startswith("! full is not recommended: its spread, ")
    )
    assert said.endswith("makes its time unusable.")


@pytest.mark.parametrize("quiet", [True, False])
def test_a_race_in_which_no_compiled_arm_is_quiet_is_unusable_though_eager_is(tmp_path: Path, quiet: bool) -> None:
    asked = advise.Measurement("bert-debug", "cpu", None, thorough=False, folder=tmp_path)
    times = {"eager": [200.0], "full": [200.0, 100.0, 300.0], "regional": [150.0] if quiet else [100.0, 250.0]}
    asked.found.arms += [Arm("full"), Arm("regional")]
    for arm in asked.found.arms:
        cycle = itertools.cycle(times[arm.name])
        arm.ms, arm.process = 200.0, mock.Mock(ask=lambda op, calls, cycle=cycle: {"ms": next(cycle)})
    asked._race(asked.found.arms[1:])
    assert [arm.usable for arm in asked.found.arms] == [True, False, quiet]
    assert ("makes this measurement unusable" in verdict(asked.found, 10**6)) == (not quiet)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"right": False}, "no compiled arm is measurably faster than its 10 ms a call."),
        ({"failure": "gone"}, "no compiled arm is measurably faster than its 10 ms a call."),
        ({}, "For 1,000,000 calls run full"),
    ],
)
def test_an_arm_that_differs_from_eager_or_failed_is_not_recommended(change: dict[str, Any], said: str) -> None:
    found = measured(full=4.0)
    vars(found.arms[1]).update(change)
    assert said in verdict(found, 10**6)


def test_the_table_fits_80_columns_and_marks_what_is_wrong() -> None:
    found = measured(full=9.95, regional=5.0)
    found.arms.append(Arm("regional + CUDA graph", 1234.0, 123.0, 0.01, [0.001] * 9, 0.3, False, 99, 88))
    found.arms.append(Arm("accelerate", failure="no"))
    head, eager, full, regional, graph = table(found)
    assert all(len(line) <= 80 for line in (head, eager, full, regional, graph))
    assert eager.split() == ["eager", "-", "10", *"-----"]
    assert full.split()[4:] == ["same", "0e+00", "1/0", "never"]
    assert regional.split()[4:] == ["2.00×", "0e+00", "1/0", "600"]
    assert "3e-01!" in graph and "1,234/123" in graph
    found.noise = 2 * advise.UNUSABLE
    assert all(line.split()[4:] == ["?", "0e+00", "1/0", "?"] for line in list(table(found))[2:4])
    assert any("regional + CUDA graph computes something else" in note for note in advise.notes(found, "cpu"))


@pytest.mark.parametrize(
    ("values", "low", "high"), [([3, 1, 2, 5, 4], 1, 5), (range(1, 10), 2, 8), (range(1, 31), 10, 21), ([7], 7, 7)]
)
def test_intervals_of_medians(values: Any, low: float, high: float) -> None:
    assert interval(list(values))[1:] == (low, high)


def test_numbers_have_three_digits() -> None:
    assert [number(value) for value in (0.01234, 3.456, 99.96, 1234.5)] == ["0.0123", "3.46", "100", "1,234"]
