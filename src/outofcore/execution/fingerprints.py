"""Fingerprints: whether bytes are still those that they were, by whatever way somebody has written to them.

PyTorch counts what is written to a tensor (``_version``), but not what goes through ``tensor.data``, NumPy, or a
pointer that others have. So what lies in the arena between two steps and at home as well is read once when a step
starts. Bytes that differ have the same fingerprint with a chance of about 2^-64, whatever they are: it depends on
numbers that are drawn anew in each process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os

from outofcore.execution.memory import address_of
from outofcore.execution.native import load_native

_SECRETS = 10  # of 64 bits, as fingerprint.cpp takes them


@functools.cache
def secrets() -> ctypes.Array[ctypes.c_uint64]:
    """What fingerprints of this process depend on: odd numbers. None is 0, and a product with one loses nothing."""
    drawn = os.urandom(8 * _SECRETS)
    words = [int.from_bytes(drawn[8 * i : 8 * i + 8], "little") | 1 for i in range(_SECRETS)]
    return (ctypes.c_uint64 * _SECRETS)(*words)


def sampled(memory: memoryview, offset: int) -> int | None:
    """The fingerprint of a few pages of a slot at an offset of its home; None: there is no native code."""
    library = load_native().library
    if library is None or not memory.nbytes:
        return None
    return int(library.outofcore_sampled(address_of(memory), memory.nbytes, offset, secrets()))


def fingerprint(memory: memoryview) -> int:
    """The fingerprint of some bytes, of 64 bits; the same for the same bytes as long as the process lives.

    At the speed at which memory is read with the native code, at that of BLAKE2b without.
    """
    library = load_native().library
    if library is None or not memory.nbytes:
        key = bytes(secrets())[:64]
        return int.from_bytes(hashlib.blake2b(memory, digest_size=8, key=key).digest(), "little")
    return int(library.outofcore_fingerprint(address_of(memory), memory.nbytes, secrets()))
