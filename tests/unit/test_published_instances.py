"""Tests of the converters of published instances, each on a tiny instance."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from instances import checkmate, dtr, execution_traces, packings
from instances.sources import Clone

from outofcore.costs import Costs
from outofcore.graph import StorageKind
from outofcore.planning import plan_step
from outofcore.validator import validate


@dataclass(frozen=True)
class _Stored(Clone):
    path: Path = Path()
    files: dict[str, bytes] = field(default_factory=dict)

    def read(self, name: str, commit: str = "HEAD") -> bytes:
        return next(data for end, data in self.files.items() if name.endswith(end))


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> type[SimpleNamespace]:
    node_class = type("Node", (SimpleNamespace,), {"__module__": "monet.solver_info"})
    for name in ("monet", node_class.__module__):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[node_class.__module__], "Node", node_class, raising=False)
    return node_class


def test_load_pickle_reads_foreign_classes_as_inert(node: type[SimpleNamespace]) -> None:
    read = checkmate.load_pickle(pickle.dumps({"node": node(mem=4096)}))["node"]
    assert isinstance(read, checkmate.Inert)
    assert read.mem == 4096


@pytest.mark.parametrize("function", [os.system, eval, getattr(sys, "exit")])  # noqa: B009
def test_load_pickle_refuses_callables(function: Any) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return function, ("exit 1",)

    with pytest.raises(pickle.UnpicklingError, match="which is not allowed"):
        checkmate.load_pickle(pickle.dumps(Malicious()))


def test_checkmate_instance_has_rounded_costs_and_room(node: type[SimpleNamespace]) -> None:
    nodes = {k: node(mem=1024 * k + 100, fixed_mem=10_000, workspace_compute=[0.126], op=f"op{k}") for k in range(3)}
    problem = node(nodes=nodes, edge_list=[(0, 1, 0), (0, 2, 0), (1, 2, 0), (1, 2, 1)])
    data = pickle.dumps([problem, node(runtime_expected=52)])
    instance = checkmate.read_instance(_Stored(files={"vgg16_176_normal_8.00.pkl": data}), "VGG-16 8 GB")
    graph = instance.file.graph
    assert [op.reads for op in graph.ops] == [(), (0,), (0, 1)]
    assert [storage.bytes for storage in graph.storages] == [0, 1024, 2048]
    assert instance.file.costs.ops[0].seconds == 0.00013
    assert instance.budget == (8 << 30) - 10 * 1024
    assert instance.published == {"Checkmate": 0.00052}


def _node(number: int, parent: int, name: str, schema: str, inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    """Return a node of a trace; tensors are pairs of a storage and a number of floats."""

    def tensors(values: list[Any]) -> dict[str, Any]:
        def tensor(value: tuple[int, int]) -> list[Any]:
            return [1000 + value[0], value[0], 0, value[1], 4, "cuda:0"]

        lists = [isinstance(value, list) for value in values]
        return {
            "values": [[tensor(v) for v in x] if many else tensor(x) for x, many in zip(values, lists, strict=True)],
            "types": ["GenericList[Tensor(float)]" if many else "Tensor(float)" for many in lists],
            "shapes": [[[v[1]] for v in x] if many else [x[1], 1] for x, many in zip(values, lists, strict=True)],
        }

    attributes = [{"name": "op_schema", "value": schema}]
    sides = {"inputs": tensors(inputs), "outputs": tensors(outputs)}
    return {"id": number, "ctrl_deps": parent, "name": name, "attrs": attributes, **sides}


def test_trace_becomes_graph_of_lowest_calls_and_lifetimes() -> None:
    n = 1 << 16
    empty, view = "aten::empty(int[] size) -> Tensor", "aten::view(Tensor(a) self) -> Tensor(a)"
    unary = "(Tensor self) -> Tensor"
    nodes = [
        _node(1, 1, "thread", "", [], []),
        _node(2, 1, "aten::view", view, [(1, n)], [(1, n)]),
        _node(3, 1, "aten::linear", "aten::linear(Tensor input, Tensor weight) -> Tensor", [(1, n), (2, n)], [(3, n)]),
        _node(4, 3, "aten::mm", "aten::mm(Tensor self, Tensor mat2) -> Tensor", [(1, n), (2, n)], [(3, n)]),
        _node(5, 4, "aten::empty", empty, [], [(9, n)]),  # a workspace
        _node(6, 1, "aten::relu_", "aten::relu_(Tensor(a!) self) -> Tensor(a!)", [(3, n)], [(3, n)]),
        _node(7, 1, "aten::tanh", f"aten::tanh{unary}", [(3, n)], [(4, n)]),
        _node(8, 1, "aten::neg", f"aten::neg{unary}", [(4, n)], [(5, n)]),
        _node(9, 1, "aten::tanh", f"aten::tanh{unary}", [(5, n)], [(4, n)]),  # storage 4 was free again
        _node(10, 1, "Optimizer.step#SGD.step", "", [], []),
        _node(11, 10, "aten::_foreach_add_", "f(Tensor(a!)[] self, Tensor[] other) -> ()", [[(2, n)], [(4, n)]], []),
    ]
    file = execution_traces.convert_trace({"nodes": nodes})
    names = [op.name for op in file.graph.ops]
    assert names == ["aten.mm", "aten.relu_", "aten.tanh", "aten.neg", "aten.tanh", "update"]
    data, weight, hidden, first, negated, second = range(6)
    assert file.graph.ops[0].creates == (hidden,)
    assert file.costs.ops[0].workspace_bytes == 4 * n
    assert (file.graph.ops[1].mutates, file.graph.ops[1].rerunnable) == ((hidden,), True)
    assert (file.graph.ops[2].creates, file.graph.ops[3].creates, file.graph.ops[4].creates) == (
        (first,),
        (negated,),
        (second,),
    )
    assert (set(file.graph.ops[5].reads), file.graph.ops[5].mutates) == ({weight, second}, (weight,))
    assert file.graph.storages[weight].kind is StorageKind.PARAMETER
    assert file.graph.storages[data].kind is StorageKind.BUFFER
    budget = 6 * 4 * n
    for costs in (file.costs, Costs(file.costs.ops)):
        validate(file.graph, plan_step(file.graph, costs, budget).program, budget, costs)


def test_dtr_log_copies_on_write_and_keeps_referenced_storages() -> None:
    def memory_entries(*names: str, alias: int = -1) -> list[dict[str, Any]]:
        return [
            {"INSTRUCTION": kind, "NAME": name, kind: value}
            for name in names
            for kind, value in (("MEMORY", "8"), ("ALIAS", str(alias)))
        ]

    call = {"INSTRUCTION": "CALL", "TIME": "1000"}
    log = [
        {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"},
        {"INSTRUCTION": "CONSTANT", "NAME": "w"},
        {"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": "16"},
        {**call, "NAME": "mul", "ARGS": ["w"], "RESULT": ["x"]},
        *memory_entries("x"),
        {**call, "NAME": "view", "ARGS": ["x"], "RESULT": ["v"]},
        *memory_entries("v", alias=0),
        {"INSTRUCTION": "MUTATE", "NAME": "relu_", "ARGS": ["x"], "MUTATE": [0], "TIME": "2000"},
        {**call, "NAME": "sum", "ARGS": ["v", "x"], "RESULT": ["y"]},
        *memory_entries("y"),
        {"INSTRUCTION": "RELEASE", "NAME": "x"},
        {"INSTRUCTION": "RELEASE", "NAME": "v"},
    ]
    file = dtr.convert_log(log)
    assert [(op.name, op.reads, op.creates) for op in file.graph.ops] == [
        ("mul", (0,), (1,)),
        ("relu_", (1,), (2,)),
        ("sum", (1, 2), (3,)),
    ]
    assert file.graph.outputs == (3,)
    assert file.costs.compute_seconds == pytest.approx(4e-6)


def test_packing_reads_published_table() -> None:
    clone = _Stored(files={"resnet50.csv": b"id,lower,upper,size\n0,0,9,64\n1,2,5,32\n2,5,9,16\n"})
    rectangles = packings.read_rectangles(clone, "ResNet-50")
    assert [(r.lower, r.upper, r.size) for r in rectangles] == [(0, 9, 64), (2, 5, 32), (5, 9, 16)]
