"""Lower a plan to a program: ``lower`` makes instructions and blocks, and ``wire`` adds waits."""

from outofcore.lowering.instructions import lower
from outofcore.lowering.slots import copies_in_before_room
from outofcore.lowering.waits import wire

__all__ = ["copies_in_before_room", "lower", "wire"]
