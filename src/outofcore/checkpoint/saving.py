"""Saves a checkpoint into a folder: data files of one save after the other, and an index that names those that count.

A save writes new files beside the old ones, brings them to the disk, and then puts a new index in place of the old
one by a rename, which is whole or not at all. Only after that are the old files deleted. So a save that is cut off at
any point leaves the checkpoint that was there before; what it had written is deleted by the next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore.checkpoint.contents import (
    Index,
    check_plain,
    contents_of,
    generator_tensors,
    known_to,
    parameters_of,
    plain_generators,
    plain_settings,
    plain_state,
)
from outofcore.checkpoint.tensor_files import OutFile, header_for, new_buffer, pour
from outofcore.errors import InputError, StateError, TransferError
from outofcore.execution.aliases import Faces
from outofcore.jsonfile import decode_json
from outofcore.units import format_bytes

_log = logging.getLogger("outofcore")

INDEX = "checkpoint.json"
FORMAT = "outofcore checkpoint 1"
_NEW_INDEX = "checkpoint.json.new"
_DATA = re.compile(r"[a-z]+[0-9]*-([0-9]{6})\.safetensors")

Named = list[tuple[str, torch.Tensor]]


def save_checkpoint(
    folder: Path,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    faces: Faces | None,
    extra: Any = None,
) -> None:
    """Write a checkpoint into a folder, in place of the one that is there; that one counts until this one is whole.

    Args:
        folder: made if it does not exist.
        models: whose parameters, buffers and gradients are saved.
        optimizers: whose state and settings are saved.
        faces: of the home where tensors may live.
        extra: plain data of the caller's, for JSON.

    Raises:
        TransferError: the system refuses a write or a read; the checkpoint that was there is still whole.
        StateError: something cannot be saved, or another process is saving into the folder.
    """
    check_plain(extra, "extra")
    files: dict[str, Named] = {}
    described: list[dict[str, Any]] = []
    rest: Named = []
    for number, model in enumerate(models):
        contents = contents_of(model)
        _check_devices(number, [*contents.tensors.items(), *contents.rest.items()])
        stem = "model" if len(models) == 1 else f"model{number}"
        files[stem] = list(contents.tensors.items())
        described.append({"stem": stem, "aliases": contents.aliases})
        rest += [(f"buffer.{number}.{name}", tensor) for name, tensor in contents.rest.items()]
        rest += [
            (f"gradient.{number}.{name}", tensor.grad)
            for name, tensor in contents.tensors.items()
            if tensor.is_leaf and tensor.grad is not None
        ]
    known = known_to(models)
    settings: list[dict[str, Any]] = []
    for number, optimizer in enumerate(optimizers):
        rest += _tensors_of(number, optimizer, known)
        settings.append({"groups": plain_settings(optimizer), "state": plain_state(optimizer)})
    files["training"] = [*rest, *generator_tensors()]
    index = {
        "models": described,
        "optimizers": settings,
        "generators": plain_generators(),
        "extra": extra,
    }
    with saving_into(folder) as ending:
        # A save that was cut off may have left files that take the room of these.
        discard(folder, indexed_files(folder))
        written: dict[str, dict[str, int]] = {}
        buffer = new_buffer()
        try:
            for stem, tensors in files.items():
                name = f"{stem}{ending}"
                written[name] = {}
                written[name] = _write(folder / name, tensors, faces, buffer)
            names = {stem: f"{stem}{ending}" for stem in files}
            commit(folder, {**index, "names": names, "files": written}, set(written))
        except Exception:
            discard(folder, indexed_files(folder))
            raise
    _log.info("saved %s into %s", format_bytes(sum(facts["bytes"] for facts in written.values())), folder)


def _tensors_of(number: int, optimizer: Optimizer, known: set[int]) -> Named:
    found: Named = []
    for index, group in enumerate(optimizer.param_groups):
        found += [
            (f"optimizer.{number}.setting.{index}.{name}", value)
            for name, value in group.items()
            if name != "params" and isinstance(value, torch.Tensor)
        ]
    for place, parameter in enumerate(parameters_of(optimizer)):
        if id(parameter) not in known:
            found.append((f"optimizer.{number}.parameter.{place}", parameter))
        entries = optimizer.state.get(parameter, {})
        found += [
            (f"optimizer.{number}.state.{place}.{name}", value)
            for name, value in entries.items()
            if isinstance(value, torch.Tensor)
        ]
    return found


def _write(path: Path, tensors: Named, faces: Faces | None, buffer: memoryview) -> dict[str, int]:
    with OutFile(path) as out:
        out.write(header_for(tensors))
        for _, tensor in tensors:
            pour(tensor, out, faces, buffer)
        out.finish()
        return {"bytes": out.bytes, "crc32": out.crc32}


def _check_devices(number: int, tensors: Named) -> None:
    for name, tensor in tensors:
        if tensor.device.type != "cpu":
            raise InputError(
                f"{name} of model {number} is on {tensor.device}, and a checkpoint is written from the CPU; move the "
                "model there, or give a model that has been materialized"
            )


@contextlib.contextmanager
def saving_into(folder: Path) -> Iterator[str]:
    """Make the folder if there is none, and keep others from saving into it meanwhile.

    Yields:
        what the names of this save's data files are to end with, such as "-000001.safetensors".

    Raises:
        TransferError: the folder cannot be made or written to.
        StateError: somebody else is saving into it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError(
            f"no checkpoint can be written to {folder} ({error.strerror}); name another folder"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise StateError(
                    f"another process is saving a checkpoint into {folder}; save into a folder of your own"
                ) from error
            # A file system without locks: whoever saves into one folder from two processes is on their own.
        numbers = [int(found[1]) for path in folder.iterdir() if (found := _DATA.fullmatch(path.name))]
        yield f"-{max(numbers, default=0) + 1:06}.safetensors"
    finally:
        os.close(descriptor)


def commit(folder: Path, index: Mapping[str, Any], files: set[str]) -> None:
    """Make an index the one that counts, and delete the data files that it does not name.

    Args:
        folder: where data files that are whole on the disk lie.
        index: JSON.
        files: the names of its data files.

    Raises:
        TransferError: the index cannot be written; the old one still counts.
    """
    new = folder / _NEW_INDEX
    data = (json.dumps({"format": FORMAT, **index}, separators=(",", ":"), ensure_ascii=False) + "\n").encode()
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # The names of the data files first, then that of the index.
        _sync(folder)
        os.replace(new, folder / INDEX)  # noqa: PTH105 - one system call, like the others here
        _sync(folder)
    except OSError as error:
        raise TransferError(
            f"could not write the index of the checkpoint in {folder} ({error.strerror}); the checkpoint that was "
            "there before is still whole: make room there, or save elsewhere"
        ) from error
    discard(folder, files)


def discard(folder: Path, files: set[str]) -> None:
    """Delete the data files of saves whose names are not among ``files``, as far as the system lets us."""
    for path in folder.iterdir():
        if path.name == _NEW_INDEX or (_DATA.fullmatch(path.name) and path.name not in files):
            # Left for the next save: nothing depends on it.
            with contextlib.suppress(OSError):
                path.unlink()


def read_index(folder: Path) -> Index:
    """The index of a checkpoint.

    Raises:
        InputError: there is none, or it cannot be read; ``GraphError`` is a kind of it.
    """
    if not (folder / INDEX).is_file():
        raise InputError(f"there is no checkpoint in {folder}: it has no {INDEX}")
    return decode_json(folder / INDEX, FORMAT, Index, whole=False)


def indexed_files(folder: Path) -> set[str]:
    """The names of the data files that the checkpoint in a folder consists of; none where there is no checkpoint."""
    try:
        return set(read_index(folder).files)
    except InputError:
        return set()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
