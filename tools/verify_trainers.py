"""Three trainers of other projects on small models, run by ``verify.py``: ``python verify_trainers.py transformers``.

They print every logged number exactly, and a digest of the trained parameters. This file does not use ``outofcore``.
"""

from __future__ import annotations

import hashlib
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS = 4
LENGTH = 128
WORDS = 500


def small_gpt() -> Any:
    import transformers

    transformers.set_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=LENGTH, n_embd=384, n_layer=8, n_head=6, bos_token_id=1, eos_token_id=1
        )
    )


def logs_of(trainer: Any) -> list[str]:
    """Return the logged numbers, without times and rates."""
    names = ("loss", "grad_norm", "eval_loss", "mean_token_accuracy", "entropy")
    return [f"{name} {entry[name]!r}" for entry in trainer.state.log_history for name in names if name in entry]


def train_transformers(folder: str) -> tuple[nn.Module, list[str]]:
    """Fine-tune with the Trainer of transformers, with an evaluation at the end."""
    import transformers

    class Tokens(Dataset[dict[str, torch.Tensor]]):
        def __init__(self, seed: int) -> None:
            self.rows = torch.randint(WORDS, (32, LENGTH), generator=torch.Generator().manual_seed(seed))

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": self.rows[index], "labels": self.rows[index]}

    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=STEPS, logging_steps=1,
        eval_strategy="steps", eval_steps=STEPS, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(small_gpt(), arguments, train_dataset=Tokens(1), eval_dataset=Tokens(2))
    trainer.train()
    return trainer.model, logs_of(trainer)


def train_trl(folder: str) -> tuple[nn.Module, list[str]]:
    """Fine-tune with TRL's SFTTrainer on texts of various lengths, with one token per character."""
    import datasets
    import tokenizers
    import transformers
    import trl

    words = {"<pad>": 0, "<end>": 1, "<unk>": 2} | {chr(code): code - 29 for code in range(32, 127)}
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )
    draw = random.Random(1)
    text = ["".join(draw.choice("abcdefgh .,") for _ in range(draw.randint(20, LENGTH - 8))) for _ in range(64)]
    arguments = trl.SFTConfig(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=STEPS, max_length=LENGTH,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        small_gpt(),
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"text": text}),
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer.model, logs_of(trainer)


def train_lightning(folder: str) -> tuple[nn.Module, list[str]]:
    """Train an autoencoder with Lightning, with gradient clipping and accumulation."""
    import lightning

    class AutoEncoder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 1024))
            self.decoder = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 784))
            self.losses: list[str] = []

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.decoder(self.encoder(batch)), batch)
            self.losses.append(f"loss {loss.item()!r}")
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    lightning.seed_everything(0)
    model = AutoEncoder()
    batches: Any = DataLoader(torch.rand(1024, 784), batch_size=128, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", gradient_clip_val=1.0, accumulate_grad_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, batches)
    return model, model.losses


TRAINERS: dict[str, Callable[[str], tuple[nn.Module, list[str]]]] = {
    "transformers": train_transformers,
    "trl": train_trl,
    "lightning": train_lightning,
}


def digest(model: nn.Module) -> str:
    hashed = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        hashed.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return hashed.hexdigest()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        trained, logged = TRAINERS[sys.argv[1]](scratch)
    print(*logged, f"parameters {digest(trained)}", sep="\n")
