"""Saves models, optimizers and random generators into a folder, a buffer at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore.checkpoint.contents import (
    check_plain,
    contents_of,
    known_to,
    parameters_of,
    plain_settings,
    plain_state,
)
from outofcore.checkpoint.copying import pour
from outofcore.checkpoint.folder import commit, discard, indexed_files, saving_into
from outofcore.checkpoint.format import header_for
from outofcore.checkpoint.generators import generator_tensors, plain_generators
from outofcore.checkpoint.stream import OutFile, new_buffer
from outofcore.errors import InputError
from outofcore.execution.aliases import Faces
from outofcore.units import format_bytes

_log = logging.getLogger("outofcore")

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
                "model there, or give a model that has been materialised"
            )
