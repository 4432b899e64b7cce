"""The cells of storages: boxes of a large storage that are storages of their own in the split step.

Where all ops cut a storage alike, each part has a cell; else a part gathers its argument from several cells. The cells
of a parameter or of optimizer state are ranges at home (``state_ranges``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outofcore.analysis.boxes import Axes, Box, Placed
from outofcore.transforms.split.ways import Cut

# A storage is worth cutting if it takes at least this part of what an op may need.
WORTH = 8


@dataclass(frozen=True)
class CellMap:
    """Which storages are cut, and where.

    Attributes:
        axes: of storages that ops cut, by storage id.
        cuts: where cells begin and the last one ends, for each axis; a storage that is missing stays whole.
        places: of values on storages that may be cut, by index.
        ranged: storages whose cells are ranges at home.
    """

    axes: Mapping[int, Axes]
    cuts: Mapping[int, list[list[int]]]
    places: Mapping[int, Placed]
    ranged: frozenset[int]

    def box(self, storage: int, value: int, cut: Cut | None, low: int, high: int) -> Box | None:
        """Return the box of a value on a cut storage, or of its part for a part of an op; None if there is none."""
        axes, place = self.axes[storage], self.places[value]
        return axes.box_of(place) if cut is None else axes.part(place, cut.dims, *cut.ends(low, high))
