"""Training steps from PyTorch's execution traces, such as those in the repository ``facebookresearch/param``.

A trace (``torch.profiler.ExecutionTraceObserver``) lists the calls of one run as a tree, with the storage, offset and
size of every tensor that they take and return. From it, one step becomes a graph:

* **Ops** are the lowest calls that compute. A call is left whole if its children only allocate and view, or read less
  than it does itself; else its children stand for it. Views, allocations and reads of sizes or single values are no
  ops. What a whole call allocates and does not return is its workspace.
  Calls in a row that work on lists of tensors, as optimizers make them, become one op for each place in the lists.
* **Storages** go by the ids of the trace. An id is that of an address, and serves again once its memory is freed: a
  call that allocates it, or returns it without having been given it, begins another storage. Tensors in host memory
  are left out. A storage that is first filled in by several ops is created by the first.
* **Mutation** is what the schema of the operator marks with "!", and the running statistics of batch norm. ``fill_``,
  ``zero_``, ``copy_`` and ``out=`` overwrite a storage where the tensor covers all of it.
* **What exists before the step** is told apart by its use: written by the optimizer, and read elsewhere, it is a
  parameter, else optimizer state; read there, and written elsewhere, a gradient; all else that is written, a buffer.
  What is only read is an input if it holds integers or its id serves again, else a buffer. Optimizer state that the
  first step makes is taken as having been there.

Limits: the trace says nothing of time, so ops take what a roofline says for a device (``outofcore.presets``).
Published kernel times are of other runs. Collectives are ordinary ops, and copies from host memory take no longer than
others. The step is the one that ran: shapes and branches are fixed, and a gradient that lasts until the next step frees
it is free after its last use. Collectives, updates and copies from host memory do not run again; all other ops may, as
in a captured step. How large a storage is that exists before the step is known only from its tensors.
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
_DEVICE = "v100-16gb-pcie3"  # whose link carries 12 GB/s each way
_FOLDER = "et_replay/tests/inputs/"
# Files, and the call that holds one step in the steady state, or nearly so; none: all calls.
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
# Calls that compute nothing, beyond those whose schema says that they return a view.
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
_LIKE = {"aten::zeros_like", "aten::ones_like", "aten::full_like"}  # what they are given says no more than a shape
_OVERWRITING = {"aten::fill_", "aten::zero_", "aten::copy_"}
_BATCH_NORMS = {"aten::cudnn_batch_norm", "aten::native_batch_norm", "aten::miopen_batch_norm"}
_RUNNING = (3, 4)  # which of their arguments are running statistics
_RANDOM = {"aten::native_dropout", "aten::bernoulli_", "aten::normal_", "aten::uniform_", "aten::random_"}
_COLLECTIVE = "record_param_comms"
_PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1)}
_CONVOLUTIONS = {"aten::cudnn_convolution", "aten::convolution_overrideable", "aten::thnn_conv2d"}


class _Tensor(NamedTuple):
    """A tensor on the device, as one call names it."""

    storage: int
    offset: int  # in elements, as is ``size``
    size: int
    item: int  # bytes of an element
    dtype: str
    argument: int
    place: int  # in the list that is the argument
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

    def below(self) -> Iterator[_Call]:
        """Yield all calls that it makes, directly or not."""
        for child in self.children:
            yield child
            yield from child.below()

    @cached_property
    def written(self) -> frozenset[int]:
        """Which arguments it writes in place."""
        if self.name == _COLLECTIVE:
            return frozenset(tensor.argument for tensor in self.inputs)
        marked = frozenset(i for i, text in enumerate(_split_arguments(self.schema)) if "!" in text)
        return marked | frozenset(_RUNNING) if self.name in _BATCH_NORMS else marked

    @property
    def is_upload(self) -> bool:
        """Whether it copies from host memory."""
        return self.name == "aten::copy_" and len(self.inputs) < 2

    @cached_property
    def computes(self) -> bool:
        """Whether it, or a call below it, computes something on the device."""
        if self.name == _COLLECTIVE:
            return bool(self.inputs)
        if not self.name.startswith("aten::") or self.name in _FREE or _returns_view(self.schema):
            return False
        return bool(self.outputs) or any(tensor.argument in self.written for tensor in self.inputs)

    @cached_property
    def is_op(self) -> bool:
        """Whether it is an op of the graph: it computes, and its children do not do all of that."""
        parts = [call for call in self.below() if call.computes]
        read = {tensor.storage for call in parts for tensor in call.inputs}
        read |= {tensor.storage for tensor in self.inputs if self.name in _LIKE}
        return self.computes and (not parts or not {tensor.storage for tensor in self.inputs} <= read)


def _is_update(call: _Call, calls: Mapping[int, _Call]) -> bool:
    """Return whether the optimizer makes a call."""
    while call.parent in calls and call.parent != call.id and not call.name.startswith("Optimizer.step"):
        call = calls[call.parent]
    return call.name.startswith("Optimizer.step")


def _split_arguments(schema: str) -> list[str]:
    """Split the arguments of an operator's schema, of which types may hold commas in brackets."""
    inside = schema[schema.find("(") + 1 : schema.rfind(") ->")]
    return re.split(r", (?![^\[(]*[\])])", inside.replace("*, ", ""))


def _returns_view(schema: str) -> bool:
    returned = schema.rpartition("->")[2]
    return "(a" in returned and "!" not in returned


def _find_tensors(values: Sequence[Any], types: Sequence[str], shapes: Sequence[Any]) -> Iterator[_Tensor]:
    """Yield the tensors on the device among arguments, lists of tensors taken apart."""
    for argument, (value, kind, shape) in enumerate(zip(values, types, shapes, strict=False)):
        if kind.startswith("GenericList[Tensor"):
            kinds = kind[len("GenericList[") : -1].split(",")
            for each in _find_tensors(value, kinds, shape):
                yield each._replace(argument=argument, place=each.argument)
        elif kind.startswith("Tensor("):
            _, storage, offset, size, item, where = value
            if size and item and where.startswith("cuda"):
                yield _Tensor(storage, offset, size, item, kind[7:-1], argument, 0, tuple(shape))


def read_calls(trace: Mapping[str, Any]) -> dict[int, _Call]:
    """Read the calls of a trace of any version of the format since 1.0.1, with their children in order."""
    calls: dict[int, _Call] = {}
    for node in sorted(trace["nodes"], key=lambda node: node["id"]):
        if "attrs" in node:
            given = {each["name"]: each["value"] for each in node["attrs"]}
            parent, schema = node["ctrl_deps"], given.get("op_schema", "")
            inputs, outputs = (
                [node[way][key] for key in ("values", "types", "shapes")] for way in ("inputs", "outputs")
            )
        else:
            parent, schema = node["parent"], node["op_schema"]
            inputs, outputs = (
                [node[f"{way}{key}"] for key in ("s", "_types", "_shapes")] for way in ("input", "output")
            )
        call = _Call(node["id"], parent, node["name"], schema, [*_find_tensors(*inputs)], [*_find_tensors(*outputs)])
        calls[call.id] = call
        if parent in calls and parent != call.id:
            calls[parent].children.append(call)
    return calls


@dataclass
class _Lifetime:
    """A storage in the making."""

    bytes: int
    dtype: str
    exists: bool  # before the step
    pending: bool = False  # allocated, and nothing written yet
    reused: bool = False  # the trace gives its id to another one
    kind: StorageKind | None = None
    written: set[bool] = field(default_factory=set[bool])  # whether by the optimizer
    used: set[bool] = field(default_factory=set[bool])  # likewise

    def classify(self) -> StorageKind:
        """Return the kind that its use speaks for."""
        if self.kind is not None or not self.exists:
            return self.kind or StorageKind.ACTIVATION
        if self.reused:
            return StorageKind.INPUT
        if True in self.written:
            return StorageKind.PARAMETER if False in self.used else StorageKind.OPTIMIZER_STATE
        if self.written:
            return StorageKind.GRADIENT if True in self.used else StorageKind.BUFFER
        return StorageKind.INPUT if self.dtype in ("long", "long int", "int") else StorageKind.BUFFER


def _join(number: int, ops: Sequence[Op]) -> Op:
    """Make one op of several in a row."""
    reads, mutates, creates = dict[int, None](), dict[int, None](), dict[int, None]()
    for op in ops:
        reads |= dict.fromkeys(s for s in op.reads if s not in creates and (s in reads or s not in mutates))
        mutates |= dict.fromkeys(s for s in op.mutates if s not in creates)
        creates |= dict.fromkeys(op.creates)
    return Op(number, "update", tuple(reads), tuple(mutates), tuple(creates), rerunnable=False)


class _Builder:
    """Makes a graph of calls, in the order in which they began."""

    def __init__(self, target: Device) -> None:
        self.target = target
        self.lifetimes: list[_Lifetime] = []
        self.current: dict[int, int] = {}  # the lifetime that an id of the trace stands for
        self.ops: list[Op] = []
        self.costs: list[OpCost] = []

    def begin(self, tensor: _Tensor, *, exists: bool = False, pending: bool = False) -> int:
        """Begin another lifetime of a storage's id."""
        if tensor.storage in self.current:
            self.lifetimes[self.current[tensor.storage]].reused = True
        self.lifetimes.append(_Lifetime(tensor.bytes + tensor.offset * tensor.item, tensor.dtype, exists, pending))
        self.current[tensor.storage] = len(self.lifetimes) - 1
        return self.current[tensor.storage]

    def find(self, tensor: _Tensor) -> int:
        """Return the lifetime of a tensor that a call is given."""
        if tensor.storage not in self.current:
            return self.begin(tensor, exists=True)
        lifetime = self.lifetimes[self.current[tensor.storage]]
        if lifetime.exists:
            lifetime.bytes = max(lifetime.bytes, tensor.bytes + tensor.offset * tensor.item)
        return self.current[tensor.storage]

    def build(self, calls: Mapping[int, _Call], first: int, last: float) -> GraphFile:
        """Make a graph of the calls with ids from ``first`` up to ``last``, in the order in which they began."""
        covered: set[int] = set()
        updates: list[_Call] = []
        for call in calls.values():
            if not first <= call.id < last or call.id in covered:
                continue
            if call.is_op and call.name.startswith("aten::_foreach_"):
                updates.append(call)
                covered |= {each.id for each in call.below()}
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
            covered |= {each.id for each in call.below()}
        self.add_updates(updates)
        return self.finish()

    def add_updates(self, calls: list[_Call]) -> None:
        """Add calls in a row that work on lists, as one op for each place in the lists; empties ``calls``."""
        for place in sorted({tensor.place for call in calls for tensor in call.inputs}):
            begin = len(self.ops)
            for call in calls:
                inputs, outputs = ([t for t in way if t.place == place] for way in (call.inputs, call.outputs))
                if inputs:
                    self.add(replace(call, inputs=inputs, outputs=outputs, children=[]), updating=True)
            ops, costs = self.ops[begin:], self.costs[begin:]
            del self.ops[begin:], self.costs[begin:]
            self.ops.append(_join(begin, ops))
            self.costs.append(OpCost(sum(c.seconds for c in costs)))
        calls.clear()

    def allocate(self, call: _Call) -> list[int]:
        """Begin what a call allocates, if that is all that it does."""
        if call.name not in _ALLOCATIONS or call.children:
            return []
        given = {tensor.storage for tensor in call.inputs}
        return [self.begin(tensor, pending=True) for tensor in call.outputs if tensor.storage not in given]

    def add(self, call: _Call, updating: bool) -> None:
        """Add an op."""
        given = {tensor: self.find(tensor) for tensor in call.inputs}
        of_id = {tensor.storage: lifetime for tensor, lifetime in given.items()}
        inner = [lifetime for each in call.below() for lifetime in self.allocate(each)]
        returned: dict[int, None] = {}
        for tensor in call.outputs:
            if tensor.storage not in of_id:
                begun = self.current.get(tensor.storage)
                returned[begun if begun in inner else self.begin(tensor, pending=True)] = None  # type: ignore[index]
        reads, mutates, discards = dict[int, None](), dict[int, None](), dict[int, None]()
        for tensor, lifetime in given.items():
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
        workspace = sum(self.lifetimes[each].bytes for each in inner if each not in returned)
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
            replace(op, **{key: tuple(number[each] for each in getattr(op, key)) for key in _FIELDS}) for op in self.ops
        )
        graph = StepGraph(storages, ops)
        costs = Costs(tuple(self.costs), (self.target.home(),))
        graph.check()
        costs.check(graph)
        return GraphFile.of(graph, costs)


_FIELDS = ("reads", "mutates", "creates", "discards")


def estimate_seconds(call: _Call, target: Device) -> float:
    """Estimate the seconds of a call on a device, from its bytes and, of products and convolutions, its operations."""
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
    """Make a graph of one step of a trace.

    Args:
        trace: the decoded JSON.
        step: the name of the call that holds the step; later calls of other threads belong to it, up to the next step.
            Empty: the whole trace.
        target: a device of ``outofcore.presets``, for times and the home.

    Raises:
        GraphError: the calls contradict each other.
        ValueError: no call has the name.
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
    """Decode a file that is compressed, and may be an archive of one."""
    text = gzip.decompress(data)
    if name.endswith(".tar.gz"):
        with tarfile.open(fileobj=io.BytesIO(text)) as archive:
            member = archive.extractfile(archive.getmembers()[0])
            text = member.read() if member is not None else b""
    return json.loads(text)


def read_instance(clone: Clone, case: str) -> Instance:
    """Read one of ``CASES``.

    With a home the budget is a share of the peak in core. Without, it lies at that share of the way from the smallest
    that has a plan up to the peak: what lasts cannot leave then, nor can gradients that wait for the optimizer.
    """
    name, share, home = CASES[case]
    path, step = _TRACES[name]
    file = convert_trace(_decode(path, clone.read(_FOLDER + path)), step)
    peak, least = in_core_budget(file.graph, file.costs), 0
    if not home:
        file = replace(file, costs=replace(file.costs, homes=()))
        least = smallest_budget(file.graph, file.costs)
    return Instance(case, int(least + (peak - least) * share), file)
