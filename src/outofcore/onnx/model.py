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
from outofcore.onnx.building import OPERATOR_ERRORS, Builder
from outofcore.onnx.contents import DeclaredValue, Model
from outofcore.onnx.operators.registry import Unsupported
from outofcore.onnx.storage import DTYPES, Files


@dataclass(frozen=True)
class _Signature:
    path: Path
    inputs: tuple[DeclaredValue, ...]
    output_names: tuple[str, ...]
    opset: int


class OnnxModel(fx.GraphModule):
    """An ONNX model as a module, made by ``outofcore.onnx.load``.

    Call it with tensors in the order of ``input_names``, or by these names; it returns the output, or a tuple of
    outputs. A call raises ``InputError`` if an input is missing or does not match its declaration, or if a node fails.

    The state has the names of the file's initializers. Floating-point weights are parameters. Statistics, quantised
    weights, scales and tables are buffers. Scalars, shapes and axes are neither. ``model.graph`` has the file's node
    names, and ``model.code`` is the Python code that runs.
    """

    def __init__(self, model: Model, *, has_contents: bool = True) -> None:
        super().__init__(nn.Module(), fx.Graph(), "OnnxModel")
        names = tuple(item.name for item in model.graph.outputs)
        self.meta["onnx"] = _Signature(model.path, model.graph.inputs, names, model.opset)
        Builder(self, Files(), model.graph, has_contents=has_contents).build(model.graph, "")

    @property
    def inputs(self) -> tuple[DeclaredValue, ...]:
        """The declared inputs."""
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
        """Compile the graph, and remove the wrapper of ``GraphModule``, which prints errors."""
        code = super().recompile()
        type(self).__call__ = OnnxModel.__call__
        return code

    def __call__(self, *args: Any, **named: Any) -> Any:
        inputs = self._bind_inputs(args, named)
        try:
            return super().__call__(*inputs)
        except (OutOfCoreError, torch.OutOfMemoryError):
            raise
        except OPERATOR_ERRORS as error:
            message = _describe_failure(error)
            if message is None:
                raise
            raise InputError(message) from error

    def _bind_inputs(self, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        path, names = self.meta["onnx"].path, self.input_names
        if len(args) > len(names):
            raise InputError(
                f"{path.name} has {len(names)} inputs and was given {len(args)}; it takes {', '.join(names)}"
            )
        table = dict(zip(names, args, strict=False))
        for name, value in named.items():
            if name not in names or name in table:
                reason = "is given twice" if name in table else "is unknown"
                raise InputError(f"the input {name!r} {reason}; {path.name} has {', '.join(names)}")
            table[name] = value
        missing = [name for name in names if name not in table]
        if missing:
            raise InputError(f"{path.name} is not given its input {missing[0]!r}; it has {', '.join(names)}")
        for declared in self.inputs:
            _check_input(declared, table[declared.name])
        return [table[name] for name in names]


def _check_input(declared: DeclaredValue, value: Any) -> None:
    if isinstance(value, list) and declared.code is None:  # a sequence
        return
    if not isinstance(value, Tensor):
        raise InputError(f"the input {declared.name!r} must be a tensor, and is {type(value).__name__}; convert it")
    if declared.code is None:
        return
    dtype = DTYPES.get(declared.code)
    if dtype is not None and value.dtype is not dtype:
        raise InputError(f"the input {declared.name!r} must be of {dtype}, and is of {value.dtype}; convert it")
    if declared.shape is not None:
        declared_sizes = [dim.size for dim in declared.shape]
        fits = len(declared_sizes) == value.dim() and all(
            declared_size is None or declared_size == size
            for declared_size, size in zip(declared_sizes, value.shape, strict=True)
        )
        if not fits:
            shape = ", ".join(str(dim.name or "?") if dim.size is None else str(dim.size) for dim in declared.shape)
            raise InputError(
                f"the input {declared.name!r} must have the shape [{shape}], and has {list(value.shape)}; reshape it"
            )


def _describe_failure(error: BaseException) -> str | None:
    """Return a message that names the ONNX node that failed and its inputs; None if no node failed."""
    failed: tuple[fx.Node, dict[str, Any]] | None = None
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, fx.GraphModule):
            line = linecache.getline(frame.f_code.co_filename, traceback.tb_lineno)
            name = re.match(r"\s*(\w+)", line)
            node = next((candidate for candidate in module.graph.nodes if name and candidate.name == name[1]), None)
            failed = (node, frame.f_locals) if node is not None and node.meta.get("onnx") else failed
        traceback = traceback.tb_next
    if failed is None:
        return None
    node, values = failed
    if isinstance(error, Unsupported):
        return f"{node.meta['onnx']}: {error}; pass other inputs, or change this node and export the model again"
    shapes = ", ".join(_describe_value(values.get(candidate.name)) for candidate in node.all_input_nodes)
    line = (str(error).splitlines() or [""])[0]
    return (
        f"{node.meta['onnx']} cannot be computed: {type(error).__name__}: {line} (its inputs: {shapes}); check the "
        "inputs of the model, and the model"
    )


def _describe_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "none" if value is None else type(value).__name__
