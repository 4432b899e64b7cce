"""Checksums of 64 bits (checksum.h), for writes that PyTorch does not count, such as through ``tensor.data``.

Different bytes have the same checksum with a probability of about 2^-64. The keys are constants: the checksum detects
faults and oversights, not deliberate collisions.
"""

from __future__ import annotations

from outofcore.runtime.memory import address_of
from outofcore.runtime.native import Flavor, load_unlocked


def checksum(memory: memoryview, offset: int = 0) -> int:
    """Return the checksum of bytes. Checksums of parts (at an ``offset`` of n * 1024) add up modulo 2^64."""
    return int(load_unlocked(Flavor.CPU).outofcore_sum(address_of(memory), memory.nbytes, offset))


def sampled_checksum(memory: memoryview, offset: int) -> int:
    """Return the checksum of up to four pages of a slot, two of them chosen by the slot's ``offset`` in its home."""
    return int(load_unlocked(Flavor.CPU).outofcore_sampled(address_of(memory), memory.nbytes, offset))
