"""Tests that damaged, wrong or absurd files raise an error with the file's name and no traceback."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from outofcore.cli.app import app
from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import GraphError, InputError, ValidationError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.graphfile import GraphFile, read_graph, write_graph
from outofcore.planfile import PlanFile, read_plan, write_plan
from outofcore.planning import plan_step
from outofcore.validator import validate

MIB = 1 << 20
BUDGET = 4 * MIB
Change = Callable[[Any], Any]


def valid_file() -> GraphFile:
    storages = [Storage(i, MIB, StorageKind.PARAMETER, f"weight {i}") for i in range(2)]
    storages += [Storage(2 + i, MIB, StorageKind.ACTIVATION, f"activation {i}") for i in range(3)]
    ops = (
        Op(0, "forward", (0,), (), (2,)),
        Op(1, "forward", (1, 2), (), (3,)),
        Op(2, "backward", (3,), (1,), (4,)),
        Op(3, "backward", (2, 4), (0,), ()),
    )
    costs = Costs(tuple(OpCost(0.01) for _ in ops), (Home("disk", None, 1e9, 1e9, 0.0, 0.5, 0.1),))
    return GraphFile.of(StepGraph(tuple(storages), ops), costs)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    folder, file = tmp_path_factory.mktemp("valid"), valid_file()
    planned = plan_step(file.graph, file.costs, BUDGET, "auto")
    write_graph(folder / "graph.json", file)
    saved = PlanFile(BUDGET, planned.plan, planned.program, planned.timeline.step_seconds)
    write_plan(folder / "plan.json", saved, file.keys)
    assert read_plan(folder / "plan.json", file.keys) == saved
    return (folder / "graph.json").read_bytes(), (folder / "plan.json").read_bytes()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield value, key
        yield from places(item)


NUMBERS = [-1, 0, 1, 7, 0.5, -0.5, 1e308, 1e300, 1e19, 1e6, 1e-300, 5e-324, float("nan"), float("inf"), 2**50, 2**62]
ODD = st.sampled_from([*NUMBERS, 2**63, 2**70, -(2**70), 10**400, None, True, "", "x", "\x00", "\ud800", [], {}, [[]]])


def read_and_check(graph: Path, plan: Path) -> None:
    """Read and check both files as the commands do, without planning."""
    file = read_graph(graph)
    saved = read_plan(plan, file.keys)
    validate(file.graph, saved.program, saved.budget, file.costs)


@settings(deadline=None, max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_file_with_odd_values_is_refused_or_read(
    texts: tuple[bytes, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("odd")
    files = [json.loads(text) for text in texts]
    changed = data.draw(st.integers(0, 1))
    for _ in range(data.draw(st.integers(1, 2))):
        all_places = list(places(files[changed]))
        container, key = all_places[data.draw(st.integers(0, len(all_places) - 1))]
        edit = data.draw(st.sampled_from(["replace", "delete", "double"]))
        if edit == "replace":
            container[key] = copy.deepcopy(data.draw(ODD))
        elif edit == "delete":
            del container[key]
        elif isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
    paths = [folder / "graph.json", folder / "plan.json"]
    for path, file in zip(paths, files, strict=True):
        path.write_text(json.dumps(file), encoding="utf-8")
    try:
        read_and_check(*paths)
    except ValidationError:
        pass
    except InputError as error:
        assert str(paths[changed]) in str(error)


@settings(deadline=None, max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_file_with_damaged_bytes_is_refused_or_read(
    texts: tuple[bytes, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    contents = list(texts)
    changed = data.draw(st.integers(0, 1))
    raw = contents[changed]
    if data.draw(st.booleans()):
        raw = gzip.compress(raw, mtime=0)
    begin = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(begin, min(begin + 40, len(raw))) | st.just(len(raw)))
    contents[changed] = raw[:begin] + data.draw(st.binary(max_size=20)) + raw[end:]
    paths = [folder / "graph.json", folder / "plan.json"]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    try:
        read_and_check(*paths)
    except ValidationError:
        pass
    except InputError as error:
        assert str(paths[changed]) in str(error)


@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_readable_graph_is_planned_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    write_graph(path, valid_file())
    content = json.loads(path.read_text(encoding="utf-8"))
    numbers = {
        "bytes": [0, 1, MIB, 2**40, 2**50],
        "seconds": [0, 5e-324, 1e-12, 1, 1e6],
        "workspace_bytes": [0, 1, 2**50],
        "latency_s": [0, 5e-324, 1e6],
        "bytes_per_s_out": [1e3, 1e9, 1e15],
        "bytes_per_s_in": [1e3, 1e9, 1e15],
        "contention": [0, 5e-324, 1],
        "compute_slowdown": [0, 1e3],
        "contention_out": [0.05, 0.95],
    }
    for container, key in [*places(content)]:
        if key in numbers and data.draw(st.booleans()):
            container[key] = data.draw(st.sampled_from(numbers[key]))
    path.write_text(json.dumps(content), encoding="utf-8")
    budget = data.draw(st.sampled_from(["1", "4MiB", "1TiB", str(2**52), str(2**70)]))
    run = CliRunner().invoke(app, ["plan", "--graph", str(path), "--budget", budget, "--json"])

    assert run.exit_code != 2 or run.stderr.startswith("error: ")
    if not (run.exception is None or isinstance(run.exception, SystemExit)):
        raise run.exception


def write_edited(path: Path, change: Change) -> None:
    write_graph(path, valid_file())
    root = json.loads(path.read_text(encoding="utf-8"))
    change(root)
    path.write_text(json.dumps(root), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: root["ops"][3].update(seconds=1e308), r"\$\.ops\[3\]\.seconds: expected float <= 1000000"),
        (
            lambda root: root["ops"][3].update(seconds=float("nan")),
            r"\$\.ops\[3\]\.seconds: NaN is not a finite number",
        ),
        (lambda root: root["ops"][3].update(seconds="fast"), r"\$\.ops\[3\]\.seconds: expected float, got str"),
        (lambda root: root["ops"][3].pop("seconds"), r"\$\.ops\[3\]: .*seconds"),
        (
            lambda root: root["ops"][3].update(reads=[77]),
            r"\$\.ops\[3\]\.reads\[0\]: is 77, and no storage has that id",
        ),
        (lambda root: root["ops"].reverse(), "uses storage . before any op creates it"),
        (lambda root: root["storages"][1].update(bytes=2**70), r"\$\.storages\[1\]\.bytes: expected int <= "),
        (lambda root: root["storages"][1].update(id=0), r"\$\.storages\[1\]\.id: is 0, and so is that of"),
        (lambda root: root["storages"][1].update(kind="weight"), r"\$\.storages\[1\]\.kind: .*'weight'"),
        (lambda root: root["homes"][0].update(bytes_per_s_in=0), r"\$\.homes\[0\]\.bytes_per_s_in: expected float >= "),
        (lambda root: root.update(format="outofcore-graph/9"), "another type of file"),
        (
            lambda root: root.update(ops=[{**root["ops"][0], "creates": [], "seconds": 1e6}] * 1001),
            r"\$\.ops: .* seconds in total",
        ),
    ],
)
def test_graph_error_names_the_field(tmp_path: Path, change: Change, message: str) -> None:
    path = tmp_path / "graph.json"
    write_edited(path, change)
    with pytest.raises(GraphError, match=message) as raised:
        read_graph(path)
    assert str(raised.value).startswith(f"{path}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"\x00\xff\xfe garbage", "is not JSON"),
        (b'{"format":"outofcore-graph/1","storages":[', "is not JSON"),
        (b'{"format":"outofcore-graph/1","storages":[{"id":0,"id":1}]}', r"\$\.storages\[0\]: has the key 'id' twice"),
        (b'{"format":"outofcore-graph/1","storages":[1e999]}', r"\$\.storages\[0\]: 1e999 is not a finite number"),
        (b"[" * 100_000 + b"]" * 100_000, "is not JSON"),
        (b'{"format":"outofcore-graph/1","storages":[],"ops":[' + b"1" * 10_000 + b"]}", "is not JSON"),
        (b'{"format":"outofcore-graph/1","storages":[],"ops":[],"name":"\\ud800"}', "is not JSON"),
        (b"[]", "must be an object"),
    ],
    ids=["empty", "garbage", "truncated", "twice", "infinite", "deep", "digits", "surrogate", "array"],
)
def test_invalid_json_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "graph.json"
    path.write_bytes(content)
    with pytest.raises(GraphError, match=message):
        read_graph(path)


@pytest.mark.parametrize("cut", [5, 20, -8])
def test_damaged_gzip_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "graph.json.gz"
    write_graph(path, valid_file())
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InputError, match="cannot read"):
        read_graph(path)


def test_whole_numbers_may_be_written_as_floats(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    write_edited(path, lambda root: root["storages"][0].update(bytes=1.048576e6))
    assert read_graph(path).graph.storages[0].bytes == MIB
