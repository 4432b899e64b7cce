"""Lower a plan to a program in three steps.

``lower`` makes instructions and blocks, ``planning.addresses.place`` adds block offsets, and ``wire`` adds waits.
"""

from outofcore.lowering.instructions import lower
from outofcore.lowering.slots import room_at_homes
from outofcore.lowering.waits import wire

__all__ = ["lower", "room_at_homes", "wire"]
