"""``outofcore plan config.json``: steps of models that are known by their configuration alone."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import outofcore
from outofcore import planning
from outofcore.capture import capture_step
from outofcore.capture.passes import leanest
from outofcore.cli.app import app
from outofcore.estimation.costing import estimated_costs
from outofcore.presets import device

transformers = pytest.importorskip("transformers")
configs = pytest.importorskip("outofcore.cli.configs")
fitting = pytest.importorskip("outofcore.cli.fit")

CARD = device("rtx4090")
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 16,
}
LLAMA: dict[str, Any] = {
    **TEXT,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 2,
    "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
}
MIXTRAL = {
    **TEXT,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
SLIDING = {
    **TEXT,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
BERT = {**TEXT, "architectures": ["BertForSequenceClassification"], "model_type": "bert"}
VIT = {**VISION, "architectures": ["ViTForImageClassification"], "model_type": "vit"}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 512,
    "num_mel_bins": 80,
    "max_source_positions": 50,
    "max_target_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_model": 64,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 16,
    "vocab_size": 512,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
CLIP = {
    "architectures": ["CLIPModel"],
    "model_type": "clip",
    "projection_dim": 64,
    "text_config": {**TEXT, "max_position_embeddings": 77},
    "vision_config": VISION,
}
LENGTH = 32


def tokens(count: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, 500, (count, length))


def texts() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "labels": tokens()}


# By name: a configuration, what its model is called with, and that in text.
MODELS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "llama": (LLAMA, texts),
    "mixtral": (MIXTRAL, texts),
    "sliding": (SLIDING, texts),
    "bert": (BERT, lambda: {"input_ids": tokens(), "labels": torch.zeros(2, dtype=torch.long)}),
    "vit": (VIT, lambda: {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.zeros(2, dtype=torch.long)}),
    "whisper": (WHISPER, lambda: {"input_features": torch.randn(2, 80, 100), "labels": tokens()}),
    "t5": (T5, texts),
    "clip": (CLIP, lambda: {"pixel_values": torch.randn(2, 3, 64, 64), "input_ids": tokens(length=77)}),
}


def written(folder: Path, content: object) -> str:
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def answered(*arguments: str) -> dict[str, Any]:
    result = asked(*arguments, "--json")
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_needs_what_the_real_model_needs(name: str, tmp_path: Path) -> None:
    content, batch = MODELS[name]
    found = configs.read_config(written(tmp_path, content))
    length = LENGTH if found.reads_tokens else None
    step, graph, costs = fitting.Captures(found, CARD).of(configs.Training(batch=2, sequence=length))

    inputs = batch()
    kind = getattr(transformers, content["architectures"][0])
    model = kind(kind.config_class(**{k: v for k, v in content.items() if k != "architectures"}))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    # What only generating text needs is not kept, in either.
    more = {"return_loss": True} if name == "clip" else {} if name in ("bert", "vit") else {"use_cache": False}

    def train_step(batch: dict[str, Any]) -> torch.Tensor:
        loss = model(**batch, **more).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    real = leanest(capture_step(train_step, [model], [optimizer], (inputs,), {}))
    real_costs = estimated_costs(real, CARD)
    assert planning.smallest_budget(graph, costs) == planning.smallest_budget(real.graph, real_costs)
    assert planning.in_core_budget(graph, costs) == planning.in_core_budget(real.graph, real_costs)
    assert [op.name for op in graph.ops] == [op.name for op in real.graph.ops]
    assert costs.compute_seconds == pytest.approx(real_costs.compute_seconds)
    assert step.parameters == sum(p.numel() for p in model.parameters())


def test_a_compiled_step_of_the_real_model_wants_no_less(tmp_path: Path) -> None:
    told = answered(written(tmp_path, LLAMA), "--batch", "2", "--sequence", str(LENGTH))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(batch: dict[str, Any]) -> torch.Tensor:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    measured = outofcore.smallest_budget(train_step, model, optimizer, inputs=(texts(),), cache=False)
    # On the CPU ops have scratch memory besides, which is measured there and is not known of a card.
    assert told["smallest_budget"] <= measured <= 2 * told["smallest_budget"]


@pytest.mark.parametrize("name", ["llama", "mixtral", "vit"])
def test_lora_trains_adapters_alone(name: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    path = written(tmp_path, MODELS[name][0])
    whole, adapted = answered(path, "--batch", "2"), answered(path, "--batch", "2", "--lora", "4")
    assert adapted["parameters"] > whole["parameters"] == whole["trained_parameters"]
    assert adapted["trained_parameters"] == adapted["parameters"] - whole["parameters"]
    assert ("experts" in " ".join(adapted["notes"])) == (name == "mixtral")


def test_lora_without_peft_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    result = asked(written(tmp_path, LLAMA), "--lora", "4")
    assert result.exit_code == 2
    assert "pip install peft" in result.output


def test_a_forward_pass_keeps_nothing_for_a_backward_pass(tmp_path: Path) -> None:
    path = written(tmp_path, LLAMA)
    training = answered(path, "--batch", "2", "--sequence", "64", "--dtype", "bf16")
    forward = answered(path, "--batch", "2", "--sequence", "64", "--dtype", "bf16", "--optimizer", "none")
    assert forward["trained_parameters"] == 0
    assert 2 * forward["parameters"] < forward["in_core_budget"] < training["in_core_budget"] / 3
    assert "forward pass" in forward["model"]


@pytest.mark.parametrize("name", ["llama", "whisper", "vit"])
def test_the_largest_that_fits_fits_and_the_next_does_not(name: str, tmp_path: Path) -> None:
    found = configs.read_config(written(tmp_path, MODELS[name][0]))
    training = configs.Training(batch=2, sequence=LENGTH if found.reads_tokens else None)
    budget = 24 << 20
    known = fitting.fit(found, training, None, (budget,), "auto", fitting.silent)
    captures = fitting.Captures(found, CARD)
    sizes = [(known.batch, "batch")]
    if known.longest is not None:
        sizes.append((known.longest, "sequence"))
    assert (known.longest is None) == (name == "vit")
    for largest, what in sizes:
        assert largest.size > 0
        here = captures.smallest(fitting.replace(training, **{what: largest.size}))
        assert here == largest.smallest_budget <= budget
        if not largest.limit:
            more = largest.size + largest.step
            assert captures.smallest(fitting.replace(training, **{what: more})) > budget
            assert largest.next_smallest_budget > budget


@pytest.mark.parametrize(
    ("slope", "curve", "base"), [(10, 0, 0), (10, 1, 100), (1, 0, 999), (1000, 0, 1), (3, 5, 7), (0, 0, 5)]
)
def test_the_search_finds_the_last_that_fits(slope: int, curve: int, base: int) -> None:
    tried: list[int] = []

    def need(count: int) -> int:
        tried.append(count)
        return base + slope * count + curve * count * count

    for memory in (0, 50, 999, 1000, 1009, 12_345, 10**7):
        tried.clear()
        for most in (1, 7, 5000):
            wanted = max((n for n in range(1, most + 1) if need(n) <= memory), default=0)
            tried.clear()
            assert fitting._search(need, {2.0: base + 2 * slope + 4 * curve}, memory, most) == wanted
            assert len(tried) <= 30


def test_the_answer_for_a_card(tmp_path: Path) -> None:
    path = written(tmp_path, LLAMA)
    told = answered(path, "--batch", "2", "--sequence", "64", "--gpu", "rtx4090", "--budget", "6MiB")
    tight, roomy = told["plans"]
    assert tight["budget"] == 6 << 20
    assert roomy["budget"] == told["device_bytes"] == CARD.memory_bytes
    assert roomy["fits"]
    assert roomy["bytes_in"] == roomy["bytes_out"] == 0 < tight["bytes_in"]
    assert roomy["seconds"] <= tight["seconds"]
    assert roomy["items_per_s"] == pytest.approx(2 * 64 / roomy["seconds"])
    assert tight["bound_seconds"] <= tight["seconds"]
    assert told["longest_sequence"]["size"] == 2048
    assert told["longest_sequence"]["limit"]
    changed = {change["what"]: change["need"] for change in told["changes"]}
    assert changed["parameters in bfloat16"]["in_core_budget"] < told["in_core_budget"]
    assert changed["gradient checkpointing"]["in_core_budget"] < told["in_core_budget"]
    assert changed["logits and loss in 8 pieces"]["in_core_budget"] <= told["in_core_budget"]
    words = asked(path, "--batch", "2", "--sequence", "64", "--gpu", "rtx4090")
    assert words.exit_code == 0, words.output
    for part in (
        "smallest budget",
        "nothing moves",
        "tokens a second",
        "longest sequence",
        "largest batch",
        "SIMULATED",
    ):
        assert part in words.output


def test_a_step_is_the_same_whatever_was_asked_before(tmp_path: Path) -> None:
    # transformers writes the dtype into the configuration that it builds of.
    found = configs.read_config(written(tmp_path, LLAMA))
    training = configs.Training(batch=2, sequence=LENGTH)
    first = fitting.Captures(found, CARD).of(training)[1]
    fitting.Captures(found, CARD).of(fitting.replace(training, dtype="bf16"))
    assert fitting.Captures(found, CARD).of(training)[1] == first


def test_a_budget_that_is_too_small_says_so(tmp_path: Path) -> None:
    result = asked(written(tmp_path, BERT), "--budget", "100KiB")
    assert result.exit_code == 1
    assert "does not fit" in result.output


REMOTE = {"model_type": "invented", "auto_map": {"AutoModelForCausalLM": "modeling_invented.Invented"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{not json", "is not JSON"),
        ([1, 2], "holds no JSON object"),
        ({"hidden_size": 4}, "no 'model_type'"),
        ({"model_type": "lama"}, "knows no model of type 'lama'"),
        (REMOTE, "which outofcore never runs"),
        ({**LLAMA, "architectures": ["LlamaForCausalML"]}, "has no model 'LlamaForCausalML'"),
        ({**LLAMA, "architectures": ["BertForMaskedLM"]}, "the two have to be of one model"),
        ({**LLAMA, "hidden_size": "wide"}, "hidden_size"),
        ({**LLAMA, "hidden_size": 66, "num_attention_heads": 7}, "LlamaForCausalLM"),
        ({**LLAMA, "dtype": "int8"}, "give --dtype bf16"),
    ],
)
def test_a_configuration_that_cannot_be_used(content: object, message: str, tmp_path: Path) -> None:
    (tmp_path / "modeling_invented.py").write_text("raise SystemExit('remote code was run')")
    written(tmp_path, content)
    result = asked(str(tmp_path), "--batch", "2")
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequence", "4096"], "positions for 2048 tokens"),
        (["--dtype", "fp4"], "choose one of fp32, bf16 and fp16"),
        (["--optimizer", "lion"], "choose one of adamw"),
        (["--optimizer", "none", "--lora", "4"], "no gradients"),
        (["--layers", "4"], "goes with models of the zoo"),
        (["--sweep"], "does not go with a model's config.json"),
        (["--device", "cuda"], "by its data sheet"),
    ],
)
def test_options_that_do_not_go_with_a_configuration(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = asked(written(tmp_path, LLAMA), *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_options_of_configurations_go_with_nothing_else() -> None:
    assert "config.json" in asked("gpt", "--lora", "4").output


def test_what_data_decides_is_refused_with_the_module(tmp_path: Path) -> None:
    result = asked(written(tmp_path, {**MIXTRAL, "experts_implementation": "eager"}), "--batch", "2")
    assert result.exit_code == 2
    assert "MixtralForCausalLM cannot be captured" in result.output
    assert "outofcore.budget" in result.output
