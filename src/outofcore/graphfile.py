"""Step graphs with their costs as JSON files: format ``outofcore-graph/1``, see docs/graph-format.md.

Graphs can so come from anywhere, and be planned without PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, convert

from outofcore.costs import LEAST_PART, Costs, Home, OpCost
from outofcore.errors import GraphError
from outofcore.graph import ARRIVING_KINDS, Op, StepGraph, Storage, StorageKind
from outofcore.jsonfile import decode_json, refuse, write_json

FORMAT = "outofcore-graph/1"

# What a file may say. Planning adds up bytes in 64 bits, and solves linear programs in float64, in which numbers from
# 1e20 on count as infinite.
Key = Annotated[int, Meta(ge=-(2**62), le=2**62)] | str  # what a file calls a storage
Bytes = Annotated[int, Meta(ge=0, le=2**50)]  # of a storage or a workspace: up to a PiB
Capacity = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Rate = Annotated[float, Meta(ge=1e3, le=1e15)]  # bytes a second
_MOST_BYTES = 2**60  # of all storages
_MOST_SECONDS = 1e9  # of all ops


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
    keys: tuple[int | str, ...]

    @staticmethod
    def of(graph: StepGraph, costs: Costs) -> GraphFile:
        """Make a graph file whose storages are called by their numbers.

        >>> from outofcore.costs import Costs
        >>> from outofcore.graph import StepGraph, Storage, StorageKind
        >>> graph = StepGraph((Storage(0, 4096, StorageKind.PARAMETER), Storage(1, 64, StorageKind.INPUT)), ())
        >>> GraphFile.of(graph, Costs(())).keys
        (0, 1)
        """
        return GraphFile(graph, costs, tuple(range(len(graph.storages))))


class _Storage(Struct, omit_defaults=True):
    id: Key
    bytes: Bytes
    kind: StorageKind
    name: str | None = None
    watched: bool = False


class _Op(Struct, omit_defaults=True):
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
    contention_out: Annotated[float, Meta(ge=LEAST_PART, le=1 - LEAST_PART)] = 0.5


class _File(Struct):
    format: str
    storages: tuple[_Storage, ...]
    ops: tuple[_Op, ...]
    outputs: tuple[Key, ...] = ()
    homes: tuple[_Home, ...] = ()


def read_graph(path: Path) -> GraphFile:
    """Read a graph file.

    A storage that no op creates exists before the step. If it is called an activation or an output
    it becomes an input here, since its contents are new in each step; and what is called an input
    but created by an op becomes an activation.

    Raises:
        InputError: the file cannot be read.
        GraphError: it is not a graph file, a number is out of its range, or the file contradicts itself; says where.

    >>> import tempfile
    >>> from outofcore.costs import Costs
    >>> from outofcore.graph import StepGraph, Storage, StorageKind
    >>> graph = StepGraph((Storage(0, 4096, StorageKind.PARAMETER, "weight"),), ())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_graph(Path(folder) / "graph.json", GraphFile.of(graph, Costs(())))
    ...     read_graph(Path(folder) / "graph.json").graph == graph
    True
    """
    file = decode_json(path, FORMAT, _File)
    keys: dict[int | str, int] = {}
    for number, storage in enumerate(file.storages):
        if storage.id in keys:
            refuse(
                path, f"$.storages[{number}].id", f"is {storage.id!r}, and so is that of $.storages[{keys[storage.id]}]"
            )
        keys[storage.id] = number
    for what, total, most in (
        ("storages", sum(storage.bytes for storage in file.storages), _MOST_BYTES),
        ("ops", fsum(op.seconds for op in file.ops), _MOST_SECONDS),
    ):
        if total > most:
            unit = "bytes" if what == "storages" else "seconds"
            refuse(path, f"$.{what}", f"have {total:g} {unit} together; at most {most:g} can be planned for")
    ops = tuple(_op(path, number, op, keys) for number, op in enumerate(file.ops))
    created = {storage for op in ops for storage in op.creates}
    graph = StepGraph(
        tuple(_storage(path, number, storage, number in created) for number, storage in enumerate(file.storages)),
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


def _storage(path: Path, number: int, storage: _Storage, created: bool) -> Storage:
    kind = storage.kind
    if created and kind is StorageKind.CONSTANT:
        refuse(path, f"$.storages[{number}]", "is a constant that an op creates: a constant must exist before the step")
    if created and kind in ARRIVING_KINDS:
        kind = StorageKind.ACTIVATION
    if not created and kind in (StorageKind.ACTIVATION, StorageKind.OUTPUT):
        kind = StorageKind.INPUT
    name = _unnamed(storage.id) if storage.name is None else storage.name
    return Storage(number, storage.bytes, kind, name, storage.watched)


def _unnamed(key: int | str) -> str:
    """Return a name for a storage that has none."""
    return key if isinstance(key, str) else ""


def _op(path: Path, number: int, op: _Op, keys: Mapping[int | str, int]) -> Op:
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


def _numbers(path: Path, where: str, named: Sequence[int | str], keys: Mapping[int | str, int]) -> tuple[int, ...]:
    """Return the numbers of storages, each once."""
    for index, key in enumerate(named):
        if key not in keys:
            refuse(path, f"{where}[{index}]", f"is {key!r}, and no storage has that id")
    return tuple(dict.fromkeys(keys[key] for key in named))


def write_graph(path: Path, file: GraphFile) -> None:
    """Write a graph file; read again, it gives an equal graph and equal costs.

    Args:
        path: the file; through gzip if its name ends in ``.gz``.
        file: what to write.

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

    def named(storages: Sequence[int]) -> tuple[int | str, ...]:
        return tuple(keys[storage] for storage in storages)

    write_json(
        path,
        _File(
            format=FORMAT,
            storages=tuple(
                _Storage(keys[s.id], s.bytes, s.kind, None if s.name == _unnamed(keys[s.id]) else s.name, s.watched)
                for s in graph.storages
            ),
            ops=tuple(
                _Op(
                    seconds=cost.seconds,
                    name=op.name,
                    reads=named(op.reads),
                    mutates=named(op.mutates),
                    creates=named(op.creates),
                    discards=named(op.discards),
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
            outputs=named(graph.outputs),
            homes=convert(costs.homes, tuple[_Home, ...], from_attributes=True),
        ),
    )
