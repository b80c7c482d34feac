"""Which way to run a model pays off for N calls: ``zoo advise mine.py:make --calls 10000``.

Each arm has a process and compiler caches of its own. One compiles at a time; then all take turns in shuffled rounds.
Eager has a turn between rounds: two in a row show the noise, and all times are relative to those before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zoo
from zoo.engine.lifted import tensors_of
from zoo.registry import did_you_mean

# The lines that turn ``model`` into an arm, as they are run and printed.
CODE = {
    "eager": "",
    "full": "model = torch.compile(model)",
    "full + CUDA graph": 'model = torch.compile(model, mode="reduce-overhead")',
    "regional": "zoo.compile_regions(model)",
    "regional + CUDA graph": "zoo.compile_regions(model)\nmodel = zoo.cuda_graph(model, kwargs=inputs)",
    "accelerate": "from accelerate.utils import compile_regions\nmodel = compile_regions(model)",
    "diffusers": "model.compile_repeated_blocks(fullgraph=True)",
}
UNUSABLE = 0.2  # with more noise no comparison means anything
STEP_SECONDS = 900  # what one step of an arm may take
TURN_MS = 100
# Fewest and most rounds, and seconds that bound their number between the two.
QUICK, THOROUGH = (5, 30, 40), (15, 100, 300)
HEAD = ("arm", "compile s", "ms a call", "spread", "vs eager", "error", "g/b", "payback")
WIDTHS = (-21, 11, 9, 6, 8, 6, 4, 7)


class Refused(ValueError):
    """The model cannot be measured; the message says why and what to do."""


class Failed(Exception):
    """An arm cannot go on; the message says why."""


# The model ------------------------------------------------------------------------------------------------------------


def load(name: str, device: str, dtype: str | None) -> tuple[nn.Module, dict[str, Any]]:
    """The model in eval mode and its inputs by name, on the device; in the dtypes they have if ``dtype`` is None.

    ``name`` is ``file.py:function``, ``module:function`` or a preset of the zoo. The function is called after the seeds
    of torch, numpy and Python were set, so that every process draws the same weights. Refused if it is not there,
    fails, or returns something else than a model and its inputs.
    """
    random.seed(0)
    torch.manual_seed(0)
    if importlib.util.find_spec("numpy"):
        importlib.import_module("numpy").random.seed(0)
    function = None if name in zoo.list_models() else _function(name)
    try:
        if function is None:
            preset = zoo.create(name)
            returned: Any = preset, zoo.example_inputs(preset)
        else:
            returned = function()
    except Exception as error:
        raise Refused(f"{name} failed: {_in_a_line(error)}") from error
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise Refused(f"{name} returned {_kind(returned)}, expected (model, inputs)")
    model, inputs = returned
    if not isinstance(model, nn.Module):
        raise Refused(f"{name} returned {_kind(model)} as the model, expected an nn.Module")
    number = None if dtype is None else getattr(torch, dtype)

    def placed(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().to(device, number if leaf.is_floating_point() else None)
        if leaf is None or isinstance(leaf, (bool, int, float, str)):
            return leaf
        raise Refused(f"{name} returned {_kind(leaf)} as inputs{pytree.keystr(path)}, expected a tensor or plain value")

    named = pytree.tree_map_with_path(placed, _named(name, model, inputs))
    if not tensors_of(named):
        raise Refused(f"{name} returned inputs without a tensor")
    return model.to(device, number).eval(), named


def _function(name: str) -> Callable[[], Any]:
    where, _, function = name.rpartition(":")
    if not where or not function:
        known = did_you_mean(name, zoo.list_models())
        raise Refused(f"{name!r} is neither file.py:function nor module:function nor a model of the zoo{known}")
    try:
        if where.endswith(".py"):
            if not Path(where).is_file():
                raise FileNotFoundError(f"there is no file {where}")
            sys.path.insert(0, str(Path(where).parent))  # as if it were run as a program
        module = importlib.import_module(Path(where).stem if where.endswith(".py") else where)
    except Exception as error:
        raise Refused(f"{where} cannot be imported: {_in_a_line(error)}") from error
    if not hasattr(module, function):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise Refused(f"{where} has no function {function!r}{did_you_mean(function, own)}")
    found: Callable[[], Any] = getattr(module, function)
    if not callable(found):
        raise Refused(f"{name} is {_kind(found)}, expected a function that returns (model, inputs)")
    return found


def _named(name: str, model: nn.Module, inputs: Any) -> dict[str, Any]:
    if isinstance(inputs, Mapping):
        if wrong := [key for key in inputs if not isinstance(key, str)]:
            raise Refused(f"{name} returned an input called {wrong[0]!r}, expected names of forward's parameters")
        return dict(inputs)
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    if not isinstance(inputs, tuple | list):
        raise Refused(f"{name} returned {_kind(inputs)} as inputs, expected a dict or a tuple of tensors")
    try:
        bound = inspect.signature(model.forward).bind(*inputs)
    except TypeError as error:
        raise Refused(f"{type(model).__name__}.forward does not take {len(inputs)} input(s): {error}") from error
    kinds = {bound.signature.parameters[key].kind for key in bound.arguments}
    if kinds - {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        raise Refused(f"{type(model).__name__}.forward takes *args; return the inputs by name, as a dict")
    return dict(bound.arguments)


def _kind(value: Any) -> str:
    what = type(value).__name__
    many = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{'an' if what[0] in 'aeiouAEIOU' else 'a'} {what}{many}"


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600].removesuffix(": ")


# The process of an arm ------------------------------------------------------------------------------------------------


class ArmWorker:
    """Answers requests on one arm; each public method is a request and returns figures."""

    def __init__(self, arm: str, name: str, device: str, dtype: str, expected: str) -> None:
        self.arm, self.name, self.device, self.dtype, self.expected = arm, name, device, dtype or None, expected

    def load(self) -> dict[str, Any]:
        """Import what is needed; build model and inputs."""
        self.model, self.inputs = load(self.name, self.device, self.dtype)
        self.step: Callable[..., Any] = self.model
        return {}

    def look(self) -> dict[str, Any]:
        """Call the model eagerly, keep its output for the others, and say what there is to compile."""
        try:
            output = self._call()
        except Exception as error:
            raise Refused(f"{self.name}: the model does not run on its inputs: {_in_a_line(error)}") from error
        if not tensors_of(output):
            raise Refused(f"{self.name}: the model returns {_kind(output)} without a tensor in it")
        torch.save(_flat(output), self.expected)
        helper, packages = None, {cls.__module__.partition(".")[0] for cls in type(self.model).__mro__}
        if "diffusers" in packages and getattr(self.model, "_repeated_blocks", None):
            helper = "diffusers"
        elif "transformers" in packages and importlib.util.find_spec("accelerate"):
            helper = "accelerate"
        fit = len(CODE)
        if self.device == "cuda":
            fit = int(torch.cuda.mem_get_info()[0] / (1.2 * torch.cuda.max_memory_reserved() + 6e8))
        try:
            report = zoo.find_regions(self.model, kwargs=self.inputs)
        except Exception as error:
            return {"fit": fit, "helper": helper, "regional": False, "report": f"no regions: {_in_a_line(error)}"}
        return {"fit": fit, "helper": helper, "regional": bool(report.regions), "report": str(report)}

    def start(self) -> dict[str, Any]:
        """Start the compiler on a small graph: imports, probes of the toolchain, its workers."""
        began = time.perf_counter()
        with torch.inference_mode():
            torch.compile(lambda x: torch.softmax((x @ x.T).relu(), -1).sum(-1))(torch.randn(8, 16, device=self.device))
        return {"seconds": time.perf_counter() - began}

    def compile(self) -> dict[str, Any]:
        """Run the arm's code and its first calls; compare the output with eager's, and time one more call."""
        from torch._dynamo.utils import counters

        counters.clear()
        calls = 3 if self.arm == "full + CUDA graph" else 1  # the second and third record the CUDA graph
        names: dict[str, Any] = {"torch": torch, "zoo": zoo, "model": self.model, "inputs": self.inputs}
        began = time.perf_counter()
        with torch.inference_mode():
            exec(CODE[self.arm], names)
        self.step = names["model"]
        for _ in range(calls):
            output = self._call()
        self._synchronise()
        paid, graphs = time.perf_counter() - began, counters["stats"]["unique_graphs"]
        error, breaks = _error(output, torch.load(self.expected)), sum(counters["graph_break"].values())
        weights = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        # Rounding, TensorFloat32 and autocast make smaller errors than these.
        right = error <= {torch.float64: 1e-6, torch.float32: 1e-2}.get(weights, 5e-2)
        steady = self.time(calls=1)
        paid = max(0.0, paid - calls * steady["ms"] / 1e3)
        return steady | {"paid": paid, "error": error, "right": right, "graphs": graphs, "breaks": breaks}

    def time(self, *, calls: int) -> dict[str, Any]:
        """Milliseconds a call of so many."""
        if calls > 1:
            self._call()  # brings the caches of the processor back
        self._synchronise()
        began = time.perf_counter()
        for _ in range(calls):
            self._call()
        self._synchronise()
        return {"ms": (time.perf_counter() - began) / calls * 1e3}

    def _call(self) -> Any:
        if self.arm == "full + CUDA graph":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.inference_mode():
            return self.step(**self.inputs)

    def _synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _flat(output: Any) -> Tensor:
    return torch.cat([tensor.detach().cpu().reshape(-1) for tensor in tensors_of(output)]).clone()


def _error(output: Any, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinite if other values are finite."""
    got, finite = _flat(output), expected.isfinite()
    if got.shape != expected.shape or not torch.equal(got.isfinite(), finite):
        return math.inf
    wide = torch.promote_types(expected.dtype, torch.float64)
    got, expected = got[finite].to(wide), expected[finite].to(wide)
    return float(torch.linalg.vector_norm(got - expected) / torch.linalg.vector_norm(expected).clamp_min(1e-300))


def serve(worker: ArmWorker) -> None:
    """Answer requests from standard input on standard output, a line of JSON each; prints go to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(worker, request.pop("op"))(**request)
        except Refused as error:
            reply = {"refused": str(error)}
        except Exception as error:
            reply = {"failed": _in_a_line(error)}
        print(json.dumps(reply), file=replies, flush=True)


class ArmProcess:
    """An arm's process. Its caches are ``folder``'s, those of an earlier process of the arm too."""

    def __init__(self, arm: str, folder: Path, model: Sequence[str]) -> None:
        self.caches = folder / arm
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(self.caches), "TRITON_CACHE_DIR": str(self.caches / "triton")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zoo.advise", arm, *model, str(folder / "expected.pt")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | caches, start_new_session=True,
        )  # fmt: skip

    def send(self, op: str, **arguments: Any) -> None:
        """Send a request. Failed if the process has ended."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({"op": op, **arguments}), file=self._process.stdin, flush=True)
        except OSError as error:
            raise Failed("its process has ended") from error

    def answer(self) -> dict[str, Any]:
        """The answer to a request. Refused if the model cannot be measured, Failed if this arm cannot."""
        assert self._process.stdout is not None
        timer = threading.Timer(STEP_SECONDS, self.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:  # Ctrl-C too: the program would wait for it
            timer.cancel()
        if not line:
            code = self._process.wait()
            killed = f", killed: memory is short or it took more than {STEP_SECONDS} s" * (code == -signal.SIGKILL)
            raise Failed(f"its process ended with code {code}{killed}")
        reply: dict[str, Any] = json.loads(line)
        if "refused" in reply:
            raise Refused(reply["refused"])
        if "failed" in reply:
            raise Failed(reply["failed"])
        return reply

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for the answer."""
        self.send(op, **arguments)
        return self.answer()

    def kill(self) -> None:
        """End the process and its compile workers."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """End it, and let go of its pipes."""
        self.kill()
        with contextlib.suppress(OSError):  # a request that was not read any more
            self._process.communicate()


# Figures and words ----------------------------------------------------------------------------------------------------


@dataclass
class Arm:
    """What was measured of an arm: ``relative`` holds a call's time over eager's, a figure a round."""

    name: str
    paid: float | None = None  # seconds to compile on empty caches: of the first calls, less as many steady ones
    warm: float | None = None  # the same on filled caches
    ms: float = math.nan
    relative: list[float] = field(default_factory=list)
    error: float = 0.0
    right: bool = True
    graphs: int = 0
    breaks: int = 0
    failure: str = ""
    process: Any = None  # an ArmProcess, once it was started

    @property
    def spread(self) -> float:
        """Half the interval of its median, as a part of the median."""
        middle, low, high = interval(self.relative)
        return (high - low) / 2 / middle

    @property
    def usable(self) -> bool:
        """Whether it ran, computes what eager does and took about as long in each round."""
        return self.right and not self.failure and self.spread <= UNUSABLE


@dataclass
class Measured:
    """All arms, eager first; ``start`` is the seconds that starting the compiler takes a process without caches."""

    arms: list[Arm]
    noise: float = 0.0
    start: float = 0.0

    def times(self, arm: Arm, over: Arm) -> float | None:
        """How many times as fast one arm is; None if there is no measurable difference."""
        ratios = [theirs / ours for ours, theirs in zip(arm.relative, over.relative, strict=False)]
        middle, low, high = interval(ratios)
        return middle if low > 1 + self.noise or high < 1 / (1 + self.noise) else None

    def before(self, arm: Arm) -> float:
        """Seconds that a new process without caches pays."""
        return 0.0 if arm.paid is None else self.start + arm.paid

    def total(self, arm: Arm, calls: int) -> float:
        """Seconds of so many calls in such a process."""
        return self.before(arm) + calls * arm.ms / 1e3

    def payback(self, arm: Arm) -> float:
        """Calls after which compiling has paid off; infinite if never, or if the arm failed, is wrong or unusable."""
        saved = self.arms[0].ms - arm.ms
        if not arm.usable or saved <= 0 or self.times(arm, self.arms[0]) is None:
            return math.inf
        return math.ceil(self.before(arm) * 1e3 / saved)

    def choose(self, calls: int) -> Arm:
        """The arm that takes the least time for so many calls; among measurably equal ones the one ready first."""
        best = self.arms[0]
        for arm in sorted((arm for arm in self.arms if math.isfinite(self.payback(arm))), key=self.before):
            if (self.times(arm, best) or 0.0) > 1 and self.total(arm, calls) < self.total(best, calls):
                best = arm
        return best


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and two of the values between which the true one lies with a probability of 93 % or more."""
    ordered, n = sorted(values), len(values)
    outside = [k for k in range(n // 2) if 2 * sum(math.comb(n, i) for i in range(k + 1)) <= 0.07 * 2**n]
    k = max(outside, default=0)
    return median(ordered), ordered[k], ordered[n - 1 - k]


def number(value: float) -> str:
    """Three significant digits: ``0.012``, ``3.46``, ``1,234``."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def gain(seconds: float | None, ms: float, over: Iterable[tuple[str, float | None, float, float | None]]) -> str:
    """What an arm costs and brings: ``compiles in 12.1 s, then takes 310 ms a call, 2× as fast as eager (620 ms)``."""
    # Over each arm: its name, seconds to compile, ms, and how many times as fast this one is, None if not measurably.
    told = [("" if seconds is None else f"compiles in {number(seconds)} s, then ") + f"takes {number(ms)} ms a call"]
    for name, paid, theirs, times in over:
        against = "not measurably faster or slower than" if times is None else f"{number(times)}× as fast as"
        told.append(f"{against} {name} ({'' if paid is None else f'{number(paid)} s to compile, '}{number(theirs)} ms)")
    return ", ".join(told)


def unusable(noise: float) -> str:
    """The message that replaces a verdict where two measurements of one arm differ by more than ``UNUSABLE``."""
    return f"The noise, {noise:.0%}, makes this measurement unusable: measure again on an idle machine."


def verdict(found: Measured, calls: int) -> str:
    """The sentence that recommends what to run for so many calls."""
    eager, best = found.arms[0], found.choose(calls)
    if found.noise > UNUSABLE:
        return unusable(found.noise)
    if best is not eager:
        others = [arm for arm in found.arms if arm.usable and arm is not best and "regional" not in arm.name]
        over = [(arm.name, arm.paid, arm.ms, found.times(best, arm)) for arm in others]
        told = gain(best.paid, best.ms, over)
        return f"For {calls:,} calls run {best.name}: it {told}, and pays back after {found.payback(best):,} calls."
    later = min(found.arms, key=found.payback)
    if math.isinf(found.payback(later)):
        why = f"no compiled arm is measurably faster than its {number(eager.ms)} ms a call"
    else:
        why = f"{later.name} pays back only after {found.payback(later):,} calls"
    return f"For {calls:,} calls run the model eagerly: {why}."


def table(found: Measured) -> Iterator[str]:
    """The arms that ran, in lines of at most 80 columns."""
    rows = [HEAD]
    for arm in found.arms:
        if arm.failure:
            continue
        times, payback = found.times(arm, found.arms[0]), found.payback(arm)
        compiled = "/".join(number(paid) for paid in (arm.paid, arm.warm) if paid is not None)
        against = "same" if times is None else f"{times:.2f}×"
        paid = "never" if math.isinf(payback) else f"{payback:,}" if payback < 1e6 else f"{payback:.1e}"
        if max(found.noise, arm.spread) > UNUSABLE:
            against = paid = "?"
        error = f"{arm.error:.0e}" + "!" * (not arm.right)
        cells = (f"{arm.spread:.0%}", against, error, f"{arm.graphs}/{arm.breaks}", paid)
        rows.append((arm.name, compiled or "-", number(arm.ms), *(cells if compiled else "-----")))
    for row in rows:
        yield " ".join(f"{cell:<{-w}}" if w < 0 else f"{cell:>{w}}" for cell, w in zip(row, WIDTHS, strict=True))


def notes(found: Measured, device: str) -> Iterator[str]:
    """What a reader must know to read the table right."""
    for arm in found.arms:
        if not arm.right:
            yield (
                f"! {arm.name} computes something else than eager, so it is not recommended. (A forward "
                "that draws random numbers differs from call to call, and weights that are neither loaded nor drawn by "
                "torch's, numpy's or Python's generators from process to process.)"
            )
        elif not arm.failure and arm.spread > UNUSABLE:
            yield f"! {arm.name} is not recommended: its spread, {arm.spread:.0%}, makes its time unusable."
    yield (
        f"compile s: on empty caches{'/on filled ones' * any(arm.warm for arm in found.arms)}. A new process pays "
        f"{number(found.start)} s more to start the compiler, which payback counts. spread: half the interval of the "
        "median. same: no measurable difference. error: relative, against eager. g/b: graphs and graph breaks. "
        f"payback: calls after which compiling has paid. Noise: {found.noise:.0%}. "
        f"torch {torch.__version__} on {device}, {torch.get_num_threads()} threads."
    )


def say(*lines: str) -> None:
    """Print lines, wrapped at 80 columns."""
    for line in lines:
        print(textwrap.fill(line, 79, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2)), flush=True)


# The command ----------------------------------------------------------------------------------------------------------


class Measurement:
    """All arms of one model, from loading to figures; says on the way what is done."""

    def __init__(self, name: str, device: str, dtype: str | None, *, thorough: bool, folder: Path) -> None:
        self.model, self.folder, self.thorough = (name, device, dtype or ""), folder, thorough
        self.began = time.monotonic()
        self.found = Measured([Arm("eager")])

    def run(self) -> Measured:
        """Measure. Refused if the model cannot be measured."""
        eager, cuda = self.found.arms[0], self.model[1] == "cuda"
        say(f"eager: loading {self.model[0]}")
        self._start(eager)
        try:
            eager.process.ask("load")
            self.loading = time.monotonic() - self.began
            facts = eager.process.ask("look")
            eager.ms = eager.process.ask("time", calls=1)["ms"]
        except Failed as error:
            raise Refused(f"{self.model[0]}: {error}") from error
        say(*facts["report"].splitlines())
        kinds = ["full", "regional"] if facts["regional"] else ["full"]
        names = [name for kind in kinds for name in (kind, f"{kind} + CUDA graph")[: 1 + cuda]]
        self.found.arms += map(Arm, [*names, *filter(None, [facts["helper"]])])
        # Arms that fit into memory together with eager run side by side.
        size, others = max(1, facts["fit"]), self.found.arms[1:]
        for first in range(0, len(others), size):
            self._group(others[first : first + size])
        say(f"took {time.monotonic() - self.began:.0f} s", "")
        return self.found

    def _group(self, arms: Sequence[Arm]) -> None:
        for arm in arms:
            self._start(arm)
            arm.process.send("load")
        self._each(arms, lambda arm: arm.process.answer())
        for arm in arms:
            self._each([arm], self._compile)
            if arm is self.found.arms[1]:
                self._estimate(arm)
        self._race(arms)
        self.stop(arms)

    def stop(self, arms: Sequence[Arm] | None = None) -> None:
        """End the processes of some arms, or of all."""
        for arm in self.found.arms if arms is None else arms:
            if arm.process is not None:
                arm.process.stop()

    def _start(self, arm: Arm) -> None:
        arm.process = ArmProcess(arm.name, self.folder, self.model)

    def _each(self, arms: Sequence[Arm], do: Callable[[Arm], Any]) -> None:
        """Do something with each arm that has not failed, and note what fails."""
        for arm in arms:
            if not arm.failure:
                try:
                    do(arm)
                except (Failed, Refused) as error:
                    arm.failure = str(error)
                    say(f"{arm.name}: failed: {error}")

    def _compile(self, arm: Arm) -> None:
        """Start the compiler and compile. What the first start leaves in its caches is given to the others."""
        seed, caches = self.folder / "seed", arm.process.caches
        if seed.exists():
            shutil.copytree(seed, caches, dirs_exist_ok=True)
            arm.process.ask("start")
        else:
            self.found.start = arm.process.ask("start")["seconds"]
            shutil.copytree(caches, seed)
        vars(arm).update(arm.process.ask("compile"))
        say(f"{arm.name}: {number(arm.paid or 0.0)} s to compile")
        if self.thorough:
            arm.process.stop()
            self._start(arm)
            for op in ("load", "start"):
                arm.process.ask(op)
            arm.warm = arm.process.ask("compile")["paid"]

    def _estimate(self, arm: Arm) -> None:
        """Say how long all will take, by what the first compiled arm took."""
        elapsed, others = time.monotonic() - self.began, len(self.found.arms) - 2
        left = others * (0.5 * (arm.paid or 0.0) + (2.0 if self.thorough else 0.5) * self.loading + (arm.warm or 0.0))
        left += self._rounds([self.found.arms[0]] * (others + 2))[1]
        say(f"about {elapsed + left:.0f} s in all, {left:.0f} s of them left")

    def _rounds(self, turns: Sequence[Arm]) -> tuple[int, float]:
        fewest, most, seconds = THOROUGH if self.thorough else QUICK
        one = sum(max(arm.ms, TURN_MS) for arm in turns) / 1e3
        rounds = min(most, max(fewest, int(seconds / one)))
        return rounds, rounds * one

    def _race(self, arms: Sequence[Arm]) -> None:
        """Take turns in rounds: medians, times relative to eager's, and the noise."""
        eager, arms = self.found.arms[0], [arm for arm in arms if not arm.failure]
        turns: dict[str, int] = {arm.name: max(1, int(TURN_MS / arm.ms)) for arm in (eager, *arms)}
        same, eagers = [], []

        def turn(arm: Arm) -> float:
            return float(arm.process.ask("time", calls=turns[arm.name])["ms"])

        fewest, _, seconds = THOROUGH if self.thorough else QUICK
        began, opening = time.monotonic(), turn(eager)
        for done in range(self._rounds([eager, *arms])[0]):
            if done >= fewest and time.monotonic() - began > seconds:
                break  # calls take longer than the first ones did
            self._each(random.sample(arms, len(arms)), lambda arm: arm.relative.append(turn(arm)))
            closing = turn(eager)
            same.append(opening / closing)
            eagers.append((opening + closing) / 2)
            for arm in arms:
                arm.relative[-1:] = [ms / eagers[-1] for ms in arm.relative[-1:]]
            opening = closing
        _, low, high = interval(same)
        quietest = min((arm.spread for arm in arms if arm.right and not arm.failure), default=0.0)
        self.found.noise = max(self.found.noise, high - 1, 1 / low - 1, quietest if quietest > UNUSABLE else 0.0)
        eager.ms, eager.relative = median(eagers), [1.0] * len(eagers)
        self._each(arms, lambda arm: setattr(arm, "ms", eager.ms * median(arm.relative)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of ``zoo advise``."""
    parser.add_argument("name", help="file.py:function or module:function that returns (model, inputs), or a preset")
    parser.add_argument("--calls", type=int, required=True, help="number of calls in one process")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the model's own")
    parser.add_argument("--thorough", action="store_true", help="up to 100 rounds, and compile times on warm caches")
    parser.set_defaults(command=run)


def device_of(given: str | None) -> str:
    """The device that an option names, else a GPU if torch finds one; Refused if there is no such GPU."""
    usable = torch.cuda.is_available()
    if given and given.startswith("cuda") and not usable:
        raise Refused(f"--device {given}: torch finds no usable GPU here; use --device cpu")
    return given or ("cuda" if usable else "cpu")


def run(given: argparse.Namespace) -> int:
    """Exit code: 0; 1 if nothing can be recommended; 2 on what cannot be measured."""
    with ExitStack() as stack:
        try:
            if given.calls < 1:
                raise Refused(f"--calls is {given.calls}, expected at least 1")
            device = device_of(given.device)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="zoo-advise-", ignore_cleanup_errors=True))
            asked = Measurement(given.name, device, given.dtype, thorough=given.thorough, folder=Path(folder))
            stack.callback(asked.stop)
            found = asked.run()
        except Refused as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if all(arm.failure for arm in found.arms[1:]):
        say("Every compiled arm failed, so there is nothing to recommend.")
        return 1
    print(*table(found), sep="\n")
    say("", *notes(found, device), "", verdict(found, given.calls))
    if found.noise > UNUSABLE:
        return 1
    if code := CODE[found.choose(given.calls).name]:
        print(textwrap.indent(code, "    "))
    return 0


if __name__ == "__main__":
    serve(ArmWorker(*sys.argv[1:]))
