"""Save a checkpoint into a folder: numbered data files, and an index that names the current ones.

A save writes new files next to the old ones, syncs them to the disk, and then replaces the index by an atomic rename.
Only after that are the old files deleted. So a save that is cut off at any point leaves the checkpoint that was there
before; the next save deletes its leftovers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins
from torch import nn
from torch.optim import Optimizer

from outofcore.capture.shards import Shard, Shards, talking
from outofcore.checkpoint.contents import (
    Index,
    OmittedParameter,
    check_plain,
    contents_of,
    generator_tensors,
    known_to,
    parameters_of,
    plain_generators,
    plain_settings,
    plain_state,
    untrained,
)
from outofcore.checkpoint.tensor_files import BUFFER_BYTES, OutFile, bytes_of, header_for, new_buffer, pour
from outofcore.errors import InputError, StateError, TransferError
from outofcore.execution.aliases import Faces
from outofcore.jsonfile import decode_json
from outofcore.units import format_bytes

_log = logging.getLogger("outofcore")

INDEX = "checkpoint.json"
FORMAT = "outofcore checkpoint 1"
_NEW_INDEX = "checkpoint.json.new"
_DATA = re.compile(r"[a-z]+[0-9]*-([0-9]{6})\.safetensors")


@dataclass(frozen=True)
class Part:
    """The own range of a sharded tensor, which the file has whole."""

    shard: Shard
    tensor: torch.Tensor

    @property
    def whole(self) -> torch.Tensor:
        """A meta tensor with the shape and dtype of the whole."""
        return torch.empty(self.shard.shape, dtype=self.tensor.dtype, device="meta")


Named = list[tuple[str, torch.Tensor | Part]]


def save_checkpoint(
    folder: Path,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    faces: Faces | None,
    extra: Any = None,
    shards: Shards | None = None,
    *,
    frozen: bool = True,
    written: Collection[torch.Tensor] = (),
) -> None:
    """Write a checkpoint into a folder, which replaces an existing one once it is complete.

    ``faces`` are of the home where tensors may be; ``extra`` is plain data for JSON. All processes of ``shards`` call
    this at once: the first writes whole tensors, and the others send their ranges, some MiB at a time. ``frozen`` False
    leaves out frozen parameters that are not among those that steps have ``written`` (see ``untrained``).

    Raises:
        TransferError: a write or a read failed; the previous checkpoint is still complete.
        StateError: something cannot be saved, or another process is saving into the folder, or cannot go on.
    """
    omitted = set[int]() if frozen else untrained(models, optimizers, written)
    if shards is None:
        files, index = _contents(models, optimizers, extra, None, omitted)
        _save(folder, files, index, faces, None)
        return
    together = Together(shards, faces)
    with shards.together("save the model"):
        files, index = _contents(models, optimizers, extra, shards, omitted)
    files["training"] += together.generators()
    with shards.together("save the model"):
        if shards.rank:
            together.send([item for named in files.values() for _, item in named])
        else:
            _save(folder, files, index, faces, together)


def _contents(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    extra: Any,
    shards: Shards | None,
    omitted: Collection[int],
) -> tuple[dict[str, Named], dict[str, Any]]:
    """Return the contents of each data file by its stem, and the plain data.

    ``omitted`` are ids of parameters that are left out.
    """

    def part_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor | Part:
        shard = None if shards is None else shards.of(parameter)
        if shard is None:
            return value
        if value is parameter:
            return Part(shard, shard.own)
        return Part(shard, value) if value.ndim else value

    check_plain(extra, "extra")
    files: dict[str, Named] = {}
    described: list[dict[str, Any]] = []
    rest: Named = []
    for number, model in enumerate(models):
        contents = contents_of(model)
        stem = "model" if len(models) == 1 else f"model{number}"
        files[stem] = [
            (n, part_of(tensor, tensor)) for n, tensor in contents.tensors.items() if id(tensor) not in omitted
        ]
        left_out = {n: OmittedParameter.of(tensor) for n, tensor in contents.tensors.items() if id(tensor) in omitted}
        _check_devices(number, [*files[stem], *contents.rest.items()])
        described.append({"stem": stem, "aliases": contents.aliases, "omitted": to_builtins(left_out)})
        rest += [(f"buffer.{number}.{name}", tensor) for name, tensor in contents.rest.items()]
        for name, tensor in contents.tensors.items():
            shard = None if shards is None else shards.of(tensor)
            gradient = (tensor if shard is None else shard.own).grad if tensor.is_leaf else None
            if gradient is not None:
                rest.append((f"gradient.{number}.{name}", part_of(tensor, gradient)))
    known = known_to(models)
    settings: list[dict[str, Any]] = []
    for number, optimizer in enumerate(optimizers):
        rest += _tensors_of(number, optimizer, known, part_of)
        settings.append({"groups": plain_settings(optimizer), "state": plain_state(optimizer)})
    files["training"] = [*rest, *generator_tensors()]
    index = {
        "models": described,
        "optimizers": settings,
        "generators": plain_generators(),
        "extra": extra,
    }
    return files, index


def _save(
    folder: Path, files: Mapping[str, Named], index: Mapping[str, Any], faces: Faces | None, together: Together | None
) -> None:
    with contextlib.ExitStack() as stack:
        if together is not None:
            stack.enter_context(
                together.receiving(sum(isinstance(i, Part) for named in files.values() for _, i in named))
            )
        ending = stack.enter_context(saving_into(folder))
        # A save that was cut off may have left files that take the room of these.
        discard(folder, indexed_files(folder))
        written: dict[str, dict[str, int]] = {}
        buffer = new_buffer()
        try:
            for stem, tensors in files.items():
                name = f"{stem}{ending}"
                written[name] = {}
                written[name] = _write(folder / name, tensors, faces, buffer, together)
            names = {stem: f"{stem}{ending}" for stem in files}
            commit(folder, {**index, "names": names, "files": written}, set(written))
        except Exception:
            discard(folder, indexed_files(folder))
            raise
    _log.info("saved %s into %s", format_bytes(sum(facts["bytes"] for facts in written.values())), folder)


class Together:
    """Sends the ranges of all processes to the first one, which writes the files."""

    def __init__(self, shards: Shards, faces: Faces | None) -> None:
        self._shards = shards
        self._faces = faces
        self._left = 0

    def generators(self) -> Named:
        """Return the states of PyTorch's generator in the other processes, which differ."""
        shards = self._shards
        states: list[Any] = [None] * shards.group.size()
        with talking():
            torch.distributed.all_gather_object(states, torch.get_rng_state(), group=shards.group)
        return [(other_generator(rank), state) for rank, state in enumerate(states) if rank]

    def send(self, items: Sequence[torch.Tensor | Part]) -> None:
        """Send the own ranges to the first process, as long as it asks for them."""
        for part in items:
            if not isinstance(part, Part):
                continue
            if not self._go_on():
                return
            if not part.shard.in_order:
                self._shards.whole(part.shard, part.tensor)
                continue
            for piece in self._own(part):
                self._shards.send(piece, 0)

    @contextlib.contextmanager
    def receiving(self, count: int) -> Iterator[None]:
        """Receive this many tensors in this context; tell the other processes if it fails."""
        self._left = count
        try:
            yield
        finally:
            if self._left:
                self._go_on(wanted=False)

    def pour(self, part: Part, out: OutFile, buffer: memoryview) -> None:
        """Append a whole tensor to a file."""
        self._left -= 1
        self._go_on()
        if not part.shard.in_order:
            pour(self._shards.whole(part.shard, part.tensor), out, None, buffer)
            return
        pieces = self._pieces(part)
        try:
            for piece in pieces:
                out.write(bytes_of(piece.contiguous()))
        except TransferError:
            for _ in pieces:
                pass  # the others are sending, and wait for who receives
            raise

    def _go_on(self, *, wanted: bool = True) -> bool:
        """Return whether the first process wants more."""
        told = [wanted]
        with talking():
            torch.distributed.broadcast_object_list(told, group=self._shards.group, group_src=0)
        return told[0]

    def _pieces(self, part: Part) -> Iterator[torch.Tensor]:
        yield from self._own(part)
        chunks, most = part.shard.chunks, BUFFER_BYTES // part.tensor.element_size()
        for rank in range(1, chunks.ranks):
            for start in range(0, chunks.count(rank), most):
                yield self._shards.receive(min(most, chunks.count(rank) - start), part.tensor.dtype, rank)

    def _own(self, part: Part) -> Iterator[torch.Tensor]:
        for piece in part.tensor.detach().split(BUFFER_BYTES // part.tensor.element_size()):
            if piece.numel():
                yield piece
            if self._faces is not None:
                self._faces.drop_cache(part.tensor)


def other_generator(rank: int) -> str:
    """Return the name of another process's generator state."""
    return f"rank.{rank}.generator.cpu"


def _tensors_of(
    number: int, optimizer: Optimizer, known: set[int], part_of: Callable[..., torch.Tensor | Part]
) -> Named:
    found: Named = []
    for index, group in enumerate(optimizer.param_groups):
        found += [
            (f"optimizer.{number}.setting.{index}.{name}", value)
            for name, value in group.items()
            if name != "params" and isinstance(value, torch.Tensor)
        ]
    for place, parameter in enumerate(parameters_of(optimizer)):
        if id(parameter) not in known:
            found.append((f"optimizer.{number}.parameter.{place}", part_of(parameter, parameter)))
        entries = optimizer.state.get(parameter, {})
        found += [
            (f"optimizer.{number}.state.{place}.{name}", part_of(parameter, value))
            for name, value in entries.items()
            if isinstance(value, torch.Tensor)
        ]
    return found


def _write(
    path: Path, tensors: Named, faces: Faces | None, buffer: memoryview, together: Together | None
) -> dict[str, int]:
    with OutFile(path) as out:
        out.write(header_for([(name, item.whole if isinstance(item, Part) else item) for name, item in tensors]))
        for _, item in tensors:
            if not isinstance(item, Part):
                pour(item, out, faces, buffer)
            elif together is not None:
                together.pour(item, out, buffer)
        out.finish()
        return {"bytes": out.bytes, "crc32": out.crc32}


def _check_devices(number: int, tensors: Named) -> None:
    for name, tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
            raise InputError(
                f"{name} of model {number} is on {tensor.device}, and a checkpoint is written from the CPU; move the "
                "model there, or give a model that has been materialized"
            )


@contextlib.contextmanager
def saving_into(folder: Path) -> Iterator[str]:
    """Make the folder if needed, and keep others from saving into it meanwhile.

    Yields the suffix of this save's data files, such as "-000001.safetensors". Raises ``TransferError`` if the folder
    cannot be written to, ``StateError`` if somebody else is saving into it.
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
    """Make an index the current one, and delete the data files that it does not name.

    If it raises ``TransferError``, the old index is still current.
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
    """Delete data files of saves that are not among ``files``, as far as the system allows."""
    for path in folder.iterdir():
        if path.name == _NEW_INDEX or (_DATA.fullmatch(path.name) and path.name not in files):
            # Left for the next save: nothing depends on it.
            with contextlib.suppress(OSError):
                path.unlink()


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint; raises ``InputError`` (or its kind ``GraphError``) if that fails."""
    if not (folder / INDEX).is_file():
        raise InputError(f"there is no checkpoint in {folder}: it has no {INDEX}")
    return decode_json(folder / INDEX, FORMAT, Index, whole=False)


def indexed_files(folder: Path) -> set[str]:
    """Return the names of a checkpoint's data files; none where there is no checkpoint."""
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
