"""What placement tries, and how hard: one switch for each technique."""

from __future__ import annotations

from dataclasses import dataclass

from outofcore.errors import InputError


@dataclass(frozen=True)
class PlacementParams:
    """Switches and effort of ``pack``.

    Attributes:
        effort: rectangles that the canonical search may look at, and ejection likewise; some 400 million take a second.
            0: the quick rules only.
        seconds: stop as well after so many; then the result depends on the machine. None: no such limit.
        first_fit: first fit in orders by size and area, beside best fit over the skyline.
        canonical: the canonical search within the capacity.
        ejection: lower the lowest placement found by ejection.
        dominance: see ``canonical``, as for the following.
        lifting: of what is passed over.
        precedence: the not-first rule in each section.
        decomposition: solve stretches of time apart.
        restarts: of the canonical search.
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
