"""Fingerprints: whether bytes are unchanged, however somebody may have written to them.

PyTorch counts writes to a tensor (``_version``), but not those through ``tensor.data``, NumPy, or a pointer. So what is
both in the arena and at home between two steps is read once when a step starts. Different bytes have the same
fingerprint with a chance of about 2^-64, whatever they are: it depends on random numbers of the process.
"""

from __future__ import annotations

import ctypes
import functools
import os

from outofcore.runtime.memory import address_of
from outofcore.runtime.native import load_native

_Secrets = ctypes.c_uint64 * 10  # as fingerprint.cpp takes them


@functools.cache
def secrets() -> ctypes.Array[ctypes.c_uint64]:
    """Return the random odd numbers on which this process's fingerprints depend; a product with one loses nothing."""
    drawn = _Secrets.from_buffer_copy(os.urandom(ctypes.sizeof(_Secrets)))
    return _Secrets(*(word | 1 for word in drawn))


def sampled(memory: memoryview, offset: int) -> int:
    """Return the fingerprint of a few pages of a slot at an offset of its home."""
    return int(load_native().outofcore_sampled(address_of(memory), memory.nbytes, offset, secrets()))


def fingerprint(memory: memoryview) -> int:
    """Return a 64-bit fingerprint, the same for the same bytes while the process lives; it runs at memory speed."""
    address = address_of(memory) if memory.nbytes else None
    return int(load_native().outofcore_fingerprint(address, memory.nbytes, secrets()))
