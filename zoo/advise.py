"""Which way to run a model pays off for N calls: ``zoo advise mine.py:make --calls 10000``.

Each way, an *arm*, has a process and compiler caches of its own. The arms compile one at a time and then take turns in
shuffled rounds. A turn of eager before and after each round shows the noise, and times are relative to their mean.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from statistics import mean, median, quantiles
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zoo
from zoo.engine.lifted import tensors_of
from zoo.registry import did_you_mean

# The lines that turn ``model`` into an arm, as they are run and printed. ``model(*args, **kwargs)`` is a call.
CODE = {
    "eager": "",
    "full": "model = torch.compile(model)",
    "full + CUDA graph": 'model = torch.compile(model, mode="reduce-overhead")',
    "regional": "zoo.compile_regions(model)",
    "regional + CUDA graph": "zoo.compile_regions(model)\nmodel = zoo.cuda_graph(model, args, kwargs)",
    "accelerate": "from accelerate.utils import compile_regions\nmodel = compile_regions(model)",
    "diffusers": "model.compile_repeated_blocks(fullgraph=True)",
}
COLUMNS = {"compile s": 10, "ms a call": 10, "spread": 7, "vs eager": 9, "total s": 8, "payback": 9, "error": 6}
UNUSABLE = 0.2  # with more noise no comparison means anything
ANSWER_SECONDS = 900  # what an arm may take to load and compile, or for a turn
TURN_SECONDS = 0.1  # a turn has as many calls as fit, at least one
FEWEST_ROUNDS, MOST_ROUNDS, RACE_SECONDS = 5, 30, 40  # the seconds bound the rounds above the fewest


class Failed(ValueError):
    """The model, or an arm of it, cannot be measured; the message says why."""


# The model ------------------------------------------------------------------------------------------------------------


def load(name: str, device: str, dtype: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model in eval mode, and the arguments and keyword arguments of a call, on the device.

    ``name`` is ``file.py:function``, ``module:function`` or a preset of the zoo. The seeds of torch, numpy and Python
    are set before, so that every process draws the same weights. Floating-point tensors are cast to ``dtype`` unless
    that is empty. Failed if there is no such function, it fails, or it returns something else.
    """
    random.seed(0)
    torch.manual_seed(0)
    if importlib.util.find_spec("numpy"):
        importlib.import_module("numpy").random.seed(0)
    make = _function(name)
    try:
        returned = make()
    except Exception as error:
        raise Failed(f"{name} raised {_in_a_line(error)}") from error
    if not (isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[0], nn.Module)):
        raise Failed(f"{name} returned {type(returned).__name__}, expected (model, inputs), the model an nn.Module")
    model, inputs = returned
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (inputs, {})
    args = (args,) if isinstance(args, Tensor) else args
    if not isinstance(args, tuple | list):
        raise Failed(f"{name} returned {type(inputs).__name__} as inputs, expected a dict, a tuple or a tensor")
    cast = getattr(torch, dtype) if dtype else None
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda x: x.detach().to(device, cast if x.is_floating_point() else None), (tuple(args), kwargs)
    )
    return model.to(device, cast).eval(), args, kwargs


def _function(name: str) -> Callable[[], Any]:
    """The function that returns the model and its inputs."""
    if name in zoo.list_models():
        return lambda: (model := zoo.create(name), zoo.example_inputs(model))
    where, _, function = name.rpartition(":")
    if not where or not function:
        known = did_you_mean(name, zoo.list_models())
        raise Failed(f"{name!r} is neither file.py:function nor module:function nor a model of the zoo{known}")
    if where.endswith(".py") and not Path(where).is_file():
        raise Failed(f"there is no file {where}")
    try:
        module = _module_of(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:
        raise Failed(f"{where} cannot be imported: {_in_a_line(error)}") from error
    found = getattr(module, function, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if callable(value)]
        raise Failed(f"{where} has no function {function!r}{did_you_mean(function, own)}")
    return found


def _module_of(file: Path) -> ModuleType:
    """Run a file as if it were a program: it imports what lies beside it, and may have the name of another module."""
    sys.path.insert(0, str(file.parent))
    spec: Any = importlib.util.spec_from_file_location("__advised__", file)
    module = sys.modules["__advised__"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600].removesuffix(": ")


# The process of an arm ------------------------------------------------------------------------------------------------


class Worker:
    """Runs an arm in its process. Each public method answers a request."""

    def __init__(self, arm: str, name: str, device: str, dtype: str, expected: str) -> None:
        self.arm, self.device, self.expected = arm, device, expected
        self.model, self.args, self.kwargs = load(name, device, dtype)
        self.step: Callable[..., Any] = self.model

    def look(self) -> dict[str, Any]:
        """Run eagerly and keep the output for the others; say what to compile, and how many arms fit beside it."""
        output = self._call()
        if not tensors_of(output):
            raise Failed(f"the model returned {type(output).__name__} without a tensor, so outputs cannot be compared")
        torch.save(_flat(output), self.expected)
        try:
            found = zoo.find_regions(self.model, args=self.args, kwargs=self.kwargs)
            report, arms = str(found), ["full", "regional"] if found.regions else ["full"]
        except Exception as error:
            report, arms = f"no regions: {_in_a_line(error)}", ["full"]
        fit = len(CODE)
        if self.device == "cuda":
            arms = [each for arm in arms for each in (arm, f"{arm} + CUDA graph")]
            fit = max(1, int(torch.cuda.mem_get_info()[0] / (1.2 * torch.cuda.max_memory_reserved() + 6e8)))
        packages = {cls.__module__.partition(".")[0] for cls in type(self.model).__mro__}
        if "transformers" in packages and importlib.util.find_spec("accelerate"):
            arms.append("accelerate")
        if "diffusers" in packages and getattr(self.model, "_repeated_blocks", None):
            arms.append("diffusers")
        return {"report": report, "arms": arms, "fit": fit}

    def compile(self) -> dict[str, Any]:
        """Run the arm's code and three calls, which record CUDA graphs too; compare the output with eager's."""
        names = vars(self) | {"torch": torch, "zoo": zoo}
        began = time.perf_counter()
        with torch.inference_mode():
            exec(CODE[self.arm], names)
        self.step = names["model"]
        self._seconds(calls=3)
        took = time.perf_counter() - began
        error = _error(self._call(), torch.load(self.expected))
        weights = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        # Rounding, TensorFloat32 and autocast make smaller errors than these.
        right = error <= {torch.float64: 1e-6, torch.float32: 1e-2}.get(weights, 5e-2)
        return {"paid": max(0.0, took - self._seconds(calls=3)), "error": error, "right": right}

    def turn(self) -> float:
        """Milliseconds a call, over as many calls as fit into a turn."""
        one = self._seconds(calls=1)  # brings the caches of the processor back
        calls = int(TURN_SECONDS / one)
        return 1e3 * (self._seconds(calls) / calls if calls > 1 else one)

    def _call(self) -> Any:
        with torch.inference_mode():
            return self.step(*self.args, **self.kwargs)

    def _seconds(self, calls: int) -> float:
        wait = getattr(torch, self.device).synchronize
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            self._call()
        wait()
        return time.perf_counter() - began


def _flat(output: Any) -> Tensor:
    """All tensors of an output in one, in double precision on the CPU."""
    tensors = [tensor.detach().cpu().reshape(-1) for tensor in tensors_of(output)]
    return torch.cat([tensor.to(torch.promote_types(tensor.dtype, torch.float64)) for tensor in tensors])


def _error(output: Any, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinite if other values are finite."""
    got, finite, norm = _flat(output), expected.isfinite(), torch.linalg.vector_norm
    if got.shape != expected.shape or not torch.equal(got.isfinite(), finite):
        return math.inf
    return float(norm((got - expected)[finite]) / norm(expected[finite]).clamp_min(1e-300))


def serve(handle: str, *arguments: str) -> None:
    """Answer requests until the command ends: with figures, or with the ``Failed`` that says why there are none."""
    connection, worker = Connection(int(handle)), None
    with contextlib.suppress(EOFError):
        while True:
            request = connection.recv()
            try:
                worker = worker or Worker(*arguments)
                reply = getattr(worker, request)()
            except Exception as error:
                reply = error if isinstance(error, Failed) else Failed(f"the model raised {_in_a_line(error)}")
            connection.send(reply)


# Measuring ------------------------------------------------------------------------------------------------------------


@dataclass
class Arm:
    """A way to run the model: its process, and what was measured of it."""

    name: str
    paid: float = 0.0  # seconds to start the compiler and compile: of three first calls, less three steady ones
    error: float = 0.0  # relative to eager's output
    right: bool = True
    failure: str = ""
    times: list[float] = field(default_factory=list)  # how many times as fast as eager, in each round
    ms: float = math.nan  # of a call, in the median
    spread: float = 0.0  # half the distance between the quartiles of ``times``, as a part of the median
    gain: float = 1.0  # the median of ``times``
    payback: float = math.inf  # calls after which compiling has paid; never if it is wrong or not measurably faster

    def start(self, model: Sequence[str], folder: Path, stack: contextlib.ExitStack) -> None:
        """Start the process, which the stack ends. Its compiler caches are empty folders; what it prints is dropped."""
        own = str(folder / self.name)
        code = "import sys; from zoo.advise import serve; serve(*sys.argv[1:])"
        self._connection, theirs = Pipe()
        with theirs:
            handle, nowhere = theirs.fileno(), subprocess.DEVNULL
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(handle), self.name, *model, str(folder / "expected.pt")],
                env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": own, "TRITON_CACHE_DIR": f"{own}/triton"},
                stdin=nowhere, stdout=nowhere, stderr=nowhere, pass_fds=[handle], start_new_session=True,
            )  # fmt: skip
        stack.callback(self.stop)

    def ask(self, request: str) -> Any:
        """What a method of the worker returns. Failed if it raised, crashed or took too long."""
        try:
            self._connection.send(request)
            if not self._connection.poll(ANSWER_SECONDS):
                raise Failed(f"{request} took more than {ANSWER_SECONDS} s")
            reply = self._connection.recv()
        except (EOFError, OSError) as error:
            code = self._process.wait()
            end = "was killed: memory may be short" if code == -signal.SIGKILL else f"ended with code {code}"
            raise Failed(f"the process {end}") from error
        if isinstance(reply, Failed):
            raise reply
        return reply

    def attempt(self, request: str) -> Any:
        """As ``ask``; but None if it fails, after the reason was told and the process ended."""
        try:
            return self.ask(request)
        except Failed as error:
            self.failure = str(error)
            self.stop()
            say(f"{self.name}: failed: {error}")

    def stop(self) -> None:
        """End the process and those that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._connection.close()

    def total(self, calls: int) -> float:
        """Seconds of so many calls in a new process with empty caches."""
        return self.paid + calls * self.ms / 1e3


def measure(*model: str) -> tuple[list[Arm], float]:
    """The arms of a model (name, device, dtype) that ran, eager first, and the noise; Failed if no other ran."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zoo-", ignore_cleanup_errors=True)))
        say(f"eager: loading {model[0]}")
        eager, turns = Arm("eager"), []
        eager.start(model, folder, stack)
        seen = eager.ask("look")
        say(*seen["report"].splitlines())
        arms = list(map(Arm, seen["arms"]))
        for first in range(0, len(arms), seen["fit"]):
            group = arms[first : first + seen["fit"]]
            for arm in group:
                arm.start(model, folder, stack)
                if figures := arm.attempt("compile"):
                    vars(arm).update(figures)
                    say(f"{arm.name}: {number(arm.paid)} s to compile")
            turns += race(eager, [arm for arm in group if not arm.failure])
            for arm in group:
                arm.stop()
    ran = [eager, *(arm for arm in arms if not arm.failure)]
    if len(ran) == 1:
        raise Failed("every compiled arm failed, so there is nothing to recommend")
    return ran, judge(ran, turns)


def race(eager: Arm, arms: Sequence[Arm]) -> list[float]:
    """Take turns in shuffled rounds, and note how many times as fast as eager each is. Returns eager's milliseconds."""
    say(f"taking turns, {RACE_SECONDS} s or less if calls are short")
    began, turns = time.monotonic(), [eager.ask("turn")]
    for done in range(MOST_ROUNDS):
        if not arms or (done >= FEWEST_ROUNDS and time.monotonic() - began > RACE_SECONDS):
            break
        taken = {arm.name: arm.attempt("turn") for arm in random.sample(arms, len(arms))}
        turns.append(eager.ask("turn"))
        arms = [arm for arm in arms if not arm.failure]
        for arm in arms:
            arm.times.append(mean(turns[-2:]) / taken[arm.name])
    return turns


def judge(arms: Sequence[Arm], turns: Sequence[float]) -> float:
    """Set what follows from the rounds. Returns the noise: by how much two turns of eager differ, in the median."""
    noise = median(max(pair) / min(pair) - 1 for pair in pairwise(turns))
    eager = arms[0]
    eager.ms = median(turns)
    for arm in arms[1:]:
        low, arm.gain, high = quantiles(arm.times, n=4)
        arm.ms, arm.spread = eager.ms / arm.gain, (high - low) / 2 / arm.gain
        if arm.right and low > 1 + noise:  # three rounds of four show a difference above the noise
            arm.payback = math.ceil(1e3 * arm.paid / (eager.ms - arm.ms))
    return noise


def choose(arms: Sequence[Arm], noise: float, calls: int) -> Arm:
    """Of arms that pay back, the one ready first among those whose total is the least or within its noise; or eager."""
    paying = [arm for arm in arms if arm.payback < calls] or [arms[0]]
    least = min(arm.total(calls) for arm in paying)
    return min((arm for arm in paying if arm.total(calls) <= least * (1 + noise)), key=lambda arm: arm.paid)


# The command and its words -------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three significant digits: ``0.012``, ``3.46``, ``1,234``."""
    return f"{value:,.0f}" if 99.95 <= value < 1e6 else f"{value:.3g}"


def say(*lines: str) -> None:
    """Print lines, wrapped at 80 columns."""
    for line in lines:
        print(textwrap.fill(line, 79, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2)), flush=True)


def table(arms: Sequence[Arm], calls: int) -> Iterator[str]:
    """Lines of at most 80 columns, one an arm."""
    rows = [("arm", *COLUMNS), ("eager", "-", number(arms[0].ms), "-", "-", number(arms[0].total(calls)), "-", "-")]
    for arm in arms[1:]:
        payback = "never" if math.isinf(arm.payback) else number(arm.payback)
        compared = (f"{arm.spread:.0%}", f"{arm.gain:.2f}×", number(arm.total(calls)), payback, f"{arm.error:.0e}")
        rows.append((arm.name, number(arm.paid), number(arm.ms), *compared))
    for name, *cells in rows:
        yield f"{name:<21}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True))


def unusable(noise: float) -> str:
    """The message that replaces a verdict where two measurements of one arm differ by more than ``UNUSABLE``."""
    return f"The noise, {noise:.0%}, makes this measurement unusable: measure again on an idle machine."


def verdict(arms: Sequence[Arm], noise: float, calls: int) -> str:
    """The sentence that says what to run for so many calls."""
    best = choose(arms, noise, calls)
    if best is not arms[0]:
        gain, payback = f"{best.gain:.2f}× as fast as eager", f"pays back after {best.payback:,} calls"
        return f"For {calls:,} calls run {best.name}: it is {gain} and {payback}."
    first = min(arm.payback for arm in arms)
    why = "no compiled arm is measurably faster" if math.isinf(first) else f"none pays back before {first:,} calls"
    return f"For {calls:,} calls run the model eagerly: {why}."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of ``zoo advise``."""
    parser.add_argument("name", help="file.py:function or module:function that returns (model, inputs), or a preset")
    parser.add_argument("--calls", type=int, required=True, help="number of calls in one process")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the model's own")
    parser.set_defaults(command=run)


def device_of(given: str | None) -> str:
    """The device that an option names, else a GPU if torch finds one; Failed if there is no such GPU."""
    if given == "cuda" and not torch.cuda.is_available():
        raise Failed(f"--device {given}: torch finds no usable GPU here; use --device cpu")
    return given or ("cuda" if torch.cuda.is_available() else "cpu")


def run(given: argparse.Namespace) -> int:
    """Exit code: 0; 1 if the noise allows no verdict. Failed if the model cannot be measured."""
    if given.calls < 1:
        raise Failed(f"--calls is {given.calls}, expected at least 1")
    device = device_of(given.device)
    arms, noise = measure(given.name, device, given.dtype or "")
    print("", *table(arms, given.calls), "", sep="\n")
    say(
        "compile s: in a new process with empty caches, the start of the compiler included. "
        f"payback: never without a gain above the noise, {noise:.0%}, in three of four rounds. "
        f"torch {torch.__version__} on {device}, {torch.get_num_threads()} threads."
    )
    if wrong := [arm.name for arm in arms if not arm.right]:
        say(f"Not recommended, as they compute something else than eager or random numbers: {', '.join(wrong)}.")
    if noise > UNUSABLE:
        say("", unusable(noise))
        return 1
    say("", verdict(arms, noise, given.calls))
    if code := CODE[choose(arms, noise, given.calls).name]:
        print(textwrap.indent(code, "    "))
    return 0
