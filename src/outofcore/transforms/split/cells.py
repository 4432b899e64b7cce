"""The cells of storages: boxes of a large storage that are separate storages in the split step.

If all ops cut a storage alike, each part has a cell; otherwise parts gather arguments from several cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outofcore.analysis.boxes import Axes, Box, Placed
from outofcore.transforms.split.ways import Cut

# A storage is worth cutting if it takes at least this fraction (1/8) of the op budget.
WORTH = 8


@dataclass(frozen=True)
class CellMap:
    """The storages that are cut, and where.

    Attributes:
        axes: axes of cut storages, by storage id.
        cuts: ends of the cells along each axis, by storage id; other storages stay whole.
        places: boxes of values on storages that may be cut, by value index.
        ranged: storages with cells that are ranges at home.
    """

    axes: Mapping[int, Axes]
    cuts: Mapping[int, list[list[int]]]
    places: Mapping[int, Placed]
    ranged: frozenset[int]

    def box(self, storage: int, value: int, cut: Cut | None, low: int, high: int) -> Box | None:
        """Return the box of a value on a cut storage, or of one part of it; None if it is not a box."""
        axes, place = self.axes[storage], self.places[value]
        return axes.box_of(place) if cut is None else axes.part(place, cut.dims, *cut.ends(low, high))
