"""Tests of text generation from a checkpoint within a third of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import outofcore

pytestmark = pytest.mark.usefixtures("one_thread")
transformers = pytest.importorskip("transformers")

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 50, "temperature": 0.8},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "no-cache": {"use_cache": False},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=800,
        max_position_embeddings=128,
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="2MB")
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_tokens_match_plain_pytorch(checkpoint: Path, mode: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    prompts = torch.randint(0, 800, (2, 12), generator=torch.Generator().manual_seed(3))

    def generate_tokens() -> torch.Tensor:
        torch.manual_seed(5)
        return model.generate(prompts, max_new_tokens=8, min_new_tokens=8, pad_token_id=0, **MODES[mode])

    expected = generate_tokens()
    large = sum(p.nbytes for p in model.parameters() if p.nbytes >= 1 << 16)
    with outofcore.budget(large // 3, model) as run:
        assert all(torch.equal(generate_tokens(), expected) for _ in range(2))
    assert run.stats.file_bytes >= large
    assert run.stats.steps >= 16
    assert run.stats.peak_home_bytes < large / 8
    assert torch.equal(generate_tokens(), expected)
