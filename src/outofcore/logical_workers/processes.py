"""The processes that train together: torch.distributed's default group, that of torchrun, or this process alone."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from outofcore.errors import StateError

# What torchrun tells each process that it starts.
_TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Meeting:
    """What processes compare at the end of ``together``.

    Attributes:
        steps: that this process has made.
        digest: of what it has done in this one.
        told: steps and digest of each process, by rank, once all have ended.
    """

    steps: int = 0
    digest: int = 0
    told: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


class Processes:
    """All processes, with a gloo group of their own: what is exchanged is in host memory.

    They are those of ``torch.distributed`` if it has been initialised; else those that torchrun has started together,
    for which it is initialised now; else this process alone. ``bytes_sent`` counts ``send`` and ``share``. The
    constructor raises ``StateError`` if they do not find each other.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.bytes_sent = 0
        self._timeout = timeout
        self._group: Any = None
        self.rank, self.count = 0, 1
        if not dist.is_available():
            return
        try:
            if not dist.is_initialized() and all(name in os.environ for name in _TOLD):
                store, rank, count = next(rendezvous("env://", timeout=timeout))
                name = met(store, rank, count, timeout)
                store = dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]
                dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
            if dist.is_initialized():
                self.rank, self.count = dist.get_rank(), dist.get_world_size()
            if self.count > 1:
                self._group = dist.new_group(backend="gloo", timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise StateError(
                f"the processes did not find together: {error}; start all of them within {timeout.total_seconds():g} s"
            ) from error

    def close(self) -> None:
        """End the group; PyTorch's default one stays for later use."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def gather(self, item: Any) -> list[Any]:
        """Return every process's item, by rank."""
        if self.count == 1:
            return [item]
        found: list[Any] = [None] * self.count
        self._answered(lambda: dist.all_gather_object(found, item, self._group))
        return found

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[Meeting]:
        """Leave the block when all processes have; raise this one's error, or ``StateError`` for another one's."""
        meeting = Meeting()
        try:
            yield meeting
        except BaseException as error:  # the others wait for this process, whatever has happened to it
            try:
                self._numbers([0, 0, 0])
            except StateError as another:
                error.add_note(str(another))
            raise
        numbers = self._numbers([1, meeting.steps, meeting.digest])
        failed = [rank for rank, (is_well, _, _) in enumerate(numbers) if not is_well]
        if failed:
            raise StateError(f"process {failed[0]} failed in {what}, and says why; this one has changed nothing in it")
        meeting.told = [(steps, digest) for _, steps, digest in numbers]

    def _numbers(self, numbers: list[int]) -> list[list[int]]:
        """Return some 64-bit numbers of every process, by rank."""
        if self.count == 1:
            return [numbers]
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.count)]
        self._answered(lambda: dist.all_gather(found, own, self._group))
        return [one.tolist() for one in found]

    def share(self, tensor: torch.Tensor) -> None:
        """Broadcast a tensor from process 0."""
        if self.count > 1:
            self._answered(lambda: dist.broadcast(tensor, 0, self._group))
            self.bytes_sent += tensor.numel() * tensor.element_size() * (self.rank == 0)

    def send(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Begin to send bytes; the returned function waits until the tensor may be used again."""
        self.bytes_sent += tensor.numel() * tensor.element_size()
        return self._begun(lambda: dist.isend(tensor.view(torch.uint8), rank, self._group))

    def receive(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Begin to receive bytes; the returned function waits until they are there."""
        return self._begun(lambda: dist.irecv(tensor.view(torch.uint8), rank, self._group))

    def _begun(self, begin: Callable[[], Any]) -> Callable[[], None]:
        work = self._answered(begin)

        def wait() -> None:
            self._answered(work.wait)

        return wait

    def _answered(self, call: Callable[[], Any]) -> Any:
        """Call the group; raises ``StateError`` if another process has ended, or did not answer in time."""
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            raise StateError(
                f"another process has ended or did not answer within {self._timeout.total_seconds():g} s ({error}); "
                "start all of them again and go on from the last checkpoint: torchrun does so with --max-restarts"
            ) from error


# How often a store is looked at, in seconds.
_POLL = 0.01


def met(store: Any, rank: int, count: int, timeout: timedelta) -> str:
    """Return a name that all processes of this start have agreed on, and no earlier ones.

    torchrun keeps its store where it starts processes again, so what earlier ones have left, such as the addresses that
    they listened at, is still there. So each process but the first announces itself under a fresh name, and the first
    answers every such name with that of the start, until all have read it. ``store`` is a shared
    ``torch.distributed.Store``. Raises ``RuntimeError`` if not all have come in time.
    """
    end = time.monotonic() + timeout.total_seconds()
    fresh = uuid.uuid4().hex

    def until(done: Callable[[], bool]) -> None:
        while not done():
            if time.monotonic() > end:
                raise RuntimeError("not all processes have come in time")
            time.sleep(_POLL)

    if rank > 0:
        store.set(f"outofcore/here/{rank}", fresh)
        until(lambda: store.check([f"outofcore/answer/{fresh}"]))
        start = store.get(f"outofcore/answer/{fresh}").decode()
        store.set(f"outofcore/{start}/{rank}", "")
        return f"outofcore/{start}"

    def all_have_come() -> bool:
        for other in range(1, count):
            if store.check([f"outofcore/{fresh}/{other}"]):
                continue
            if store.check([f"outofcore/here/{other}"]):
                store.set(f"outofcore/answer/{store.get(f'outofcore/here/{other}').decode()}", fresh)
        return all(store.check([f"outofcore/{fresh}/{other}"]) for other in range(1, count))

    until(all_have_come)
    return f"outofcore/{fresh}"
