"""Read and write step graphs with their costs as JSON, see docs/graph-format.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, convert

from outofcore.costs import MIN_CONTENTION_SHARE, Costs, Home, OpCost
from outofcore.errors import GraphError
from outofcore.graph import ARRIVING_KINDS, Op, StepGraph, Storage, StorageKind
from outofcore.jsonfile import decode_json, refuse, write_json

FORMAT = "outofcore-graph/1"

# Limits of values in a file. Planning sums bytes in 64 bits, and its linear programs treat 1e20 and above as infinite.
Key = Annotated[int, Meta(ge=-(2**62), le=2**62)] | str  # the id of a storage in a file
Bytes = Annotated[int, Meta(ge=0, le=2**50)]  # of a storage or a workspace: up to a PiB
Capacity = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Rate = Annotated[float, Meta(ge=1e3, le=1e15)]  # bytes a second
_MAX_TOTAL_BYTES = 2**60  # of all storages
_MAX_TOTAL_SECONDS = 1e9  # of all ops


@dataclass(frozen=True)
class GraphFile:
    """The contents of a graph file."""

    graph: StepGraph  # its storages are numbered in file order
    costs: Costs
    keys: tuple[int | str, ...]  # the file's id of each storage, by number

    @staticmethod
    def of(graph: StepGraph, costs: Costs) -> GraphFile:
        """Return a graph file in which the ids of storages are their numbers."""
        return GraphFile(graph, costs, tuple(range(len(graph.storages))))


class _StorageEntry(Struct, omit_defaults=True):
    id: Key
    bytes: Bytes
    kind: StorageKind
    name: str | None = None
    watched: bool = False


class _OpEntry(Struct, omit_defaults=True):
    seconds: Seconds
    name: str | None = None
    reads: tuple[Key, ...] = ()
    mutates: tuple[Key, ...] = ()
    creates: tuple[Key, ...] = ()
    discards: tuple[Key, ...] = ()
    workspace_bytes: Bytes = 0
    rerunnable: bool = True
    random: bool = False
    family: str = ""
    module: str = ""
    source: str = ""
    communicates: bool = False
    module_class: str = ""


class _Home(Struct, omit_defaults=True):
    name: str
    bytes_per_s_out: Rate
    bytes_per_s_in: Rate
    bytes: Capacity | None = None
    latency_s: Seconds = 0.0
    contention: Annotated[float, Meta(ge=0, le=1)] = 0.0
    compute_slowdown: Annotated[float, Meta(ge=0, le=1e3)] = 0.0
    contention_out: Annotated[float, Meta(ge=MIN_CONTENTION_SHARE, le=1 - MIN_CONTENTION_SHARE)] = 0.5


class _GraphDocument(Struct):
    format: str
    storages: tuple[_StorageEntry, ...]
    ops: tuple[_OpEntry, ...]
    outputs: tuple[Key, ...] = ()
    homes: tuple[_Home, ...] = ()


def read_graph(path: Path) -> GraphFile:
    """Read a graph file.

    An activation or output that no op creates becomes an input, since it exists before the step with contents that are
    new in each step. An input that an op creates becomes an activation.

    Raises:
        InputError: the file cannot be read.
        GraphError: the file is not a graph file, a number is out of range, or entries contradict each other; the
            message names the place.

    >>> import tempfile
    >>> from outofcore.costs import Costs
    >>> from outofcore.graph import StepGraph, Storage, StorageKind
    >>> graph = StepGraph((Storage(0, 4096, StorageKind.PARAMETER, "weight"),), ())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_graph(Path(folder) / "graph.json", GraphFile.of(graph, Costs(())))
    ...     read_graph(Path(folder) / "graph.json").graph == graph
    True
    """
    file = decode_json(path, FORMAT, _GraphDocument)
    keys: dict[int | str, int] = {}
    for number, storage in enumerate(file.storages):
        if storage.id in keys:
            refuse(
                path, f"$.storages[{number}].id", f"is {storage.id!r}, and so is that of $.storages[{keys[storage.id]}]"
            )
        keys[storage.id] = number
    for field, total, limit in (
        ("storages", sum(storage.bytes for storage in file.storages), _MAX_TOTAL_BYTES),
        ("ops", fsum(op.seconds for op in file.ops), _MAX_TOTAL_SECONDS),
    ):
        if total > limit:
            unit = "bytes" if field == "storages" else "seconds"
            refuse(path, f"$.{field}", f"have {total:g} {unit} in total; at most {limit:g} can be planned")
    ops = tuple(_convert_op(path, number, op, keys) for number, op in enumerate(file.ops))
    created = {storage for op in ops for storage in op.creates}
    graph = StepGraph(
        tuple(
            _convert_storage(path, number, storage, number in created) for number, storage in enumerate(file.storages)
        ),
        ops,
        _numbers(path, "$.outputs", file.outputs, keys),
    )
    costs = Costs(
        tuple(OpCost(op.seconds, op.workspace_bytes) for op in file.ops),
        convert(file.homes, tuple[Home, ...], from_attributes=True),
    )
    try:
        graph.check()
        costs.check(graph)
    except GraphError as error:
        raise GraphError(f"{path}: {error} (storages are numbered in the order of the file)") from error
    return GraphFile(graph, costs, tuple(keys))


def _convert_storage(path: Path, number: int, storage: _StorageEntry, created: bool) -> Storage:
    """Convert an entry of a graph file to a storage; raise ``GraphError`` for a constant that an op creates."""
    kind = storage.kind
    if created and kind is StorageKind.CONSTANT:
        refuse(path, f"$.storages[{number}]", "is a constant that an op creates: a constant must exist before the step")
    if created and kind in ARRIVING_KINDS:
        kind = StorageKind.ACTIVATION
    if not created and kind in (StorageKind.ACTIVATION, StorageKind.OUTPUT):
        kind = StorageKind.INPUT
    name = _default_name(storage.id) if storage.name is None else storage.name
    return Storage(number, storage.bytes, kind, name, storage.watched)


def _default_name(key: int | str) -> str:
    return key if isinstance(key, str) else ""


def _convert_op(path: Path, number: int, op: _OpEntry, keys: Mapping[int | str, int]) -> Op:
    """Convert an entry of a graph file to an op, with the numbers of its storages instead of their ids."""

    def storages(field: str, named: Sequence[int | str]) -> tuple[int, ...]:
        return _numbers(path, f"$.ops[{number}].{field}", named, keys)

    return Op(
        number,
        f"op {number}" if op.name is None else op.name,
        storages("reads", op.reads),
        storages("mutates", op.mutates),
        storages("creates", op.creates),
        rerunnable=op.rerunnable,
        random=op.random,
        family=op.family,
        module=op.module,
        source=op.source,
        discards=storages("discards", op.discards),
        communicates=op.communicates,
        module_class=op.module_class,
    )


def _numbers(path: Path, place: str, named: Sequence[int | str], keys: Mapping[int | str, int]) -> tuple[int, ...]:
    """Convert storage ids of a file to numbers, without duplicates; raise ``GraphError`` for an unknown id."""
    for index, key in enumerate(named):
        if key not in keys:
            refuse(path, f"{place}[{index}]", f"is {key!r}, and no storage has that id")
    return tuple(dict.fromkeys(keys[key] for key in named))


def write_graph(path: Path, file: GraphFile) -> None:
    """Write a graph file, compressed by gzip if its name ends in ``.gz``.

    Raises:
        InputError: the file cannot be written.

    >>> import tempfile
    >>> from outofcore.costs import Costs
    >>> from outofcore.graph import StepGraph
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_graph(Path(folder) / "graph.json", GraphFile.of(StepGraph((), ()), Costs(())))
    ...     (Path(folder) / "graph.json").read_text()
    '{"format":"outofcore-graph/1","storages":[],"ops":[],"outputs":[],"homes":[]}\\n'
    """
    graph, costs, keys = file.graph, file.costs, file.keys

    def keys_of(storages: Sequence[int]) -> tuple[int | str, ...]:
        return tuple(keys[storage] for storage in storages)

    write_json(
        path,
        _GraphDocument(
            format=FORMAT,
            storages=tuple(
                _StorageEntry(
                    keys[s.id], s.bytes, s.kind, None if s.name == _default_name(keys[s.id]) else s.name, s.watched
                )
                for s in graph.storages
            ),
            ops=tuple(
                _OpEntry(
                    seconds=cost.seconds,
                    name=op.name,
                    reads=keys_of(op.reads),
                    mutates=keys_of(op.mutates),
                    creates=keys_of(op.creates),
                    discards=keys_of(op.discards),
                    workspace_bytes=cost.workspace_bytes,
                    rerunnable=op.rerunnable,
                    random=op.random,
                    family=op.family,
                    module=op.module,
                    source=op.source,
                    communicates=op.communicates,
                    module_class=op.module_class,
                )
                for op, cost in zip(graph.ops, costs.ops, strict=True)
            ),
            outputs=keys_of(graph.outputs),
            homes=convert(costs.homes, tuple[_Home, ...], from_attributes=True),
        ),
    )
