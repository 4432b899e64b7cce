"""Training steps from PyTorch's execution traces, such as those in the repository ``facebookresearch/param``.

* **Ops** are the lowest calls that compute. A call is one op if its children only allocate and view, or read less than
  the call itself. Memory that an op allocates and does not return is its workspace. Consecutive calls on lists of
  tensors become one op per list position.
* **Storages** are the ids of the trace. Ids are reused after a free: a call that allocates or returns an id without
  receiving it begins another storage.
* **Mutations** are the schema's "!" arguments and batch norm's running statistics. ``fill_``, ``zero_``, ``copy_`` and
  ``out=`` overwrite a storage if the tensor covers all of it.
* **Storages that exist before the step** are classified by use: see ``_Lifetime.classify``.

Traces have no times, so ops cost a roofline on a device (``outofcore.presets``). Collectives, updates and copies from
host memory are not rerunnable; all other ops are.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from instances.sources import Clone, Instance

from outofcore.costs import Costs, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.graphfile import GraphFile
from outofcore.planning import in_core_budget, smallest_budget
from outofcore.presets import Device, Number, Work, device

REPOSITORY = "param"
_DEVICE = "v100-16gb-pcie3"  # 12 GB/s in each direction of the link
_FOLDER = "et_replay/tests/inputs/"
# Files, and the call that contains one step near the steady state; empty: all calls.
_TRACES = {
    "ResNet-50": ("resnet_et.json.gz", "ProfilerStep#7"),
    "GPT-2": ("hf_GPT2_et.json.tar.gz", "ProfilerStep#0"),
    "MLP": ("linear_et.json.gz", ""),
}
_SHARES = (0.5, 0.3, 0.2)
CASES = {
    f"{name}, {share:g} {'of the peak' if home else 'without homes'}": (name, share, home)
    for name in _TRACES
    for home in (True, False)
    for share in _SHARES
}

_ALLOCATIONS = {"aten::empty", "aten::empty_strided", "aten::resize_"}
# Calls that do not compute, although their schema does not return a view.
_FREE = _ALLOCATIONS | {
    "aten::_local_scalar_dense",
    "aten::_unsafe_view",
    "aten::detach_",
    "aten::empty_like",
    "aten::item",
    "aten::result_type",
    "aten::unflatten_dense_tensors",
}
_ZEROS = {"aten::zeros", "aten::zeros_like"}
_LIKE = {"aten::zeros_like", "aten::ones_like", "aten::full_like"}  # their input only provides a shape
_OVERWRITING = {"aten::fill_", "aten::zero_", "aten::copy_"}
_BATCH_NORMS = {"aten::cudnn_batch_norm", "aten::native_batch_norm", "aten::miopen_batch_norm"}
_RUNNING = (3, 4)  # positions of the running statistics in their arguments
_RANDOM = {"aten::native_dropout", "aten::bernoulli_", "aten::normal_", "aten::uniform_", "aten::random_"}
_COLLECTIVE = "record_param_comms"
_PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1)}
_CONVOLUTIONS = {"aten::cudnn_convolution", "aten::convolution_overrideable", "aten::thnn_conv2d"}


class _Tensor(NamedTuple):
    """A tensor on the device, as an argument or result of a call."""

    storage: int
    offset: int  # in elements, like ``size``
    size: int
    item: int  # bytes per element
    dtype: str
    argument: int
    place: int  # index in a list argument
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.size * self.item


@dataclass
class _Call:
    """A node of the trace."""

    id: int
    parent: int
    name: str
    schema: str
    inputs: list[_Tensor]
    outputs: list[_Tensor]
    children: list[_Call] = field(default_factory=list["_Call"])

    def descendants(self) -> Iterator[_Call]:
        """Yield all calls made by this call, directly or indirectly."""
        for child in self.children:
            yield child
            yield from child.descendants()

    @cached_property
    def written(self) -> frozenset[int]:
        """Return the positions of the arguments that the call mutates."""
        if self.name == _COLLECTIVE:
            return frozenset(tensor.argument for tensor in self.inputs)
        marked = frozenset(i for i, text in enumerate(_split_arguments(self.schema)) if "!" in text)
        return marked | frozenset(_RUNNING) if self.name in _BATCH_NORMS else marked

    @property
    def is_upload(self) -> bool:
        return self.name == "aten::copy_" and len(self.inputs) < 2

    @cached_property
    def computes(self) -> bool:
        if self.name == _COLLECTIVE:
            return bool(self.inputs)
        if not self.name.startswith("aten::") or self.name in _FREE or _returns_view(self.schema):
            return False
        return bool(self.outputs) or any(tensor.argument in self.written for tensor in self.inputs)

    @cached_property
    def is_op(self) -> bool:
        """Return whether the call is one op of the graph: its children do not do all of its work."""
        computing_children = [call for call in self.descendants() if call.computes]
        read = {tensor.storage for call in computing_children for tensor in call.inputs}
        read |= {tensor.storage for tensor in self.inputs if self.name in _LIKE}
        return self.computes and (not computing_children or not {tensor.storage for tensor in self.inputs} <= read)


def _is_update(call: _Call, calls: Mapping[int, _Call]) -> bool:
    while call.parent in calls and call.parent != call.id and not call.name.startswith("Optimizer.step"):
        call = calls[call.parent]
    return call.name.startswith("Optimizer.step")


def _split_arguments(schema: str) -> list[str]:
    """Split the arguments of an operator's schema; types may contain commas in brackets."""
    inside = schema[schema.find("(") + 1 : schema.rfind(") ->")]
    return re.split(r", (?![^\[(]*[\])])", inside.replace("*, ", ""))


def _returns_view(schema: str) -> bool:
    returned = schema.rpartition("->")[2]
    return "(a" in returned and "!" not in returned


def _find_tensors(values: Sequence[Any], types: Sequence[str], shapes: Sequence[Any]) -> Iterator[_Tensor]:
    """Yield the tensors on the device among arguments, including those in lists."""
    for argument, (value, kind, shape) in enumerate(zip(values, types, shapes, strict=False)):
        if kind.startswith("GenericList[Tensor"):
            kinds = kind[len("GenericList[") : -1].split(",")
            for tensor in _find_tensors(value, kinds, shape):
                yield tensor._replace(argument=argument, place=tensor.argument)
        elif kind.startswith("Tensor("):
            _, storage, offset, size, item, device_name = value
            if size and item and device_name.startswith("cuda"):
                yield _Tensor(storage, offset, size, item, kind[7:-1], argument, 0, tuple(shape))


def read_calls(trace: Mapping[str, Any]) -> dict[int, _Call]:
    """Read the calls of a trace of format 1.0.1 or later, with their children in order."""
    calls: dict[int, _Call] = {}
    for node in sorted(trace["nodes"], key=lambda node: node["id"]):
        if "attrs" in node:
            attributes = {attribute["name"]: attribute["value"] for attribute in node["attrs"]}
            parent, schema = node["ctrl_deps"], attributes.get("op_schema", "")
            inputs, outputs = (
                [node[direction][key] for key in ("values", "types", "shapes")] for direction in ("inputs", "outputs")
            )
        else:
            parent, schema = node["parent"], node["op_schema"]
            inputs, outputs = (
                [node[f"{direction}{key}"] for key in ("s", "_types", "_shapes")] for direction in ("input", "output")
            )
        call = _Call(node["id"], parent, node["name"], schema, [*_find_tensors(*inputs)], [*_find_tensors(*outputs)])
        calls[call.id] = call
        if parent in calls and parent != call.id:
            calls[parent].children.append(call)
    return calls


@dataclass
class _Lifetime:
    """A storage under construction."""

    bytes: int
    dtype: str
    exists: bool  # the storage exists before the step
    pending: bool = False  # allocated and not yet written
    reused: bool = False  # its id is reused by another storage
    kind: StorageKind | None = None
    written: set[bool] = field(default_factory=set[bool])  # True: by the optimizer; False: elsewhere
    used: set[bool] = field(default_factory=set[bool])  # as for ``written``

    def classify(self) -> StorageKind:
        """Return the kind that the storage's uses imply."""
        if self.kind is not None or not self.exists:
            return self.kind or StorageKind.ACTIVATION
        if self.reused:
            return StorageKind.INPUT
        if True in self.written:
            return StorageKind.PARAMETER if False in self.used else StorageKind.OPTIMIZER_STATE
        if self.written:
            return StorageKind.GRADIENT if True in self.used else StorageKind.BUFFER
        return StorageKind.INPUT if self.dtype in ("long", "long int", "int") else StorageKind.BUFFER


def _join_ops(number: int, ops: Sequence[Op]) -> Op:
    reads, mutates, creates = dict[int, None](), dict[int, None](), dict[int, None]()
    for op in ops:
        reads |= dict.fromkeys(s for s in op.reads if s not in creates and (s in reads or s not in mutates))
        mutates |= dict.fromkeys(s for s in op.mutates if s not in creates)
        creates |= dict.fromkeys(op.creates)
    return Op(number, "update", tuple(reads), tuple(mutates), tuple(creates), rerunnable=False)


class _Builder:
    """Builds a graph from calls in start order."""

    def __init__(self, target: Device) -> None:
        self.target = target
        self.lifetimes: list[_Lifetime] = []
        self.current: dict[int, int] = {}  # current lifetime of each storage id
        self.ops: list[Op] = []
        self.costs: list[OpCost] = []

    def begin(self, tensor: _Tensor, *, exists: bool = False, pending: bool = False) -> int:
        """Begin another lifetime of a storage id."""
        if tensor.storage in self.current:
            self.lifetimes[self.current[tensor.storage]].reused = True
        self.lifetimes.append(_Lifetime(tensor.bytes + tensor.offset * tensor.item, tensor.dtype, exists, pending))
        self.current[tensor.storage] = len(self.lifetimes) - 1
        return self.current[tensor.storage]

    def find(self, tensor: _Tensor) -> int:
        if tensor.storage not in self.current:
            return self.begin(tensor, exists=True)
        lifetime = self.lifetimes[self.current[tensor.storage]]
        if lifetime.exists:
            lifetime.bytes = max(lifetime.bytes, tensor.bytes + tensor.offset * tensor.item)
        return self.current[tensor.storage]

    def build(self, calls: Mapping[int, _Call], first: int, last: float) -> GraphFile:
        """Build a graph of the calls with ids from ``first`` up to ``last``."""
        covered: set[int] = set()
        updates: list[_Call] = []
        for call in calls.values():
            if not first <= call.id < last or call.id in covered:
                continue
            if call.is_op and call.name.startswith("aten::_foreach_"):
                updates.append(call)
                covered |= {child.id for child in call.descendants()}
                continue
            if call.is_op:
                self.add_updates(updates)
            updating = _is_update(call, calls)
            if updating and call.name in _ZEROS:
                for tensor in call.outputs:
                    self.lifetimes[self.begin(tensor, exists=True)].kind = StorageKind.OPTIMIZER_STATE
            elif call.is_op:
                self.add(call, updating)
            else:
                self.allocate(call)
                continue
            covered |= {child.id for child in call.descendants()}
        self.add_updates(updates)
        return self.finish()

    def add_updates(self, calls: list[_Call]) -> None:
        """Add consecutive calls on lists as one op per list position, and clear ``calls``."""
        for index in sorted({tensor.place for call in calls for tensor in call.inputs}):
            begin = len(self.ops)
            for call in calls:
                inputs, outputs = ([t for t in tensors if t.place == index] for tensors in (call.inputs, call.outputs))
                if inputs:
                    self.add(replace(call, inputs=inputs, outputs=outputs, children=[]), updating=True)
            ops, costs = self.ops[begin:], self.costs[begin:]
            del self.ops[begin:], self.costs[begin:]
            self.ops.append(_join_ops(begin, ops))
            self.costs.append(OpCost(sum(c.seconds for c in costs)))
        calls.clear()

    def allocate(self, call: _Call) -> list[int]:
        """Begin the storages of a call that only allocates."""
        if call.name not in _ALLOCATIONS or call.children:
            return []
        argument_ids = {tensor.storage for tensor in call.inputs}
        return [self.begin(tensor, pending=True) for tensor in call.outputs if tensor.storage not in argument_ids]

    def add(self, call: _Call, updating: bool) -> None:
        arguments = {tensor: self.find(tensor) for tensor in call.inputs}
        of_id = {tensor.storage: lifetime for tensor, lifetime in arguments.items()}
        inner = [lifetime for child in call.descendants() for lifetime in self.allocate(child)]
        returned: dict[int, None] = {}
        for tensor in call.outputs:
            if tensor.storage not in of_id:
                current_lifetime = self.current.get(tensor.storage)
                returned[current_lifetime if current_lifetime in inner else self.begin(tensor, pending=True)] = None  # type: ignore[index]
        reads, mutates, discards = dict[int, None](), dict[int, None](), dict[int, None]()
        for tensor, lifetime in arguments.items():
            data = self.lifetimes[lifetime]
            writes = tensor.argument in call.written
            if data.pending:
                returned[lifetime] = None
                continue
            if writes:
                mutates[lifetime] = None
                whole = tensor.bytes >= data.bytes
                if whole and (
                    call.name in _OVERWRITING or "out" in _split_arguments(call.schema)[tensor.argument].split()
                ):
                    continue
                if call.name in _BATCH_NORMS:
                    discards[lifetime] = None
            reads[lifetime] = None
        for lifetime in (*reads, *mutates, *returned):
            self.lifetimes[lifetime].used.add(updating)
            if lifetime in mutates or lifetime in returned:
                self.lifetimes[lifetime].written.add(updating)
                self.lifetimes[lifetime].pending = False
        self.ops.append(
            Op(
                len(self.ops),
                call.name.replace("::", "."),
                tuple(reads),
                tuple(mutates),
                tuple(returned),
                rerunnable=not (updating or call.name == _COLLECTIVE or call.is_upload),
                random=call.name in _RANDOM,
                discards=tuple(discards),
            )
        )
        workspace = sum(self.lifetimes[child].bytes for child in inner if child not in returned)
        self.costs.append(OpCost(estimate_seconds(call, self.target), workspace))

    def finish(self) -> GraphFile:
        """Return the graph file, without storages that no op touches."""
        touched = sorted({storage for op in self.ops for storage in op.touched})
        number = {lifetime: index for index, lifetime in enumerate(touched)}
        storages = tuple(
            Storage(index, self.lifetimes[lifetime].bytes, self.lifetimes[lifetime].classify())
            for index, lifetime in enumerate(touched)
        )
        ops = tuple(
            replace(op, **{key: tuple(number[lifetime_id] for lifetime_id in getattr(op, key)) for key in _FIELDS})
            for op in self.ops
        )
        graph = StepGraph(storages, ops)
        costs = Costs(tuple(self.costs), (self.target.home(),))
        graph.check()
        costs.check(graph)
        return GraphFile.of(graph, costs)


_FIELDS = ("reads", "mutates", "creates", "discards")


def estimate_seconds(call: _Call, target: Device) -> float:
    """Estimate a call's seconds from its bytes and, for products and convolutions, its operations."""
    moved = sum(t.bytes for t in call.inputs + call.outputs) + sum(
        t.bytes for t in call.inputs if t.argument in call.written
    )
    half = any(t.dtype in ("c10::Half", "c10::BFloat16") for t in call.inputs)
    shapes = {t.argument: t.shape for t in call.inputs}
    if call.name in _PRODUCTS:
        left, right = (shapes[i] for i in _PRODUCTS[call.name])
        operations = 2.0 * math.prod(left) * right[-1]
        return target.seconds(Work.MATMUL, Number.HALF if half else Number.FP32, operations, moved)
    number = Number.HALF if half else Number.TF32
    if call.name in _CONVOLUTIONS and call.outputs:
        operations = 2.0 * math.prod(call.outputs[0].shape) * math.prod(shapes[1][1:])
        return target.seconds(Work.CONVOLUTION, number, operations, moved)
    if call.name == "aten::convolution_backward":
        operations = 2.0 * math.prod(shapes[0]) * math.prod(shapes[2][1:]) * len(call.outputs)
        return target.seconds(Work.CONVOLUTION, number, operations, moved)
    return target.seconds(Work.STREAMING, number, 0.0, moved)


def convert_trace(trace: Mapping[str, Any], step: str = "", target: str = _DEVICE) -> GraphFile:
    """Convert one step of a trace to a graph.

    ``step`` names the call that contains the step; later calls of other threads belong to it, up to the next step. If
    empty, the whole trace is converted. ``target`` is a device of ``outofcore.presets``, for times and the home.
    """
    calls = read_calls(trace)
    first, last = 0, math.inf
    if step:
        prefix = step.partition("#")[0] + "#"
        marks = [call for call in calls.values() if call.name.startswith(prefix)]
        first = next((call.id for call in marks if call.name == step), None)
        if first is None:
            raise ValueError(f"the trace has no call named {step!r}")
        last = min((call.id for call in marks if call.id > first), default=math.inf)
    return _Builder(device(target)).build(calls, first, last)


def _decode(name: str, data: bytes) -> Any:
    """Decode a gzip file or a tar.gz archive with one JSON file."""
    text = gzip.decompress(data)
    if name.endswith(".tar.gz"):
        with tarfile.open(fileobj=io.BytesIO(text)) as archive:
            member = archive.extractfile(archive.getmembers()[0])
            text = member.read() if member is not None else b""
    return json.loads(text)


def read_instance(clone: Clone, case: str) -> Instance:
    """Read one of ``CASES``.

    Without a home, the budget is at the case's share between the smallest budget and the peak.
    """
    name, share, home = CASES[case]
    path, step = _TRACES[name]
    file = convert_trace(_decode(path, clone.read(_FOLDER + path)), step)
    peak, lower = in_core_budget(file.graph, file.costs), 0
    if not home:
        file = replace(file, costs=replace(file.costs, homes=()))
        lower = smallest_budget(file.graph, file.costs)
    return Instance(case, int(lower + (peak - lower) * share), file)
