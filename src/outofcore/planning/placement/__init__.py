"""Placement: an address for every block, such that blocks do not overlap and the arena is small.

The field calls this static memory allocation, dynamic storage allocation, or strip packing with fixed intervals. It is
NP-hard, in theory as in practice. Its terms:

- *rectangle*: bytes (height) by *live range* (width), which may have a gap, but returns to its address.
- *contention*: the bytes live at a moment; its maximum, the *peak*, is a lower bound of the height.
- *section*: a moment whose live set is not part of a neighbour's.
- *skyline*: the lowest free offset over time.
- *dominance*: a partial placement need not be tried if another one is at least as good.
- *ejection*: a rectangle above a ceiling is pushed in below it, and the rectangles in its way are placed again.

``pack`` tries best fit over the skyline and first fit; if these exceed the capacity, the canonical search
(``canonical``); and then ejection. ``PlacementParams`` has a switch for each. ``requests`` places the scratch memory of
one op. The native code is ``placement.cpp``. For logs, set the logger ``outofcore.planning`` to debug level.

Ejection follows the ejection pool of Nagata & Bräysy, "A powerful route minimization heuristic for the vehicle routing
problem with time windows" (2009). Rectangles above a ceiling are taken out. A random one of them goes to the offset
where the obstructing rectangles have the least weight, and these are taken out in turn. The weight of a rectangle grows
each time it is pushed, so rectangles that are hard to place stay and others move around them. Once all are placed, the
ceiling is lowered; if a ceiling takes too long, a higher one is tried from the present state.
"""

from outofcore.planning.placement.packing import Packing, best_fit, pack
from outofcore.planning.placement.parameters import PlacementParams
from outofcore.planning.placement.rectangles import Peak, Rectangle, peak

__all__ = ["Packing", "Peak", "PlacementParams", "Rectangle", "best_fit", "pack", "peak"]
