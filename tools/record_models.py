"""The models of the record: small ones of the zoo and of transformers, and one for several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from outofcore import zoo

SEED = 1234


@dataclass(frozen=True)
class Training:
    """A model with weights drawn from ``SEED``, its plain PyTorch step, and an endless stream of batches."""

    model: nn.Module
    optimizer: Optimizer
    step: Callable[..., Tensor]
    batches: Iterator[tuple[Tensor, ...]]


def zoo_model(name: str, *, keeps_gradients: bool = False, **options: Any) -> Training:
    """Build a zoo training; with ``keeps_gradients`` each step ends with zeroed gradients instead of none."""
    work = zoo.workload(name, **options)
    model = work.build(SEED)
    optimizer = work.optimizer(model)
    step = work.make_step(model, optimizer)
    if keeps_gradients:
        turn, update = work.make_turn(model), work.make_update(model, optimizer)

        def step(*batch: Tensor) -> Tensor:
            loss = turn(*batch)
            update()
            optimizer.zero_grad(set_to_none=False)
            return loss

    return Training(model, optimizer, step, work.batches(seed=SEED))


def transformers_model(name: str) -> Training:
    import transformers  # noqa: PLC0415 - slow to import, not needed for the zoo

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(SEED)
    model, draw = _TRANSFORMERS[name](transformers)
    model.train()
    names = tuple(draw(torch.Generator()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(*batch: Tensor) -> Tensor:
        loss = model(**dict(zip(names, batch, strict=True))).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, step, _draw_batches(draw))


_Draw = Callable[[torch.Generator], dict[str, Tensor]]
_WORDS = 512


def _draw_batches(draw: _Draw) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(SEED)
    while True:
        yield tuple(draw(generator).values())


def _tokens(length: int, batch: int = 4) -> _Draw:
    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        ids = torch.randint(_WORDS, (batch, length), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

    return draw


def _gpt2(library: Any) -> tuple[nn.Module, _Draw]:
    config = library.GPT2Config(vocab_size=_WORDS, n_positions=64, n_embd=128, n_layer=2, n_head=4)
    return library.GPT2LMHeadModel(config), _tokens(64)


def _llama(library: Any) -> tuple[nn.Module, _Draw]:
    config = library.LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,
    )
    return library.LlamaForCausalLM(config), _tokens(64)


def _bert(library: Any) -> tuple[nn.Module, _Draw]:
    config = library.BertConfig(
        vocab_size=_WORDS, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    return library.BertForMaskedLM(config), _tokens(64)


def _t5(library: Any) -> tuple[nn.Module, _Draw]:
    config = library.T5Config(
        vocab_size=_WORDS, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return library.T5ForConditionalGeneration(config), _tokens(48)


def _vit(library: Any) -> tuple[nn.Module, _Draw]:
    config = library.ViTConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        pictures = torch.randn(4, 3, 64, 64, generator=generator)
        return {"pixel_values": pictures, "labels": torch.randint(10, (4,), generator=generator)}

    return library.ViTForImageClassification(config), draw


def _mamba(library: Any) -> tuple[nn.Module, _Draw]:
    config = library.MambaConfig(vocab_size=_WORDS, hidden_size=64, state_size=8, num_hidden_layers=2)
    return library.MambaForCausalLM(config), _tokens(16)


def _whisper(library: Any) -> tuple[nn.Module, _Draw]:
    config = library.WhisperConfig(
        vocab_size=_WORDS,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        num_mel_bins=16,
        max_source_positions=64,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        sound = torch.randn(4, 16, 128, generator=generator)
        return {"input_features": sound, "labels": torch.randint(3, _WORDS, (4, 24), generator=generator)}

    return library.WhisperForConditionalGeneration(config), draw


_TRANSFORMERS: dict[str, Callable[[Any], tuple[nn.Module, _Draw]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "mamba": _mamba,
    "whisper": _whisper,
}


class Normed(nn.Module):
    """A model with statistics in buffers, dropout and a shared layer, for distributed training."""

    def __init__(self, width: int = 301) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, width), nn.BatchNorm1d(width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        for layer in (*self.hidden, self.hidden[0]):
            x = x + F.dropout(torch.relu(layer(x)), 0.1, self.training)
        return self.last(x)


def shared_model(rank: int, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Training:
    """Build the training of one of several processes; ``wrap`` wraps the model before its optimizer is created."""
    torch.manual_seed(SEED)
    model = wrap(Normed())
    torch.manual_seed(SEED + rank)  # for dropout
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def batches() -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(SEED + rank)
        while True:
            yield torch.randn(512, 64, generator=generator), torch.randint(0, 10, (512,), generator=generator)

    return Training(model, optimizer, step, batches())
