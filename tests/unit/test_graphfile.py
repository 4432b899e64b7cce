"""Tests that graph files preserve the step and its homes."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import costs_for, graphs

from outofcore.costs import Costs, Home
from outofcore.errors import GraphError
from outofcore.graph import Op, StepGraph, StorageKind
from outofcore.graphfile import GraphFile, read_graph, write_graph


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=examples(50))
@given(st.data())
def test_written_step_is_read_back(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    costs = data.draw(costs_for(graph))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json"
        write_graph(path, GraphFile.of(graph, costs))
        loaded = read_graph(path)
    assert loaded.costs == costs
    assert loaded.graph.outputs == graph.outputs
    # Ops are equal in all fields, families and discards among them.
    assert loaded.graph.ops == graph.ops
    assert [s.bytes for s in loaded.graph.storages] == [s.bytes for s in graph.storages]
    for before, after in zip(graph.storages, loaded.graph.storages, strict=True):
        assert after.kind is before.kind or after.kind is StorageKind.INPUT


def test_content_ignores_source_lines_and_class_names() -> None:
    op = Op(0, "aten.convolution.default", (), (), (), module="layers.1", source="model.py:10", module_class="Conv2d")
    renamed = replace(op, source="model.py:12", module_class="MyConvolution")
    assert StepGraph((), (op,)).content() == StepGraph((), (renamed,)).content()
    assert StepGraph((), (op,)).content() != StepGraph((), (replace(op, module="layers.2"),)).content()


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (
            Op(0, "aten.relu.default", (), (), (), module="a.1", source="net.py:3", module_class="ReLU"),
            "relu in a.1 (ReLU) at net.py:3",
        ),
        (Op(0, "aten.relu.default", (), (), (), module="a.1"), "relu in a.1"),
        (Op(0, "optimizer.SGD", (), (), (), source="net.py:3"), "optimizer.SGD at net.py:3"),
    ],
)
def test_op_text_names_module_class_and_line(op: Op, text: str) -> None:
    assert op.text == text


def write_home(path: Path, home: Home) -> dict[str, object]:
    write_graph(path, GraphFile.of(StepGraph((), ()), Costs((), (home,))))
    return json.loads(path.read_text(encoding="utf-8"))["homes"][0]


@settings(max_examples=examples(30), deadline=None)
@given(contention=st.floats(0, 1), slowdown=st.floats(0, 1e3), part=st.floats(0.05, 0.95))
def test_contention_fields_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, contention: float, slowdown: float, part: float
) -> None:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    home = Home("disk", 5, 1e9, 2e9, 1e-4, contention, slowdown, part)
    write_home(path, home)
    assert read_graph(path).costs.homes == (home,)


@pytest.mark.parametrize(
    ("field", "value"), [("contention", 1.5), ("contention", -1), ("compute_slowdown", -0.5), ("contention_out", 1)]
)
def test_impossible_contention_is_refused(tmp_path: Path, field: str, value: float) -> None:
    path = tmp_path / "graph.json"
    content = write_home(path, Home("host", None, 1e9, 2e9))
    root = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**root, "homes": [{**content, field: value}]}), encoding="utf-8")
    with pytest.raises(GraphError, match=rf"homes\[0\]\.{field}"):
        read_graph(path)
