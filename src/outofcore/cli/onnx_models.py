"""ONNX files on the command line: plan their forward pass, or run them on arrays within a budget."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outofcore.api import CheckName, budget, compile, open_home
from outofcore.errors import CaptureError, InputError
from outofcore.materialization import build
from outofcore.onnx import OnnxModel, load
from outofcore.onnx.storage import DTYPES

# Dtypes that NumPy lacks: files store such inputs and outputs as float32.
_DTYPES_WITHOUT_NUMPY = (
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)


@dataclass(frozen=True)
class ForwardStep:
    """The forward pass of an ONNX model, without gradients; planning uses only the shapes of ``inputs``."""

    model: OnnxModel
    inputs: tuple[torch.Tensor, ...]
    title: str

    def __call__(self, *inputs: torch.Tensor) -> Any:
        with torch.no_grad():
            return self.model(*inputs)


def forward_step(path: str, dims: Sequence[str], arrays: Sequence[str]) -> ForwardStep:
    """Build the forward pass of an ONNX file; dynamic sizes come from ``dims``, or from array files."""
    model = load(path, contents=False)
    if arrays:
        if dims:
            raise InputError("--input and --dim both give sizes; leave one of them out")
        inputs = read_inputs(model, arrays)
    else:
        inputs = _meta_inputs(model, path, _parse_dims(dims))
    shapes = ", ".join(
        f"{name} {'×'.join(map(str, x.shape))}" for name, x in zip(model.input_names, inputs, strict=True)
    )
    count = sum(p.numel() for p in model.parameters()) + sum(b.numel() for b in model.buffers())
    return ForwardStep(model, inputs, f"{path}: forward pass, {count:,} weights, inputs {shapes or 'none'}")


def _parse_dims(dims: Sequence[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for text in dims:
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal():
            raise InputError(f"{text!r} is not a size; write e.g. --dim batch=4")
        sizes[name] = int(size)
    return sizes


def _meta_inputs(model: OnnxModel, path: str, sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
    """Return the model's inputs as meta tensors; raise ``InputError`` if a dynamic dimension has no size."""
    inputs: list[torch.Tensor] = []
    used: set[str] = set()
    missing: dict[str, str] = {}
    for declared in model.inputs:
        if declared.shape is None:
            raise InputError(f"{path} has no shape for its input {declared.name!r}; give arrays with --input x.npz")
        shape: list[int] = []
        for axis, dim in enumerate(declared.shape):
            dim_key = f"{declared.name}.{axis}"
            key = dim_key if dim_key in sizes or not dim.name else dim.name
            if dim.size is not None:
                shape.append(dim.size)
            elif key in sizes:
                used.add(key)
                shape.append(sizes[key])
            else:
                missing[key] = declared.name
        if len(shape) == len(declared.shape):
            dtype = DTYPES.get(declared.code or 1, torch.float32)
            inputs.append(torch.empty(shape, dtype=dtype, device="meta"))
    if missing:
        example = " ".join(f"--dim {key}=4" for key in missing)
        raise InputError(f"{path} has inputs with dynamic dimensions; give their sizes, such as {example}")
    unknown = sorted(set(sizes) - used)
    if unknown:
        dim_names = sorted(
            {dim.name for declared_input in model.inputs for dim in declared_input.shape or () if dim.name}
        )
        raise InputError(
            f"{path} has no dynamic dimension {unknown[0]!r}; it has {', '.join(dim_names) or 'none'}: correct --dim"
        )
    return tuple(inputs)


# ---- arrays in files -------------------------------------------------------------------------------------------------


def read_inputs(model: OnnxModel, arrays: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Read a model's inputs from NumPy files, in the model's order; raise ``InputError`` if one is missing."""
    arrays_by_name: dict[str, np.ndarray[Any, Any]] = {}
    for text in arrays:
        name, _, path = text.rpartition("=") if "=" in text and not Path(text).exists() else ("", "", text)
        content = _read_arrays(Path(path))
        if not isinstance(content, dict):
            if not name and len(model.input_names) != 1:
                advice = f"name each array, such as --input {model.input_names[0]}={path}, or give one .npz file"
                raise InputError(
                    f"{path} is one array, but the model's inputs are {', '.join(model.input_names) or 'none'}: "
                    f"{advice if model.input_names else 'omit --input'}"
                )
            content = {name or model.input_names[0]: content}
        for key, array in content.items():
            if key in arrays_by_name:
                raise InputError(f"the input {key!r} is given twice; give it once")
            arrays_by_name[key] = array
    inputs: list[torch.Tensor] = []
    for declared in model.inputs:
        if declared.name not in arrays_by_name:
            raise InputError(
                f"no file contains the model's input {declared.name!r}; the files contain "
                f"{', '.join(arrays_by_name) or 'no arrays'}; give it as --input {declared.name}=x.npy"
            )
        inputs.append(_to_tensor(declared.name, arrays_by_name.pop(declared.name), DTYPES.get(declared.code or 0)))
    if arrays_by_name:
        raise InputError(
            f"the model has no input {next(iter(arrays_by_name))!r}; it has {', '.join(model.input_names) or 'none'}: "
            "remove or rename the array"
        )
    return tuple(inputs)


def _read_arrays(path: Path) -> np.ndarray[Any, Any] | dict[str, np.ndarray[Any, Any]]:
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return content
        with content:
            return {name: content[name] for name in content.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"cannot read arrays from {path}: {error}; write it with numpy.savez or numpy.save") from error


def _to_tensor(name: str, array: np.ndarray[Any, Any], dtype: torch.dtype | None) -> torch.Tensor:
    """Convert an array to a tensor; cast float32 to ``dtype`` if NumPy has no such dtype, as for bfloat16."""
    try:
        tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    except TypeError as error:
        raise InputError(
            f"the input {name!r} has the dtype {array.dtype}, which PyTorch lacks; store it in another, such as float32"
        ) from error
    if dtype in _DTYPES_WITHOUT_NUMPY and tensor.dtype is torch.float32:
        return tensor.to(dtype)
    return tensor


def write_outputs(path: Path, outputs: Mapping[str, torch.Tensor]) -> None:
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as file:
            for name, tensor in outputs.items():
                writable = tensor.to(torch.float32) if tensor.dtype in _DTYPES_WITHOUT_NUMPY else tensor
                with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, writable.detach().cpu().contiguous().numpy(), allow_pickle=False)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; choose another --output") from error


# ---- running ---------------------------------------------------------------------------------------------------------


def run_model(
    path: str,
    limit: int,
    arrays: Sequence[str],
    output: Path | None,
    *,
    home: str | None,
    host_budget: int | None,
    checked: bool,
    quiet: bool,
) -> None:
    """Run an ONNX file within ``limit`` bytes; write outputs to ``output``, if given, and print their shapes."""
    if output is not None and not output.resolve().parent.is_dir():
        raise InputError(f"there is no folder {output.resolve().parent}; create it, or choose another --output")
    check: CheckName = "sampled" if checked else "off"
    try:
        names, outputs, stats = _run_compiled(path, limit, arrays, home, host_budget, check)
    except CaptureError:  # sizes or branches depend on values
        names, outputs, stats = _run_eagerly(path, limit, arrays, home, host_budget, check)
    outputs_by_name: dict[str, torch.Tensor] = {}
    for name, output_value in zip(names, outputs, strict=True):
        if not isinstance(output_value, torch.Tensor):
            raise InputError(
                f"the output {name!r} is a {type(output_value).__name__}, but run supports only tensors; "
                "remove it from the outputs of the file"
            )
        outputs_by_name[name] = output_value
    if output is not None:
        write_outputs(output, outputs_by_name)
    if not quiet:
        for name, tensor in outputs_by_name.items():
            print(f"{name}: {str(tensor.dtype).removeprefix('torch.')} {'×'.join(map(str, tensor.shape)) or 'scalar'}")
        print(f"outofcore: {repr(stats).strip('<>')}", file=sys.stderr)


_RunResult = tuple[tuple[str, ...], tuple[Any, ...], object]


def _run_compiled(
    path: str, limit: int, arrays: Sequence[str], home: str | None, host_budget: int | None, check: CheckName
) -> _RunResult:
    """Compile and run an ONNX file; raise ``CaptureError`` if its forward pass cannot be captured."""
    with open_home(home, host_budget, check=check) as opened:
        model = build(lambda: load(path), home=opened)
        inputs = read_inputs(model, arrays)
        with compile(ForwardStep(model, inputs, path), model, budget=limit, home=opened, check=check) as step:
            outputs = step(*inputs)
            return model.output_names, outputs if isinstance(outputs, tuple) else (outputs,), step.stats


def _run_eagerly(
    path: str, limit: int, arrays: Sequence[str], home: str | None, host_budget: int | None, check: CheckName
) -> _RunResult:
    model = load(path)
    arrays_read = read_inputs(model, arrays)
    loop = budget(limit, model, home=home, host_budget=host_budget, policy=None, check=check)
    with loop, torch.no_grad():
        # Copies count against the budget; the arrays read above do not.
        inputs = [tensor.clone() for tensor in arrays_read]
        del arrays_read
        outputs = model(*inputs)
    return model.output_names, outputs if isinstance(outputs, tuple) else (outputs,), loop.stats
