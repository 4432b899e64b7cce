"""An ONNX model as a ``torch.fx.GraphModule``."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import PythonCode

from outofcore.errors import InputError, OutOfCoreError
from outofcore.onnx.building import RAISED, Builder
from outofcore.onnx.contents import Declared, Model
from outofcore.onnx.operators.registry import Refused
from outofcore.onnx.storage import DTYPES, Files


@dataclass(frozen=True)
class _Signature:
    path: Path
    inputs: tuple[Declared, ...]
    output_names: tuple[str, ...]
    opset: int


class OnnxModel(fx.GraphModule):
    """An ONNX model as a module: made by ``outofcore.onnx.load``.

    It is called with tensors in the order of ``input_names``, or by these names, and returns the output, or a tuple of
    several. A call raises ``InputError`` if an input is missing or is not as the file declares it, and if a node cannot
    compute with what it gets.

    Its state has the names of the file's initialisers. Weights (fractions) are parameters; statistics, quantised
    weights, scales and tables are buffers; single numbers, shapes and axes are neither. ``model.graph`` has the nodes
    by their names, and ``model.code`` is the Python code that runs.
    """

    def __init__(self, model: Model, *, has_contents: bool = True) -> None:
        """``has_contents``: False leaves large weights on the device meta, and their files unread."""
        super().__init__(nn.Module(), fx.Graph(), "OnnxModel")
        names = tuple(item.name for item in model.graph.outputs)
        self.meta["onnx"] = _Signature(model.path, model.graph.inputs, names, model.opset)
        Builder(self, Files(), model.graph, has_contents=has_contents).build(model.graph, "")

    @property
    def inputs(self) -> tuple[Declared, ...]:
        """The inputs as the file declares them."""
        return self.meta["onnx"].inputs

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs, in the order of ``forward``."""
        return tuple(item.name for item in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return self.meta["onnx"].output_names

    @property
    def opset(self) -> int:
        """The version of the standard operators."""
        return self.meta["onnx"].opset

    def recompile(self) -> PythonCode:
        """Make the code of the graph. It is called without the wrapper of ``GraphModule``, which prints errors."""
        code = super().recompile()
        type(self).__call__ = OnnxModel.__call__
        return code

    def __call__(self, *args: Any, **named: Any) -> Any:
        given = self._given(args, named)
        try:
            return super().__call__(*given)
        except (OutOfCoreError, torch.OutOfMemoryError):
            raise
        except RAISED as error:
            told = _explained(error)
            if told is None:
                raise
            raise InputError(told) from error

    def _given(self, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        path, names = self.meta["onnx"].path, self.input_names
        if len(args) > len(names):
            raise InputError(f"{path.name} has {len(names)} inputs and was given {len(args)}")
        table = dict(zip(names, args, strict=False))
        for name, value in named.items():
            if name not in names or name in table:
                why = "is given twice" if name in table else "is not known"
                raise InputError(f"the input {name!r} {why}; {path.name} has {', '.join(names)}")
            table[name] = value
        missing = [name for name in names if name not in table]
        if missing:
            raise InputError(f"{path.name} is not given its input {missing[0]!r}; it has {', '.join(names)}")
        for declared in self.inputs:
            _check(declared, table[declared.name])
        return [table[name] for name in names]


def _check(declared: Declared, value: Any) -> None:
    """Raise an error for an input that is not as the file declares it."""
    if isinstance(value, list) and declared.code is None:  # a sequence
        return
    if not isinstance(value, Tensor):
        raise InputError(f"the input {declared.name!r} must be a tensor, and is {type(value).__name__}")
    if declared.code is None:
        return
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


def _explained(error: BaseException) -> str | None:
    """Return what went wrong in which node; None: no node has raised the error."""
    found: tuple[fx.Node, dict[str, Any]] | None = None
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, fx.GraphModule):
            line = linecache.getline(frame.f_code.co_filename, traceback.tb_lineno)
            name = re.match(r"\s*(\w+)", line)
            node = next((one for one in module.graph.nodes if name and one.name == name[1]), None)
            found = (node, frame.f_locals) if node is not None and node.meta.get("onnx") else found
        traceback = traceback.tb_next
    if found is None:
        return None
    node, values = found
    if isinstance(error, Refused):
        return f"{node.meta['onnx']}: {error}"
    shapes = ", ".join(_described(values.get(one.name)) for one in node.all_input_nodes)
    line = (str(error).splitlines() or [""])[0]
    return (
        f"{node.meta['onnx']} cannot be computed: {type(error).__name__}: {line} (its inputs: {shapes}); check the "
        "inputs of the model, and the model"
    )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "none" if value is None else type(value).__name__
