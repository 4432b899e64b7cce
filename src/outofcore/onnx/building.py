"""Build a ``torch.fx`` graph from an ONNX graph.

Values that do not depend on inputs are computed when the model is built. Values that depend on shapes alone are small
CPU tensors on any device ("host" below); a captured step treats them as constants.
"""

from __future__ import annotations

import inspect
import operator as builtin
from collections import ChainMap, defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from enum import Flag, auto
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

import outofcore
from outofcore.errors import InputError
from outofcore.onnx.contents import FileRange, Graph, Node, StoredTensor
from outofcore.onnx.operators.control import ControlNode
from outofcore.onnx.operators.elementwise import UNSIGNED, compute_plain
from outofcore.onnx.operators.registry import Operator, Unsupported, find, to_list
from outofcore.onnx.storage import DTYPES, Files, is_mapped

# Larger constant results are computed when the model runs.
_MAX_CONSTANT_ELEMENTS = 64
# The alignment of PyTorch's own tensors, in bytes.
ALIGNMENT = 64
# Floating-point inputs that are not trained: statistics, scales, limits, masks, tables.
_UNTRAINED_INPUTS: dict[str, frozenset[int]] = {
    "Attention": frozenset({3, 4, 5}),
    "BatchNormalization": frozenset({3, 4}),
    "Clip": frozenset({1, 2}),
    "ConvInteger": frozenset({2, 3}),
    "DequantizeLinear": frozenset({0, 1, 2}),
    "OneHot": frozenset({0, 1, 2}),
    "Pad": frozenset({2}),
    "QLinearConv": frozenset(range(9)),
    "QLinearMatMul": frozenset(range(8)),
    "QuantizeLinear": frozenset({1, 2}),
    "RotaryEmbedding": frozenset({1, 2}),
    **dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), frozenset({0, 1})),
}
_TRAINED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Attributes that hold the code of a data type.
_DTYPE_ATTRIBUTES = frozenset({"to", "dtype", "precision", "softmax_precision"})
# Errors of PyTorch's operators for inputs that do not match.
OPERATOR_ERRORS = (
    *(RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, ArithmeticError, AssertionError),
    *(MemoryError, Unsupported),
)


@dataclass(frozen=True, eq=False)
class _Value:
    """A value of an ONNX graph: the fx node that computes it, or a constant tensor."""

    node: fx.Node | None
    tensor: Tensor | None = None  # the constant, or, with a node, a weight of which only the shape is used
    is_host: bool = False  # on the CPU, and independent of data
    is_unaligned: bool = False  # on pages of a file, at an address with less than PyTorch's alignment

    @property
    def constant(self) -> Tensor | None:
        return self.tensor if self.node is None else None


def device_of(*tensors: Any) -> torch.device:
    return next((tensor.device for tensor in tensors if isinstance(tensor, Tensor)), torch.device("cpu"))


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor to a device; in a captured step it becomes a constant."""
    return torch.tensor(x.tolist(), dtype=x.dtype, device=device).reshape(x.shape)


class Builder:
    """Builds the fx graph of an ONNX model, or of a graph inside a node such as ``Loop``."""

    def __init__(
        self, module: fx.GraphModule, files: Files, graph: Graph, *, has_contents: bool, outer: Builder | None = None
    ) -> None:
        self._module = module
        self._files = files
        self._has_contents = has_contents
        self._outer = outer
        self._graph = fx.Graph()
        self._is_narrow: bool = _has_unsigned_dtypes(graph) if outer is None else outer._is_narrow
        self._values: MutableMapping[str, _Value | None] = {}
        self._imports: dict[fx.Node, _Value] = {}  # by nodes of the outer graph
        self._materialized: dict[tuple[_Value, str], fx.Node] = {}
        self._current_node: Node | None = None
        placeholders = [self._placeholder(declared.name) for declared in graph.inputs]
        # Weights and values of the outer graph are inserted before this node.
        self._device = self._call(device_of, *placeholders) if outer is None else self._placeholder("device")
        for declared, node in zip(graph.inputs, placeholders, strict=True):
            self._values[declared.name] = _Value(node)

    def build(self, graph: Graph, prefix: str, host_inputs: int = 0) -> list[fx.Node]:
        """Build the fx graph, and return the nodes of the enclosing graph that this graph takes as inputs."""
        # The first inputs of a Loop body, the iteration and the condition, are on the CPU.
        for declared in graph.inputs[:host_inputs]:
            value = self._values[declared.name]
            self._values[declared.name] = None if value is None else replace(value, is_host=True)
        nodes = [self._device_node(result) for result in self._build_nodes(graph, prefix)]
        self._graph.output(nodes[0] if self._outer is None and len(nodes) == 1 else tuple(nodes))
        if not self._device.users and self._outer is None:
            self._graph.erase_node(self._device)
        self._module.graph = self._graph
        return list(self._imports)

    def _build_nodes(self, graph: Graph, prefix: str) -> list[_Value | None]:
        """Add a graph's weights and nodes to the fx graph, and return the values of the graph's outputs."""
        uses = defaultdict[str, _Use](lambda: _Use.NONE)
        _record_uses(graph, uses)
        for name, stored in graph.tensors.items():
            self._values[name] = self._constant_or_weight(prefix + name, stored, uses[name])
        for node in graph.nodes:
            self._current_node = node
            stored = _constant_of(node)
            if stored is None:
                values = self._build_node(node, prefix)
            else:
                name = node.outputs[0]
                values = [self._constant_or_weight(prefix + name, stored, uses[name] & ~_Use.TRAINED)]
            self._values.update({name: value for name, value in zip(node.outputs, values, strict=False) if name})
        return [self._find(item.name) for item in graph.outputs]

    def _inline(self, graph: Graph, prefix: str, values: MutableMapping[str, _Value | None]) -> list[_Value | None]:
        """Add the nodes of ``graph`` to this fx graph, with its inputs in ``values``, and return its outputs."""
        before, self._values = self._values, values
        try:
            return self._build_nodes(graph, prefix)
        finally:
            self._values = before

    def _build_node(self, node: Node, prefix: str) -> Sequence[_Value | None]:
        """Add a node to the fx graph, or compute it now if its inputs are constant; return the node's outputs."""
        inputs = [self._find(name) if name else None for name in node.inputs]
        inner = f"{prefix}{node.name}/"
        if node.body is not None:
            names = [declared.name for declared in node.body.inputs]
            return self._inline(node.body, inner, dict(zip_longest(names, inputs)))
        operator = find(node.domain, node.op, node.version)
        if operator is None:
            raise InputError(
                f"{node} is not supported, and ONNX has no function for it; write it with other operators before the "
                "export"
            )
        keywords = self._call_keywords(node, operator)
        constants = self._fold_constants(node, operator, inputs, keywords)
        if constants is not None:
            return constants
        if not isinstance(operator.run, type):
            return self._call_operator(node, operator, inputs, keywords)
        condition = inputs[0].constant if node.op == "If" and inputs[0] else None
        if condition is not None:
            branch = node.attributes["then_branch" if condition.item() else "else_branch"]
            return self._inline(branch, inner, ChainMap({}, self._values))
        return self._call_control(node, operator, inputs, inner)

    # ---- values -----------------------------------------------------------------------------------------------------

    def _find(self, name: str) -> _Value | None:
        """Return a value by its name in this graph or an outer one; raises ``InputError`` for an unknown name."""
        if name in self._values:
            return self._values[name]
        if self._outer is None:
            raise InputError(f"no node produces {name!r}; export the model again")
        return self._import(self._outer._find(name))

    def _import(self, value: _Value | None) -> _Value | None:
        """Pass a value of the enclosing graph into this graph as an input; return a constant unchanged."""
        if value is None or value.node is None:
            return value
        if value.node not in self._imports:
            with self._graph.inserting_before(self._device):
                self._imports[value.node] = replace(value, node=self._placeholder(value.node.name))
        return self._imports[value.node]

    def _placeholder(self, name: str) -> fx.Node:
        node = self._graph.create_node("placeholder", "", name="x" if name in ("self", "") else name)
        node.target = node.name
        return node

    def _call(self, function: Any, *arguments: Any, **keywords: Any) -> fx.Node:
        name = keywords.pop("name", None)
        node = self._graph.create_node("call_function", function, arguments, keywords, name=name)
        node.meta["onnx"] = self._current_node
        return node

    def _constant_or_weight(self, name: str, stored: StoredTensor, use: _Use) -> _Value | None:
        """Return the value of a stored tensor: a constant for scalars, sizes and the like, else a new weight."""
        looked_at = _Use.READ in use and _Use.COMPUTED not in use
        if is_mapped(stored) and not (self._has_contents or looked_at):
            tensor = torch.empty(stored.shape, dtype=DTYPES[stored.code], device="meta")
        else:
            tensor = self._files.read_tensor(stored)
        is_whole = not tensor.is_floating_point() and not tensor.is_complex()
        if looked_at or not tensor.dim() or (is_whole and tensor.numel() <= _MAX_CONSTANT_ELEMENTS):
            return _Value(None, tensor.clone() if is_mapped(stored) else tensor)
        return self._register_weight(name, tensor, stored, use)

    def _register_weight(self, name: str, tensor: Tensor, stored: StoredTensor, use: _Use) -> _Value | None:
        """Register a weight as parameter or buffer of the outermost module, and return its value in this graph."""
        if self._outer is not None:
            return self._import(self._outer._register_weight(name, tensor, stored, use))
        holder, leaf, target = _find_or_add_module(self._module, name)
        if _Use.TRAINED in use and tensor.dtype in _TRAINED_DTYPES:
            holder.register_parameter(leaf, nn.Parameter(tensor))
        else:
            holder.register_buffer(leaf, tensor)
        with self._graph.inserting_before(self._device):
            node = self._graph.get_attr(target)
        if not self._device.args:
            self._device.args = (node,)
        unaligned = is_mapped(stored) and isinstance(stored.data, FileRange) and stored.data.offset % ALIGNMENT != 0
        return _Value(node, tensor, is_unaligned=unaligned)

    def _device_node(self, value: _Value | None, *, aligned: bool = True) -> fx.Node | None:
        """Return an fx node with the value on the model's device, at an aligned address if ``aligned``."""
        if value is None:
            return None
        if value.node is None or value.is_host:
            return self._materialize_once(value, "device")
        return self._call(outofcore.aligned, value.node) if value.is_unaligned and aligned else value.node

    def _materialize_once(self, value: _Value, device_kind: str) -> fx.Node:
        """Return an fx node that puts a value on the model's device or the CPU; add the node only once."""
        node = self._materialized.get((value, device_kind))
        if node is None:
            keywords = {"device": self._device} if device_kind == "device" else {}
            if value.constant is None:
                node = self._call(copy_to_device, value.node, **keywords)
            elif value.constant.numel():
                node = self._call(torch.tensor, value.constant.tolist(), dtype=value.constant.dtype, **keywords)
            else:
                node = self._call(torch.empty, tuple(value.constant.shape), dtype=value.constant.dtype, **keywords)
            self._materialized[value, device_kind] = node
        return node

    def _host_node(self, value: _Value) -> fx.Node:
        return self._materialize_once(value, "cpu") if value.node is None else value.node

    # ---- operators --------------------------------------------------------------------------------------------------

    def _call_keywords(self, node: Node, operator: Operator) -> dict[str, Any]:
        """Return the keyword arguments for a node's operator; raises ``InputError`` for an unusable attribute."""
        count = max((place + 1 for place, name in enumerate(node.outputs) if name), default=1)
        builder_values = {"version": node.version, "op": node.op, "outputs": len(node.outputs), "count": count}
        keywords: dict[str, Any] = {}
        for keyword, (name, default) in operator.parameters.items():
            value = node.attributes.get(name, default)
            if keyword in builder_values:
                value = builder_values[keyword]
            elif isinstance(value, StoredTensor):
                tensor = self._files.read_tensor(value)
                if tensor.numel() != 1:
                    raise InputError(f"{node}: the attribute {name!r} must hold one number; export the model again")
                value = (to_list(tensor)[0], tensor.dtype)
            elif name in _DTYPE_ATTRIBUTES and name in node.attributes:
                if value and (value not in DTYPES or value in (21, 22)):
                    raise InputError(
                        f"{node}: PyTorch does not compute with the ONNX data type {value} here; export the model "
                        "with another type"
                    )
                value = DTYPES.get(value, inspect.Parameter.empty)
            if value is not inspect.Parameter.empty:
                keywords[keyword] = value
        return keywords

    def _function(self, node: Node, operator: Operator) -> tuple[Any, tuple[str, ...]]:
        """Return the function that implements an operator, and the arguments that precede its inputs."""
        return (compute_plain, (node.op,)) if operator.is_plain and self._is_narrow else (operator.run, ())

    def _fold_constants(
        self, node: Node, operator: Operator, inputs: Sequence[_Value | None], keywords: Mapping[str, Any]
    ) -> list[_Value] | None:
        """Compute a node's outputs now, and return them as constants; None if impossible or too large."""
        tensors = [None if value is None else value.tensor if operator.by_shape else value.constant for value in inputs]
        if not operator.pure or any(value is not None and x is None for value, x in zip(inputs, tensors, strict=True)):
            return None
        function, lead = self._function(node, operator)
        here = {"device": torch.device("cpu")} if "device" in operator.parameters else {}
        arguments = [to_list(x) if x is not None and place in operator.read else x for place, x in enumerate(tensors)]
        try:
            with torch.no_grad():
                if operator.size is not None and operator.size(*arguments) > _MAX_CONSTANT_ELEMENTS:
                    return None
                result = function(*lead, *arguments, **keywords, **here)
        except OPERATOR_ERRORS:  # raised again if the node runs
            return None
        outputs: Sequence[Any] = result if operator.many else [result]
        if not all(isinstance(value, Tensor) and value.numel() <= _MAX_CONSTANT_ELEMENTS for value in outputs):
            return None
        return [_Value(None, value) for value in outputs]

    def _call_operator(
        self, node: Node, operator: Operator, inputs: Sequence[_Value | None], keywords: Mapping[str, Any]
    ) -> list[_Value | None]:
        """Add an operator call to the fx graph, with inputs on the right device; return the node's outputs."""
        values = [value for value in inputs if value is not None and value.node is not None]
        on_host = operator.pure and operator.size is None and bool(values) and all(value.is_host for value in values)
        arguments: list[Any] = []
        for place, value in enumerate(inputs):
            if value is None:
                arguments.append(None)
            elif place in operator.read:
                arguments.append(
                    to_list(value.constant) if value.constant is not None else self._call(to_list, value.node)
                )
            elif on_host or operator.by_shape or place in operator.host:
                arguments.append(self._host_node(value))
            else:
                arguments.append(self._device_node(value, aligned=(node.op, place) != ("Gather", 0)))
        while arguments and arguments[-1] is None:
            arguments.pop()
        here = {"device": torch.device("cpu") if on_host else self._device} if "device" in operator.parameters else {}
        function, lead = self._function(node, operator)
        result = self._call(function, *lead, *arguments, **keywords, **here, name=node.name)
        if operator.many:
            return self._unpack(node, result, is_host=on_host)
        return [_Value(result, is_host=on_host or operator.by_shape)]

    def _unpack(self, node: Node, result: fx.Node, *, is_host: bool = False) -> list[_Value | None]:
        return [
            _Value(self._call(builtin.getitem, result, place), is_host=is_host) if name else None
            for place, name in enumerate(node.outputs)
        ]

    def _call_control(
        self, node: Node, operator: Operator, values_in: Sequence[_Value | None], prefix: str
    ) -> list[_Value | None]:
        """Add a module for the graphs inside a node such as ``Loop``, and a call of it; return the node's outputs."""
        graphs = {name: x for name, x in node.attributes.items() if isinstance(x, Graph)}
        modules = {name: fx.GraphModule(nn.Module(), fx.Graph()) for name in graphs}
        outer: dict[str, Any] = {}
        for name, graph in graphs.items():
            builder = Builder(modules[name], self._files, graph, has_contents=self._has_contents, outer=self)
            outer[name] = builder.build(graph, prefix, host_inputs=2 if node.op == "Loop" else 0)
        self._current_node = node
        attributes = {name: x for name, x in node.attributes.items() if name not in graphs}
        results = max(len(graph.outputs) for graph in graphs.values()) - (node.op == "Loop")
        target = _free_name(self._module, node.name)
        self._module.add_module(target, operator.run(modules, attributes, results))
        inputs = [
            None
            if x is None
            else self._call(to_list, self._host_node(x))
            if place in operator.read
            else self._device_node(x)
            for place, x in enumerate(values_in)
        ]
        result = self._graph.create_node("call_module", target, (self._device, inputs, outer), name=node.name)
        result.meta["onnx"] = node
        return self._unpack(node, result)


def _has_unsigned_dtypes(graph: Graph) -> bool:
    """Return whether a graph or a graph inside it uses unsigned dtypes for which PyTorch has few kernels."""
    codes = {declared.code for declared in graph.inputs} | {stored.code for stored in graph.tensors.values()}
    for node in graph.nodes:
        for name, value in node.attributes.items():
            if isinstance(value, StoredTensor):
                codes.add(value.code)
            elif name in _DTYPE_ATTRIBUTES or name == "output_dtype":
                codes.add(value)
        if any(map(_has_unsigned_dtypes, (*node.inner_graphs(), *(() if node.body is None else (node.body,))))):
            return True
    return any(DTYPES.get(code) in UNSIGNED for code in codes if code is not None)


class _Use(Flag):
    NONE = 0
    READ = auto()  # as Python numbers
    COMPUTED = auto()  # as a tensor
    TRAINED = auto()  # as a weight


def _record_uses(graph: Graph, uses: dict[str, _Use]) -> None:
    """Record in ``uses`` how the nodes use each value of a graph: as Python numbers, as a tensor or as a weight."""
    for node in graph.nodes:
        operator = None if node.body is not None else find(node.domain, node.op, node.version)
        for place, name in enumerate(node.inputs):
            is_trained = place not in _UNTRAINED_INPUTS.get(node.op, ())
            use = _Use.COMPUTED | _Use.TRAINED if is_trained else _Use.COMPUTED
            is_read = operator is not None and place in operator.read | operator.host
            uses[name] |= _Use.READ if is_read else use
        for inner in node.inner_graphs():
            _record_uses(inner, uses)
    for item in graph.outputs:
        uses[item.name] |= _Use.COMPUTED


def _constant_of(node: Node) -> StoredTensor | None:
    """Return the tensor in a ``Constant`` node, None for any other node; raises ``InputError`` for text."""
    if (node.domain, node.op) != ("", "Constant"):
        return None
    attributes = node.attributes
    for name in ("value", "sparse_value"):
        if name in attributes:
            return attributes[name]
    for name, code, kind in (("value_float", 1, np.float32), ("value_int", 7, np.int64)):
        for key in (name, f"{name}s"):
            if key in attributes:
                array = np.array(attributes[key], dtype=kind)
                return StoredTensor("", code, array.shape, np.frombuffer(array.tobytes(), dtype=np.uint8))
    raise InputError(f"{node} is a constant without a number, such as text; remove it before the export")


def _find_or_add_module(root: nn.Module, name: str) -> tuple[nn.Module, str, str]:
    """Return a module to register a tensor in, the tensor's name there, and its dotted name from ``root``."""
    *parts, leaf = name.split(".")
    holder = root
    for part in parts:
        child = holder._modules.get(part)
        if child is None and part and not hasattr(holder, part):
            child = nn.Module()
            holder.add_module(part, child)
        if child is None or isinstance(child, ControlNode):
            break
        holder = child
    else:
        if leaf and not hasattr(holder, leaf):
            return holder, leaf, name
    flat = _free_name(root, name)
    return root, flat, flat


def _free_name(module: nn.Module, name: str) -> str:
    free_name = name.replace(".", "_") or "tensor"
    while hasattr(module, free_name):
        free_name += "_"
    return free_name
