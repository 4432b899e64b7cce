"""Save a checkpoint into a folder: new numbered data files, then an atomically replaced index that names them."""

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

from outofcore.capture.shards import Shard, Shards, translate_group_errors
from outofcore.checkpoint.contents import (
    Index,
    OmittedParameter,
    check_plain,
    collect_contents,
    generator_tensors,
    model_parameter_ids,
    parameters_of,
    plain_generators,
    plain_settings,
    plain_state,
    unchanged_parameter_ids,
)
from outofcore.checkpoint.tensor_files import (
    BUFFER_BYTES,
    OutFile,
    allocate_buffer,
    append_tensor,
    bytes_of,
    header_for,
)
from outofcore.errors import InputError, StateError, TransferError
from outofcore.execution.aliases import HomeTensors
from outofcore.jsonfile import decode_json
from outofcore.units import format_bytes

_log = logging.getLogger("outofcore")

INDEX = "checkpoint.json"
FORMAT = "outofcore checkpoint 1"
_NEW_INDEX = "checkpoint.json.new"
_DATA = re.compile(r"[a-z]+[0-9]*-([0-9]{6})\.safetensors")


@dataclass(frozen=True)
class ShardRange:
    """This process's range of a sharded tensor; the file contains the whole tensor."""

    shard: Shard
    tensor: torch.Tensor

    @property
    def whole(self) -> torch.Tensor:
        """A meta tensor with the shape and dtype of the whole tensor."""
        return torch.empty(self.shard.shape, dtype=self.tensor.dtype, device="meta")


NamedTensors = list[tuple[str, torch.Tensor | ShardRange]]


def save_checkpoint(
    folder: Path,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    home_tensors: HomeTensors | None,
    extra: Any = None,
    shards: Shards | None = None,
    *,
    frozen: bool = True,
    written: Collection[torch.Tensor] = (),
) -> None:
    """Write a checkpoint into a folder; only a complete checkpoint replaces the previous one.

    Tensors in ``home_tensors`` are read from their home; ``extra`` is data for JSON. All processes of ``shards`` call
    this together, and process 0 writes the parts that the others send. ``frozen=False`` leaves out frozen parameters
    that training does not change; ``written`` are the tensors that steps write.
    """
    omitted = set[int]() if frozen else unchanged_parameter_ids(models, optimizers, written)
    if shards is None:
        files, index = _collect_state(models, optimizers, extra, None, omitted)
        _write_checkpoint(folder, files, index, home_tensors, None)
        return
    gatherer = ShardGatherer(shards, home_tensors)
    with shards.finish_together("save the model"):
        files, index = _collect_state(models, optimizers, extra, shards, omitted)
    files["training"] += gatherer.gather_generators()
    with shards.finish_together("save the model"):
        if shards.rank:
            gatherer.send([item for named in files.values() for _, item in named])
        else:
            _write_checkpoint(folder, files, index, home_tensors, gatherer)


def _collect_state(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    extra: Any,
    shards: Shards | None,
    omitted: Collection[int],
) -> tuple[dict[str, NamedTensors], dict[str, Any]]:
    """Collect a checkpoint's tensors by file, and its index; leave out tensors with ids in ``omitted``."""

    def wrap_if_sharded(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor | ShardRange:
        """Wrap a sharded parameter, its gradient or state in a ``ShardRange``; return scalars and others unchanged."""
        shard = None if shards is None else shards.shard_of(parameter)
        if shard is None:
            return value
        if value is parameter:
            return ShardRange(shard, shard.own_range)
        return ShardRange(shard, value) if value.ndim else value

    check_plain(extra, "extra")
    files: dict[str, NamedTensors] = {}
    saved_models: list[dict[str, Any]] = []
    training: NamedTensors = []
    for number, model in enumerate(models):
        contents = collect_contents(model)
        stem = "model" if len(models) == 1 else f"model{number}"
        files[stem] = [
            (n, wrap_if_sharded(tensor, tensor)) for n, tensor in contents.tensors.items() if id(tensor) not in omitted
        ]
        left_out = {n: OmittedParameter.of(tensor) for n, tensor in contents.tensors.items() if id(tensor) in omitted}
        _check_devices(number, [*files[stem], *contents.non_persistent.items()])
        saved_models.append({"stem": stem, "aliases": contents.aliases, "omitted": to_builtins(left_out)})
        training += [(f"buffer.{number}.{name}", tensor) for name, tensor in contents.non_persistent.items()]
        for name, tensor in contents.tensors.items():
            shard = None if shards is None else shards.shard_of(tensor)
            gradient = (tensor if shard is None else shard.own_range).grad if tensor.is_leaf else None
            if gradient is not None:
                training.append((f"gradient.{number}.{name}", wrap_if_sharded(tensor, gradient)))
    model_ids = model_parameter_ids(models)
    saved_optimizers: list[dict[str, Any]] = []
    for number, optimizer in enumerate(optimizers):
        training += _optimizer_tensors(number, optimizer, model_ids, wrap_if_sharded)
        saved_optimizers.append({"groups": plain_settings(optimizer), "state": plain_state(optimizer)})
    files["training"] = [*training, *generator_tensors()]
    index = {
        "models": saved_models,
        "optimizers": saved_optimizers,
        "generators": plain_generators(),
        "extra": extra,
    }
    return files, index


def _write_checkpoint(
    folder: Path,
    files: Mapping[str, NamedTensors],
    index: Mapping[str, Any],
    home_tensors: HomeTensors | None,
    gatherer: ShardGatherer | None,
) -> None:
    """Write the data files and then the index of a checkpoint; if that fails, delete the new files."""
    with contextlib.ExitStack() as stack:
        if gatherer is not None:
            stack.enter_context(
                gatherer.receiving(sum(isinstance(i, ShardRange) for named in files.values() for _, i in named))
            )
        suffix = stack.enter_context(lock_folder(folder))
        previous_files = indexed_files(folder)
        # Free the disk space of files that an interrupted save left.
        delete_unused_files(folder, previous_files)
        written: dict[str, dict[str, int]] = {}
        buffer = allocate_buffer()
        try:
            for stem, tensors in files.items():
                name = f"{stem}{suffix}"
                written[name] = {}
                written[name] = _write_file(folder / name, tensors, home_tensors, buffer, gatherer)
            names = {stem: f"{stem}{suffix}" for stem in files}
            commit_index(folder, {**index, "names": names, "files": written}, set(written))
        except Exception:
            # If the new index is in place but not durable, either index may be there after a power failure.
            delete_unused_files(folder, previous_files | indexed_files(folder))
            raise
    _log.info("saved %s into %s", format_bytes(sum(facts["bytes"] for facts in written.values())), folder)


class ShardGatherer:
    """Sends each process's parts of sharded tensors to process 0, which writes the files."""

    def __init__(self, shards: Shards, home_tensors: HomeTensors | None) -> None:
        self._shards = shards
        self._home_tensors = home_tensors
        self._remaining = 0

    def gather_generators(self) -> NamedTensors:
        """Exchange the states of CPU random generators; return names and states for every process except 0."""
        shards = self._shards
        states: list[Any] = [None] * shards.group.size()
        with translate_group_errors():
            torch.distributed.all_gather_object(states, torch.get_rng_state(), group=shards.group)
        return [(generator_name(rank), state) for rank, state in enumerate(states) if rank]

    def send(self, items: Sequence[torch.Tensor | ShardRange]) -> None:
        """Send this process's parts of sharded tensors to process 0; stop early if process 0 has failed."""
        for part in items:
            if not isinstance(part, ShardRange):
                continue
            if not self._broadcast_more():
                return
            if not part.shard.is_row_major:
                self._shards.assemble(part.shard, part.tensor)
                continue
            for piece in self._local_pieces(part):
                self._shards.send(piece, 0)

    @contextlib.contextmanager
    def receiving(self, count: int) -> Iterator[None]:
        """Prepare to receive ``count`` tensors in this context; if the context ends early, stop the senders."""
        self._remaining = count
        try:
            yield
        finally:
            if self._remaining:
                self._broadcast_more(more=False)

    def append_whole(self, part: ShardRange, out: OutFile, buffer: memoryview) -> None:
        """Collect a sharded tensor's parts from all processes, and append the whole tensor to a file."""
        self._remaining -= 1
        self._broadcast_more()
        if not part.shard.is_row_major:
            append_tensor(self._shards.assemble(part.shard, part.tensor), out, None, buffer)
            return
        pieces = self._gathered_pieces(part)
        try:
            for piece in pieces:
                out.write(bytes_of(piece.contiguous()))
        except TransferError:
            for _ in pieces:
                pass  # the other processes block until their pieces are received
            raise

    def _broadcast_more(self, *, more: bool = True) -> bool:
        message = [more]
        with translate_group_errors():
            torch.distributed.broadcast_object_list(message, group=self._shards.group, group_src=0)
        return message[0]

    def _gathered_pieces(self, part: ShardRange) -> Iterator[torch.Tensor]:
        """Yield the pieces of a sharded tensor: first its own, then the pieces of the other processes by rank."""
        yield from self._local_pieces(part)
        chunks, max_elements = part.shard.chunks, BUFFER_BYTES // part.tensor.element_size()
        for rank in range(1, chunks.ranks):
            for start in range(0, chunks.count(rank), max_elements):
                yield self._shards.receive(min(max_elements, chunks.count(rank) - start), part.tensor.dtype, rank)

    def _local_pieces(self, part: ShardRange) -> Iterator[torch.Tensor]:
        for piece in part.tensor.detach().split(BUFFER_BYTES // part.tensor.element_size()):
            if piece.numel():
                yield piece
            if self._home_tensors is not None:
                self._home_tensors.drop_cache(part.tensor)


def generator_name(rank: int) -> str:
    return f"rank.{rank}.generator.cpu"


def _optimizer_tensors(
    number: int, optimizer: Optimizer, model_ids: set[int], wrap_if_sharded: Callable[..., torch.Tensor | ShardRange]
) -> NamedTensors:
    """Return an optimizer's tensors by name in the file: settings, state, and parameters that no model has."""
    named: NamedTensors = []
    for index, group in enumerate(optimizer.param_groups):
        named += [
            (f"optimizer.{number}.setting.{index}.{name}", value)
            for name, value in group.items()
            if name != "params" and isinstance(value, torch.Tensor)
        ]
    for place, parameter in enumerate(parameters_of(optimizer)):
        if id(parameter) not in model_ids:
            named.append((f"optimizer.{number}.parameter.{place}", wrap_if_sharded(parameter, parameter)))
        entries = optimizer.state.get(parameter, {})
        named += [
            (f"optimizer.{number}.state.{place}.{name}", wrap_if_sharded(parameter, value))
            for name, value in entries.items()
            if isinstance(value, torch.Tensor)
        ]
    return named


def _write_file(
    path: Path,
    tensors: NamedTensors,
    home_tensors: HomeTensors | None,
    buffer: memoryview,
    gatherer: ShardGatherer | None,
) -> dict[str, int]:
    """Write a safetensors file, and return its size as "bytes" and its checksum as "crc32"."""
    with OutFile(path) as out:
        out.write(header_for([(name, item.whole if isinstance(item, ShardRange) else item) for name, item in tensors]))
        for _, item in tensors:
            if not isinstance(item, ShardRange):
                append_tensor(item, out, home_tensors, buffer)
            elif gatherer is not None:
                gatherer.append_whole(item, out, buffer)
        out.finish()
        return {"bytes": out.bytes, "crc32": out.crc32}


def _check_devices(number: int, tensors: NamedTensors) -> None:
    for name, tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
            raise InputError(
                f"{name} of model {number} is on {tensor.device}, and a checkpoint is written from the CPU; move the "
                "model there, or pass a model that has been materialized"
            )


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[str]:
    """Lock a folder in this context, and yield the suffix for new data files; raises ``StateError`` if locked."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError(
            f"no checkpoint can be written to {folder} ({error.strerror}); use another folder"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise StateError(
                    f"another process is saving a checkpoint into {folder}; wait until it has finished, or save into "
                    "another folder"
                ) from error
            # The file system has no locks: two processes must not save into one folder.
        numbers = [int(match[1]) for path in folder.iterdir() if (match := _DATA.fullmatch(path.name))]
        yield f"-{max(numbers, default=0) + 1:06}.safetensors"
    finally:
        os.close(descriptor)


def commit_index(folder: Path, index: Mapping[str, Any], files: set[str]) -> None:
    """Replace a checkpoint's index, then delete the data files that are not in ``files``."""
    new = folder / _NEW_INDEX
    data = (json.dumps({"format": FORMAT, **index}, separators=(",", ":"), ensure_ascii=False) + "\n").encode()
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[os.write(descriptor, remaining) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # The directory entries of the data files must reach the disk before that of the index.
        _sync(folder)
        os.replace(new, folder / INDEX)  # noqa: PTH105 - one system call, like the others here
    except OSError as error:
        raise TransferError(
            f"could not write the index of the checkpoint in {folder} ({error.strerror}); the checkpoint that was "
            "there before is still whole: make room there, or save elsewhere"
        ) from error
    try:
        _sync(folder)
    except OSError as error:
        raise TransferError(
            f"the new checkpoint in {folder} is complete, but a power failure may still bring back the previous one "
            f"({error.strerror}): save again, or save elsewhere"
        ) from error
    delete_unused_files(folder, files)


def delete_unused_files(folder: Path, files: set[str]) -> None:
    """Delete an unfinished index and all data files except ``files``; ignore failed deletions."""
    for path in folder.iterdir():
        if path.name == _NEW_INDEX or (_DATA.fullmatch(path.name) and path.name not in files):
            # The next save tries again.
            with contextlib.suppress(OSError):
                path.unlink()


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint; raises ``InputError`` (or its subclass ``GraphError``)."""
    if not (folder / INDEX).is_file():
        raise InputError(f"there is no checkpoint in {folder}: it has no {INDEX}; name the folder that was saved into")
    return decode_json(folder / INDEX, FORMAT, Index, whole=False)


def indexed_files(folder: Path) -> set[str]:
    """Return the names of a checkpoint's data files, or an empty set if the index is missing or unreadable."""
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
