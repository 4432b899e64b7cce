"""Placement: an address for every block, so that blocks held at the same time share none and the arena stays low.

The field calls this static (or dynamic) memory allocation, dynamic storage allocation, or strip packing with fixed
intervals. It is NP-hard, in theory as in practice. Its terms:

- *rectangle*: bytes (height) by *live range* (width); it may be away over a gap in it and come back to its address.
- *contention*: the bytes live at a moment; the most of them, the *peak*, is a lower bound of the height.
- *section*: a moment whose live set is not part of a neighbour's.
- *skyline*: the lowest free offset over time.
- *dominance*: of two partial placements, one cannot lead to less than the other, so that the other need not be tried.
- *ejection*: what stands above a ceiling pushes its way in below it, and what it pushed out is placed anew.

``pack`` tries best fit over the skyline and first fit; where these do not stay within the capacity, the canonical
search; and where that finds nothing either, ejection. Which of them may run, and how hard, say the fields of
``PlacementParams``.

Modules:

- ``rectangles``: what is placed, checked and as arrays; the peak.
- ``parameters``: the switches.
- ``packing``: ``pack``, and ``best_fit``, the rule of profile-guided memory optimization alone.
- ``compiled``, ``placement.cpp``: the quick rules; ejection; one run of the canonical search.
- ``canonical``: what that search is, and its restarts.
- ``requests``: the scratch memory of one op, from a log of its allocations.

Ejection is after the ejection pool of Nagata & Bräysy, "A powerful route minimization heuristic for the vehicle
routing problem with time windows" (2009), carried over to addresses. Rectangles above a ceiling are taken out. One of
them, drawn by lot, goes to the offset where what is in its way weighs least, and what was in its way is taken out in
turn. A rectangle weighs more each time it is pushed, so that those that are hard to place settle, and the others move
around them. Once nothing is left out, the ceiling is lowered; if a ceiling takes too long, a higher one is tried from
where things stand.

To log: the logger ``outofcore.planning`` at debug level says what each search was asked and what came of it.
"""

from outofcore.planning.placement.packing import Packing, best_fit, pack
from outofcore.planning.placement.parameters import PlacementParams
from outofcore.planning.placement.rectangles import Peak, Rectangle, peak

__all__ = ["Packing", "Peak", "PlacementParams", "Rectangle", "best_fit", "pack", "peak"]
