"""From a plan to a program: instructions, the blocks they work on, and what they wait for.

lower(graph, costs, plan)    -> Program with blocks, no addresses and no waits (planning.addresses.place)   -> the same
with an offset for each block wire(graph, program, costs)  -> the same with the fewest waits that make it safe
"""

from outofcore.lowering.instructions import lower
from outofcore.lowering.slots import room_at_homes
from outofcore.lowering.waits import wire

__all__ = ["lower", "room_at_homes", "wire"]
