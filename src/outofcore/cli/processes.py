"""Commands that torchrun starts in several processes: they train data parallel; the first one prints."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

T = TypeVar("T")


@dataclass(frozen=True)
class CommandProcesses:
    """The rank and device of this process, and the number of processes in which torchrun runs the command."""

    rank: int = 0
    count: int = 1
    device: str = "cpu"

    def wrap(self, network: nn.Module, *, shard: bool = False) -> nn.Module:
        """Wrap the network in ``DistributedDataParallel``; return it unchanged if sharded, or in a single process."""
        if self.count == 1 or shard:
            return network
        return torch.nn.parallel.DistributedDataParallel(network)

    def select_batches(self, batches: Iterator[T], steps_done: int) -> Iterator[T]:
        """Skip the batches of earlier steps, and return this process's share of the others."""
        return itertools.islice(batches, steps_done * self.count + self.rank, None, self.count)


@contextlib.contextmanager
def join_processes(device: str) -> Generator[CommandProcesses]:
    """Join the processes that torchrun started, if any; only the first prints to stdout in the block."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 or "RANK" not in os.environ or not torch.distributed.is_available():
        yield CommandProcesses(device=device)
        return
    rank = int(os.environ["RANK"])
    if device == "cuda":  # one GPU per process; never run
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("gloo" if device == "cpu" else "nccl")
    try:
        with contextlib.ExitStack() as stack:
            if rank:
                null = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stdout(null))
            yield CommandProcesses(rank, count, device)
    finally:
        torch.distributed.destroy_process_group()
