"""ONNX files on the command line: planned as a step without gradients, and run on arrays within a budget."""

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

# What NumPy has no name for: such inputs and outputs are single-precision numbers in files.
_WITHOUT_ARRAYS = (
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)


@dataclass(frozen=True)
class ForwardStep:
    """A forward pass without gradients to be planned; of ``inputs`` only the shapes matter."""

    model: OnnxModel
    inputs: tuple[torch.Tensor, ...]
    title: str

    def __call__(self, *inputs: torch.Tensor) -> Any:
        with torch.no_grad():
            return self.model(*inputs)


def forward_step(path: str, dims: Sequence[str], arrays: Sequence[str]) -> ForwardStep:
    """Build the step of a file.

    ``dims`` are sizes that the file leaves open, as "batch=4", or "x.0=4" for the first dimension of the input x;
    ``arrays`` are files with inputs, as for ``run_model``, that give sizes instead.
    """
    model = load(path, contents=False)
    if arrays:
        if dims:
            raise InputError("sizes come from --input or from --dim; give one of the two")
        inputs = read_inputs(model, arrays)
    else:
        inputs = _made(model, path, _sizes(dims))
    shapes = ", ".join(
        f"{name} {'×'.join(map(str, x.shape))}" for name, x in zip(model.input_names, inputs, strict=True)
    )
    count = sum(p.numel() for p in model.parameters()) + sum(b.numel() for b in model.buffers())
    return ForwardStep(model, inputs, f"{path}: forward pass, {count:,} weights, inputs {shapes or 'none'}")


def _sizes(dims: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for text in dims:
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal():
            raise InputError(f"{text!r} is no size; write for example --dim batch=4")
        found[name] = int(size)
    return found


def _made(model: OnnxModel, path: str, sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
    inputs: list[torch.Tensor] = []
    used: set[str] = set()
    missing: dict[str, str] = {}
    for declared in model.inputs:
        if declared.shape is None:
            raise InputError(
                f"{path} does not tell the shape of its input {declared.name!r}; give arrays by --input x.npz"
            )
        shape: list[int] = []
        for place, dim in enumerate(declared.shape):
            own = f"{declared.name}.{place}"
            key = own if own in sizes or not dim.name else dim.name
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
        asked = " ".join(f"--dim {key}=4" for key in missing)
        raise InputError(f"{path} leaves sizes of its inputs open; give them, such as {asked}")
    unknown = sorted(set(sizes) - used)
    if unknown:
        named = sorted({dim.name for one in model.inputs for dim in one.shape or () if dim.name})
        raise InputError(f"{path} has no open size {unknown[0]!r}; it has {', '.join(named) or 'none'}")
    return tuple(inputs)


# ---- arrays in files -------------------------------------------------------------------------------------------------


def read_inputs(model: OnnxModel, arrays: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Read inputs from files, in the order of the model.

    Each is an .npz file with arrays by input name, a .npy file for a model with one input, or "name=file.npy". Raises
    ``InputError`` if a file cannot be read, or an input is missing or unknown.
    """
    found: dict[str, np.ndarray[Any, Any]] = {}
    for text in arrays:
        name, _, path = text.rpartition("=") if "=" in text and not Path(text).exists() else ("", "", text)
        content = _read(Path(path))
        if not isinstance(content, dict):
            if not name and len(model.input_names) != 1:
                raise InputError(
                    f"{path} is one array, and the model has {len(model.input_names)} inputs; write "
                    f"--input {(model.input_names or ('x',))[0]}={path}, or give an .npz file"
                )
            content = {name or model.input_names[0]: content}
        for key, array in content.items():
            if key in found:
                raise InputError(f"the input {key!r} is given twice")
            found[key] = array
    inputs: list[torch.Tensor] = []
    for declared in model.inputs:
        if declared.name not in found:
            raise InputError(
                f"the model's input {declared.name!r} is in none of the files; they have "
                f"{', '.join(found) or 'nothing'}"
            )
        inputs.append(_tensor(declared.name, found.pop(declared.name), DTYPES.get(declared.code or 0)))
    if found:
        raise InputError(
            f"the model has no input {next(iter(found))!r}; it has {', '.join(model.input_names) or 'none'}"
        )
    return tuple(inputs)


def _read(path: Path) -> np.ndarray[Any, Any] | dict[str, np.ndarray[Any, Any]]:
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return content
        with content:
            return {name: content[name] for name in content.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"cannot read arrays from {path}: {error}; write it with numpy.savez or numpy.save") from error


def _tensor(name: str, array: np.ndarray[Any, Any], wanted: torch.dtype | None) -> torch.Tensor:
    try:
        tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    except TypeError as error:
        raise InputError(f"the input {name!r} holds {array.dtype}, of which PyTorch has no tensors") from error
    if wanted in _WITHOUT_ARRAYS and tensor.dtype is torch.float32:
        return tensor.to(wanted)
    return tensor


def write_outputs(path: Path, outputs: Mapping[str, torch.Tensor]) -> None:
    """Write arrays by name as an .npz file."""
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as file:
            for name, tensor in outputs.items():
                known = tensor.to(torch.float32) if tensor.dtype in _WITHOUT_ARRAYS else tensor
                with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, known.detach().cpu().contiguous().numpy(), allow_pickle=False)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


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
    """Run a file on arrays within a budget, and write its outputs.

    It runs as ``outofcore plan`` plans it, so it fits where that says so; where values decide what is computed, op by
    op. Weights stay in the file, and are read ahead of the nodes that use them.
    """
    if output is not None and not output.resolve().parent.is_dir():
        raise InputError(f"there is no folder {output.resolve().parent}; make it, or write --output elsewhere")
    check: CheckName = "sampled" if checked else "off"
    try:
        names, outputs, stats = _planned(path, limit, arrays, home, host_budget, check)
    except CaptureError:  # sizes or branches that depend on values
        names, outputs, stats = _followed(path, limit, arrays, home, host_budget, check)
    named: dict[str, torch.Tensor] = {}
    for name, one in zip(names, outputs, strict=True):
        if not isinstance(one, torch.Tensor):
            raise InputError(f"the output {name!r} is no tensor, and cannot be written")
        named[name] = one
    if output is not None:
        write_outputs(output, named)
    if not quiet:
        for name, tensor in named.items():
            print(f"{name}: {str(tensor.dtype).removeprefix('torch.')} {'×'.join(map(str, tensor.shape)) or 'scalar'}")
        print(f"outofcore: {repr(stats).strip('<>')}", file=sys.stderr)


_Ran = tuple[tuple[str, ...], tuple[Any, ...], object]


def _planned(
    path: str, limit: int, arrays: Sequence[str], home: str | None, host_budget: int | None, check: CheckName
) -> _Ran:
    """Run the planned step; return output names, outputs, and facts. Raises ``CaptureError`` if that is impossible."""
    with open_home(home, host_budget, check=check) as opened:
        model = build(lambda: load(path), home=opened)
        inputs = read_inputs(model, arrays)
        with compile(ForwardStep(model, inputs, path), model, budget=limit, home=opened, check=check) as step:
            found = step(*inputs)
            return model.output_names, found if isinstance(found, tuple) else (found,), step.stats


def _followed(
    path: str, limit: int, arrays: Sequence[str], home: str | None, host_budget: int | None, check: CheckName
) -> _Ran:
    """Run the file op by op."""
    model = load(path)
    given = read_inputs(model, arrays)
    loop = budget(limit, model, home=home, host_budget=host_budget, policy=None, check=check)
    with loop, torch.no_grad():
        # Copies, so that they are in the budget as well.
        inputs = [one.clone() for one in given]
        del given
        found = model(*inputs)
    return model.output_names, found if isinstance(found, tuple) else (found,), loop.stats
