"""Tests of the metrics of loops and compiled steps in loggers, transformers and Lightning."""

from __future__ import annotations

import csv
import doctest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outofcore
from outofcore.integrations import metrics as module
from outofcore.integrations.metrics import StepMetrics

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = {f"outofcore/{name}" for name in ("step_seconds", "wait_seconds", "bytes_out", "bytes_in", "peak_bytes")}


@pytest.fixture(autouse=True)
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Run:
    """A test double of a wandb run, which records its rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int | None]] = []

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        self.rows.append((data, step))


class Training:
    """A model with its optimizer and step, whose weights exceed the budgets of the tests."""

    def __init__(self) -> None:
        self.model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def test_metrics_of_a_loop_are_logged_every_second_step() -> None:
    train, run = Training(), Run()
    with outofcore.budget("1MiB", train.model) as loop:
        train.step(torch.ones(64, 256))  # not counted
        before = loop.stats
        metrics = StepMetrics(loop, run, every=2)
        returned = []
        for number in range(4):
            train.step(torch.ones(64, 256))
            returned.append(metrics.step(None if number < 2 else 10 * number))
        after = loop.stats
    assert [bool(values) for values in returned] == [False, True, False, True]
    assert [(values, step) for values, step in run.rows] == [(returned[1], None), (returned[3], 30)]
    assert set(returned[1]) == NAMES
    for name, field in (("bytes_out", "written_bytes"), ("bytes_in", "fetched_bytes")):
        total = 2 * sum(values[f"outofcore/{name}"] for values, _ in run.rows)
        assert total == getattr(after, field) - getattr(before, field) > 0
    wait_seconds = 2 * sum(values["outofcore/wait_seconds"] for values, _ in run.rows)
    assert wait_seconds == pytest.approx((after.transfer_microseconds - before.transfer_microseconds) / 1e6)
    assert returned[3]["outofcore/peak_bytes"] == after.peak_bytes
    assert 0 < returned[1]["outofcore/wait_seconds"] < returned[1]["outofcore/step_seconds"]


def test_metrics_of_a_compiled_step_are_logged_to_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train = Training()
    with (
        tensorboard.SummaryWriter(tmp_path) as writer,
        outofcore.compile(train.step, train.model, train.optimizer, budget="1200KiB") as step,
    ):
        metrics = StepMetrics(step, writer, prefix="ours/")
        moved = []
        for length in (64, 64, 48):  # the last call runs in an eager loop
            step(torch.ones(length, 256))
            metrics.step()
            moved.append(step.stats.bytes_in)
        assert 0 < step.stats.peak_bytes <= 1200 << 10
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {name.replace("outofcore", "ours") for name in NAMES}
    assert [(e.step, e.value) for e in events.Scalars("ours/bytes_in")] == list(enumerate(moved, 1))
    assert all(0 < e.value <= 1200 << 10 for e in events.Scalars("ours/peak_bytes"))
    assert all(e.value > 0 for e in events.Scalars("ours/step_seconds"))


def test_transformers_logs_have_metrics_for_every_callback(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from outofcore.integrations.transformers import OutOfCoreCallback  # noqa: PLC0415 - it needs transformers

    class Reporter(transformers.TrainerCallback):
        """A callback that runs before the user's, like a logger in ``report_to``."""

        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []
            self.began = 0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began += 1

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **__: Any) -> None:
            self.rows.append(dict(logs))

    class Derived(OutOfCoreCallback):
        began = 0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began += 1
            super().on_train_begin(*args, **kwargs)

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=256, n_positions=32, n_embd=128, n_layer=2, n_head=2, bos_token_id=0)
    )
    data = [{"input_ids": list(range(i, i + 32)), "labels": list(range(i, i + 32))} for i in range(8)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=4, logging_steps=2, eval_strategy="steps",
        eval_steps=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    reporter, callback = Reporter(), Derived("3MiB", log=True)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=[callback])
    trainer.callback_handler.callbacks.insert(0, reporter)
    callbacks = list(trainer.callback_handler.callbacks)
    for _ in range(2):  # a second training behaves like the first
        trainer.train()
        rows = [row for row in reporter.rows if "loss" in row]
        assert len(rows) == 2
        assert all(set(row) >= NAMES and row["outofcore/bytes_in"] > 0 for row in rows)
        assert not [row for row in reporter.rows if "loss" not in row and NAMES & set(row)]
        logged = next(row for row in trainer.state.log_history if "outofcore/step_seconds" in row)
        assert logged.items() >= rows[0].items()
        assert trainer.callback_handler.callbacks == callbacks
        assert (reporter.began, callback.began) == (1, 1)
        reporter.rows.clear()
        reporter.began = callback.began = 0


def test_lightning_logger_records_metrics(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger  # noqa: PLC0415 - as above

    from outofcore.integrations.lightning import OutOfCore  # noqa: PLC0415 - as above

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Training().model

        def training_step(self, x: torch.Tensor, _: int) -> torch.Tensor:
            return (self.net(x) - x).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=CSVLogger(tmp_path), callbacks=[OutOfCore("1MiB", log=True)],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=2,
    )  # fmt: skip
    trainer.fit(Lit(), torch.utils.data.DataLoader(torch.rand(320, 256), batch_size=64))
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["outofcore/bytes_in"]]
    assert [row["step"] for row in rows] == ["2", "4"]
    assert all(set(row) >= NAMES and float(row["outofcore/bytes_in"]) > 0 for row in rows)


def test_invalid_arguments_are_refused() -> None:
    loop = outofcore.budget("1MiB")
    with pytest.raises(outofcore.InputError, match="not Linear"):
        StepMetrics(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(outofcore.InputError, match="every must be"):
        StepMetrics(loop, every=0)
    with pytest.raises(outofcore.InputError, match="add_scalar, log_metrics, log"):
        StepMetrics(loop, object())


def test_docstring_example_runs() -> None:
    assert doctest.testmod(module) == (0, 6)
