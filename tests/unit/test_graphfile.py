"""A step written to a graph file and read again is the same step."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import costs_for, graphs

from outofcore.graph import StorageKind
from outofcore.graphfile import GraphFile, read_graph, write_graph


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(st.data())
def test_a_written_step_is_read_as_it_was(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    costs = data.draw(costs_for(graph))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json"
        write_graph(path, GraphFile.of(graph, costs))
        again = read_graph(path)
    assert again.costs == costs
    assert again.graph.outputs == graph.outputs
    # Families and the rest of the names come back as well; what a second run may have scratch memory for among them.
    assert again.graph.ops == graph.ops
    assert [s.bytes for s in again.graph.storages] == [s.bytes for s in graph.storages]
    for before, after in zip(graph.storages, again.graph.storages, strict=True):
        assert after.kind is before.kind or after.kind is StorageKind.INPUT
