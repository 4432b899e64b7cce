"""Read and check ONNX files (https://github.com/onnx/onnx/blob/main/docs/IR.md); errors are ``InputError``."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from outofcore.errors import InputError
from outofcore.onnx.wire import MAX_DEPTH, SlimModel, remove_large_tensors

# The newest version of the standard operators that has been reviewed.
NEWEST_OPSET = 28
# Nodes of a model with its functions inlined; bounds the expansion of a malicious file.
_MAX_NODES = 2_000_000
# Elements of a tensor, so that its bytes fit in 64 bits.
_MAX_ELEMENTS = 1 << 60
_STANDARD = ("", "ai.onnx")
# Bits of an element in a file, by data type in TensorProto.
BITS = {
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20), 8),
    **dict.fromkeys((4, 5, 10, 16), 16),
    **dict.fromkeys((1, 6, 12), 32),
    **dict.fromkeys((7, 11, 13, 14), 64),
    15: 128,
    **dict.fromkeys((21, 22), 4),
}
STRING = 8  # TensorProto.STRING


class _Immutable:
    """A base class of immutable objects, which ``deepcopy`` returns unchanged."""

    def __deepcopy__(self, memo: object) -> Self:
        return self


@dataclass(frozen=True)
class FileRange(_Immutable):
    path: Path
    offset: int
    length: int


@dataclass(frozen=True, eq=False)
class StoredTensor(_Immutable):
    """A tensor in an ONNX file, little-endian and in row-major order."""

    name: str  # "" for a tensor of an attribute
    code: int  # data type in TensorProto
    shape: tuple[int, ...]
    data: FileRange | np.ndarray[Any, Any]  # the bytes of a small tensor, or their place


@dataclass(frozen=True)
class Dimension:
    """One dimension of a declared shape: a number, a name, or unknown."""

    size: int | None
    name: str = ""


@dataclass(frozen=True)
class DeclaredValue:
    name: str
    code: int | None  # data type in TensorProto; None: not a tensor, or undeclared
    shape: tuple[Dimension, ...] | None  # None: undeclared


@dataclass(frozen=True, eq=False)
class Node(_Immutable):
    name: str  # without a name in the file, that of the first output
    op: str
    domain: str  # "" for standard operators
    version: int  # the opset of the domain
    inputs: tuple[str, ...]  # "": omitted
    outputs: tuple[str, ...]  # "": unused
    attributes: Mapping[str, Any]  # tensors as StoredTensor, graphs as Graph
    body: Graph | None = None  # of a function

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.domain or 'ai.onnx'}::{self.op} of opset {self.version})"

    def inner_graphs(self) -> Iterator[Graph]:
        """Yield the graphs among the node's attributes, such as the branches of an ``If``."""
        for value in self.attributes.values():
            if isinstance(value, Graph):
                yield value
            elif isinstance(value, tuple):
                yield from (item for item in value if isinstance(item, Graph))


@dataclass(frozen=True, eq=False)
class Graph(_Immutable):
    """An ONNX graph with its nodes in topological order."""

    name: str
    inputs: tuple[DeclaredValue, ...]  # without the initializers
    outputs: tuple[DeclaredValue, ...]
    nodes: tuple[Node, ...]
    tensors: Mapping[str, StoredTensor]  # initializers
    outer: frozenset[str] = frozenset()  # values of outer graphs that it uses


@dataclass(frozen=True)
class Model:
    path: Path
    opset: int  # of the standard operators
    graph: Graph


@dataclass
class _Reader:
    onnx: Any
    path: Path
    slim: SlimModel
    is_supported: Callable[[str, str, int], bool]
    functions: dict[tuple[str, str, str], Any] = field(default_factory=dict[tuple[str, str, str], Any])
    opsets: Mapping[str, int] = field(default_factory=dict[str, int])
    calls: tuple[Any, ...] = ()
    attributes: Mapping[str, Any] | None = None  # of the call of the function that is being inlined
    node_count: list[int] = field(default_factory=lambda: [0])


def read_model(path: Path, onnx: Any, is_supported: Callable[[str, str, int], bool]) -> Model:
    """Read an ONNX file without its large tensors; ``is_supported`` takes an operator's domain, name and opset."""
    from google.protobuf.message import DecodeError  # noqa: PLC0415 - it comes with the package onnx

    try:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            if not length:
                raise InputError("it is empty")
            # Not closed here: the traceback of an error may still refer to it.
            slimmed = remove_large_tensors(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except InputError as error:
        raise InputError(f"{path} is not a complete ONNX file: {error}; use another copy of it") from error
    try:
        proto = onnx.ModelProto.FromString(slimmed.message)
        return _read_model_message(_Reader(onnx, path, slimmed, is_supported), proto)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error.__cause__
    except (DecodeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError) as error:
        raise InputError(
            f"{path} is damaged, or not an ONNX file ({type(error).__name__}: {error}); use another copy of it"
        ) from error
    except RecursionError as error:
        raise InputError(f"{path}: graphs or functions are nested too deeply; simplify the model") from error


def _read_model_message(reader: _Reader, proto: Any) -> Model:
    opsets: dict[str, int] = {}
    for item in proto.opset_import:
        domain = _normalize_domain(item.domain)
        if domain in opsets:
            raise InputError(f"the opset of the domain {domain or 'ai.onnx'!r} is given twice; export the model again")
        opsets[domain] = item.version
    if not proto.HasField("graph") or not opsets:
        raise InputError(
            "the file has no graph or no opset, so it is not an ONNX model; save it again with onnx.save or "
            "torch.onnx.export"
        )
    reader.opsets = _check_opsets(opsets)
    for function in proto.functions:
        _check_text(function.name, function.overload, *function.input, *function.output)
        key = (_normalize_domain(function.domain), function.name, function.overload)
        if key in reader.functions:
            raise InputError(f"the function {function.name!r} is defined twice; export the model again")
        reader.functions[key] = function
    graph = _read_graph(reader, proto.graph, frozenset(), 0)
    if not graph.outputs:
        raise InputError("the graph has no outputs; export the model again")
    return Model(reader.path, opsets.get("", 0), graph)


def _check_opsets(opsets: Mapping[str, int]) -> Mapping[str, int]:
    version = opsets.get("", 1)
    if not 1 <= version <= NEWEST_OPSET:
        raise InputError(
            f"the model needs opset {version}, and opsets 1 to {NEWEST_OPSET} are supported; export it for one of these"
        )
    return opsets


def _check_text(*names: object) -> None:
    # Protobuf returns bytes for invalid text.
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"the name {name!r} is not text; the file is damaged")


def _normalize_domain(name: str) -> str:
    _check_text(name)
    return "" if name in _STANDARD else name


# ---- graphs ---------------------------------------------------------------------------------------------------------


def _read_graph(reader: _Reader, proto: Any, outer_values: frozenset[str], depth: int) -> Graph:
    """Read and check a graph; ``outer_values`` are the values that it may use from enclosing graphs."""
    if depth > MAX_DEPTH:
        raise InputError(f"graphs are nested more than {MAX_DEPTH} deep; simplify the model")
    tensors: dict[str, StoredTensor] = {}
    for item in proto.initializer:
        _add_unique(tensors, item.name, _read_tensor(reader, item), "initializer")
    for item in proto.sparse_initializer:
        _add_unique(tensors, item.values.name, _read_sparse(reader, item), "initializer")
    inputs: dict[str, DeclaredValue] = {}
    for item in proto.input:
        _add_unique(inputs, item.name, _read_declared_value(item), "input")
    outputs = tuple(_read_declared_value(item) for item in proto.output)
    inputs_and_weights = frozenset(inputs) | frozenset(tensors)
    protos = list(proto.node)
    nodes = _read_nodes(reader, protos, inputs_and_weights, outer_values, depth)
    produced = {name for node in nodes for name in node.outputs if name}
    ends = _first_duplicate([item.name for item in outputs])
    if ends is not None:
        raise InputError(f"two outputs of the graph are called {ends!r}; export the model again")
    for item in outputs:
        if item.name not in produced and item.name not in inputs_and_weights and item.name not in outer_values:
            raise InputError(
                f"no node produces the output {item.name!r} of the graph {proto.name!r}; export the model again"
            )
    outer = _used_names(nodes, outputs) - produced - inputs_and_weights
    required_inputs = tuple(item for name, item in inputs.items() if name not in tensors)
    return Graph(proto.name, required_inputs, outputs, nodes, tensors, frozenset(outer))


def _used_names(nodes: Sequence[Node], outputs: Sequence[DeclaredValue]) -> set[str]:
    used = {name for node in nodes for name in node.inputs if name}
    for node in nodes:
        for graph in node.inner_graphs():
            used |= graph.outer
    return used | {item.name for item in outputs}


def _add_unique(table: dict[str, Any], name: str, item: Any, kind: str) -> None:
    _check_text(name)
    if not name:
        raise InputError(f"an {kind} of a graph has no name; export the model again")
    if name in table:
        raise InputError(f"two {kind}s of a graph are called {name!r}; names must differ")
    table[name] = item


def _first_duplicate(names: Sequence[str]) -> str | None:
    unique: set[str] = set()
    for name in names:
        if name in unique:
            return name
        unique.add(name)
    return None


def _read_nodes(
    reader: _Reader,
    protos: Sequence[Any],
    inputs_and_weights: frozenset[str],
    outer_values: frozenset[str],
    depth: int,
) -> tuple[Node, ...]:
    """Read and sort a graph's nodes; ``outer_values`` are the values that they may use from enclosing graphs."""
    producers: dict[str, int] = {}
    for place, proto in enumerate(protos):
        _check_text(proto.name, proto.op_type, proto.domain, proto.overload, *proto.input, *proto.output)
        for name in proto.output:
            if not name:
                continue
            if name in producers or name in inputs_and_weights:
                raise InputError(
                    f"the value {name!r} is made twice, the second time by {_describe_node(proto)}; "
                    "export the model again"
                )
            producers[name] = place
    predecessors = [
        {producers[name] for name in _names_from_outside(proto, reader, depth) if name in producers}
        for place, proto in enumerate(protos)
    ]
    order = _topological_order(protos, predecessors)
    available = outer_values | inputs_and_weights
    visible = set(available)
    nodes: list[Node] = []
    for place in order:
        proto = protos[place]
        for name in proto.input:
            if name and name not in visible:
                raise InputError(
                    f"{_describe_node(proto)} uses {name!r}, which no node produces; export the model again"
                )
        nodes.append(_read_node(reader, proto, frozenset(visible) if _has_graphs(proto) else frozenset(), depth))
        visible.update(name for name in proto.output if name)
    return tuple(nodes)


def _has_graphs(proto: Any) -> bool:
    return any(item.type in (5, 10) for item in proto.attribute)


def _names_from_outside(proto: Any, reader: _Reader, depth: int) -> set[str]:
    """Return the names of all values that a node, or a graph inside the node, takes from outside."""
    names = {name for name in proto.input if name}
    if depth > MAX_DEPTH:
        raise InputError(f"graphs are nested more than {MAX_DEPTH} deep; simplify the model")
    for item in proto.attribute:
        for graph in (*((item.g,) if item.type == 5 else ()), *(item.graphs if item.type == 10 else ())):
            local_names = {declared.name for declared in graph.input} | {
                declared.name for declared in graph.initializer
            }
            inner = {declared.name for declared in graph.output}
            for node in graph.node:
                inner |= _names_from_outside(node, reader, depth + 1)
                local_names.update(node.output)
            names |= inner - local_names
    return names


def _topological_order(protos: Sequence[Any], needed: Sequence[set[int]]) -> list[int]:
    """Sort nodes, as indices, so that each follows its ``needed`` nodes; raises ``InputError`` for a cycle."""
    if all(predecessor < place for place, predecessors in enumerate(needed) for predecessor in predecessors):
        return list(range(len(protos)))
    remaining = [set(predecessors) for predecessors in needed]
    users: dict[int, list[int]] = {}
    for place, predecessors in enumerate(needed):
        for predecessor in predecessors:
            users.setdefault(predecessor, []).append(place)
    ready = [place for place in reversed(range(len(protos))) if not remaining[place]]
    order: list[int] = []
    while ready:
        place = ready.pop()
        order.append(place)
        for user in users.get(place, ()):
            remaining[user].discard(place)
            if not remaining[user]:
                ready.append(user)
    if len(order) < len(protos):
        place = min(set(range(len(protos))) - set(order))
        raise InputError(
            f"the graph has a cycle, among others through {_describe_node(protos[place])}, so it cannot be run; "
            "export the model again"
        )
    return order


def _describe_node(proto: Any) -> str:
    name = proto.name or next(iter(proto.output), "")
    return f"node {name!r} ({proto.domain or 'ai.onnx'}::{proto.op_type})"


def _read_node(reader: _Reader, proto: Any, outer_values: frozenset[str], depth: int) -> Node:
    """Read a node; if the node stands for a function, the function's graph becomes its ``body``."""
    reader.node_count[0] += 1
    if reader.node_count[0] > _MAX_NODES:
        raise InputError(f"the model has more than {_MAX_NODES:,} nodes with its functions inlined; simplify it")
    domain = _normalize_domain(proto.domain)
    attributes = _read_attributes(reader, proto, outer_values, depth)
    key = (domain, proto.op_type, proto.overload)
    if key in reader.functions:
        body = _inline_function(reader, proto, reader.functions[key], attributes, depth)
        version = reader.opsets.get(domain, 1)
        name = proto.name or next(iter(proto.output), proto.op_type)
        return Node(name, proto.op_type, domain, version, tuple(proto.input), tuple(proto.output), {}, body)
    if domain not in reader.opsets:
        raise InputError(
            f"{_describe_node(proto)} is of the domain {domain or 'ai.onnx'!r}, which has no opset in the model; "
            "export the model again"
        )
    name = proto.name or next(iter(proto.output), proto.op_type)
    node = Node(
        name,
        proto.op_type,
        domain,
        reader.opsets[domain],
        tuple(proto.input),
        tuple(proto.output),
        attributes,
    )
    schema = _find_schema(reader.onnx, domain, proto.op_type, node.version)
    if reader.is_supported(domain, proto.op_type, node.version):
        if schema is not None:
            _check_schema(reader, node, schema)
        return node
    if schema is None or not schema.has_function:
        raise InputError(
            f"{node} is not supported; write it with other operators before the export, or run this part of the model "
            "elsewhere"
        )
    _check_schema(reader, node, schema)
    defaults = {name: item.default_value for name, item in schema.attributes.items()}
    inner = {
        name: _read_attribute(reader, node.name, item, outer_values, depth)
        for name, item in defaults.items()
        if item.type and name not in attributes
    }
    return replace(
        node, attributes={}, body=_inline_function(reader, proto, schema.function_body, {**inner, **attributes}, depth)
    )


def _inline_function(reader: _Reader, proto: Any, function: Any, attributes: Mapping[str, Any], depth: int) -> Graph:
    """Read a called function as a graph with the call's attributes; raises ``InputError`` on recursion."""
    title = f"{function.domain}::{function.name}"
    key = (function.domain, function.name, function.overload)
    if key in reader.calls:
        raise InputError(f"the function {title} calls itself, so it cannot be run; write it without recursion")
    if depth > MAX_DEPTH:
        raise InputError(f"functions call each other more than {MAX_DEPTH} deep; simplify the model")
    if len(proto.input) > len(function.input) or len(proto.output) > len(function.output):
        raise InputError(
            f"{_describe_node(proto)} has more inputs or outputs than the function {title}; export the model again"
        )
    opsets: dict[str, int] = {_normalize_domain(item.domain): item.version for item in function.opset_import}
    defaults = {
        item.name: _read_attribute(reader, title, item, frozenset(), depth) for item in function.attribute_proto
    }
    inner = replace(
        reader,
        opsets=_check_opsets({**reader.opsets, **opsets}),
        calls=(*reader.calls, key),
        attributes={**defaults, **attributes},
    )
    names = list(function.input)
    if _first_duplicate(names) is not None:
        raise InputError(
            f"two inputs of the function {title} are called {_first_duplicate(names)!r}; export the model again"
        )
    nodes = _read_nodes(inner, list(function.node), frozenset(names), frozenset(), depth + 1)
    produced = {name for node in nodes for name in node.outputs if name}
    for name in function.output:
        if name not in produced and name not in names:
            raise InputError(f"no node produces the output {name!r} of the function {title}; export the model again")
    inputs = tuple(DeclaredValue(name, None, None) for name in names)
    outputs = tuple(DeclaredValue(name, None, None) for name in list(function.output)[: len(proto.output)])
    return Graph(title, inputs, outputs, nodes, {})


def _read_declared_value(item: Any) -> DeclaredValue:
    _check_text(item.name)
    kind = item.type.WhichOneof("value") if item.HasField("type") else None
    if kind != "tensor_type":
        return DeclaredValue(item.name, None, None)
    tensor = item.type.tensor_type
    shape = None
    if tensor.HasField("shape"):
        shape = tuple(
            Dimension(dim.dim_value if dim.HasField("dim_value") else None, dim.dim_param) for dim in tensor.shape.dim
        )
        for dim in shape:
            _check_text(dim.name)
            if dim.size is not None and dim.size < 0:
                raise InputError(f"{item.name!r} is declared with the size {dim.size}; export the model again")
    return DeclaredValue(item.name, tensor.elem_type or None, shape)


# ---- attributes -----------------------------------------------------------------------------------------------------

# The field of each type of attribute in AttributeProto.
_VALUE_FIELDS = {
    1: "f",
    2: "i",
    3: "s",
    4: "t",
    5: "g",
    6: "floats",
    7: "ints",
    8: "strings",
    9: "tensors",
    10: "graphs",
}
_VALUE_FIELDS[11] = "sparse_tensor"


def _read_attributes(reader: _Reader, proto: Any, outer_values: frozenset[str], depth: int) -> dict[str, Any]:
    """Return a node's attributes by name; inside a function, resolve references to the call's attributes."""
    attributes: dict[str, Any] = {}
    for item in proto.attribute:
        _check_text(item.name, item.ref_attr_name)
        if item.name in attributes:
            raise InputError(f"{_describe_node(proto)} has the attribute {item.name!r} twice; export the model again")
        if item.ref_attr_name:
            if reader.attributes is None:
                raise InputError(
                    f"{_describe_node(proto)} refers to the function attribute {item.name!r} outside of a function; "
                    "export the model again"
                )
            if item.ref_attr_name in reader.attributes:
                attributes[item.name] = reader.attributes[item.ref_attr_name]
            continue
        attributes[item.name] = _read_attribute(reader, _describe_node(proto), item, outer_values, depth)
    return attributes


def _read_attribute(reader: _Reader, title: str, item: Any, outer_values: frozenset[str], depth: int) -> Any:
    """Return the value of an attribute: a number, text, ``StoredTensor`` or ``Graph``, or a tuple of such values."""
    if item.type not in _VALUE_FIELDS:
        raise InputError(
            f"{title}: the attribute {item.name!r} is of the unknown type {item.type}; export the model again"
        )
    name = _VALUE_FIELDS[item.type]
    value = getattr(item, name)
    if name == "s":
        return _decode_text(value)
    if name == "t":
        return _read_tensor(reader, value)
    if name == "sparse_tensor":
        return _read_sparse(reader, value)
    if name == "g":
        return _read_graph(reader, value, outer_values, depth + 1)
    if name == "strings":
        return tuple(_decode_text(element) for element in value)
    if name == "tensors":
        return tuple(_read_tensor(reader, element) for element in value)
    if name == "graphs":
        return tuple(_read_graph(reader, element, outer_values, depth + 1) for element in value)
    return tuple(value) if name in ("floats", "ints") else value


def _decode_text(value: bytes) -> str:
    return value.decode("utf-8", errors="replace")


def _find_schema(package: Any, domain: str, name: str, version: int) -> Any:
    try:
        return package.defs.get_schema(name, max_inclusive_version=version, domain=domain)
    except package.defs.SchemaError:
        return None


def _check_schema(reader: _Reader, node: Node, schema: Any) -> None:
    """Raise ``InputError`` if a node breaks its operator's schema, or if the operator is deprecated."""
    if schema.deprecated:
        raise InputError(
            f"{node}: ONNX has removed this operator; convert the model to a newer opset with onnx.version_converter"
        )
    for name, value in node.attributes.items():
        if name not in schema.attributes:
            if node.domain == "":
                raise InputError(
                    f"{node} has an attribute {name!r}, which the operator does not have; export the model again"
                )
            continue
        type_name = schema.attributes[name].type.name
        if not _has_type(type_name, value):
            raise InputError(f"{node}: the attribute {name!r} is not of the type {type_name}; export the model again")
    for name, item in schema.attributes.items():
        if item.required and name not in node.attributes:
            raise InputError(f"{node} lacks its attribute {name!r}; export the model again")
    counts = (
        ("inputs", len(node.inputs), schema.min_input, schema.max_input),
        ("outputs", len(node.outputs), schema.min_output, schema.max_output),
    )
    for kind, count, min_count, max_count in counts:
        if not min_count <= count <= max_count:
            raise InputError(
                f"{node} has {count} {kind}, and the operator allows {min_count} to {max_count}; export the model again"
            )
    for place, formal in enumerate(schema.inputs):
        option = formal.option.name
        if option == "Single" and place < len(node.inputs) and not node.inputs[place]:
            raise InputError(f"{node} lacks its input {formal.name!r}; export the model again")


def _has_type(type_name: str, value: Any) -> bool:
    kinds: dict[str, Callable[[Any], bool]] = {
        "FLOAT": lambda v: isinstance(v, float),
        "INT": lambda v: isinstance(v, int),
        "STRING": lambda v: isinstance(v, str),
        "TENSOR": lambda v: isinstance(v, StoredTensor),
        "SPARSE_TENSOR": lambda v: isinstance(v, StoredTensor),
        "GRAPH": lambda v: isinstance(v, Graph),
        "FLOATS": lambda v: isinstance(v, tuple) and all(isinstance(element, float) for element in v),
        "INTS": lambda v: isinstance(v, tuple) and all(isinstance(element, int) for element in v),
        "STRINGS": lambda v: isinstance(v, tuple) and all(isinstance(element, str) for element in v),
    }
    return type_name not in kinds or kinds[type_name](value)


# ---- tensors --------------------------------------------------------------------------------------------------------


def _read_tensor(reader: _Reader, proto: Any) -> StoredTensor:
    """Read a tensor's name, type, shape and bytes; for a large or external tensor, only where the bytes are."""
    _check_text(proto.name)
    shape, code = tuple(proto.dims), proto.data_type
    title = f"the tensor {proto.name!r}" if proto.name else "a tensor of an attribute"
    if any(size < 0 for size in shape) or math.prod(max(size, 1) for size in shape) > _MAX_ELEMENTS:
        raise InputError(f"{title} has the impossible shape {shape}; export the model again")
    if proto.HasField("segment"):
        raise InputError(f"{title} is in segments, which are not supported; save the model again")
    if code == STRING and not proto.external_data:
        strings = np.array([_decode_text(string) for string in proto.string_data], dtype=object)
        return StoredTensor(proto.name, code, shape, _check_shape(title, strings, shape))
    if code not in BITS:
        names = reader.onnx.TensorProto.DataType
        name = names.Name(code) if code in names.values() else str(code)
        raise InputError(f"{title} is of the data type {name}, which is not supported; convert it to another type")
    count = math.prod(shape)
    byte_count = (count * BITS[code] + 7) // 8
    entries = {entry.key: entry.value for entry in proto.external_data}
    if reader.slim.key in entries:
        offset, length = reader.slim.ranges[int(entries[reader.slim.key])]
        place = FileRange(reader.path, offset, length)
    elif proto.data_location == proto.EXTERNAL:
        place = _find_external(reader.path, title, entries, byte_count)
    elif proto.HasField("raw_data"):
        _check_length(title, shape, code, len(proto.raw_data), byte_count)
        return StoredTensor(proto.name, code, shape, np.frombuffer(proto.raw_data, dtype=np.uint8))
    else:
        return StoredTensor(proto.name, code, shape, _read_typed_field(reader, title, proto, shape))
    _check_length(title, shape, code, place.length, byte_count)
    return StoredTensor(proto.name, code, shape, place)


def _check_length(title: str, shape: tuple[int, ...], code: int, length: int, byte_count: int) -> None:
    if length != byte_count:
        raise InputError(
            f"{title} has {length} bytes, and its shape {shape} with {BITS[code]} bits per element needs {byte_count}; "
            "the file was cut off or changed: use another copy of it"
        )


def _check_shape(title: str, array: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if array.size != math.prod(shape):
        raise InputError(
            f"{title} has {array.size} elements, and its shape {shape} needs {math.prod(shape)}; export the model again"
        )
    return array.reshape(shape)


def _read_typed_field(reader: _Reader, title: str, proto: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the bytes of a tensor that is stored as numbers in a typed field, such as ``float_data``."""
    code = proto.data_type
    name, kind = _TYPED_FIELDS.get(code, ("int32_data", np.int32))
    values = np.array(list(getattr(proto, name)), dtype=kind)
    number_count = math.prod(shape) if BITS[code] >= 8 else (math.prod(shape) * BITS[code] + 7) // 8
    if code in (14, 15):
        number_count *= 2
    if values.size != number_count:
        raise InputError(
            f"{title} has {values.size} numbers, and its shape {shape} needs {number_count}; export the model again"
        )
    if name == "int32_data" and code != 6:  # int32_data stores an element of a smaller type per number
        values = values.astype({8: np.uint8, 4: np.uint8, 16: np.uint16}[BITS[code]])
    return np.frombuffer(values.tobytes(), dtype=np.uint8)


# By data type: the typed field, and the NumPy type of its numbers.
_TYPED_FIELDS: dict[int, tuple[str, Any]] = {
    1: ("float_data", np.float32),
    14: ("float_data", np.float32),
    11: ("double_data", np.float64),
    15: ("double_data", np.float64),
    7: ("int64_data", np.int64),
    12: ("uint64_data", np.uint32),
    13: ("uint64_data", np.uint64),
}


def _find_external(model: Path, title: str, entries: Mapping[str, str], byte_count: int) -> FileRange:
    """Find the bytes of an external tensor; raises ``InputError`` for files outside of the model's folder."""
    # A downloaded model could otherwise read any file of the user.
    location = entries.get("location", "")
    folder = model.resolve().parent
    outside = (
        f"{title} is stored in {location!r}, which is outside of the model's folder and therefore not read; put the "
        "data next to the model, not as a link, and save the model with that name"
    )
    if not location:
        raise InputError(f"{title} is in another file that the model does not name; export the model again")
    if "\0" in location or Path(location).is_absolute() or ".." in Path(location.replace("\\", "/")).parts:
        raise InputError(outside)
    path = model.parent / location
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise InputError(f"{title} is stored in {path}, which cannot be read: {error}; put the file there") from error
    if not real.is_relative_to(folder) and not real.is_relative_to(model.parent.resolve()):
        raise InputError(outside)
    if not real.is_file():
        raise InputError(f"{title} is stored in {path}, which is not a file; put the data there")
    try:
        offset = int(entries.get("offset") or 0)
        length = int(entries.get("length") or byte_count)
    except ValueError as error:
        raise InputError(
            f"{title}: its offset or length in {location!r} is not a number; export the model again"
        ) from error
    size = real.stat().st_size
    if offset < 0 or length < 0 or offset + length > size:
        raise InputError(
            f"{title} is at bytes {offset} to {offset + length} of {path}, which has {size}; the file was cut off or "
            "replaced: use another copy of it"
        )
    return FileRange(real, offset, length)


def _read_sparse(reader: _Reader, proto: Any) -> StoredTensor:
    """Read a sparse tensor, and return it as a dense one."""
    values, places = _read_tensor(reader, proto.values), _read_tensor(reader, proto.indices)
    shape = tuple(proto.dims)
    title = f"the sparse tensor {values.name!r}"
    count = math.prod(shape)
    if any(size < 0 for size in shape) or count * BITS[values.code] > 8 << 30:
        raise InputError(
            f"{title} has the shape {shape}, and takes more than 1 GiB as a dense tensor; export it as dense"
        )
    if BITS[values.code] < 8:
        raise InputError(f"{title} has elements of fewer than eight bits; export it as a dense tensor")
    if places.code != 7 or len(values.shape) != 1 or places.shape[:1] != values.shape or len(places.shape) > 2:
        raise InputError(f"{title} has values and indices that do not match; export the model again")
    positions = _bytes_of(places).view(np.int64).reshape(places.shape)
    if positions.ndim == 2:
        if positions.shape[1] != len(shape):
            raise InputError(
                f"{title} has indices for {positions.shape[1]} dimensions, and its shape {shape} has {len(shape)}; "
                "export the model again"
            )
        if positions.size and ((positions < 0) | (positions >= np.array(shape, dtype=np.int64))).any():
            raise InputError(f"{title} has indices outside of its shape {shape}; export the model again")
        positions = positions @ np.array([math.prod(shape[place + 1 :]) for place in range(len(shape))], dtype=np.int64)
    if positions.size and (positions.min() < 0 or positions.max() >= count):
        raise InputError(f"{title} has indices outside of its shape {shape}; export the model again")
    width = BITS[values.code] // 8
    dense = np.zeros((count, width), dtype=np.uint8)
    dense[positions] = _bytes_of(values).reshape(-1, width)
    return StoredTensor(values.name, values.code, shape, dense.reshape(-1))


def _bytes_of(tensor: StoredTensor) -> np.ndarray[Any, Any]:
    data = tensor.data
    if not isinstance(data, FileRange):
        return data
    with contextlib.closing(data.path.open("rb")) as file:
        file.seek(data.offset)
        return np.frombuffer(file.read(data.length), dtype=np.uint8)
