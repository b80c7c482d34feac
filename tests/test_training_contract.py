"""A training step of every family, as the plain loop; a long one; and several processes on the CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zoo
from tests.parallel_process import PROCESSES, checks
from zoo.llm import LLMLayer
from zoo.training import LinearCrossEntropy, TrainingStep, checkpoint_regions

DEBUG = [name for name in zoo.list_models() if name.endswith("-debug")]


class Squares:
    """A loss whose batches are the floating-point inputs; the others, a graph or tokens, are the same in each step."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.rest = {name: value for name, value in inputs.items() if not _moves(value)}

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs = pytree.tree_leaves(model(**batch, **self.rest))
        return torch.stack([leaf.float().square().mean() for leaf in outputs if isinstance(leaf, Tensor)]).mean()


def _moves(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def make(name: str, **options: Any) -> TrainingStep:
    torch.manual_seed(0)
    model = zoo.create(name).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return TrainingStep(model, Squares(zoo.example_inputs(model)), optimizer, **options)


# Autocast without a scaler and a second UNet under autocast would compile what the others do.
CASES = [
    *((name, None) for name in DEBUG),
    *((name, torch.float16) for name in DEBUG if name != "unet-debug"),
    ("llm-debug", torch.bfloat16),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "autocast"), CASES, ids=str)
def test_compiled_and_captured_steps_train_like_eager_ones(name: str, autocast: torch.dtype | None):
    eager = make(name, autocast=autocast)
    drawn = [zoo.example_inputs(eager.model, seed=seed) for seed in range(5)]
    batches = [{key: value for key, value in inputs.items() if _moves(value)} for inputs in drawn]
    expected = [eager(batch).item() for batch in batches]
    step = make(name, autocast=autocast, cuda_graph=True)
    zoo.compile_regions(step.model, backend="aot_eager")
    with zoo.enforce_budget(step.model):
        losses = [step(batch).item() for batch in batches]
    assert step.captured
    assert losses == pytest.approx(expected, rel=1e-4 if autocast is None else 2e-2)
    if autocast is None:
        torch.testing.assert_close(step.model.state_dict(), eager.model.state_dict(), rtol=1e-3, atol=1e-4)


class WithLoss(nn.Module):
    """What the Trainer asks of a model: a forward that returns the loss. It writes into a ``config`` if it sees one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.model(input_ids).flatten(0, 1), labels.flatten())}


@pytest.mark.slow
def test_what_the_trainer_saved_goes_on_and_is_evaluated(tmp_path: Path):
    from transformers import Trainer, TrainingArguments

    rows = torch.randint(8, (16, 9), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]

    def trainer(steps: int) -> Trainer:
        torch.manual_seed(0)
        model = zoo.compile_regions(zoo.create("llm-debug").train(), backend="aot_eager")
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=8, max_steps=steps, learning_rate=1e-2, logging_steps=1,
            report_to="none", save_steps=3, disable_tqdm=True, use_cpu=True, lr_scheduler_type="constant",
        )  # fmt: skip
        return Trainer(model=WithLoss(model), args=arguments, train_dataset=data, eval_dataset=data)

    whole = trainer(6)
    whole.train()
    again = trainer(6)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    losses = [[e["loss"] for e in one.state.log_history if "loss" in e] for one in (whole, again)]
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and len(losses[0]) == 6
    assert again.evaluate()["eval_loss"] == pytest.approx(whole.evaluate()["eval_loss"], rel=1e-4)


SHORT = 256
# Of the model: weights, gradients and two moments in bfloat16, 10 GB; the rest is of 131,072 tokens.
MOST_BYTES = 40 << 30

LONGEST = [
    pytest.param("llm-debug", "cpu", "aot_eager"),
    pytest.param("llama-3.2-1b", "cuda", "inductor", marks=[pytest.mark.gpu, pytest.mark.slow]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "device", "backend"), LONGEST)
def test_all_positions_are_trained_on_and_no_token_sees_a_later_one(name: str, device: str, backend: str) -> None:
    torch.manual_seed(0)
    model = zoo.create(name, device=device, dtype=torch.bfloat16).train().requires_grad_(True)
    loss = LinearCrossEntropy()
    for module in (model, loss):
        zoo.compile_regions(module, backend=backend)
    checkpoint_regions(model, LLMLayer, preserve_rng_state=False)
    length = model.config.max_position_embeddings
    ids = torch.randint(64, (1, length), device=device)

    def loss_of(call: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(*call.output_product(batch[0]), batch[1])

    # Labels at the start alone: the rest of the sequence may be there or not.
    found = []
    for tokens in (SHORT, length):
        labels = F.pad(ids[:, 1:SHORT], (0, tokens - SHORT + 1), value=-100)
        loss_of(model, (ids[:, :tokens], labels)).backward()
        found.append({n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    short, long = found
    assert short.keys() == long.keys() == {n for n, _ in model.named_parameters()}
    for parameter, gradient in short.items():
        difference = (long[parameter] - gradient).norm() / gradient.norm()
        assert difference < 0.03, f"{parameter}: {difference:.3f}"
    del found, short, long

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rate = torch.tensor(1e-4, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=device == "cuda")
    step = TrainingStep(model, loss_of, optimizer, warmup=2, cuda_graph=True)
    batch = (ids, F.pad(ids[:, 1:], (0, 1), value=-100))
    losses = [step(batch).item() for _ in range(4)]
    assert losses[0] == pytest.approx(math.log(model.config.vocab_size), rel=0.1)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.01
    if device == "cuda":
        assert step.captured
        assert torch.cuda.max_memory_reserved() < MOST_BYTES, f"{torch.cuda.max_memory_reserved() / 2**30:.1f} GiB"


HERE = Path(__file__).parent


def run(group: str, folder: Path) -> dict[str, list[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]), "OMP_NUM_THREADS": "1"}
    environment |= {"TRITON_INTERPRET": str(int(group == "interpreter"))}
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "parallel_process.py"), str(rank), group, str(folder)],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(PROCESSES[group])
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=280)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    found: dict[str, list[str]] = {}
    for rank, error in enumerate(errors):
        written = folder / f"{group}-{rank}.json"
        assert written.exists(), f"rank {rank} ended early: {error[-2000:]}"
        for name, wrong in json.loads(written.read_text()).items():
            found.setdefault(name, []).append(wrong)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def quick(folder: Path) -> dict[str, list[str]]:
    return run("quick", folder)


SLOW = [pytest.param(group, marks=pytest.mark.slow) for group in ("families", "artifacts", "four")]


@pytest.mark.parametrize("group", ["quick", "one", "interpreter", *SLOW])
def test_several_processes(request: pytest.FixtureRequest, folder: Path, group: str) -> None:
    quick = request.getfixturevalue("quick") if group in ("quick", "one", "four") else {}
    found = quick if group == "quick" else run(group, folder)
    assert found.keys() == checks(group, folder).keys()
    assert not any(map(any, found.values())), "\n".join(each for wrong in found.values() for each in wrong)
    # The second one ends in the check of that.
    assert {name for name, wrong in found.items() if len(wrong) < PROCESSES[group]} <= {"one dies"}


@pytest.mark.slow
@pytest.mark.parametrize("dimension", ["dp_shard", "dp_replicate", "tp"])
def test_the_example_trains_on_two_processes(dimension: str) -> None:
    command = [
        "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/train_parallel.py", "llm-debug",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", *command, "--dimension", dimension, "--steps", "3"],
        cwd=HERE.parent, env={**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2]
