"""Tests of loops of frameworks within budgets: Lightning, TRL, accelerate, PEFT, transformers."""

from __future__ import annotations

import contextlib
import importlib
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import Language, Pictures, loss_of, sentences, tensors_in
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import outofcore
from outofcore.follow.native import is_any_loop_running, load_paging

pytestmark = pytest.mark.usefixtures("one_thread")

# Trains in a folder; returns the model and the other results to compare.
Train = Callable[[Path], tuple[nn.Module, list[Any]]]


@pytest.fixture(autouse=True)
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run_training(
    train: Train, folder: Path, budget: int | None = None, *, stress: bool = False
) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    random.seed(0)
    stats = None
    with contextlib.ExitStack() as stack:
        run = None if budget is None else stack.enter_context(outofcore.budget(budget))
        if run is not None:
            load_paging().follow_stress(run._space, int(stress))
        model, results = train(folder)
        stats = None if run is None else run.stats
    tensors = [t.detach().clone() for t in (*model.state_dict().values(), *tensors_in(results), torch.get_rng_state())]
    return [*(value for value in results if not isinstance(value, Tensor | dict)), *tensors], stats


def assert_exact(train: Train, folder: Path, shares: tuple[float, ...] = (0.5, 0.3)) -> None:
    theirs, _ = run_training(train, folder / "eager")
    roomy, stats = run_training(train, folder / "roomy", 1 << 30)
    assert_same(roomy, theirs)
    peak = stats.peak_bytes + stats.peak_small_bytes
    for number, (share, stress) in enumerate([*((share, False) for share in shares), (shares[0], True)]):
        ours, stats = run_training(train, folder / str(number), int(share * peak), stress=stress)
        assert_same(ours, theirs)
        assert stats.peak_bytes <= share * peak
        assert stats.evictions > 0


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for actual, expected in zip(ours, theirs, strict=True):
        assert torch.equal(actual, expected) if isinstance(expected, Tensor) else actual == expected


# ---- Lightning ------------------------------------------------------------------------------------------------------


def make_lightning(folder: Path, callbacks: tuple[Any, ...] = ()) -> tuple[Any, Any, Any, Any]:
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = Pictures(), []

        def training_step(self, batch: Any, _: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss, prog_bar=True)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            x, y = batch
            self.log("right", (self.net(x).argmax(-1) == y).float().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]

    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, default_root_dir=folder, gradient_clip_val=0.5, logger=True,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks), log_every_n_steps=1,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(32, 3, 32, 32, generator=draw), torch.randint(0, 10, (32,), generator=draw))
    return trainer, Lit(), DataLoader(rows, 16, shuffle=True), DataLoader(rows, 16)


def test_lightning_training_is_exact(tmp_path: Path) -> None:
    def train(folder: Path) -> tuple[nn.Module, list[Any]]:
        trainer, module, batches, validation = make_lightning(folder)
        trainer.fit(module, batches, validation)
        saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
        assert trainer.global_step == 4
        right = trainer.callback_metrics["right"].item()
        return module, [*module.losses, right, saved["state_dict"], saved["optimizer_states"][0]["state"]]

    assert_exact(train, tmp_path)


# ---- transformers, TRL, PEFT ----------------------------------------------------------------------------------------


def small_gpt(transformers: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=300, n_positions=64, n_embd=192, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=1
        )
    )


def tokenizer_of(transformers: Any) -> Any:
    """Return a tokenizer of single characters."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<end>": 1, "<unk>": 2} | {chr(code): code - 29 for code in range(32, 127)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )


def sft(folder: Path, model: nn.Module, peft: Any = None) -> Any:
    transformers, trl = pytest.importorskip("transformers"), pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    transformers.set_seed(0)
    draw = random.Random(1)
    letters = "abcdefgh .,"
    text = ["".join(draw.choice(letters) for _ in range(draw.randint(10, 50))) for _ in range(16)]
    # The loss has a buffer of 128 KiB for each token.
    arguments = trl.SFTConfig(
        str(folder), per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=4, max_length=24,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    return trl.SFTTrainer(
        model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"text": text}),
        processing_class=tokenizer_of(transformers),
        peft_config=peft,
    )


def read_log(trainer: Any) -> list[Any]:
    names = ("loss", "grad_norm", "eval_loss", "mean_token_accuracy", "entropy")
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]


@pytest.mark.exhaustive
def test_trl_fine_tuning_is_exact(tmp_path: Path) -> None:
    def train(folder: Path) -> tuple[nn.Module, list[Any]]:
        trainer = sft(folder, small_gpt(pytest.importorskip("transformers")))
        trainer.train()
        return trainer.model, read_log(trainer)

    assert_exact(train, tmp_path)


def test_peft_adapters_are_exact(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def train(folder: Path) -> tuple[nn.Module, list[Any]]:
        adapters = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], task_type="CAUSAL_LM", fan_in_fan_out=True)
        trainer = sft(folder, small_gpt(pytest.importorskip("transformers")), adapters)
        trainer.train()
        return trainer.model.merge_and_unload(), read_log(trainer)

    assert_exact(train, tmp_path, (0.5, 0.4))


@pytest.mark.exhaustive
def test_seq2seq_trainer_with_generation_is_exact(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def train(folder: Path) -> tuple[nn.Module, list[Any]]:
        transformers.set_seed(0)
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=200, d_model=96, d_kv=24, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0
            )
        )
        draw = random.Random(2)
        rows = [[draw.randrange(3, 200) for _ in range(draw.randint(8, 24))] for _ in range(16)]
        data = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row[::-1][:12]} for row in rows]
        arguments = transformers.Seq2SeqTrainingArguments(
            str(folder), per_device_train_batch_size=4, max_steps=4, report_to=[], use_cpu=True, disable_tqdm=True,
            eval_strategy="steps", eval_steps=2, save_steps=2, logging_steps=1, load_best_model_at_end=True,
            predict_with_generate=True, generation_max_length=8,
        )  # fmt: skip
        trainer = transformers.Seq2SeqTrainer(
            model,
            arguments,
            train_dataset=data,
            eval_dataset=data[:8],
            data_collator=transformers.DataCollatorForSeq2Seq(tokenizer_of(transformers), model),
            compute_metrics=lambda evaluation: {"sum": float(evaluation.predictions.clip(0).sum())},
        )
        trainer.train()
        predicted = trainer.predict(data[:6])
        sums = [entry["eval_sum"] for entry in trainer.state.log_history if "eval_sum" in entry]
        return model, [*read_log(trainer), *sums, predicted.predictions.tolist()]

    assert_exact(train, tmp_path)


# ---- accelerate -----------------------------------------------------------------------------------------------------


def test_accelerate_loop_is_exact(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(folder: Path) -> tuple[nn.Module, list[Any]]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, losses = Language(), []
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        rows = [(ids[i], targets[i]) for ids, targets in sentences(3) for i in range(len(ids))]
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        model, optimizer, batches, schedule = accelerator.prepare(
            model, optimizer, DataLoader(rows, 4, shuffle=True), schedule
        )
        for ids, targets in batches:
            with accelerator.accumulate(model):
                loss = loss_of(model, ids, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).item())
        accelerator.save_state(str(folder))
        accelerator.load_state(str(folder))
        return accelerator.unwrap_model(model), [*losses, optimizer.state_dict()]

    assert_exact(train, tmp_path)


@pytest.mark.exhaustive
def test_batch_size_is_reduced_when_a_batch_does_not_fit(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=32, auto_find_batch_size=True, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    row = {"input_ids": list(range(64)), "labels": list(range(64))}
    trainer = transformers.Trainer(small_gpt(transformers), arguments, train_dataset=[row] * 64)
    with outofcore.budget("12MiB", trainer.model) as run:
        trainer.train()
    assert 0 < trainer.state.train_batch_size < 32
    assert run.stats.steps == 2


# ---- the callbacks --------------------------------------------------------------------------------------------------


def test_lightning_callback_runs_within_a_budget(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from outofcore.integrations.lightning import OutOfCore  # noqa: PLC0415 - it needs Lightning

    def fit_model(folder: Path, *callbacks: Any) -> list[Any]:
        torch.manual_seed(0)
        trainer, module, batches, validation = make_lightning(folder, callbacks)
        trainer.fit(module, batches, validation)
        right = trainer.validate(module, validation, verbose=False)
        return [*module.losses, right, *(t.clone() for t in module.state_dict().values())]

    callback = OutOfCore("8MiB", home="host")
    assert callback.run is None
    theirs = fit_model(tmp_path / "eager")
    assert_same(fit_model(tmp_path / "ours", callback), theirs)
    assert callback.run is not None
    assert not is_any_loop_running()
    assert 0 < callback.stats.peak_bytes <= 8 << 20
    assert callback.stats.steps == 0  # the last run was a validation
    # A failed training ends the loop too, and the error names the op that does not fit.
    trainer, module, batches, _ = make_lightning(tmp_path / "small", (OutOfCore("1MiB"),))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(module, batches)
    assert not is_any_loop_running()
    (note,) = caught.value.__notes__
    assert note.startswith("outofcore: the budget of 1.00 MiB is too small: aten::")
    assert "loops.py:" in note


def test_transformers_callback_runs_within_a_budget(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from outofcore.integrations.transformers import OutOfCoreCallback  # noqa: PLC0415 - it needs transformers

    class Failing(transformers.TrainerCallback):
        steps = 0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.steps += 1
            if self.steps == 2:
                raise ValueError("the disk of the loader is gone")

    def trainer_of(folder: Path, *callbacks: Any) -> Any:
        transformers.set_seed(0)
        data = [{"input_ids": [3 + (7 * i + k) % 200 for k in range(30)], "labels": [5] * 30} for i in range(16)]
        arguments = transformers.TrainingArguments(
            str(folder), max_steps=4, per_device_train_batch_size=4, logging_steps=1, eval_strategy="steps",
            eval_steps=2, save_steps=2, load_best_model_at_end=True, report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        return transformers.Trainer(
            small_gpt(transformers), arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks)
        )

    def train_and_log(trainer: Any) -> list[Any]:
        trainer.train()
        return [*read_log(trainer), *(t.clone() for t in trainer.model.state_dict().values())]

    theirs = train_and_log(trainer_of(tmp_path / "eager"))
    callback = OutOfCoreCallback("16MiB")
    assert_same(train_and_log(trainer_of(tmp_path / "ours", callback)), theirs)
    assert not is_any_loop_running()
    assert callback.run is not None
    assert callback.stats.steps == 4
    assert callback.stats.evictions > 0
    # A failed trainer does not end the loop: it can train again, be stopped, or be deleted.
    callback = OutOfCoreCallback("16MiB")
    trainer = trainer_of(tmp_path / "again", callback, Failing())
    with pytest.raises(ValueError, match="the disk"):
        trainer.train()
    assert is_any_loop_running()
    callback.stop()
    assert not is_any_loop_running()
    trainer = trainer_of(tmp_path / "once more", callback := OutOfCoreCallback("16MiB"), Failing())
    with pytest.raises(ValueError, match="the disk"):
        trainer.train()
    trainer.train()
    assert not is_any_loop_running()
    assert callback.stats.steps == 4
    trainer = trainer_of(tmp_path / "gone", OutOfCoreCallback("16MiB"), Failing())
    with pytest.raises(ValueError, match="the disk"):
        trainer.train()
    del trainer, callback
    with outofcore.budget("16MiB"):
        torch.ones(1 << 16)


def test_bad_arguments_of_a_callback_are_refused() -> None:
    for module, name in (("transformers", "OutOfCoreCallback"), ("lightning", "OutOfCore")):
        pytest.importorskip(module)
        kind = getattr(importlib.import_module(f"outofcore.integrations.{module}"), name)
        with pytest.raises(outofcore.UnitError, match="much"):
            kind("much")
        with pytest.raises(outofcore.InputError, match="there is no check 'some'"):
            kind("1GiB", check="some")


MISSING = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "lightning", "pytorch_lightning"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import outofcore, outofcore.api, outofcore.integrations
assert not {"transformers", "lightning", "pytorch_lightning"} & set(sys.modules)
sys.meta_path.insert(0, Refuse())
for name in ("transformers", "lightning"):
    try:
        __import__(f"outofcore.integrations.{name}")
    except ImportError as error:
        print(error)
"""


def test_missing_framework_is_named_with_its_install_command() -> None:
    process = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, check=True)
    for line, package in zip(process.stdout.splitlines(), ("transformers accelerate", "lightning"), strict=True):
        assert "which is not installed" in line
        assert line.endswith(f"pip install {package}")
