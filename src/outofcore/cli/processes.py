"""Commands that torchrun has started in several processes: they train data parallel, and the first one prints.

torchrun --nproc-per-node 2 -m outofcore train gpt --budget 512MiB
"""

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
class Processes:
    """The processes of a command; ``device`` is where this one trains."""

    rank: int = 0
    count: int = 1
    device: str = "cpu"

    def wrapped(self, network: nn.Module, *, shard: bool = False) -> nn.Module:
        """Wrap the network in ``DistributedDataParallel`` if there are other processes and they do not share it."""
        if self.count == 1 or shard:
            return network
        return torch.nn.parallel.DistributedDataParallel(network)

    def share(self, batches: Iterator[T], begun: int) -> Iterator[T]:
        """Select this process's batches from those of all, starting at a step."""
        return itertools.islice(batches, begun * self.count + self.rank, None, self.count)


@contextlib.contextmanager
def joined(device: str) -> Generator[Processes]:
    """Join the processes that torchrun has started; in this context only the first prints."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 or "RANK" not in os.environ or not torch.distributed.is_available():
        yield Processes(device=device)
        return
    rank = int(os.environ["RANK"])
    if device == "cuda":  # a GPU for each process (never run)
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("gloo" if device == "cpu" else "nccl")
    try:
        with contextlib.ExitStack() as stack:
            if rank:
                nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stdout(nowhere))
            yield Processes(rank, count, device)
    finally:
        torch.distributed.destroy_process_group()
