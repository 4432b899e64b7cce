"""An ONNX graph as a PyTorch module: its weights are parameters, its nodes are modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outofcore._torch_internals import is_aligned, without_modes
from outofcore.errors import InputError, OutOfCoreError
from outofcore.follow.native import is_followed_tensor
from outofcore.onnx.contents import Declared, Graph, Model, Node, StoredTensor
from outofcore.onnx.operators import Call, Operator, find
from outofcore.onnx.operators.registry import Known
from outofcore.onnx.storage import DTYPES, Files, is_mapped

# Tensors up to this size are computed on the side if they depend on no data.
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
# What PyTorch's operators raise for inputs that do not go together.
_RAISED = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    MemoryError,
)


@dataclass(frozen=True)
class _Constant:
    """A tensor of the file that is a parameter or buffer of the model.

    Attributes:
        holder: the module that has it.
        name: in that module.
        mapped: whether it lies on the pages of its file, at any address.
    """

    holder: nn.Module
    name: str
    mapped: bool


@dataclass(frozen=True)
class _Step:
    """A node, the names of its inputs and outputs, and of what nobody needs after it."""

    module: OnnxNode
    drops: tuple[str, ...]


@dataclass(frozen=True)
class _Program:
    """A graph that can be run."""

    graph: Graph
    steps: tuple[_Step, ...]
    constants: Mapping[str, _Constant | Known]


@dataclass
class _Run:
    """One run of a model."""

    model: OnnxModel
    device: torch.device


class _Scope:
    """The values of a graph that runs, within those of the graph around it."""

    def __init__(self, program: _Program, around: _Scope | None) -> None:
        self.program = program
        self.values: dict[str, Any] = {}
        self.around = around

    def find(self, name: str) -> Any:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            if name in scope.program.constants:
                return scope.program.constants[name]
            scope = scope.around
        raise InputError(f"nothing has made {name!r}")


class OnnxNode(nn.Module):
    """One node of a graph. It has no parameters of its own: those of a graph may serve several nodes."""

    def __init__(self, node: Node, operator: Operator | None) -> None:
        super().__init__()
        self.node = node
        self.operator = operator
        self.programs: dict[int, _Program] = {}  # by the id of a graph of the node
        self.known: dict[int, Known] = {}  # by the id of a tensor of the node

    def extra_repr(self) -> str:
        node = self.node
        return f"{node.op}: {', '.join(node.inputs)} → {', '.join(node.outputs)}"

    def forward(self, run: _Run, scope: _Scope) -> list[Any]:
        """Compute the outputs, in the order of the node."""
        node = self.node
        given: list[Any] = [None if not name else scope.find(name) for name in node.inputs]
        try:
            if node.body is not None:
                body = self.programs[id(node.body)]
                values = [run.model.value_of(one, node, place, run) for place, one in enumerate(given)]
                return run.model.run_program(body, values, run, None)
            return self._computed(run, scope, given)
        except (OutOfCoreError, torch.OutOfMemoryError):
            raise
        except _RAISED as error:
            shapes = ", ".join(_described(one) for one in given)
            raise InputError(
                f"{node} cannot be computed: {type(error).__name__}: {_first_line(error)} (its inputs: {shapes}); "
                "check the inputs of the model, and the model"
            ) from error

    def _computed(self, run: _Run, scope: _Scope, given: list[Any]) -> list[Any]:
        node, operator = self.node, self.operator
        if operator is None:
            raise InputError(f"{node} has neither an operator nor a body")

        def within(graph: Graph, values: Sequence[Any]) -> list[Any]:
            return run.model.run_program(self.programs[id(graph)], values, run, scope)

        call = Call(node, run.device, within, lambda stored: self.known[id(stored)])
        if operator.pure:
            found = self._on_the_side(operator, call, given)
            if found is not None:
                return found
        values = [
            one if place in operator.read and isinstance(one, Known) else run.model.value_of(one, node, place, run)
            for place, one in enumerate(given)
        ]
        return _outputs(node, operator.run(call, *values))

    def _on_the_side(self, operator: Operator, call: Call, given: list[Any]) -> list[Any] | None:
        """What follows from shapes and constants alone, if it is small."""
        if operator.by_shape:
            values = [one.value if isinstance(one, Known) else one for one in given]
            if any(isinstance(one, _Constant) for one in values):
                values = [getattr(one.holder, one.name) if isinstance(one, _Constant) else one for one in values]
        elif all(one is None or isinstance(one, Known) for one in given):
            if operator.size is not None and operator.size(call, *given) > _KNOWN_ELEMENTS:
                return None
            values = [
                one.value if isinstance(one, Known) and place not in operator.read else one
                for place, one in enumerate(given)
            ]
        else:
            return None
        with without_modes(), torch.no_grad():
            outputs = _outputs(self.node, operator.run(call, *values))
        if all(one is None or (isinstance(one, torch.Tensor) and one.numel() <= _KNOWN_ELEMENTS) for one in outputs):
            return [None if one is None else Known(one) for one in outputs]
        return None


def _outputs(node: Node, result: Any) -> list[Any]:
    found = list(result) if isinstance(result, tuple) else [result]
    wanted = len(node.outputs)
    if len(found) < wanted and any(node.outputs[len(found) :]):
        raise InputError(f"{node} has {wanted} outputs, of which {len(found)} are computed here")
    return found[:wanted]


def _described(value: Any) -> str:
    if isinstance(value, _Constant):
        value = getattr(value.holder, value.name)
    if isinstance(value, Known):
        value = value.value
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "none" if value is None else type(value).__name__


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


class OnnxModel(nn.Module):
    """An ONNX model as a module: made by ``outofcore.onnx.load``.

    Its state has the names of the file's initialisers. Weights (fractions) are parameters; statistics, quantised
    weights, scales and tables are buffers; single numbers, shapes and axes are neither. ``model.nodes`` has a module
    for each node.

    Attributes:
        input_names: what ``forward`` takes, in this order or by name.
        output_names: what it returns: one tensor, or a tuple of several.
        inputs: the inputs as the file declares them.
        opset: the version of the standard operators.
    """

    def __init__(self, model: Model, *, has_contents: bool = True) -> None:
        """``has_contents``: False leaves large weights on the device meta, and their files unread."""
        super().__init__()
        self.nodes = nn.Module()
        self._path = model.path
        self.inputs: tuple[Declared, ...] = model.graph.inputs
        self.input_names = tuple(item.name for item in model.graph.inputs)
        self.output_names = tuple(item.name for item in model.graph.outputs)
        self.opset = model.opset
        files = Files()
        self._program = _Builder(self, files, has_contents=has_contents).program(model.graph, "", self.nodes)

    def extra_repr(self) -> str:
        return f"{self._path.name}: {', '.join(self.input_names)} → {', '.join(self.output_names)}"

    def forward(self, *args: torch.Tensor, **named: torch.Tensor) -> Any:
        """Run the graph.

        Args:
            args: tensors, in the order of ``input_names``.
            named: tensors by those names.

        Returns:
            the output, or a tuple of all.

        Raises:
            InputError: an input is missing, or is not as the file declares it; or a node cannot compute with what it
                gets.
        """
        given = self._given(args, named)
        device = next((one.device for one in given if isinstance(one, torch.Tensor)), None)
        if device is None:
            device = next((one.device for one in (*self.parameters(), *self.buffers())), torch.device("cpu"))
        run = _Run(self, device)
        found = self.run_program(self._program, given, run, None)
        made = [one.tensor(device) if isinstance(one, Known) else one for one in found]
        return made[0] if len(made) == 1 else tuple(made)

    def _given(self, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        if len(args) > len(self.inputs):
            raise InputError(f"{self._path.name} has {len(self.inputs)} inputs and was given {len(args)}")
        table = dict(zip(self.input_names, args, strict=False))
        for name, value in named.items():
            if name not in self.input_names or name in table:
                why = "is given twice" if name in table else "is not known"
                raise InputError(f"the input {name!r} {why}; {self._path.name} has {', '.join(self.input_names)}")
            table[name] = value
        missing = [name for name in self.input_names if name not in table]
        if missing:
            raise InputError(
                f"{self._path.name} is not given its input {missing[0]!r}; it has {', '.join(self.input_names)}"
            )
        return [_fitting(declared, table[declared.name]) for declared in self.inputs]

    # ---- how nodes get at values ------------------------------------------------------------------------------------

    def value_of(self, value: Any, node: Node, place: int, run: _Run) -> Any:
        """A value as a node computes with it: a tensor, a list of tensors, or None."""
        if isinstance(value, Known):
            return value.tensor(run.device)
        if isinstance(value, _Constant):
            tensor = getattr(value.holder, value.name)
            if not value.mapped or tensor.device.type != "cpu" or (node.op, place) == ("Gather", 0):
                return tensor
            # PyTorch's kernels round otherwise where memory does not lie as its own does, or where a loop moves it to.
            moved = tensor.storage_offset() == 0 and is_followed_tensor(tensor)
            return tensor if moved or is_aligned(tensor, ALIGNMENT) else tensor.clone()
        return value

    def run_program(self, program: _Program, values: Sequence[Any], run: _Run, around: _Scope | None) -> list[Any]:
        """Run a graph on the values of its inputs; what was left out is None."""
        scope = _Scope(program, around)
        graph = program.graph
        for place, declared in enumerate(graph.inputs):
            scope.values[declared.name] = values[place] if place < len(values) else None
        for step in program.steps:
            outputs = step.module(run, scope)
            for name, value in zip(step.module.node.outputs, outputs, strict=False):
                if name:
                    scope.values[name] = value
            for name in step.drops:
                scope.values.pop(name, None)
        node = Node(graph.name, "output", "", 1, (), (), {})
        found = [scope.find(item.name) for item in graph.outputs]
        return [one if isinstance(one, Known) else self.value_of(one, node, 0, run) for one in found]


def _fitting(declared: Declared, value: Any) -> Any:
    """An input, if it is as the file declares it."""
    if isinstance(value, list) and declared.code is None:  # a sequence
        return value
    if not isinstance(value, torch.Tensor):
        raise InputError(f"the input {declared.name!r} must be a tensor, and is {type(value).__name__}")
    if declared.code is None:
        return value
    dtype = DTYPES.get(declared.code)
    if dtype is not None and value.dtype is not dtype:
        raise InputError(f"the input {declared.name!r} must be of {dtype}, and is of {value.dtype}; convert it")
    if declared.shape is not None:
        wanted = [dim.size for dim in declared.shape]
        fits = len(wanted) == value.dim() and all(
            one is None or one == size for one, size in zip(wanted, value.shape, strict=True)
        )
        if not fits:
            shape = ", ".join(str(dim.name or "?") if dim.size is None else str(dim.size) for dim in declared.shape)
            raise InputError(f"the input {declared.name!r} must have the shape [{shape}], and has {list(value.shape)}")
    return value


class _Builder:
    """Makes modules of graphs."""

    def __init__(self, model: OnnxModel, files: Files, *, has_contents: bool) -> None:
        self._model = model
        self._files = files
        self._has_contents = has_contents

    def program(self, graph: Graph, prefix: str, modules: nn.Module) -> _Program:
        """A graph with its nodes as modules of ``modules``, and its tensors as those of the model."""
        uses = _Uses()
        uses.learn(graph)
        constants: dict[str, _Constant | Known] = {
            name: self._constant(prefix + name, stored, uses.of(name)) for name, stored in graph.tensors.items()
        }
        nodes: list[Node] = []
        for node in graph.nodes:
            made = _constant_of(node)
            if made is None:
                nodes.append(node)
            else:
                use = uses.of(node.outputs[0])
                constants[node.outputs[0]] = self._constant(prefix + node.outputs[0], made, use._replace_trained())
        lasts: dict[str, int] = {}
        for place, node in enumerate(nodes):
            for name in (*node.inputs, *node.outputs, *(n for g in node.graphs() for n in g.outer)):
                lasts[name] = place
        for item in graph.outputs:
            lasts.pop(item.name, None)
        drops: dict[int, list[str]] = {}
        for name, place in lasts.items():
            if name not in constants:
                drops.setdefault(place, []).append(name)
        steps: list[_Step] = []
        for place, node in enumerate(nodes):
            module = self._node(node, prefix, modules)
            steps.append(_Step(module, tuple(drops.get(place, ()))))
        return _Program(graph, tuple(steps), constants)

    def _node(self, node: Node, prefix: str, modules: nn.Module) -> OnnxNode:
        operator = None if node.body is not None else find(node.domain, node.op, node.version)
        module = OnnxNode(node, operator)
        base = name = (node.name or node.op).replace(".", "_")
        count = 1
        while not name or hasattr(modules, name):
            count += 1
            name = f"{base}_{count}"
        modules.add_module(name, module)
        graphs = [*node.graphs(), *(() if node.body is None else (node.body,))]
        for inner in graphs:
            module.programs[id(inner)] = self.program(inner, f"{prefix}{node.name}/", module)
        for value in node.attributes.values():
            if isinstance(value, StoredTensor):
                module.known[id(value)] = Known(self._files.tensor(value))
        return module

    def _constant(self, name: str, stored: StoredTensor, use: _Use) -> _Constant | Known:
        looked_at = use.read and not use.computed
        if is_mapped(stored) and not (self._has_contents or looked_at):
            tensor = torch.empty(stored.shape, dtype=DTYPES[stored.code], device="meta")
        else:
            tensor = self._files.tensor(stored)
        whole = not tensor.is_floating_point() and not tensor.is_complex()
        if looked_at:
            return Known(tensor.clone() if is_mapped(stored) else tensor)
        if not tensor.dim() or (whole and tensor.numel() <= _KNOWN_ELEMENTS):
            return Known(tensor)
        holder, leaf = _place(self._model, name)
        if use.trained and tensor.dtype in _TRAINED:
            holder.register_parameter(leaf, nn.Parameter(tensor))
        else:
            holder.register_buffer(leaf, tensor)
        return _Constant(holder, leaf, is_mapped(stored))


@dataclass(frozen=True)
class _Use:
    """How nodes use a constant: some look at its value, some compute with it, some as with a weight."""

    read: bool
    computed: bool
    trained: bool

    def _replace_trained(self) -> _Use:
        return _Use(self.read, self.computed, False)


class _Uses:
    """How all nodes of a graph, and of those within, use its constants."""

    def __init__(self) -> None:
        self._read: set[str] = set()
        self._computed: set[str] = set()
        self._trained: set[str] = set()

    def learn(self, graph: Graph) -> None:
        for node in graph.nodes:
            operator = None if node.body is not None else find(node.domain, node.op, node.version)
            spared = _NOT_TRAINED.get(node.op, frozenset())
            for place, name in enumerate(node.inputs):
                if operator is not None and place in operator.read:
                    self._read.add(name)
                else:
                    self._computed.add(name)
                    if place not in spared:
                        self._trained.add(name)
            for inner in node.graphs():
                self.learn(inner)
        for item in graph.outputs:
            self._computed.add(item.name)

    def of(self, name: str) -> _Use:
        return _Use(name in self._read, name in self._computed, name in self._trained)


def _constant_of(node: Node) -> StoredTensor | None:
    """What a node Constant holds."""
    if (node.domain, node.op) != ("", "Constant"):
        return None
    import numpy as np  # noqa: PLC0415

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


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module and the name in it under which a tensor is kept: parts between dots are modules, where that can be."""
    *outer, leaf = name.split(".")
    holder = root
    path: list[nn.Module] = []
    for part in outer:
        child = holder._modules.get(part)
        if child is None or isinstance(child, OnnxNode) or child is getattr(root, "nodes", None):
            if not part or hasattr(holder, part):
                path = []
                break
            child = nn.Module()
            holder.add_module(part, child)
        holder = child
        path.append(holder)
    else:
        if leaf and not hasattr(holder, leaf):
            return holder, leaf
    flat = name.replace(".", "_") or "tensor"
    while hasattr(root, flat):
        flat += "_"
    return root, flat
