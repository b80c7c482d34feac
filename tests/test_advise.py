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
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch

from zoo import advise
from zoo.__main__ import main
from zoo.advise import Arm, Failed, Worker, choose, judge, load, table, verdict

ROOT = Path(__file__).resolve().parent.parent
MODELS = """
import os
import signal

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

class Fragile(Model):
    def forward(self, x):
        if torch.compiler.is_compiling():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

def x(width=8): return torch.randn(4, width)
def make(): return Model(), {"x": x()}
def positional(): return Model(), (x(), 2.0)
def lonely(): return nn.Sequential(nn.Linear(8, 8), nn.ReLU()), x()
def broken(): return Model(), {"x": x(9)}
def raises(): raise RuntimeError("the weights are gone")
def silent(): return nn.Identity(), (3,)
def no_module(): return make, {"x": x()}
def no_inputs(): return Model(), 3
def dies(): os.kill(os.getpid(), signal.SIGKILL)
def fragile(): return Fragile(), x()
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A user's file of models."""
    path = tmp_path_factory.mktemp("user") / "models_to_advise_on.py"
    path.write_text(MODELS)
    return str(path)


def worker(arm: str, name: str, folder: Path) -> Worker:
    return Worker(arm, name, "cpu", "", str(folder / "expected.pt"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mke", "has no function 'mke', did you mean 'make'?"),
        ("", "is neither file.py:function nor module:function nor a model of the zoo"),
        ("raises", "raises raised RuntimeError: the weights are gone"),
        ("no_module", "returned tuple, expected (model, inputs), the model an nn.Module"),
        ("no_inputs", "returned int as inputs, expected a dict, a tuple or a tensor"),
        ("silent", "the model returned int without a tensor"),
        ("folder/none.py:make", "there is no file folder/none.py"),
        ("bert-debgu", "nor a model of the zoo, did you mean 'bert-debug'?"),
    ],
)
def test_what_cannot_be_measured_is_named_with_the_reason(models, function, message, tmp_path):
    with pytest.raises(Failed) as failed:
        worker("eager", function if ":" in function or "-" in function else f"{models}:{function}", tmp_path).look()
    assert message in str(failed.value) and "\n" not in str(failed.value)


def test_wrong_usage_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["advise", "mine.py:make", "--calls", "0"]) == 2
    assert capsys.readouterr() == ("", "error: --calls is 0, expected at least 1\n")
    assert main(["advise", "mine.py:make", "--calls", "5", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "error: --device cuda: torch finds no usable GPU here; use --device cpu\n"


def test_the_page_names_every_option_and_column() -> None:
    page = (ROOT / "docs/advise.md").read_text(encoding="utf-8")
    parser = argparse.ArgumentParser(add_help=False)
    advise.add_arguments(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    assert set(re.findall(r"^\| `(--[\w-]+)`", page, re.MULTILINE)) == options
    assert all(f"| `{name}` |" in page for name in (*advise.CODE, *advise.COLUMNS))


def test_inputs_are_given_as_they_are_returned_and_the_dtype_is_cast(models: str) -> None:
    model, args, kwargs = load(f"{models}:positional", "cpu", "bfloat16")
    assert args[1] == 2.0 and kwargs == {} and not model.training
    assert args[0].dtype == next(model.parameters()).dtype == torch.bfloat16
    # Every process draws the same weights.
    (first, _, given), (second, _, same) = (load(f"{models}:make", "cpu", "") for _ in range(2))
    assert torch.equal(next(first.parameters()), next(second.parameters())) and torch.equal(given["x"], same["x"])


def test_a_look_says_what_there_is_to_compile_and_the_lines_that_are_printed_run(models, tmp_path, one_thread):
    lonely = worker("eager", f"{models}:lonely", tmp_path).look()
    assert lonely["arms"] == ["full"] and "no regions: no block repeats" in lonely["report"]
    seen = worker("eager", f"{models}:positional", tmp_path).look()
    assert seen["arms"] == ["full", "regional"] and "Block: 3 module(s), 1 graph(s)" in seen["report"]
    figures = worker("regional", f"{models}:positional", tmp_path).compile()
    assert figures["right"] and figures["error"] < 1e-5 and figures["paid"] > 0
    torch.save(2 * torch.load(tmp_path / "expected.pt"), tmp_path / "expected.pt")
    assert not worker("regional", f"{models}:positional", tmp_path).compile()["right"]


def test_the_librarys_own_helper_is_an_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "random.py").write_text(
        "from benchmarks.conformance import MODELS\n"
        "def make(bert=MODELS['transformers Bert']):\n    return bert.make(), bert.inputs(5)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert "accelerate" in worker("eager", "random.py:make", tmp_path).look()["arms"]


def test_errors_are_relative_and_of_what_is_finite() -> None:
    expected = torch.tensor([3.0, 4.0, -math.inf], dtype=torch.float64)
    assert advise._error({"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([-math.inf])}, expected) == 0.1
    assert advise._error(torch.tensor([3.0, math.nan, -math.inf]), expected) == math.inf


@pytest.mark.slow
def test_a_process_that_dies_raises_or_hangs_is_a_failure_with_its_reason(models, tmp_path, monkeypatch, capsys):
    with ExitStack() as stack:
        arm = Arm("full")
        for function, reason in (("dies", "the process was killed"), ("broken", "the model raised RuntimeError: mat1")):
            arm.start((f"{models}:{function}", "cpu", ""), tmp_path, stack)
            assert arm.attempt("look") is None
            assert reason in arm.failure and capsys.readouterr().out.startswith("full: failed: ")
        arm.start((f"{models}:make", "cpu", ""), tmp_path, stack)
        monkeypatch.setattr(advise, "ANSWER_SECONDS", 0.01)
        with pytest.raises(Failed, match=r"look took more than 0.01 s"):
            arm.ask("look")


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
def test_a_users_model_from_the_command_to_the_advice_while_one_arm_dies(models: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zoo", "advise", f"{models}:fragile", "--calls", "10", "--device", "cpu"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    said = done.stdout
    assert done.returncode in (0, 1) and not done.stderr, done
    assert max(map(len, said.splitlines())) <= 80
    assert "full: failed: the process was killed" in said and "Block: 3 module(s)" in said
    lines = [line.split() for line in said.splitlines() if line.startswith(("eager  ", "full  ", "regional  "))]
    assert [line[0] for line in lines] == ["eager", "regional"]
    assert float(lines[1][1]) > 0 and float(lines[1][-1]) < 1e-5
    # Ten calls of a tiny model never pay for a compiler; a loud machine says nothing.
    last = "For 10 calls run the model eagerly" if done.returncode == 0 else "makes this measurement unusable"
    assert last in said


def measured(*, noise: float = 0.02, **milliseconds: float) -> tuple[list[Arm], float]:
    """Eager takes 10 ms; full compiles in 13 s, other arms in 3."""
    arms = [Arm("eager")]
    for name, ms in milliseconds.items():
        times = [10.0 / ms * (1 + 0.001 * (index - 4)) for index in range(9)]
        arms.append(Arm(name, paid=13.0 if name == "full" else 3.0, times=times))
    return arms, judge(arms, [10.0, *[10.0 * (1 + noise), 10.0] * 5])


def test_the_verdict_depends_on_the_calls() -> None:
    found = measured(regional=5.0, full=4.0)
    assert verdict(*found, 100) == "For 100 calls run the model eagerly: none pays back before 600 calls."
    said = "For 2,000 calls run regional: it is 2.00× as fast as eager and pays back after 600 calls."
    assert verdict(*found, 2000) == said
    assert verdict(*found, 50_000).endswith("run full: it is 2.50× as fast as eager and pays back after 2,167 calls.")


def test_of_what_is_within_the_noise_the_one_that_is_ready_soonest_is_run() -> None:
    assert "run regional" in verdict(*measured(full=4.95, regional=5.0), 10**6)
    assert "run full" in verdict(*measured(full=9.0, noise=0.05), 10**6)
    assert "no compiled arm is measurably faster" in verdict(*measured(full=9.0, noise=0.15), 10**6)


def test_with_too_much_noise_nothing_is_recommended(monkeypatch, capsys):
    monkeypatch.setattr(advise, "measure", lambda *model: measured(full=1.0, noise=0.45))
    assert main(["advise", "bert-debug", "--calls", "9", "--device", "cpu"]) == 1
    assert "The noise, 45%, makes this measurement unusable" in capsys.readouterr().out


def test_an_arm_that_is_wrong_or_faster_in_half_of_its_rounds_is_not_recommended() -> None:
    arms, noise = measured(full=4.0)
    for change in ({"right": False}, {"times": [0.9, 2.0] * 4}):
        arm = Arm("full", paid=1.0, **{"times": arms[1].times, **change})
        judge([arms[0], arm], [10.0] * 5)
        assert math.isinf(arm.payback) and choose([arms[0], arm], noise, 10**6) is arms[0]


def test_a_race_ends_when_its_seconds_are_over_and_goes_on_without_an_arm_that_fails(monkeypatch) -> None:
    eager, full, failing = Arm("eager"), Arm("full"), Arm("regional")
    for arm, ms in ((eager, 2.0), (full, 1.0)):
        monkeypatch.setattr(arm, "ask", lambda request, ms=ms: ms, raising=False)
    failing.ask, failing.stop = mock.Mock(side_effect=[4.0, Failed("gone")]), mock.Mock()
    monkeypatch.setattr(advise, "time", mock.Mock(monotonic=mock.Mock(side_effect=itertools.count(step=3))))
    turns = advise.race(eager, [full, failing])
    assert advise.FEWEST_ROUNDS < len(full.times) < advise.MOST_ROUNDS and set(full.times) == {2.0}
    assert failing.failure == "gone" and failing.times == [0.5] and len(turns) == len(full.times) + 1


def test_the_table_fits_80_columns() -> None:
    arms, _ = measured(full=9.95, regional=5.0)
    arms.append(Arm("regional + CUDA graph", 12345.0, 0.3, False, "", [1.0], 123456.0, 99.99, 123.45, 12345678))
    head, eager, full, regional, graph = table(arms, 1000)
    assert all(len(line) <= 80 for line in (head, eager, full, regional, graph))
    assert eager.split() == ["eager", "-", "10", "-", "-", "10", "-", "-"]
    assert full.split()[4:] == ["1.01×", "22.9", "never", "0e+00"]
    assert regional.split()[4:] == ["2.00×", "8", "600", "0e+00"]
    assert "12,345" in graph and "1.23e+07" in graph
