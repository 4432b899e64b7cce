"""Steps of deep models that are made of a few of their layers equal those that are captured with all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from effort import some_of

from outofcore import planning
from outofcore.estimation.repeating import KEPT, Stack, Step, deepened, same_step
from outofcore.graph import StorageKind
from outofcore.presets import device

pytest.importorskip("transformers")
configs = pytest.importorskip("outofcore.cli.configs")
fitting = pytest.importorskip("outofcore.cli.fit")

CARD = device("rtx4090")
DEPTH = 7
# Wide enough that matrices are large: above 64 KiB bytes may leave, and above 256 KiB each is updated by itself.
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
# Layers that take turns, with a first block that is cut: twelve are five and a half blocks of two.
TURNS = {
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
    "layers that take turns": (TURNS, {}),
    "dense layers first": (FIRST_DENSE, {}),
}


def found_in(folder: Path, content: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(content))
    return configs.read_config(str(folder))


@pytest.mark.parametrize(
    "name", some_of(CASES, ["llama with adapters and checkpoints", "mixtral with adapters", "t5", "vit under autocast"])
)
def test_a_deep_step_of_few_layers_equals_the_captured(name: str, tmp_path: Path) -> None:
    content, how = CASES[name]
    if "lora" in how:
        pytest.importorskip("peft")
    found = found_in(tmp_path, content)
    training = configs.Training(batch=2, sequence=32 if found.reads_tokens else None, **how)
    quick = fitting.Captures(found, CARD)
    graph, costs = quick.of(training)
    assert quick.repeats
    exact, its_costs = fitting.Captures(found, CARD, repeats=False).of(training)
    assert graph.content(families=False) == exact.content(families=False)
    assert [cost.workspace_bytes for cost in costs.ops] == [cost.workspace_bytes for cost in its_costs.ops]
    assert [cost.seconds for cost in costs.ops] == pytest.approx([cost.seconds for cost in its_costs.ops], abs=1e-12)


def test_a_model_whose_layers_differ_is_captured_whole(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"] * 2 + ["sliding_attention"] * 6
    found = found_in(tmp_path, {**TURNS, "layer_types": kinds})
    captures = fitting.Captures(found, CARD)
    graph, _ = captures.of(configs.Training(batch=2, sequence=32))
    # The last six are alike, and the others come first: that saves two layers.
    assert captures.repeats
    exact, _ = fitting.Captures(found, CARD, repeats=False).of(configs.Training(batch=2, sequence=32))
    assert graph.content(families=False) == exact.content(families=False)
    found = found_in(tmp_path, {**TURNS, "layer_types": ["sliding_attention"] * 9 + ["full_attention"] * 2})
    captures = fitting.Captures(found, CARD)
    captures.of(configs.Training(batch=2, sequence=32))
    assert not captures.repeats


def shallow(folder: Path, content: dict[str, Any], **how: Any) -> tuple[Step, tuple[Stack, ...]]:
    found = found_in(folder, content)
    captures = fitting.Captures(found, CARD)
    step, captured = captures._captured(configs.Training(batch=2, sequence=32, blocks=KEPT, **how))
    return captured, step.stacks


def test_blocks_that_do_not_match_give_no_step(tmp_path: Path) -> None:
    step, stacks = shallow(tmp_path, LLAMA)
    assert deepened(step, stacks) is not None
    graph = step.graph
    # One product of the third layer takes longer, or one of its results has more bytes.
    at = next(op.id for op in graph.ops if op.module.startswith("model.layers.2.") and "mm" in op.name)
    slower = [replace(cost, seconds=cost.seconds * 2) if op == at else cost for op, cost in enumerate(step.costs.ops)]
    assert deepened(replace(step, costs=replace(step.costs, ops=tuple(slower))), stacks) is None
    [made] = graph.ops[at].creates
    larger = tuple(replace(s, bytes=s.bytes + 4096) if s.id == made else s for s in graph.storages)
    assert deepened(replace(step, graph=replace(graph, storages=larger)), stacks) is None
    # An op outside reads what a layer in the middle has made.
    last = graph.ops[-1]
    reading = (*graph.ops[:-1], replace(last, module="elsewhere", name="other", reads=(*last.reads, made)))
    assert deepened(replace(step, graph=replace(graph, ops=reading)), stacks) is None


def test_steps_that_differ_are_told_apart(tmp_path: Path) -> None:
    step, stacks = shallow(tmp_path, LLAMA)
    three, four = deepened(step, stacks, 3), deepened(step, stacks, 4)
    assert three is not None
    assert four is not None
    assert same_step(four, step)
    assert not same_step(three, four)
    ops = four.costs.ops
    slower = replace(four, costs=replace(four.costs, ops=(replace(ops[0], seconds=1.0), *ops[1:])))
    assert not same_step(slower, step)
    grown = tuple(replace(s, bytes=s.bytes + 1) if s.id == 0 else s for s in four.graph.storages)
    assert not same_step(replace(four, graph=replace(four.graph, storages=grown)), step)


def test_what_is_needed_rises_evenly_with_the_layers(tmp_path: Path) -> None:
    step, stacks = shallow(tmp_path, LLAMA)
    deep = [deepened(step, stacks, blocks) for blocks in (20, 40, 60)]
    bytes_of = [
        sum(s.bytes for s in one.graph.storages if s.kind is StorageKind.PARAMETER) for one in deep if one is not None
    ]
    assert bytes_of[2] - bytes_of[1] == bytes_of[1] - bytes_of[0] > 0
    whole = [planning.in_core_budget(one.graph, one.costs) for one in deep if one is not None]
    assert whole[2] - whole[1] == pytest.approx(whole[1] - whole[0], rel=0.01)


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
def test_a_stack_is_found_where_layers_repeat(kinds: list[int], expected: tuple[int, int, int] | None) -> None:
    stack = configs._stack_of("layers", kinds)
    assert (None if stack is None else (stack.first, stack.period, stack.blocks)) == expected
