"""Step graphs with their costs as JSON files: format ``outofcore-graph/1``, see docs/graph-format.md.

So that graphs can come from anywhere, and be planned without PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import GraphError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.jsonfile import Node, read_json, write_json

FORMAT = "outofcore-graph/1"

Key = int | str  # what a file calls a storage


@dataclass(frozen=True)
class GraphFile:
    """What a graph file holds.

    Attributes:
        graph: the step, its storages numbered in the order of the file.
        costs: of its ops, and the homes.
        keys: what the file calls each storage, by number.
    """

    graph: StepGraph
    costs: Costs
    keys: tuple[Key, ...]

    @staticmethod
    def of(graph: StepGraph, costs: Costs) -> GraphFile:
        """A graph that did not come from a file: storages are called by their numbers."""
        return GraphFile(graph, costs, tuple(range(len(graph.storages))))


def read_graph(path: Path) -> GraphFile:
    """Read a graph file.

    A storage that no op creates exists before the step. If it is called an activation or an output
    it becomes an input here, since its contents are new in each step; and what is called an input
    but created by an op becomes an activation.

    Raises:
        InputError: the file cannot be read.
        GraphError: it is not a graph file, or contradicts itself; says where.
    """
    root = read_json(path, FORMAT)
    found = [(node.at("id"), _storage(index, node)) for index, node in enumerate(root.at("storages").items())]
    keys: dict[Key, int] = {}
    for node, storage in found:
        if node.key() in keys:
            node.refuse(f"is {node.value!r}, and so is that of storages[{keys[node.key()]}]: an id must be unique")
        keys[node.key()] = storage.id
    op_nodes = list(root.at("ops").items())
    ops = [_op(index, node, keys) for index, node in enumerate(op_nodes)]
    created = {storage for op in ops for storage in op.creates}
    storages = [_settled(node, storage, storage.id in created) for node, storage in found]
    outputs = root.find("outputs")
    homes = root.find("homes")
    graph = StepGraph(tuple(storages), tuple(ops), () if outputs is None else _storages(outputs, keys))
    costs = Costs(
        tuple(OpCost(_seconds(node.at("seconds")), _count(node, "workspace_bytes")) for node in op_nodes),
        () if homes is None else tuple(_home(node) for node in homes.items()),
    )
    try:
        graph.check()
        costs.check(graph)
    except GraphError as error:
        raise GraphError(f"{path}: {error} (storages are numbered in the order of the file)") from error
    return GraphFile(graph, costs, tuple(keys))


def _storage(index: int, node: Node) -> Storage:
    named = node.at("kind")
    try:
        kind = StorageKind(named.text())
    except ValueError:
        named.refuse(f"is {named.value!r}; it must be one of {', '.join(kind.value for kind in StorageKind)}")
    name, key = node.find("name"), node.at("id").key()
    text = name.text() if name is not None else key if isinstance(key, str) else ""
    return Storage(index, node.at("bytes").count(), kind, text)


def _settled(node: Node, storage: Storage, created: bool) -> Storage:
    if created and storage.kind is StorageKind.CONSTANT:
        node.refuse(f"is {node.value!r}, of a constant that an op creates: a constant must exist before the step")
    if created and storage.kind is StorageKind.INPUT:
        return replace(storage, kind=StorageKind.ACTIVATION)
    if not created and storage.kind in (StorageKind.ACTIVATION, StorageKind.OUTPUT):
        return replace(storage, kind=StorageKind.INPUT)
    return storage


def _op(index: int, node: Node, keys: Mapping[Key, int]) -> Op:
    lists: list[tuple[int, ...]] = []
    for field in ("reads", "mutates", "creates", "discards"):
        found = node.find(field)
        lists.append(() if found is None else _storages(found, keys))
    texts: list[str] = []
    for field, default in (("name", f"op {index}"), ("family", ""), ("module", ""), ("source", "")):
        found = node.find(field)
        texts.append(default if found is None else found.text())
    name, family, module, source = texts
    reads, mutates, creates, discards = lists
    rerunnable, random = node.find("rerunnable"), node.find("random")
    return Op(
        index,
        name,
        reads,
        mutates,
        creates,
        rerunnable=rerunnable is None or rerunnable.flag(),
        random=random is not None and random.flag(),
        family=family,
        module=module,
        source=source,
        discards=discards,
    )


def _storages(node: Node, keys: Mapping[Key, int]) -> tuple[int, ...]:
    """The numbers of the storages that an array names, each once."""
    found: dict[int, None] = {}
    for item in node.items():
        number = keys.get(item.key())
        if number is None:
            item.refuse(f"is {item.value!r}, and no storage has that id")
        found[number] = None
    return tuple(found)


def _count(node: Node, field: str) -> int:
    found = node.find(field)
    return 0 if found is None else found.count()


def _seconds(node: Node) -> float:
    found = node.number()
    if found < 0:
        node.refuse(f"must not be negative, and is {found:g}")
    return found


def _home(node: Node) -> Home:
    capacity, latency = node.find("bytes"), node.find("latency_s")
    contention, slowdown = node.find("contention"), node.find("compute_slowdown")
    return Home(
        node.at("name").text(),
        None if capacity is None or capacity.value is None else capacity.count(),
        _rate(node.at("bytes_per_s_out")),
        _rate(node.at("bytes_per_s_in")),
        0.0 if latency is None else _seconds(latency),
        0.0 if contention is None else _share(contention),
        0.0 if slowdown is None else _seconds(slowdown),
    )


def _share(node: Node) -> float:
    found = node.number()
    if not 0 <= found <= 1:
        node.refuse(f"must lie from 0 to 1, and is {found:g}")
    return found


def _rate(node: Node) -> float:
    found = node.number()
    if found <= 0:
        node.refuse(f"must be above zero, and is {found:g}")
    return found


def write_graph(path: Path, file: GraphFile) -> None:
    """Write a graph file; read again, it gives an equal graph and equal costs.

    Raises:
        InputError: the file cannot be written.
    """
    graph, costs, keys = file.graph, file.costs, file.keys
    write_json(
        path,
        {
            "format": FORMAT,
            "storages": [_storage_content(storage, keys[storage.id]) for storage in graph.storages],
            "ops": [_op_content(op, cost, keys) for op, cost in zip(graph.ops, costs.ops, strict=True)],
            "outputs": [keys[storage] for storage in graph.outputs],
            "homes": [_home_content(home) for home in costs.homes],
        },
    )


def _storage_content(storage: Storage, key: Key) -> dict[str, object]:
    content: dict[str, object] = {"id": key, "bytes": storage.bytes, "kind": storage.kind.value}
    if storage.name != (key if isinstance(key, str) else ""):
        content["name"] = storage.name
    return content


def _home_content(home: Home) -> dict[str, object]:
    content: dict[str, object] = {
        "name": home.name,
        "bytes": home.bytes,
        "bytes_per_s_out": home.bytes_per_s_out,
        "bytes_per_s_in": home.bytes_per_s_in,
        "latency_s": home.latency_s,
    }
    for field, value in (("contention", home.contention), ("compute_slowdown", home.compute_slowdown)):
        if value:
            content[field] = value
    return content


def _op_content(op: Op, cost: OpCost, keys: Sequence[Key]) -> dict[str, object]:
    content: dict[str, object] = {
        "name": op.name,
        "reads": [keys[storage] for storage in op.reads],
        "mutates": [keys[storage] for storage in op.mutates],
        "creates": [keys[storage] for storage in op.creates],
        "seconds": cost.seconds,
        "workspace_bytes": cost.workspace_bytes,
        "rerunnable": op.rerunnable,
    }
    if op.random:
        content["random"] = True
    if op.discards:
        content["discards"] = [keys[storage] for storage in op.discards]
    for field, text in (("family", op.family), ("module", op.module), ("source", op.source)):
        if text:
            content[field] = text
    return content
