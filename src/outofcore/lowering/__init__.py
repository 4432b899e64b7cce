"""Lower a plan to a program: ``lower`` makes instructions and blocks, and ``wire`` adds waits."""

from outofcore.lowering.instructions import lower
from outofcore.lowering.slots import room_at_homes
from outofcore.lowering.waits import wire

__all__ = ["lower", "room_at_homes", "wire"]
