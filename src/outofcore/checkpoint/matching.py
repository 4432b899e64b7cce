"""Check that weight files fit a model, by names, shapes and dtypes, before anything is changed."""

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
# How many names a message lists.
_LISTED = 3
# What wrappers put into the names of a module's tensors.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def check_weights(model: nn.Module, weights: Weights) -> None:
    """Refuse files that do not fit a model, and warn of tensors that only one of the two has.

    Raises ``InputError`` if the files have no name of a meta tensor of the model, or another shape or kind of dtype for
    one.
    """
    named = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    wanted = {name: tensor for name, tensor in named.items() if tensor.is_meta}
    where = weights.path
    if not wanted:
        raise InputError(
            f"no tensor of the model is on the device meta, so nothing of {where} would be read; make the model under "
            "torch.device('meta'), or load the file into it by load_state_dict"
        )
    found = {name: tensor for name, tensor in wanted.items() if name in weights.names}
    for name, tensor in found.items():
        file, entry = weights.find(name)
        check_fits(name, tensor, tuple(tensor.shape), entry, file.path)
    given = {id(tensor) for tensor in found.values()}
    # What is not saved with a model, such as masks, is in no file.
    saved = model.state_dict(keep_vars=True).keys()
    lacking = {id(tensor): name for name, tensor in reversed(wanted.items()) if id(tensor) not in given}
    missing = sorted(name for name in lacking.values() if name in saved)
    unmatched = sorted(weights.names - named.keys())
    advice = _advice(unmatched, missing)
    if not found:
        raise InputError(
            f"no name in {where} is one of the model: it has {listed(unmatched)}, and the model "
            f"{listed(sorted(wanted))}; {advice or 'give the weights of this model'}"
        )
    if missing or unmatched:
        parts = [f"the model has {listed(missing)}, which the file has not: initialised anew"] if missing else []
        if unmatched:
            parts.append(f"the file has {listed(unmatched)}, which the model has not: left out")
        _log.warning("the model and %s differ: %s%s", where, "; ".join(parts), f"; {advice}" if advice else "")


def check_fits(name: str, tensor: torch.Tensor, shape: tuple[int, ...], entry: Entry, path: Path) -> None:
    """Raise ``InputError`` for an entry whose shape is not ``shape``, or that has numbers of another kind."""
    if shape != entry.shape:
        raise InputError(f"{name} has the shape {shape}, and {entry.shape} in {path}")
    if tensor.dtype != entry.dtype and _kind(tensor.dtype) != _kind(entry.dtype):
        raise InputError(
            f"{name} is of {tensor.dtype}, and of {entry.dtype} in {path}: the numbers there mean something else "
            "(quantised weights need their scales); give weights that are not quantised, or the model that they are of"
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating" if dtype.itemsize > 1 else str(dtype)
    return "whole"


def listed(names: Collection[str]) -> str:
    """Format the first few names, and how many there are."""
    first = ", ".join(list(names)[:_LISTED])
    return first if len(names) <= _LISTED else f"{first} and {len(names) - _LISTED} more"


def _advice(theirs: Collection[str], ours: Collection[str]) -> str:
    """Return advice where names would match without a prefix or a wrapper's part; empty otherwise."""
    prefix = _prefix(theirs, set(ours))
    if prefix:
        return (
            f"the file's names begin with {prefix!r}: save the state_dict() of the module inside, or rename them: "
            f"save_file({{name.removeprefix({prefix!r}): t for name, t in load_file(path).items()}}, new_path)"
        )
    prefix = _prefix(ours, set(theirs))
    if prefix:
        return (
            f"the model's names begin with {prefix!r}: materialize model.get_submodule({prefix[:-1]!r}) with these "
            "weights first, and then what is left of the model"
        )
    bare = {_unwrapped(name) for name in theirs} & {_unwrapped(name) for name in ours}
    if bare:
        marks = [mark for mark in _WRAPPERS if any(mark in name.split(".") for name in (*theirs, *ours))]
        return (
            f"the names differ by {' and '.join(marks)}, which a wrapper such as torch.compile or "
            "DistributedDataParallel puts in: save and materialize the module without it"
        )
    return ""


def _prefix(longer: Iterable[str], shorter: set[str]) -> str:
    """Return the prefix that most names have before others' names."""
    found: Counter[str] = Counter()
    for name in longer:
        parts = name.split(".")
        for count in range(1, len(parts)):
            if ".".join(parts[count:]) in shorter:
                found[".".join(parts[:count]) + "."] += 1
                break
    return found.most_common(1)[0][0] if found else ""


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
