"""Hugging Face models that no other benchmark uses, with random weights and data; half a second per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outofcore.zoo import Workload, ZooOptions

_LABELS = 10

_Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Unseen:
    """A model and its random training data; ``input_name`` is the name of the model's input argument."""

    shape: str
    batch: int
    network: Callable[[], nn.Module]
    inputs: _Draw
    input_name: str = "input_ids"


def _tokens(length: int, vocab: int, *, classes: int | None) -> _Draw:
    """Return a function that draws tokens and labels: a class per text, or the tokens if ``classes`` is None."""

    def draw(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocab, (batch, length), generator=generator)
        labels = tokens if classes is None else torch.randint(classes, (batch,), generator=generator)
        return tokens, labels

    return draw


def _pictures(size: int) -> _Draw:
    def draw(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        pictures = torch.randn(batch, 3, size, size, generator=generator)
        return pictures, torch.randint(_LABELS, (batch,), generator=generator)

    return draw


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415 - slow to import

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=8192,
            hidden_size=384,
            num_hidden_layers=4,
            num_attention_heads=6,
            intermediate_size=1536,
            num_labels=_LABELS,
        )
    )


def _distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForMaskedLM  # noqa: PLC0415

    return DistilBertForMaskedLM(DistilBertConfig(vocab_size=4096, dim=384, n_layers=4, n_heads=6, hidden_dim=1536))


def _opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM  # noqa: PLC0415

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=4096,
            hidden_size=320,
            num_hidden_layers=6,
            ffn_dim=1280,
            num_attention_heads=5,
            max_position_embeddings=256,
            word_embed_proj_dim=320,
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration  # noqa: PLC0415

    return T5ForConditionalGeneration(
        T5Config(vocab_size=4096, d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4, decoder_start_token_id=0)
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=320,
            num_hidden_layers=6,
            num_attention_heads=5,
            intermediate_size=1280,
            image_size=96,
            patch_size=8,
            num_labels=_LABELS,
        )
    )


def _convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification  # noqa: PLC0415

    return ConvNextForImageClassification(
        ConvNextConfig(depths=[2, 2, 6, 2], hidden_sizes=[48, 96, 192, 384], image_size=128, num_labels=_LABELS)
    )


def _translation(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens, labels = (torch.randint(4096, (batch, 96), generator=generator) for _ in range(2))
    return tokens, labels


UNSEEN: Mapping[str, Unseen] = {
    "hf-bert": Unseen("4 layers of width 384, 128 tokens", 8, _bert, _tokens(128, 8192, classes=_LABELS)),
    "hf-distilbert": Unseen("4 layers of width 384, 128 tokens", 8, _distilbert, _tokens(128, 4096, classes=None)),
    "hf-opt": Unseen("6 layers of width 320, 256 tokens", 4, _opt, _tokens(256, 4096, classes=None)),
    "hf-t5": Unseen("4 + 4 layers of width 256, 96 tokens each", 12, _t5, _translation),
    "hf-vit": Unseen("6 layers of width 320, 144 patches", 8, _vit, _pictures(96), "pixel_values"),
    "hf-convnext": Unseen("12 blocks of width 48 to 384, 128 pixels", 8, _convnext, _pictures(128), "pixel_values"),
}


def unseen_workload(name: str, options: Mapping[str, Any]) -> Workload:
    """Return one of ``UNSEEN`` as a workload; of the zoo's options only the batch size has an effect."""
    model = UNSEEN[name]
    chosen = ZooOptions(**{"batch": model.batch, **options})

    def stream(batch: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield model.inputs(batch, generator)

    def loss(network: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return network(**{model.input_name: inputs, "labels": labels}).loss

    inputs = next(stream(1, 0))
    sample = tuple((tuple(tensor.shape[1:]), tensor.dtype) for tensor in inputs)
    return Workload(name, chosen, model.shape, "random data", model.network, loss, stream, sample)
