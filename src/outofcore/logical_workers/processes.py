"""The processes that train together."""

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

# Environment variables that torchrun sets.
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class StepComparison:
    """The values that processes compare at the end of ``synchronized``."""

    steps: int = 0  # made by this process
    digest: int = 0  # of its work in this step
    by_rank: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # of each process, by rank


class WorkerProcesses:
    """The processes that train together. The constructor initialises ``torch.distributed`` if torchrun started them."""

    def __init__(self, timeout: timedelta) -> None:
        self.bytes_sent = 0  # by ``send`` and ``broadcast``
        self._timeout = timeout
        self._group: Any = None
        self.rank, self.count = 0, 1
        if not dist.is_available():
            return
        try:
            if not dist.is_initialized() and all(name in os.environ for name in _TORCHRUN_VARIABLES):
                store, rank, count = next(rendezvous("env://", timeout=timeout))
                name = agree_on_start(store, rank, count, timeout)
                store = dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]
                dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
            if dist.is_initialized():
                self.rank, self.count = dist.get_rank(), dist.get_world_size()
            if self.count > 1:
                self._group = dist.new_group(backend="gloo", timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise StateError(
                f"the processes did not find each other: {error}; start all of them within {timeout.total_seconds():g} "
                "s"
            ) from error

    def close(self) -> None:
        """Destroy the group; PyTorch's default group stays."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def gather(self, item: Any) -> list[Any]:
        if self.count == 1:
            return [item]
        items: list[Any] = [None] * self.count
        self._call_group(lambda: dist.all_gather_object(items, item, self._group))
        return items

    @contextlib.contextmanager
    def synchronized(self, activity: str) -> Iterator[StepComparison]:
        """Wait for all processes at the end of the block; raise ``StateError`` if another process failed in it."""
        comparison = StepComparison()
        try:
            yield comparison
        except BaseException as error:  # after any error, since the other processes wait for this one
            try:
                self._gather_numbers([0, 0, 0])
            except StateError as another:
                error.add_note(str(another))
            raise
        numbers = self._gather_numbers([1, comparison.steps, comparison.digest])
        failed = [rank for rank, (succeeded, _, _) in enumerate(numbers) if not succeeded]
        if failed:
            raise StateError(
                f"process {failed[0]} failed in {activity}, and its own error names the cause. "
                "Remove the cause, then start all processes again from the last checkpoint"
            )
        comparison.by_rank = [(steps, digest) for _, steps, digest in numbers]

    def _gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        if self.count == 1:
            return [numbers]
        row = torch.tensor(numbers, dtype=torch.int64)
        rows = [torch.empty_like(row) for _ in range(self.count)]
        self._call_group(lambda: dist.all_gather(rows, row, self._group))
        return [result.tolist() for result in rows]

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.count > 1:
            self._call_group(lambda: dist.broadcast(tensor, 0, self._group))
            self.bytes_sent += tensor.numel() * tensor.element_size() * (self.rank == 0)

    def send(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Begin to send a tensor; the returned function waits until it may be used again."""
        self.bytes_sent += tensor.numel() * tensor.element_size()
        return self._start_transfer(lambda: dist.isend(tensor.view(torch.uint8), rank, self._group))

    def receive(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Begin to receive a tensor; the returned function waits until it is complete."""
        return self._start_transfer(lambda: dist.irecv(tensor.view(torch.uint8), rank, self._group))

    def _start_transfer(self, begin: Callable[[], Any]) -> Callable[[], None]:
        work = self._call_group(begin)

        def wait() -> None:
            self._call_group(work.wait)

        return wait

    def _call_group(self, call: Callable[[], Any]) -> Any:
        """Call a function of the process group; raise ``StateError`` if another process has ended or is too slow."""
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            raise StateError(
                f"another process has ended or did not answer within {self._timeout.total_seconds():g} s ({error}); "
                "restart all processes from the last checkpoint: torchrun does so with --max-restarts"
            ) from error


# Seconds between two looks at a store.
_POLL_SECONDS = 0.01


def agree_on_start(store: Any, rank: int, count: int, timeout: timedelta) -> str:
    """Return a name for this start of the training that is new, and the same in all processes."""
    # torchrun keeps its store when it restarts processes, so keys of earlier starts remain. Each process but the first
    # announces itself under a fresh name, and the first answers it with the name of the start.
    end = time.monotonic() + timeout.total_seconds()
    fresh = uuid.uuid4().hex

    def until(is_done: Callable[[], bool]) -> None:
        while not is_done():
            if time.monotonic() > end:
                raise RuntimeError("not all processes have started in time")
            time.sleep(_POLL_SECONDS)

    if rank > 0:
        store.set(f"outofcore/here/{rank}", fresh)
        until(lambda: store.check([f"outofcore/answer/{fresh}"]))
        start = store.get(f"outofcore/answer/{fresh}").decode()
        store.set(f"outofcore/{start}/{rank}", "")
        return f"outofcore/{start}"

    def all_have_come() -> bool:
        for peer in range(1, count):
            if store.check([f"outofcore/{fresh}/{peer}"]):
                continue
            if store.check([f"outofcore/here/{peer}"]):
                store.set(f"outofcore/answer/{store.get(f'outofcore/here/{peer}').decode()}", fresh)
        return all(store.check([f"outofcore/{fresh}/{peer}"]) for peer in range(1, count))

    until(all_have_come)
    return f"outofcore/{fresh}"
