"""Tests that steps of deep models made from few captured layers equal steps captured whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from effort import some_of

from outofcore import planning
from outofcore.estimation.repeating import KEPT_BLOCKS, CostedStep, Stack, are_equal_steps, deepen_step
from outofcore.graph import StorageKind
from outofcore.presets import device

pytest.importorskip("transformers")
configs = pytest.importorskip("outofcore.cli.configs")
fitting = pytest.importorskip("outofcore.cli.fit")

CARD = device("rtx4090")
DEPTH = 7
# Wide enough for large matrices: above 64 KiB a storage can be offloaded, above 256 KiB it is updated alone.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
LLAMA = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2}
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 256,
    "n_layer": DEPTH,
    "n_head": 4,
    "vocab_size": 512,
}
VIT = {
    **SIZES,
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "image_size": 64,
    "patch_size": 16,
}
BERT = {**SIZES, "architectures": ["BertForMaskedLM"], "model_type": "bert"}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_model": 256,
    "d_ff": 512,
    "num_layers": DEPTH,
    "num_decoder_layers": 6,
    "num_heads": 4,
    "d_kv": 64,
    "vocab_size": 512,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 256,
    "encoder_layers": 6,
    "decoder_layers": DEPTH,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "vocab_size": 512,
    "num_mel_bins": 80,
    "max_source_positions": 50,
    "max_target_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
# Alternating layers with an incomplete first block: eleven layers are five and a half blocks of two.
ALTERNATING = {
    **SIZES,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 11,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 5 + ["sliding_attention"],
}
FIRST_DENSE = {
    **SIZES,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 8,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "llama in bfloat16": (LLAMA, {"dtype": "bf16"}),
    "llama with adapters": (LLAMA, {"lora": 8}),
    "llama with adapters and checkpoints": (LLAMA, {"lora": 64, "checkpointing": True}),
    "llama with checkpoints": (LLAMA, {"checkpointing": True}),
    "llama forward alone": (LLAMA, {"optimizer": "none"}),
    "llama with momentum": (LLAMA, {"optimizer": "momentum"}),
    "gpt2": (GPT2, {}),
    "bert": (BERT, {}),
    "mixtral": (MIXTRAL, {}),
    "mixtral with adapters": (MIXTRAL, {"lora": 8}),
    "vit under autocast": (VIT, {"amp": True}),
    "t5": (T5, {}),
    "t5 with checkpoints": (T5, {"checkpointing": True}),
    "whisper": (WHISPER, {}),
    "whisper with adapters": (WHISPER, {"lora": 8}),
    "alternating layers": (ALTERNATING, {}),
    "dense layers first": (FIRST_DENSE, {}),
}


def read_config(folder: Path, content: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(content))
    return configs.read_config(str(folder))


@pytest.mark.parametrize(
    "name", some_of(CASES, ["llama with adapters and checkpoints", "mixtral with adapters", "t5", "vit under autocast"])
)
def test_deepened_step_equals_the_captured_step(name: str, tmp_path: Path) -> None:
    content, options = CASES[name]
    if "lora" in options:
        pytest.importorskip("peft")
    config = read_config(tmp_path, content)
    training = configs.Training(batch=2, sequence=32 if config.reads_tokens else None, **options)
    quick = fitting.Captures(config, CARD)
    graph, costs = quick.capture(training)
    assert quick.derives_steps
    exact, exact_costs = fitting.Captures(config, CARD, repeats=False).capture(training)
    assert graph.content(families=False) == exact.content(families=False)
    assert [cost.workspace_bytes for cost in costs.ops] == [cost.workspace_bytes for cost in exact_costs.ops]
    assert [cost.seconds for cost in costs.ops] == pytest.approx([cost.seconds for cost in exact_costs.ops], abs=1e-12)


def test_layers_repeat_only_in_models_with_enough_equal_layers(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"] * 2 + ["sliding_attention"] * 6
    config = read_config(tmp_path, {**ALTERNATING, "layer_types": kinds})
    captures = fitting.Captures(config, CARD)
    graph, _ = captures.capture(configs.Training(batch=2, sequence=32))
    # The last six layers are equal and follow the others, which saves two layers.
    assert captures.derives_steps
    exact, _ = fitting.Captures(config, CARD, repeats=False).capture(configs.Training(batch=2, sequence=32))
    assert graph.content(families=False) == exact.content(families=False)
    config = read_config(tmp_path, {**ALTERNATING, "layer_types": ["sliding_attention"] * 9 + ["full_attention"] * 2})
    captures = fitting.Captures(config, CARD)
    captures.capture(configs.Training(batch=2, sequence=32))
    assert not captures.derives_steps


def capture_shallow(folder: Path, content: dict[str, Any], **options: Any) -> tuple[CostedStep, tuple[Stack, ...]]:
    config = read_config(folder, content)
    captures = fitting.Captures(config, CARD)
    step, captured = captures._capture_step(configs.Training(batch=2, sequence=32, blocks=KEPT_BLOCKS, **options))
    return captured, step.stacks


def test_mismatched_blocks_give_no_step(tmp_path: Path) -> None:
    step, stacks = capture_shallow(tmp_path, LLAMA)
    assert deepen_step(step, stacks) is not None
    graph = step.graph
    # One product of the third layer takes longer, or one of its results has more bytes.
    op_id = next(op.id for op in graph.ops if op.module.startswith("model.layers.2.") and "mm" in op.name)
    slower = [
        replace(cost, seconds=cost.seconds * 2) if op == op_id else cost for op, cost in enumerate(step.costs.ops)
    ]
    assert deepen_step(replace(step, costs=replace(step.costs, ops=tuple(slower))), stacks) is None
    [result] = graph.ops[op_id].creates
    larger = tuple(replace(s, bytes=s.bytes + 4096) if s.id == result else s for s in graph.storages)
    assert deepen_step(replace(step, graph=replace(graph, storages=larger)), stacks) is None
    # An op outside of the layers reads a result of a middle layer.
    last = graph.ops[-1]
    reading = (*graph.ops[:-1], replace(last, module="elsewhere", name="other", reads=(*last.reads, result)))
    assert deepen_step(replace(step, graph=replace(graph, ops=reading)), stacks) is None


def test_differing_steps_are_distinguished(tmp_path: Path) -> None:
    step, stacks = capture_shallow(tmp_path, LLAMA)
    three, four = deepen_step(step, stacks, 3), deepen_step(step, stacks, 4)
    assert three is not None
    assert four is not None
    assert are_equal_steps(four, step)
    assert not are_equal_steps(three, four)
    ops = four.costs.ops
    slower = replace(four, costs=replace(four.costs, ops=(replace(ops[0], seconds=1.0), *ops[1:])))
    assert not are_equal_steps(slower, step)
    grown = tuple(replace(s, bytes=s.bytes + 1) if s.id == 0 else s for s in four.graph.storages)
    assert not are_equal_steps(replace(four, graph=replace(four.graph, storages=grown)), step)


def test_bytes_rise_evenly_with_the_number_of_layers(tmp_path: Path) -> None:
    step, stacks = capture_shallow(tmp_path, LLAMA)
    deep_steps = [deepen_step(step, stacks, blocks) for blocks in (20, 40, 60)]
    parameter_bytes = [
        sum(s.bytes for s in deep_step.graph.storages if s.kind is StorageKind.PARAMETER)
        for deep_step in deep_steps
        if deep_step is not None
    ]
    assert parameter_bytes[2] - parameter_bytes[1] == parameter_bytes[1] - parameter_bytes[0] > 0
    in_core = [
        planning.in_core_budget(deep_step.graph, deep_step.costs) for deep_step in deep_steps if deep_step is not None
    ]
    assert in_core[2] - in_core[1] == pytest.approx(in_core[1] - in_core[0], rel=0.01)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([0] * 8, (0, 1, 8)),
        ([0, 1] * 5, (0, 2, 5)),
        ([0, 1] * 5 + [0], (1, 2, 5)),
        ([5, 6] + [0] * 7, (2, 1, 7)),
        ([0] * 4, None),
        ([0, 1, 2, 3, 4, 5], None),
        ([0] * 8 + [1], None),
    ],
)
def test_repeated_layers_form_a_stack(kinds: list[int], expected: tuple[int, int, int] | None) -> None:
    stack = configs._best_stack("layers", kinds)
    assert (None if stack is None else (stack.first, stack.period, stack.blocks)) == expected
