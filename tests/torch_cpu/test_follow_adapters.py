"""Tests of adapters and quantised bases within budgets: PEFT, transformers, bitsandbytes, torchao."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from following import AMPLE_BYTES, train_loop
from loops import MakeOptimizer
from torch import Tensor, nn

import outofcore
from outofcore._torch_internals import storage_address
from outofcore.follow.native import load_paging

pytestmark = pytest.mark.usefixtures("one_thread")

SHARE = 1 / 3
WORDS, LENGTH, BATCH = 192, 16, 4


@pytest.fixture(autouse=True)
def small_storages() -> Iterator[None]:
    """Move all storages of at least a page, so that models can be small."""
    load_paging().follow_smallest(4096)
    yield
    load_paging().follow_smallest(64 << 10)


@pytest.fixture(autouse=True)
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def llama(**more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    settings = {
        "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True, "attn_implementation": "sdpa",
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **more}))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=draw) for _ in range(count)]
    return [(ids[:, :-1], ids[:, 1:]) for ids in rows]


def add_adapters(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    adapted_model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=targets, lora_dropout=0.1), "one")
    adapted_model.add_adapter("two", peft.LoraConfig(r=16, target_modules=targets, init_lora_weights="gaussian"))
    adapted_model.set_adapter("one")
    return adapted_model


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    ids, targets = batch
    loss = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def plain(model: Any, make: MakeOptimizer) -> list[Any]:
    model.train()
    optimizer = make(model)
    return [*(train_step(model, optimizer, batch) for batch in batches(4)), optimizer]


def assert_exact(loop: Callable[..., list[Any]], model_of: Callable[[], nn.Module]) -> None:
    """Check for the bits of plain PyTorch within a third of the peak, also with eviction after every op."""
    theirs, _ = train_loop(loop, model_of)
    roomy, stats = train_loop(loop, model_of, budget=AMPLE_BYTES, policy=None)
    assert not roomy.differs_from(theirs)
    assert stats is not None
    budget = int(SHARE * stats.peak_bytes)
    for stress in (False, True):
        ours, stats = train_loop(loop, model_of, budget=budget, stress=stress)
        assert not ours.differs_from(theirs)
        assert stats is not None
        assert stats.peak_bytes <= budget
        assert stats.evictions > 0


# ---- PEFT -----------------------------------------------------------------------------------------------------------


def test_adapters_are_switched_merged_and_unmerged() -> None:
    def loop(model: Any, make: MakeOptimizer) -> list[Any]:
        data = batches(7)
        model.train()
        first_optimizer = make(model)
        results: list[Any] = [train_step(model, first_optimizer, batch) for batch in data[:3]]
        model.set_adapter("two")
        second_optimizer = make(model)
        results += [train_step(model, second_optimizer, batch) for batch in data[3:5]]
        model.eval()
        with torch.no_grad():
            results.append(model(input_ids=data[0][0]).logits.sum().item())
            model.merge_adapter()
            results.append(model(input_ids=data[0][0]).logits.sum().item())
            model.unmerge_adapter()
            with model.disable_adapter():
                results.append(model(input_ids=data[0][0]).logits.sum().item())
        model.train()
        model.set_adapter("one")
        results += [train_step(model, first_optimizer, batch) for batch in data[5:]]
        model.delete_adapter("two")
        results.append(train_step(model, first_optimizer, data[0]))
        merged = copy.deepcopy(model).merge_and_unload()
        return [*results, first_optimizer, *merged.state_dict().values()]

    assert_exact(loop, lambda: add_adapters(llama()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_adapters_work_with_gradient_checkpointing(reentrant: bool) -> None:
    def model_of() -> nn.Module:
        model: Any = add_adapters(llama())
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return model

    assert_exact(plain, model_of)


def test_tied_embedding_works_with_gradient_checkpointing() -> None:
    def model_of() -> nn.Module:
        model: Any = llama(attention_dropout=0.1)
        model.gradient_checkpointing_enable()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return model

    assert_exact(plain, model_of)


# ---- quantised bases ------------------------------------------------------------------------------------------------


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers" in name:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, make(module))
    return model


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_bitsandbytes_linears_are_exact(kind: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")

    def quantise(linear: nn.Linear) -> nn.Module:
        width, out = linear.in_features, linear.out_features
        if kind == "int8":
            layer = bnb.nn.Linear8bitLt(width, out, bias=False, has_fp16_weights=False)
        else:
            layer = bnb.nn.Linear4bit(
                width, out, bias=False, quant_type=kind, compute_dtype=torch.float32, compress_statistics=True
            )
        layer.load_state_dict({"weight": linear.weight.detach()})
        return layer.to("cpu")  # quantises it

    assert_exact(plain, lambda: add_adapters(replace_linears(llama(), quantise)))


def make_quantised_model() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    model = llama()
    quantization.quantize_(model.get_submodule("model.layers"), quantization.Int8WeightOnlyConfig())
    return add_adapters(model)


def test_torchao_tensors_are_exact() -> None:
    assert_exact(plain, make_quantised_model)


def test_inner_tensors_of_torchao_move_with_the_model(tmp_path: Path) -> None:
    model = make_quantised_model()
    weight: Any = model.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight")
    with outofcore.budget("1MiB", model) as run:
        before = run.stats.adoptions
        assert load_paging().follow_where(storage_address(weight.qdata.untyped_storage())) == 2  # evicted
        train_step(model, torch.optim.SGD(model.parameters(), 0.1), batches(1)[0])
        run.report(tmp_path / "report.html")
        assert run.stats.adoptions - before < 4  # a batch, and tensors created at the first call
    assert "layers.0.self_attn.q_proj.base_layer.weight" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_8_bit_optimizer_is_exact() -> None:
    bnb = pytest.importorskip("bitsandbytes")

    def loop(model: Any, make: MakeOptimizer) -> list[Any]:
        return plain(model, lambda m: bnb.optim.AdamW8bit(m.parameters(), 1e-3, min_8bit_size=1024))

    assert_exact(loop, llama)
