"""The cells of storages: boxes of a large storage that are separate storages in the split step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outofcore.analysis.boxes import Axes, Box, PlacedWindow
from outofcore.transforms.split.ways import Cut

# A storage is worth cutting if it takes at least this fraction (1/8) of the op budget.
WORTH_FRACTION = 8


@dataclass(frozen=True)
class CellMap:
    """The cut storages, with their axes and the positions of their cuts."""

    axes: Mapping[int, Axes]  # by storage
    cuts: Mapping[int, list[list[int]]]  # ends of the cells along each axis, by storage; others stay whole
    places: Mapping[int, PlacedWindow]  # boxes of values on storages that may be cut, by value index
    ranged: frozenset[int]  # storages with cells that are ranges at home

    def box_of(self, storage: int, value: int, cut: Cut | None, low: int, high: int) -> Box | None:
        """Return the box of a value, or of its slice if it is cut, in a divided storage; None if it is not a box."""
        axes, place = self.axes[storage], self.places[value]
        return axes.box_of(place) if cut is None else axes.box_of_part(place, cut.dims, *cut.ends(low, high))
