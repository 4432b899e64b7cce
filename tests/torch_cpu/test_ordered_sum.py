"""Tests of the sum of gradients over processes, with threads in their place."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch

from outofcore.execution.opening import OpenHome
from outofcore.logical_workers.assignment import worker_ranges
from outofcore.logical_workers.gradients import PIECE_BYTES, GradientLayout, Gradients
from outofcore.logical_workers.ordered_sum import OrderedSum
from outofcore.logical_workers.processes import agree_on_start
from outofcore.runtime.homes import DiskHome, HomeStore, HostHome


class Mailboxes:
    """A test double of ``Processes`` that sends messages between threads."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], queue.Queue[torch.Tensor]], count: int) -> None:
        self.rank, self.count, self.bytes_sent = rank, count, 0
        self._boxes = boxes

    def send(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        self.bytes_sent += tensor.numel() * tensor.element_size()
        self._boxes[self.rank, rank].put(tensor.clone())
        return lambda: None

    def receive(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        def wait() -> None:
            tensor.copy_(self._boxes[rank, self.rank].get(timeout=5))

        return wait


SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((3,), torch.float32),
    ((PIECE_BYTES // 2 + 12345,), torch.float32),
    ((7, 5), torch.bfloat16),
    ((300, 300), torch.float64),
    ((2, 0), torch.float32),
    ((), torch.float32),
]


def gradients_of(worker: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(worker)
    return [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in SHAPES]


def home_of(kind: str, tmp_path: Any) -> HomeStore:
    return HostHome(1 << 26) if kind == "host" else DiskHome(tmp_path)


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("counts", [(5,), (2, 3), (3, 1, 1), (1, 1, 1, 1, 1)])
def test_gradients_are_summed_in_the_order_of_the_workers(counts: Sequence[int], kind: str, tmp_path: Any) -> None:
    expected = gradients_of(0)
    for worker in range(1, 5):
        expected = [total + tensor for total, tensor in zip(expected, gradients_of(worker), strict=True)]
    expected = [total / 5 for total in expected]
    boxes = {(a, b): queue.Queue[torch.Tensor]() for a in range(5) for b in range(5)}
    results: dict[int, list[torch.Tensor]] = {}
    ends = [Mailboxes(rank, boxes, len(counts)) for rank in range(len(counts))]

    def process(rank: int, workers: range) -> None:
        home = OpenHome([home_of(kind, tmp_path)], stays_open=True)
        parameters = [torch.zeros_like(gradient, requires_grad=True) for gradient in gradients_of(0)]
        gradients = Gradients(parameters, home)
        for number, worker in enumerate(workers):
            for parameter, gradient in zip(parameters, gradients_of(worker), strict=True):
                parameter.grad = gradient
            if worker != workers[-1]:
                place = 0 if rank == 0 else number
                gradients.store(place, add=place != number)
        target = gradients.tensors()
        layout = GradientLayout(gradients_of(0))
        OrderedSum(ends[rank])([*gradients.stored.values(), target], target, layout, 5)  # type: ignore[arg-type]
        results[rank] = gradients.current()
        home.close()

    threads = [threading.Thread(target=process, args=(r, w)) for r, w in enumerate(worker_ranges(counts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(results) == len(counts)
    for result in results.values():
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    size = sum(tensor.numel() * tensor.element_size() for tensor in expected)
    assert sum(end.bytes_sent for end in ends) == 2 * (len(counts) - 1) * size


def test_processes_meet_despite_entries_of_earlier_starts() -> None:
    store = torch.distributed.HashStore()
    meetings: list[str] = []
    for start in range(3):
        names: dict[int, str] = {}

        def join(rank: int, names: dict[int, str] = names) -> None:
            names[rank] = agree_on_start(store, rank, 3, timedelta(seconds=10))

        # In the second start, one process first waits in vain.
        threads = [threading.Thread(target=join, args=(rank,)) for rank in ((1, 2, 0) if start != 1 else (2, 0, 1))]
        if start == 1:
            with pytest.raises(RuntimeError, match="not all processes"):
                agree_on_start(store, 1, 3, timedelta(seconds=0.05))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(names) == 3
        assert len(set(names.values())) == 1
        meetings.append(names[0])
    assert len(set(meetings)) == 3
