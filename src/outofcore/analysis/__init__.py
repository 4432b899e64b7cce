"""Properties of a graph under any plan: gaps, sizes, memory needs."""

from outofcore.analysis.gaps import (
    LARGE_BYTES,
    SMALL_ALIGNMENT,
    constant_bytes,
    final_gap,
    full_overwrites_of,
    gaps_of,
    is_fetched,
    is_large,
    large_needs,
    live_bytes,
    peak_activation_op,
    placed_bytes,
    touched_bytes,
)

__all__ = [
    "LARGE_BYTES",
    "SMALL_ALIGNMENT",
    "constant_bytes",
    "final_gap",
    "full_overwrites_of",
    "gaps_of",
    "is_fetched",
    "is_large",
    "large_needs",
    "live_bytes",
    "peak_activation_op",
    "placed_bytes",
    "touched_bytes",
]
