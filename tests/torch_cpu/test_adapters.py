"""Tests of PEFT adapters that are switched and merged between compiled steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import outofcore
from outofcore.program import CopyOut

_VOCABULARY = 400


def build_training(*, tied: bool, checkpointed: bool) -> tuple[Any, torch.optim.Optimizer, Any]:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=320,
        vocab_size=_VOCABULARY,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    inner = transformers.LlamaForCausalLM(config)
    if checkpointed:
        inner.gradient_checkpointing_enable()
        inner.enable_input_require_grads()
    lora_config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    model = peft.get_peft_model(inner, lora_config, adapter_name="one")
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    model.train()
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if "lora_" in n], lr=1e-3)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def train_with_switches(model: Any, step: Any) -> list[float]:
    torch.manual_seed(5)
    ids = torch.randint(0, _VOCABULARY, (2, 32))
    losses = [step(ids).item()]
    model.set_adapter("other")
    losses += [step(ids).item() for _ in range(2)]
    model.set_adapter("one")
    losses.append(step(ids).item())
    model.merge_adapter(["one"])
    model.eval()
    with torch.no_grad():
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    model.train()
    model.unmerge_adapter()
    return [*losses, *(step(ids).item() for _ in range(2))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("tied", "checkpointed"), [(True, False), (False, True)])
def test_switched_and_merged_adapters_match_peft_bit_for_bit(tied: bool, checkpointed: bool) -> None:
    plain, _, theirs = build_training(tied=tied, checkpointed=checkpointed)
    model, optimizer, step = build_training(tied=tied, checkpointed=checkpointed)
    with outofcore.compile(
        step, model, optimizer, budget="1800KiB", dynamic=False, policy="window", cache=False
    ) as compiled:
        assert train_with_switches(plain, theirs) == train_with_switches(model, compiled)
        session = compiled._session
        assert session.signature_count >= 2, "another adapter is another step"
        evicted_or_clean = 0
        for entry in session.steps.by_signature.values():
            graph, program = entry.step.graph, entry.step.planned.program
            evicted = {program.blocks[i.block].storage for i in program.instructions if isinstance(i, CopyOut)}
            assert not evicted & graph.frozen
            evicted_or_clean += len(evicted) + len(program.clean)
        assert evicted_or_clean, "the budget is too large: no tensor was evicted"
        for (name, expected), actual in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(expected, actual), name
