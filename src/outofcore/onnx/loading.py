"""``outofcore.onnx.load``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from outofcore.errors import InputError
from outofcore.onnx.contents import read_model
from outofcore.onnx.model import OnnxModel
from outofcore.onnx.operators import find


def load(path: str | os.PathLike[str], *, contents: bool = True) -> OnnxModel:
    """Load an ONNX file as a PyTorch module that can be run and trained, in core or within a budget.

    The whole file is checked before tensors are made. Tensors of 64 KiB and more stay in the file, or in its external
    data, and are read on first use. Writes by an optimizer stay in this process. The files must not change while the
    module is in use.

    Args:
        path: the model, of opset 1 to 28, with external data in the same folder.
        contents: False: put large weights on the meta device, to plan files larger than memory.

    Returns:
        a module that takes tensors in the order of ``model.input_names``, or by these names, and returns one tensor, or
        a tuple in the order of ``model.output_names``. Weights are parameters with their names in the file.

    Raises:
        InputError: the file is unreadable, damaged, inconsistent, refers to a file outside of its folder, or has an
            unsupported operator; or the package ``onnx`` is not installed.

    Limits: text, sparse and optional inputs, elements below four bits and custom domains are not supported. Scalars of
    the file are constants, not parameters.

    >>> import onnx, torch
    >>> from onnx import TensorProto, helper, numpy_helper
    >>> weight = numpy_helper.from_array(torch.ones(4, 2).numpy(), "weight")
    >>> x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    >>> graph = helper.make_graph([helper.make_node("MatMul", ["x", "weight"], ["y"])], "net", [x], [y], [weight])
    >>> onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), "net.onnx")
    >>> import outofcore
    >>> model = outofcore.onnx.load("net.onnx")
    >>> model(torch.ones(1, 4)).tolist(), [name for name, _ in model.named_parameters()]
    ([[4.0, 4.0]], ['weight'])
    """
    return OnnxModel(read_model(Path(path), _import_onnx(), _is_supported), has_contents=contents)


def _import_onnx() -> Any:
    try:
        import onnx  # noqa: PLC0415 - few users have it
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise InputError(
            "ONNX files need the package onnx, which is not installed; install it with: pip install outofcore[onnx]"
        ) from error
    return onnx


def _is_supported(domain: str, name: str, version: int) -> bool:
    return (domain, name) == ("", "Constant") or find(domain, name, version) is not None
