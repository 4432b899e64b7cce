"""Check that weight files fit a model, by names, shapes and dtypes, before any tensor is changed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

import torch
from torch import nn

from outofcore.checkpoint.tensor_files import Entry, Weights
from outofcore.errors import InputError

_log = logging.getLogger("outofcore")
_MAX_NAMES = 3  # names in a message
# Parts that wrappers add to the names of a module's tensors.
_WRAPPER_PARTS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def check_weights(model: nn.Module, weights: Weights) -> None:
    """Raise ``InputError`` if weights cannot be loaded into a model's meta tensors; warn about unmatched names."""
    named = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    meta_tensors = {name: tensor for name, tensor in named.items() if tensor.is_meta}
    path = weights.path
    if not meta_tensors:
        raise InputError(
            f"no tensor of the model is on the device meta, so no weights of {path} would be read; make the model "
            "under torch.device('meta'), or load the file into it with load_state_dict"
        )
    matched = {name: tensor for name, tensor in meta_tensors.items() if name in weights.names}
    for name, tensor in matched.items():
        file, entry = weights.find(name)
        check_fits(name, tensor, tuple(tensor.shape), entry, file.path)
    matched_ids = {id(tensor) for tensor in matched.values()}
    # Buffers that a state dict leaves out, such as masks, are in no file.
    saved = model.state_dict(keep_vars=True).keys()
    unmatched_meta = {
        id(tensor): name for name, tensor in reversed(meta_tensors.items()) if id(tensor) not in matched_ids
    }
    missing = sorted(name for name in unmatched_meta.values() if name in saved)
    unmatched = sorted(weights.names - named.keys())
    advice = _advise_on_names(unmatched, missing)
    if not matched:
        raise InputError(
            f"no name in {path} is also in the model: the file has {format_names(unmatched)}, and the model has "
            f"{format_names(sorted(meta_tensors))}; {advice or 'pass the weights of this model'}"
        )
    if missing or unmatched:
        parts = [f"the file lacks {format_names(missing)}, which the model initialises instead"] if missing else []
        if unmatched:
            parts.append(f"the model lacks {format_names(unmatched)}, which are ignored")
        _log.warning("the model and %s differ: %s%s", path, "; ".join(parts), f"; {advice}" if advice else "")


def check_fits(name: str, tensor: torch.Tensor, shape: tuple[int, ...], entry: Entry, path: Path) -> None:
    """Raise ``InputError`` unless a file's entry has ``shape``, and a dtype convertible to the tensor's."""
    if shape != entry.shape:
        raise InputError(
            f"{name} has the shape {shape}, and {entry.shape} in {path}; use the model that was saved, or a "
            "file of this model"
        )
    if tensor.dtype != entry.dtype and _dtype_kind(tensor.dtype) != _dtype_kind(entry.dtype):
        raise InputError(
            f"{name} is of {tensor.dtype}, and of {entry.dtype} in {path}: the numbers there mean something else "
            "(quantised weights need their scales); use weights that are not quantised, or the quantised model"
        )


def _dtype_kind(dtype: torch.dtype) -> str:
    """Return the kind of a dtype; weights can be converted within a kind. Each float8 dtype is its own kind."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating" if dtype.itemsize > 1 else str(dtype)
    return "whole"


def format_names(names: Collection[str]) -> str:
    first = ", ".join(list(names)[:_MAX_NAMES])
    return first if len(names) <= _MAX_NAMES else f"{first} and {len(names) - _MAX_NAMES} more"


def _advise_on_names(file_names: Collection[str], model_names: Collection[str]) -> str:
    """Return advice if names differ by a prefix, or a wrapper such as ``torch.compile``; otherwise empty text."""
    prefix = _common_prefix(file_names, set(model_names))
    if prefix:
        return (
            f"the file's names begin with {prefix!r}: save the state_dict() of the module inside, or rename them: "
            f"save_file({{name.removeprefix({prefix!r}): t for name, t in load_file(path).items()}}, new_path)"
        )
    prefix = _common_prefix(model_names, set(file_names))
    if prefix:
        return (
            f"the model's names begin with {prefix!r}: materialize model.get_submodule({prefix[:-1]!r}) with these "
            "weights first, and then the whole model"
        )
    bare = {_strip_wrappers(name) for name in file_names} & {_strip_wrappers(name) for name in model_names}
    if bare:
        marks = [
            mark for mark in _WRAPPER_PARTS if any(mark in name.split(".") for name in (*file_names, *model_names))
        ]
        return (
            f"the names differ by {' and '.join(marks)}, which a wrapper such as torch.compile or "
            "DistributedDataParallel adds: save and materialize the module without it"
        )
    return ""


def _common_prefix(longer: Iterable[str], shorter: set[str]) -> str:
    """Return the most frequent prefix, such as "model.", that ``longer`` names add to ``shorter`` names, or ""."""
    counts: Counter[str] = Counter()
    for name in longer:
        parts = name.split(".")
        for count in range(1, len(parts)):
            if ".".join(parts[count:]) in shorter:
                counts[".".join(parts[:count]) + "."] += 1
                break
    return counts.most_common(1)[0][0] if counts else ""


def _strip_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)
