"""The switches of placement, one for each technique."""

from __future__ import annotations

from dataclasses import dataclass

from outofcore.errors import InputError


@dataclass(frozen=True)
class PlacementParams:
    """Switches and effort of ``pack``.

    Attributes:
        effort: rectangles that the canonical search and ejection may inspect each; 400 million take about a second. 0:
            quick rules only.
        seconds: time limit; the result then depends on the machine. None: no limit.
        first_fit: first fit by size and by area, in addition to best fit over the skyline.
        canonical: the canonical search within the capacity.
        ejection: lower the best placement by ejection.
        dominance: dominance in the canonical search (see ``canonical``, as for the following).
        lifting: lifting of rectangles that are passed over.
        precedence: the not-first rule in each section.
        decomposition: solve disconnected intervals of time separately.
        restarts: restarts of the canonical search.
    """

    effort: int = 200_000_000
    seconds: float | None = None
    first_fit: bool = True
    canonical: bool = True
    ejection: bool = True
    dominance: bool = True
    lifting: bool = True
    precedence: bool = True
    decomposition: bool = True
    restarts: bool = True

    def __post_init__(self) -> None:
        if self.effort < 0 or (self.seconds is not None and not self.seconds >= 0):
            raise InputError(f"effort ({self.effort}) and seconds ({self.seconds}) must not be negative")
