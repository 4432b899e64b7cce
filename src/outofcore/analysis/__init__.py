"""Properties of a graph under any plan: gaps, sizes, memory needs."""

from outofcore.analysis.gaps import (
    LARGE_BYTES,
    SMALL_ALIGNMENT,
    constant_bytes,
    final_gap,
    fullest_op,
    gaps_of,
    is_fetched,
    is_large,
    large_needs,
    live_bytes,
    placed_bytes,
    renewals_of,
    touched_bytes,
)

__all__ = [
    "LARGE_BYTES",
    "SMALL_ALIGNMENT",
    "constant_bytes",
    "final_gap",
    "fullest_op",
    "gaps_of",
    "is_fetched",
    "is_large",
    "large_needs",
    "live_bytes",
    "placed_bytes",
    "renewals_of",
    "touched_bytes",
]
