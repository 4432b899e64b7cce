"""Tests of the native callback that moves bytes between a file and host memory on a GPU's stream."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from outofcore.errors import TransferError
from outofcore.execution.cuda.staging import Posted, check_transfers, create_transfer
from outofcore.runtime.homes import DiskHome
from outofcore.runtime.memory import Region, address_of, map_anonymous
from outofcore.runtime.native import load_native
from outofcore.units import MIB

SIZE = 20 * MIB
LIBRARY = load_native()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[DiskHome]:
    home = DiskHome(tmp_path)
    home.ensure(2 * SIZE)
    yield home
    home.close()


def memory() -> memoryview:
    return Region(map_anonymous(SIZE), SIZE).memory(0, SIZE)


def run_transfer(work: Posted) -> Posted:
    LIBRARY.outofcore_transfer(ctypes.byref(work))
    return work


def test_transfers_write_and_read_the_same_bytes(home: DiskHome) -> None:
    source, target = memory(), memory()
    source[:] = os.urandom(SIZE)
    out = run_transfer(create_transfer(home, 4096, address_of(source), SIZE, writes=True))
    assert (out.failure, out.done) == (0, SIZE)
    home.read(4096, target)
    assert target == source
    target[:] = bytes(SIZE)
    into = run_transfer(create_transfer(home, 4096, address_of(target), SIZE, writes=False))
    assert (into.failure, into.done) == (0, SIZE)
    assert target == source
    check_transfers([out, into])


def test_read_past_the_end_of_the_file_is_reported(home: DiskHome) -> None:
    target = memory()
    work = create_transfer(home, SIZE, address_of(target), SIZE, writes=False)
    os.ftruncate(work.descriptor, SIZE + 8192)
    run_transfer(work)
    assert work.done == 8192
    with pytest.raises(TransferError, match="the file ends there") as caught:
        check_transfers([work])
    assert caught.value.errno == errno.EIO


def test_system_errors_are_reported(home: DiskHome) -> None:
    work = create_transfer(home, 0, address_of(memory()), 4096, writes=True)
    work.descriptor = 1_000_000
    run_transfer(work)
    with pytest.raises(TransferError, match=r"could not write 4.00 KiB at byte 0 .*Bad file descriptor") as caught:
        check_transfers([work])
    assert caught.value.errno == errno.EBADF
