"""Tests of an unmodified ``transformers.Trainer`` within a budget."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.utils.data import Dataset

import outofcore

pytestmark = pytest.mark.usefixtures("one_thread")

TrainingResult = tuple[list[dict[str, float]], dict[str, torch.Tensor], dict[str, torch.Tensor]]


class Rows(Dataset[dict[str, list[int]]]):
    """Sentences of 20 to 90 words."""

    def __init__(self) -> None:
        draw = random.Random(0)
        self.rows = [[draw.randrange(5, 1000) for _ in range(draw.randint(20, 90))] for _ in range(24)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[index]}


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def make_trainer(folder: Path) -> Any:
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=1000, n_positions=96, n_embd=128, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=1
    )
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        num_train_epochs=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
    )
    rows = Rows()
    return transformers.Trainer(
        transformers.GPT2LMHeadModel(config), arguments, train_dataset=rows, eval_dataset=rows, data_collator=pad
    )


def train(folder: Path, budget: int | None, *, resume: bool = False) -> tuple[TrainingResult, int]:
    trainer, peak = make_trainer(folder), 0
    from_checkpoint = str(folder / "checkpoint-3") if resume else None
    if budget is None:
        trainer.train(resume_from_checkpoint=from_checkpoint)
    else:
        with outofcore.budget(budget, trainer.model) as run:
            trainer.train(resume_from_checkpoint=from_checkpoint)
        peak = run.stats.peak_bytes
        assert run.stats.steps == (3 if resume else 6)
    names = ("loss", "grad_norm", "eval_loss", "learning_rate", "step")
    log = [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]
    state = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    return (log, state, load_file(folder / "checkpoint-6" / "model.safetensors")), peak


def assert_same(ours: TrainingResult, theirs: TrainingResult) -> None:
    assert ours[0] == theirs[0]
    for tensors, expected in ((ours[1], theirs[1]), (ours[2], theirs[2])):
        assert tensors.keys() == expected.keys()
        assert all(tensors[name].equal(expected[name]) for name in expected)


def test_trainer_runs_within_a_budget_and_resumes(tmp_path: Path) -> None:
    theirs, _ = train(tmp_path / "eager", None)
    roomy, peak = train(tmp_path / "roomy", 1 << 30)
    assert_same(roomy, theirs)
    for share in (0.5, 0.3):
        ours, used_bytes = train(tmp_path / str(share), int(share * peak))
        assert_same(ours, theirs)
        assert used_bytes <= int(share * peak)
    # Training resumed from a checkpoint matches uninterrupted training.
    resumed, _ = train(tmp_path / "0.5", int(0.5 * peak), resume=True)
    assert resumed[0][-2:] == theirs[0][-2:]
    assert all(resumed[1][name].equal(tensor) for name, tensor in theirs[1].items())
