"""Tests of the threads that move bytes between files and host memory in stream order."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from native_threads import copy_threads

from outofcore.errors import TransferError
from outofcore.execution.cuda.staging import Posted, check_transfers, create_transfer
from outofcore.runtime.homes import DiskHome
from outofcore.runtime.native import load_native
from outofcore.units import KIB, MIB

LIBRARY = load_native()
PAUSE = -2  # in place of a file


class Lane:
    def __init__(self) -> None:
        self.count = ctypes.c_uint32(0)
        self.handle: int = LIBRARY.outofcore_lane_new(ctypes.addressof(self.count))
        self.posted = 0
        self._transfers: list[Posted] = []

    def post(self, transfer: Posted) -> Posted:
        transfer.lane = self.handle
        self._transfers.append(transfer)
        self.posted += 1
        LIBRARY.outofcore_post(ctypes.addressof(transfer))
        return transfer

    def wait(self, count: int | None = None) -> None:
        target = self.posted if count is None else count
        while self.count.value < target:
            time.sleep(1e-4)

    def close(self) -> None:
        LIBRARY.outofcore_lane_free(self.handle)


@pytest.fixture
def lanes() -> Iterator[tuple[Lane, Lane]]:
    pair = Lane(), Lane()
    yield pair
    for lane in pair:
        lane.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskHome]:
    home = DiskHome(tmp_path)
    home.ensure(MIB)
    yield home
    home.close()


def pages(count: int) -> torch.Tensor:
    """Return page-aligned host memory, as direct I/O needs it."""
    raw = torch.zeros(count + 4096, dtype=torch.uint8)
    return raw[-raw.data_ptr() % 4096 :][:count]


def transfer_to(disk: DiskHome, offset: int, memory: torch.Tensor, *, writes: bool) -> Posted:
    return create_transfer(disk, offset, memory.data_ptr(), memory.numel(), writes=writes)


def pause(microseconds: int) -> Posted:
    return Posted(0, 0, microseconds, PAUSE)


def test_transfers_run_in_the_order_of_posting(lanes: tuple[Lane, Lane], disk: DiskHome) -> None:
    lane, _ = lanes
    sources = [pages(64 * KIB).fill_(number) for number in range(1, 9)]
    for source in sources:
        lane.post(transfer_to(disk, 0, source, writes=True))  # each over the one before
    back = pages(64 * KIB)
    lane.post(transfer_to(disk, 0, back, writes=False))
    lane.wait()
    assert torch.equal(back, sources[-1])
    check_transfers(lane._transfers)


def test_transfer_may_be_posted_repeatedly(lanes: tuple[Lane, Lane], disk: DiskHome) -> None:
    lane, _ = lanes
    memory = pages(16 * KIB)
    transfer = transfer_to(disk, 0, memory, writes=True)
    for number in range(20):
        memory.fill_(number)
        lane.post(transfer)
        lane.wait()
        content = bytearray(16 * KIB)
        disk.read(0, memoryview(content))
        assert set(content) == {number}


def test_lanes_do_not_wait_for_each_other(lanes: tuple[Lane, Lane], disk: DiskHome) -> None:
    slow, quick = lanes
    memory = pages(16 * KIB).fill_(5)
    # On one thread, transfers of the quick lane would always end after earlier ones of the slow lane.
    for _ in range(100):
        for _ in range(20):
            slow.post(pause(2000))
        posted_before = slow.posted
        quick.post(transfer_to(disk, 0, memory, writes=True))
        quick.wait()
        if slow.count.value < posted_before:
            break
    else:
        pytest.fail("the threads have taken turns")
    slow.wait()


def test_failure_is_reported_and_later_transfers_run(lanes: tuple[Lane, Lane], disk: DiskHome) -> None:
    lane, _ = lanes
    memory = pages(64 * KIB)
    beyond = transfer_to(disk, 0, memory, writes=False)
    beyond.offset = disk.bytes
    lane.post(beyond)
    closed = Posted(memory.data_ptr(), memory.numel(), 0, os.sysconf("SC_OPEN_MAX") + 1, 1)
    lane.post(closed)
    fine = lane.post(transfer_to(disk, 0, memory, writes=True))
    lane.wait()
    assert (beyond.failure, closed.failure, fine.failure) == (-1, errno.EBADF, 0)
    with pytest.raises(TransferError, match="the file ends there"):
        check_transfers([fine, beyond])


def test_count_wraps_around(disk: DiskHome) -> None:
    lane = Lane()
    lane.count.value = 2**32 - 2
    for _ in range(5):
        lane.post(pause(0))
    while lane.count.value != 3:
        time.sleep(1e-4)
    lane.close()


def test_closing_lane_finishes_posted_transfers(disk: DiskHome) -> None:
    before, lane = copy_threads(), Lane()
    (thread,) = copy_threads() - before
    memory = pages(64 * KIB).fill_(9)
    lane.post(pause(20_000))
    last = lane.post(transfer_to(disk, 0, memory, writes=True))
    lane.close()
    assert (last.done, last.failure) == (64 * KIB, 0)
    assert thread not in copy_threads()
