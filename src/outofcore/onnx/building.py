"""From an ONNX graph to nodes of ``torch.fx``.

What does not depend on inputs is computed when the model is built. Values that follow from shapes alone are small
tensors on the CPU, whatever the device of the model ("host" below): a captured step knows what they hold, and the nodes
that only lead to them are no part of it.
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
from outofcore.onnx.operators.control import Control
from outofcore.onnx.operators.elementwise import NARROW, widened
from outofcore.onnx.operators.registry import Operator, Refused, find, items
from outofcore.onnx.storage import DTYPES, Files, is_mapped

# Results up to this size are computed when the model is built if they depend on no data.
_KNOWN_ELEMENTS = 64
# How PyTorch's own tensors lie in memory.
ALIGNMENT = 64
# Inputs that training leaves alone although they are fractions: statistics, scales, limits, masks, tables.
_NOT_TRAINED: dict[str, frozenset[int]] = {
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
_TRAINED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Attributes that are numbers of data types.
_DTYPES = frozenset({"to", "dtype", "precision", "softmax_precision"})
# What PyTorch's operators raise for inputs that do not go together.
RAISED = (
    *(RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, ArithmeticError, AssertionError),
    *(MemoryError, Refused),
)


@dataclass(frozen=True, eq=False)
class _Value:
    """A value of a graph: its fx node, or what it holds if the builder knows it.

    Attributes:
        tensor: what it holds; with a node, a weight, of which only the shape is known.
        is_host: it is on the CPU, and does not depend on data.
        is_unaligned: it is on the pages of a file, at an address at which PyTorch would not put it.
    """

    node: fx.Node | None
    tensor: Tensor | None = None
    is_host: bool = False
    is_unaligned: bool = False

    @property
    def known(self) -> Tensor | None:
        """What it holds, if no node makes it."""
        return self.tensor if self.node is None else None


def device_of(*tensors: Any) -> torch.device:
    """Return where a model computes: on the device of its first input, or of its weights."""
    return next((one.device for one in tensors if isinstance(one, Tensor)), torch.device("cpu"))


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a new tensor of the same numbers, of which a captured step keeps the numbers only."""
    return torch.tensor(x.tolist(), dtype=x.dtype, device=device).reshape(x.shape)


class Builder:
    """Builds the graph of a model, or of a node within it."""

    def __init__(
        self, module: fx.GraphModule, files: Files, graph: Graph, *, has_contents: bool, outer: Builder | None = None
    ) -> None:
        self._module = module
        self._files = files
        self._has_contents = has_contents
        self._outer = outer
        self._graph = fx.Graph()
        self._is_narrow: bool = _is_narrow(graph) if outer is None else outer._is_narrow
        self._values: MutableMapping[str, _Value | None] = {}
        self._imported: dict[fx.Node, _Value] = {}  # by nodes of the outer graph
        self._made: dict[tuple[_Value, str], fx.Node] = {}
        self._now: Node | None = None
        given = [self._placeholder(declared.name) for declared in graph.inputs]
        # Weights, and what comes from the outer graph, are put before this node.
        self._device = self._call(device_of, *given) if outer is None else self._placeholder("device")
        for declared, node in zip(graph.inputs, given, strict=True):
            self._values[declared.name] = _Value(node)

    def build(self, graph: Graph, prefix: str, hosts: int = 0) -> list[fx.Node]:
        """Give the module its graph.

        Args:
            prefix: of the names of tensors.
            hosts: how many of the first inputs are on the CPU and depend on no data.

        Returns:
            nodes of the outer graph, whose values the module takes after its inputs and before the device.
        """
        for declared in graph.inputs[:hosts]:
            value = self._values[declared.name]
            self._values[declared.name] = None if value is None else replace(value, is_host=True)
        found = [self._tensor(one) for one in self._nodes(graph, prefix)]
        self._graph.output(found[0] if self._outer is None and len(found) == 1 else tuple(found))
        if not self._device.users and self._outer is None:
            self._graph.erase_node(self._device)
        self._module.graph = self._graph
        return list(self._imported)

    def _nodes(self, graph: Graph, prefix: str) -> list[_Value | None]:
        uses = defaultdict[str, _Use](lambda: _Use.NONE)
        _learn_uses(graph, uses)
        for name, stored in graph.tensors.items():
            self._values[name] = self._constant(prefix + name, stored, uses[name])
        for node in graph.nodes:
            self._now = node
            stored = _constant_of(node)
            if stored is None:
                found = self._outputs(node, prefix)
            else:
                name = node.outputs[0]
                found = [self._constant(prefix + name, stored, uses[name] & ~_Use.TRAINED)]
            self._values.update({name: one for name, one in zip(node.outputs, found, strict=False) if name})
        return [self._find(item.name) for item in graph.outputs]

    def _within(self, graph: Graph, prefix: str, values: MutableMapping[str, _Value | None]) -> list[_Value | None]:
        """Put the nodes of another graph among those of this one."""
        before, self._values = self._values, values
        try:
            return self._nodes(graph, prefix)
        finally:
            self._values = before

    def _outputs(self, node: Node, prefix: str) -> Sequence[_Value | None]:
        given = [self._find(name) if name else None for name in node.inputs]
        inner = f"{prefix}{node.name}/"
        if node.body is not None:
            names = [declared.name for declared in node.body.inputs]
            return self._within(node.body, inner, dict(zip_longest(names, given)))
        operator = find(node.domain, node.op, node.version)
        if operator is None:
            raise InputError(f"{node} has neither an operator nor a body")
        keywords = self._keywords(node, operator)
        found = self._computed(node, operator, given, keywords)
        if found is not None:
            return found
        if not isinstance(operator.run, type):
            return self._called(node, operator, given, keywords)
        condition = given[0].known if node.op == "If" and given[0] else None
        if condition is not None:
            branch = node.attributes["then_branch" if condition.item() else "else_branch"]
            return self._within(branch, inner, ChainMap({}, self._values))
        return self._controlled(node, operator, given, inner)

    # ---- values -----------------------------------------------------------------------------------------------------

    def _find(self, name: str) -> _Value | None:
        if name in self._values:
            return self._values[name]
        if self._outer is None:
            raise InputError(f"nothing makes {name!r}")
        return self._import(self._outer._find(name))

    def _import(self, value: _Value | None) -> _Value | None:
        """Take a value from the outer graph."""
        if value is None or value.node is None:
            return value
        if value.node not in self._imported:
            with self._graph.inserting_before(self._device):
                self._imported[value.node] = replace(value, node=self._placeholder(value.node.name))
        return self._imported[value.node]

    def _placeholder(self, name: str) -> fx.Node:
        node = self._graph.create_node("placeholder", "", name="x" if name in ("self", "") else name)
        node.target = node.name
        return node

    def _call(self, function: Any, *arguments: Any, **keywords: Any) -> fx.Node:
        name = keywords.pop("name", None)
        node = self._graph.create_node("call_function", function, arguments, keywords, name=name)
        node.meta["onnx"] = self._now
        return node

    def _constant(self, name: str, stored: StoredTensor, use: _Use) -> _Value | None:
        looked_at = _Use.READ in use and _Use.COMPUTED not in use
        if is_mapped(stored) and not (self._has_contents or looked_at):
            tensor = torch.empty(stored.shape, dtype=DTYPES[stored.code], device="meta")
        else:
            tensor = self._files.tensor(stored)
        is_whole = not tensor.is_floating_point() and not tensor.is_complex()
        if looked_at or not tensor.dim() or (is_whole and tensor.numel() <= _KNOWN_ELEMENTS):
            return _Value(None, tensor.clone() if is_mapped(stored) else tensor)
        return self._weight(name, tensor, stored, use)

    def _weight(self, name: str, tensor: Tensor, stored: StoredTensor, use: _Use) -> _Value | None:
        if self._outer is not None:
            return self._import(self._outer._weight(name, tensor, stored, use))
        holder, leaf, target = _place(self._module, name)
        if _Use.TRAINED in use and tensor.dtype in _TRAINED:
            holder.register_parameter(leaf, nn.Parameter(tensor))
        else:
            holder.register_buffer(leaf, tensor)
        with self._graph.inserting_before(self._device):
            node = self._graph.get_attr(target)
        if not self._device.args:
            self._device.args = (node,)
        unaligned = is_mapped(stored) and isinstance(stored.data, FileRange) and stored.data.offset % ALIGNMENT != 0
        return _Value(node, tensor, is_unaligned=unaligned)

    def _tensor(self, value: _Value | None, *, aligned: bool = True) -> fx.Node | None:
        """Return a node whose value is on the device of the model."""
        if value is None:
            return None
        if value.node is None or value.is_host:
            return self._once(value, "device")
        return self._call(outofcore.aligned, value.node) if value.is_unaligned and aligned else value.node

    def _once(self, value: _Value, where: str) -> fx.Node:
        found = self._made.get((value, where))
        if found is None:
            place = {"device": self._device} if where == "device" else {}
            if value.known is None:
                found = self._call(on_device, value.node, **place)
            elif value.known.numel():
                found = self._call(torch.tensor, value.known.tolist(), dtype=value.known.dtype, **place)
            else:
                found = self._call(torch.empty, tuple(value.known.shape), dtype=value.known.dtype, **place)
            self._made[value, where] = found
        return found

    def _host(self, value: _Value) -> fx.Node:
        return self._once(value, "cpu") if value.node is None else value.node

    # ---- operators --------------------------------------------------------------------------------------------------

    def _keywords(self, node: Node, operator: Operator) -> dict[str, Any]:
        count = max((place + 1 for place, name in enumerate(node.outputs) if name), default=1)
        own = {"version": node.version, "op": node.op, "outputs": len(node.outputs), "count": count}
        found: dict[str, Any] = {}
        for keyword, (name, default) in operator.parameters.items():
            value = node.attributes.get(name, default)
            if keyword in own:
                value = own[keyword]
            elif isinstance(value, StoredTensor):
                tensor = self._files.tensor(value)
                if tensor.numel() != 1:
                    raise InputError(f"{node}: the attribute {name!r} must hold one number")
                value = (items(tensor)[0], tensor.dtype)
            elif name in _DTYPES and name in node.attributes:
                if value and (value not in DTYPES or value in (21, 22)):
                    raise InputError(f"{node}: PyTorch does not compute with its data type {value} here")
                value = DTYPES.get(value, inspect.Parameter.empty)
            if value is not inspect.Parameter.empty:
                found[keyword] = value
        return found

    def _function(self, node: Node, operator: Operator) -> tuple[Any, tuple[str, ...]]:
        return (widened, (node.op,)) if operator.is_plain and self._is_narrow else (operator.run, ())

    def _computed(
        self, node: Node, operator: Operator, given: Sequence[_Value | None], keywords: Mapping[str, Any]
    ) -> list[_Value] | None:
        """Compute what is small and follows from constants, and from shapes that are known."""
        tensors = [None if one is None else one.tensor if operator.by_shape else one.known for one in given]
        if not operator.pure or any(one is not None and x is None for one, x in zip(given, tensors, strict=True)):
            return None
        function, lead = self._function(node, operator)
        here = {"device": torch.device("cpu")} if "device" in operator.parameters else {}
        arguments = [items(x) if x is not None and place in operator.read else x for place, x in enumerate(tensors)]
        try:
            with torch.no_grad():
                if operator.size is not None and operator.size(*arguments) > _KNOWN_ELEMENTS:
                    return None
                result = function(*lead, *arguments, **keywords, **here)
        except RAISED:  # it is an error if it runs
            return None
        outputs: Sequence[Any] = result if operator.many else [result]
        if not all(isinstance(one, Tensor) and one.numel() <= _KNOWN_ELEMENTS for one in outputs):
            return None
        return [_Value(None, one) for one in outputs]

    def _called(
        self, node: Node, operator: Operator, given: Sequence[_Value | None], keywords: Mapping[str, Any]
    ) -> list[_Value | None]:
        values = [one for one in given if one is not None and one.node is not None]
        on_host = operator.pure and operator.size is None and bool(values) and all(one.is_host for one in values)
        arguments: list[Any] = []
        for place, one in enumerate(given):
            if one is None:
                arguments.append(None)
            elif place in operator.read:
                arguments.append(items(one.known) if one.known is not None else self._call(items, one.node))
            elif on_host or operator.by_shape or place in operator.host:
                arguments.append(self._host(one))
            else:
                arguments.append(self._tensor(one, aligned=(node.op, place) != ("Gather", 0)))
        while arguments and arguments[-1] is None:
            arguments.pop()
        here = {"device": torch.device("cpu") if on_host else self._device} if "device" in operator.parameters else {}
        function, lead = self._function(node, operator)
        result = self._call(function, *lead, *arguments, **keywords, **here, name=node.name)
        if operator.many:
            return self._items(node, result, is_host=on_host)
        return [_Value(result, is_host=on_host or operator.by_shape)]

    def _items(self, node: Node, result: fx.Node, *, is_host: bool = False) -> list[_Value | None]:
        return [
            _Value(self._call(builtin.getitem, result, place), is_host=is_host) if name else None
            for place, name in enumerate(node.outputs)
        ]

    def _controlled(
        self, node: Node, operator: Operator, given: Sequence[_Value | None], prefix: str
    ) -> list[_Value | None]:
        """Call a module with the graphs of a node."""
        graphs = {name: one for name, one in node.attributes.items() if isinstance(one, Graph)}
        modules = {name: fx.GraphModule(nn.Module(), fx.Graph()) for name in graphs}
        outer: dict[str, Any] = {}
        for name, graph in graphs.items():
            builder = Builder(modules[name], self._files, graph, has_contents=self._has_contents, outer=self)
            outer[name] = builder.build(graph, prefix, hosts=2 if node.op == "Loop" else 0)
        self._now = node
        others = {name: one for name, one in node.attributes.items() if name not in graphs}
        results = max(len(graph.outputs) for graph in graphs.values()) - (node.op == "Loop")
        target = _free_name(self._module, node.name)
        self._module.add_module(target, operator.run(modules, others, results))
        inputs = [
            None if one is None else self._call(items, self._host(one)) if place in operator.read else self._tensor(one)
            for place, one in enumerate(given)
        ]
        result = self._graph.create_node("call_module", target, (self._device, inputs, outer), name=node.name)
        result.meta["onnx"] = node
        return self._items(node, result)


def _is_narrow(graph: Graph) -> bool:
    """Whether a graph may have numbers that PyTorch has few kernels for."""
    codes = {declared.code for declared in graph.inputs} | {stored.code for stored in graph.tensors.values()}
    for node in graph.nodes:
        for name, value in node.attributes.items():
            if isinstance(value, StoredTensor):
                codes.add(value.code)
            elif name in _DTYPES or name == "output_dtype":
                codes.add(value)
        if any(map(_is_narrow, (*node.graphs(), *(() if node.body is None else (node.body,))))):
            return True
    return any(DTYPES.get(code) in NARROW for code in codes if code is not None)


class _Use(Flag):
    """How nodes use a value: some look at its numbers, some compute with it, some as with a weight."""

    NONE = 0
    READ = auto()
    COMPUTED = auto()
    TRAINED = auto()


def _learn_uses(graph: Graph, uses: dict[str, _Use]) -> None:
    """Add how the nodes of a graph, and of those within it, use values."""
    for node in graph.nodes:
        operator = None if node.body is not None else find(node.domain, node.op, node.version)
        for place, name in enumerate(node.inputs):
            is_trained = place not in _NOT_TRAINED.get(node.op, ())
            use = _Use.COMPUTED | _Use.TRAINED if is_trained else _Use.COMPUTED
            is_read = operator is not None and place in operator.read | operator.host
            uses[name] |= _Use.READ if is_read else use
        for inner in node.graphs():
            _learn_uses(inner, uses)
    for item in graph.outputs:
        uses[item.name] |= _Use.COMPUTED


def _constant_of(node: Node) -> StoredTensor | None:
    """What a node Constant holds."""
    if (node.domain, node.op) != ("", "Constant"):
        return None
    given = node.attributes
    for name in ("value", "sparse_value"):
        if name in given:
            return given[name]
    for name, code, kind in (("value_float", 1, np.float32), ("value_int", 7, np.int64)):
        for key in (name, f"{name}s"):
            if key in given:
                array = np.array(given[key], dtype=kind)
                return StoredTensor("", code, array.shape, np.frombuffer(array.tobytes(), dtype=np.uint8))
    raise InputError(f"{node} is a constant that holds no number")


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str, str]:
    """Return the module that holds a tensor, and its name in that and in the whole; parts between dots are modules."""
    *parts, leaf = name.split(".")
    holder = root
    for part in parts:
        child = holder._modules.get(part)
        if child is None and part and not hasattr(holder, part):
            child = nn.Module()
            holder.add_module(part, child)
        if child is None or isinstance(child, Control):
            break
        holder = child
    else:
        if leaf and not hasattr(holder, leaf):
            return holder, leaf, name
    flat = _free_name(root, name)
    return root, flat, flat


def _free_name(module: nn.Module, name: str) -> str:
    found = name.replace(".", "_") or "tensor"
    while hasattr(module, found):
        found += "_"
    return found
