"""Transfers between a file and host memory that a stream of the device runs in its turn, without the GIL.

The function is native (``transfer.cpp``): CUDA calls it on a thread of its own, which must not wait for Python, since
Python may be waiting for CUDA. What it needs to know is a ``Transfer``; how it went is written into that.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable

from outofcore.errors import TransferError
from outofcore.execution.cuda.interface import FileHome
from outofcore.units import format_bytes


class Transfer(ctypes.Structure):
    """As ``Transfer`` in ``transfer.cpp``; to be kept until it has run."""

    _fields_ = (
        ("address", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("descriptor", ctypes.c_int32),
        ("writes", ctypes.c_int32),
        ("forgets", ctypes.c_int32),
        ("failure", ctypes.c_int32),
        ("done", ctypes.c_int64),
    )


def transfer_of(home: FileHome, offset: int, address: int, count: int, *, writes: bool) -> Transfer:
    """A transfer that has yet to run.

    Args:
        home: whose file it is.
        offset: in the file.
        address: of host memory.
        count: bytes; with the address and the offset in whole pages.
        writes: to the file, or from it.
    """
    return Transfer(address, count, offset, home.descriptor, writes, not home.direct, 0, 0)


def check_transfers(transfers: Iterable[Transfer]) -> None:
    """Refuse transfers that have run and failed.

    Raises:
        TransferError: the first that did.
    """
    for transfer in transfers:
        if transfer.failure:
            verb = "write" if transfer.writes else "read"
            why = "the file ends there" if transfer.failure < 0 else os.strerror(transfer.failure)
            left, at = transfer.bytes - transfer.done, transfer.offset + transfer.done
            error = TransferError(
                f"could not {verb} {format_bytes(left)} at byte {at} of the spill file behind the device: {why}; check "
                "that disk, or name another spill directory"
            )
            error.errno = errno.EIO if transfer.failure < 0 else transfer.failure
            raise error
