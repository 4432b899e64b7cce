"""Tests of the graph of a captured step: kinds, names, source lines, and the reads and writes of ops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import capture_cases as cases
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from outofcore.capture import Captured, LeafKind, capture_step
from outofcore.graph import Op, Storage, StorageKind


def capture(case: cases.Case, *args: Any) -> Captured:
    return capture_step(case.step, case.models, case.optimizers, args or case.batch(), case.kwargs)


def ops_named(captured: Captured, name: str) -> list[Op]:
    return [op for op in captured.graph.ops if op.name == name]


def storages_of(captured: Captured, kind: StorageKind) -> dict[str, Storage]:
    return {s.name: s for s in captured.graph.storages if s.kind is kind}


def test_storages_have_kinds_names_and_bytes() -> None:
    captured = capture(cases.conv_net())
    parameters = storages_of(captured, StorageKind.PARAMETER)
    assert parameters["0.weight"].bytes == 8 * 3 * 9 * 4
    assert set(storages_of(captured, StorageKind.BUFFER)) == {
        f"{layer}.{name}" for layer in "15" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert set(storages_of(captured, StorageKind.INPUT)) == {"input 0", "input 1"}
    assert storages_of(captured, StorageKind.GRADIENT)["4.weight.grad"].bytes == parameters["4.weight"].bytes
    assert storages_of(captured, StorageKind.OPTIMIZER_STATE)["10.bias.momentum_buffer"].bytes == 16
    assert "4 convolution" in storages_of(captured, StorageKind.ACTIVATION)
    assert [s.id for s in storages_of(captured, StorageKind.OUTPUT).values()] == list(captured.graph.outputs)
    assert "model.0.weight" in {binding.key for binding in captured.states}
    assert "optimizer.0.state.model.0.weight.momentum_buffer" in {binding.key for binding in captured.states}


def test_several_models_have_their_own_prefix() -> None:
    captured = capture(cases.gan())
    keys = {binding.key for binding in captured.states}
    assert "model0.0.weight" in keys
    assert "model1.2.bias" in keys
    assert {op.module for op in captured.graph.ops} >= {"model0.0", "model1.1"}


def test_forward_and_backward_ops_have_module_and_line() -> None:
    captured = capture(cases.gpt())
    lines = Path(cases.__file__).read_text().splitlines()

    def text(op: Op) -> str:
        file, _, line = op.source.rpartition(":")
        assert file == cases.__file__
        return lines[int(line) - 1]

    (norm, *_), (norm_back, *_) = (
        [op for op in ops_named(captured, name) if op.module == "blocks.1.norm2"]
        for name in ("aten.native_layer_norm.default", "aten.native_layer_norm_backward.default")
    )
    assert "self.norm2(x)" in text(norm)
    assert text(norm_back) == text(norm)
    assert {op.module for op in ops_named(captured, "aten.mm.default")} >= {"head", "blocks.0.qkv", "blocks.1.down"}
    update = ops_named(captured, "optimizer.AdamW")[-1]
    assert "optimizer.step()" in text(update)


def test_recomputed_forward_belongs_to_its_module() -> None:
    captured = capture(cases.gpt(checkpointing="plain"))
    norms = [op for op in captured.graph.ops if op.name == "aten.native_layer_norm.default"]
    assert [op.module for op in norms].count("blocks.0.norm1") == 2
    saves = [op for op in captured.graph.ops if op.name.startswith("generator.")]
    assert saves
    assert all(op.random and not op.rerunnable and not op.touched for op in saves)


def test_fully_overwritten_storage_is_not_read() -> None:
    model = nn.Linear(4, 4, bias=False)

    def step(x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        buffer.copy_(x)
        buffer[0].copy_(x[1])
        buffer.add_(1)
        out = torch.empty(4, 4)
        torch.mul(x, 2, out=out)
        out.t().zero_()
        out.normal_()
        out[:, 1:].fill_(0)
        with torch.no_grad():
            model.weight.copy_(out)
        return buffer.sum()

    captured = capture_step(step, [model], [], (torch.ones(4, 4), torch.zeros(4, 4)), {})
    copies = ops_named(captured, "aten.copy_.default")
    buffer = copies[0].mutates[0]
    assert [buffer in op.reads for op in copies if buffer in op.mutates] == [False, True]
    assert buffer in ops_named(captured, "aten.add_.Tensor")[0].reads
    (out,) = ops_named(captured, "aten.mul.out")
    assert out.mutates[0] not in out.reads
    for name in ("aten.zero_.default", "aten.normal_.default"):
        (op,) = ops_named(captured, name)
        assert op.mutates == out.mutates
        assert op.reads == ()
    (fill,) = ops_named(captured, "aten.fill_.Scalar")
    assert fill.reads == fill.mutates == out.mutates
    assert copies[-1].reads == out.mutates
    assert ops_named(captured, "aten.normal_.default")[0].random
    assert not fill.random


def test_batch_norm_writes_its_running_statistics_only_in_training() -> None:
    case = cases.conv_net()
    (first, _) = ops_named(capture(case), "aten.native_batch_norm.default")
    assert len(first.mutates) == 2
    case.models[0].eval()
    evaluated = capture(case)
    assert all(op.mutates == () for op in ops_named(evaluated, "aten.native_batch_norm.default"))
    assert not any(s.name.endswith("num_batches_tracked") for s in evaluated.graph.storages)


def test_foreach_operator_becomes_one_op_per_tensor() -> None:
    captured = capture(cases.gpt(foreach=True))
    scaled = ops_named(captured, "aten._foreach_mul_.Tensor")
    assert len(scaled) == len(list(cases.gpt().models[0].parameters()))
    assert all(len(op.mutates) == 1 for op in scaled)
    assert len({op.mutates for op in scaled}) == len(scaled)


def test_tied_weights_are_one_parameter() -> None:
    captured = capture(cases.gpt())
    assert [b.key for b in captured.states if "words" in b.key or "head" in b.key][:1] == ["model.words.weight"]
    assert not any(b.key == "model.head.weight" for b in captured.states)


def test_equal_ops_share_a_family() -> None:
    captured = capture(cases.gpt())
    first, second = (
        next(op for op in ops_named(captured, "aten.native_layer_norm.default") if op.module == f"blocks.{k}.norm1")
        for k in (0, 1)
    )
    assert first.family == second.family
    assert "float32[3,8,16]{128,16,1}" in first.family
    up = next(op for op in ops_named(captured, "aten.addmm.default") if op.module == "blocks.0.up")
    qkv = next(op for op in ops_named(captured, "aten.addmm.default") if op.module == "blocks.0.qkv")
    assert up.family != qkv.family


def test_views_and_unused_tensors_are_not_in_the_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def step(x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        y = model[0](x.t().contiguous().view(4, 4).transpose(0, 1).detach())
        return y[1:].unsqueeze(0)

    captured = capture_step(step, [model], [], (torch.ones(4, 4), torch.ones(3)), {})
    assert [op.name for op in captured.graph.ops] == ["aten.clone.default", "aten.addmm.default"]
    assert [binding.leaf for binding in captured.inputs] == [0]
    assert [binding.key for binding in captured.states] == ["model.0.weight", "model.0.bias"]
    (leaf,) = captured.outputs
    value = captured.values[leaf.index]
    assert (value.shape, value.offset) == ((1, 3, 4), 4)


def test_outputs_have_their_leaf_kinds() -> None:
    model = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> Any:
        return x, model.weight, model.weight[1:], x[0], "word", 2 * x, {"none": None}

    captured = capture_step(step, [model], [], (torch.ones(4, 4),), {})
    kinds = [leaf.kind for leaf in captured.outputs]
    assert kinds == [
        *(LeafKind.INPUT, LeafKind.STATE, LeafKind.VALUE, LeafKind.VALUE, LeafKind.CONSTANT, LeafKind.VALUE),
        LeafKind.CONSTANT,
    ]
    assert captured.states[captured.outputs[1].index].tensor is model.weight
    assert len(ops_named(captured, "aten.clone.default")) == 2
    assert len(captured.graph.outputs) == 3


def test_graph_lists_gradients_left_and_cleared() -> None:
    case = cases.gradients_left()
    captured = capture(case)
    assert [captured.states[storages.parameter].key for storages in captured.gradients_left] == [
        f"model.{name}" for name, _ in case.models[0].named_parameters()
    ]
    assert captured.gradients_cleared == ()
    storages = {captured.values[entry.value].storage for entry in captured.gradients_left}
    assert storages <= set(captured.graph.outputs)
    assert all(captured.graph.storages[s].kind is StorageKind.GRADIENT for s in storages)

    case = cases.mlp()
    captured = capture(case)
    assert captured.gradients_left == ()
    assert {captured.states[place].key for place in captured.gradients_cleared} == {
        f"model.{name}" for name, _ in case.models[0].named_parameters()
    }


def test_accumulated_gradients_are_persistent() -> None:
    case = cases.accumulation_across()
    for parameter in case.models[0].parameters():
        parameter.grad = torch.zeros_like(parameter)
    captured = capture(case)
    gradients = [binding for binding in captured.states if binding.kind is StorageKind.GRADIENT]
    assert [binding.key for binding in gradients] == [f"model.{n}.grad" for n, _ in case.models[0].named_parameters()]
    assert all(captured.values[binding.value].storage in captured.graph.persistent for binding in gradients)
    assert captured.gradients_left == ()
    assert captured.gradients_cleared == ()


def test_gradient_shared_by_two_parameters_is_left_as_two_copies() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))

    def step(x: torch.Tensor) -> None:
        for layer in model:
            layer.weight.grad = x

    captured = capture_step(step, [model], [], (torch.ones(2, 2),), {})
    first, second = (captured.values[gradient.value].storage for gradient in captured.gradients_left)
    assert first != second
    assert len(ops_named(captured, "aten.clone.default")) == 2


def test_small_updates_are_grouped_and_large_updates_stay_alone() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)], nn.Linear(8, 40_000), nn.Linear(40_000, 8))
    for _ in range(6):
        model.append(nn.Linear(8, 7_000, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        wide = sum(layer(model[:7](x)).sum() for layer in model[7:])
        wide.backward()
        optimizer.step()

    captured = capture_step(step, [model], [optimizer], (torch.ones(2, 8),), {})
    updates = ops_named(captured, "optimizer.SGD")
    sizes = [
        [captured.graph.storages[s].bytes for s in op.reads if captured.graph.storages[s].kind is StorageKind.PARAMETER]
        for op in updates
    ]
    # Two weights of 1.28 MB; ten small ones, biases of 160 kB and 32 B and three of 224 kB; three more of 224 kB.
    assert [len(s) for s in sizes] == [1, 1, 15, 3]
    assert all(sum(s) <= 1 << 20 for s in sizes if len(s) > 1)
    assert not any(op.rerunnable or op.random for op in updates)


def test_capture_needs_no_memory() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    rows = 1 << 40

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x.sin() + torch.rand_like(x)).mean()
        loss.backward()
        optimizer.step()
        return loss

    captured = capture_step(step, [model], [optimizer], (torch.ones(1, 1).expand(rows, 1),), {})
    assert max(s.bytes for s in captured.graph.storages) == 4 * rows
    assert captured.graph.storages[captured.values[captured.inputs[0].value].storage].bytes == 4


def test_view_argument_gets_a_storage_of_its_own_size() -> None:
    base = torch.zeros(100, 10)
    captured = capture_step(lambda x: x + 1, [], [], (base[20:23, ::2],), {})
    (binding,) = captured.inputs
    value = captured.values[binding.value]
    assert (value.shape, value.stride, value.offset) == ((3, 5), (10, 2), 0)
    assert captured.graph.storages[value.storage].bytes == (2 * 10 + 4 * 2 + 1) * 4


def test_arguments_are_named_by_their_position() -> None:
    def step(pair: Any, *, more: dict[str, Any]) -> Any:
        return pair[1] + more["x"]

    captured = capture_step(step, [], [], ((1, torch.ones(2)),), {"more": {"x": torch.ones(2)}})
    assert {s.name for s in captured.graph.storages if s.kind is StorageKind.INPUT} == {"input 0[1]", "input more['x']"}


def test_parameter_hooks_receive_the_users_parameters() -> None:
    model = nn.Linear(3, 3)
    is_users_bias: list[bool] = []

    def double(p: torch.Tensor) -> None:
        p.grad.mul_(2)

    model.weight.register_post_accumulate_grad_hook(double)
    model.bias.register_post_accumulate_grad_hook(lambda p: is_users_bias.append(p is model.bias))

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    captured = capture_step(step, [model], [], (torch.ones(2, 3),), {})
    assert is_users_bias == [True]
    (doubled,) = ops_named(captured, "aten.mul_.Tensor")
    assert captured.graph.storages[doubled.mutates[0]].name == "weight.grad"


def test_attention_is_random_only_with_dropout() -> None:
    def step(p: float, q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, dropout_p=p) + torch.nn.functional.dropout(q, 0.5)

    q = torch.ones(1, 2, 4, 8)
    without = capture_step(step, [], [], (0.0, q), {})
    assert [op.name for op in without.graph.ops if op.random] == ["aten.bernoulli_.float"]
    assert len([op for op in capture_step(step, [], [], (0.5, q), {}).graph.ops if op.random]) == 2


def test_checkpointing_outside_of_modules_is_captured() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: torch.Tensor) -> None:
        checkpoint(lambda y: F.dropout(y * weight, 0.5), x, use_reentrant=False).sum().backward()
        optimizer.step()

    captured = capture_step(step, [], [optimizer], (torch.ones(3),), {})
    assert [b.key for b in captured.states] == ["optimizer0.group0.0"]
    assert len(ops_named(captured, "aten.bernoulli_.float")) == 2


@pytest.mark.parametrize("name", ["gpt", "conv_net", "gan", "rebinding"])
def test_two_captures_are_equal(name: str) -> None:
    case = getattr(cases, name)()
    batch = case.batch()
    assert capture(case, *batch).graph == capture(case, *batch).graph


def test_unused_ops_are_left_out_unless_they_draw_random_numbers() -> None:
    model = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        idle = x.exp()
        _ = idle * 2
        _ = torch.rand(3)
        return model(x).sum()

    captured = capture_step(step, [model], [], (torch.ones(2, 4),), {})
    assert [op.name for op in captured.graph.ops if "exp" in op.name or "mul" in op.name] == []
    assert [op.name for op in captured.graph.ops if op.random] == ["aten.rand.default"]
