"""A model of the zoo in the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo


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
