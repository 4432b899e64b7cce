"""What a report says beyond one plan: step time over budgets, and what would help. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """What is predicted for one budget.

    Attributes:
        budget: bytes.
        seconds: of a step; None: no plan was found.
        policy: that planned it, or "" where none did.
        bytes_out: copied from the device in a step.
        bytes_in: copied to it.
        again_seconds: of ops that run again.
        peak_bytes: the most bytes held at once.
    """

    budget: int
    seconds: float | None
    policy: str = ""
    bytes_out: int = 0
    bytes_in: int = 0
    again_seconds: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Help:
    """Something that would make a step faster, and by how much, as predicted.

    Attributes:
        what: such as "100 MiB more budget".
        saves: seconds a step.
    """

    what: str
    saves: float


@dataclass(frozen=True)
class Insight:
    """What a step could be under other circumstances.

    Attributes:
        smallest_budget: the least bytes that can hold the step.
        in_core_budget: the bytes from which on nothing needs to move.
        compute_seconds: all ops once.
        points: by rising budget.
        helps: what saves most first.
        verdict: in one sentence what holds the step back.
    """

    smallest_budget: int
    in_core_budget: int
    compute_seconds: float
    points: tuple[Point, ...]
    helps: tuple[Help, ...] = ()
    verdict: str = ""
