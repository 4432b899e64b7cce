"""Choose the saved tensors that are worth recomputing when no plan has decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Made:
    """A storage of a loop, and how it was computed."""

    storage: int  # its id in the loop's history
    bytes: int
    seconds: float | None  # total of the ops that computed it; None if they cannot run again
    inputs: tuple[int, ...]  # the storages that these ops start from
    saved: bool  # whether autograd saved it for the backward pass


def worth_making_again(made: Sequence[Made], bytes_per_second: float, *, enough: int | None = None) -> tuple[int, ...]:
    """Choose storages to recompute; return their ids in order, each followed by its intermediates.

    A storage qualifies if recomputing it is faster than copying it home and back, and if its inputs stay: they are
    saved and not chosen themselves, or persistent. Unsaved intermediates are recomputed too, at most three in a row.
    The lowest time per byte comes first. A recipe thus never extends the life of another storage.

    Args:
        bytes_per_second: bandwidth of the home in one direction.
        target_bytes: stop after choosing this many bytes; None: choose every storage that pays off.

    >>> hidden = Made(1, 1 << 20, 0.5, (0,), True)
    >>> active = Made(2, 1 << 20, 0.0001, (1,), True)  # an activation function of ``hidden``
    >>> worth_making_again([hidden, active], bytes_per_second=1e9)
    (2,)
    """
    if not bytes_per_second > 0:
        raise ValueError(f"bytes_per_second must be positive, and is {bytes_per_second}")
    by_id = {one.storage: one for one in made}
    candidates: list[tuple[float, Made, _Way]] = []
    for one in made:
        way = _way_to(one, by_id, _DEEPEST) if one.saved and one.bytes > 0 else None
        if way is not None and way.seconds / one.bytes < 2 / bytes_per_second:
            candidates.append((way.seconds / one.bytes, one, way))
    candidates.sort(key=lambda candidate: (candidate[0], candidate[1].storage))
    chosen: dict[int, None] = {}  # in order, with intermediates
    needed: set[int] = set()  # inputs of chosen storages, which must stay
    total = 0
    for _, one, way in candidates:
        if enough is not None and total >= enough:
            break
        if one.storage in needed or not way.start.isdisjoint(chosen):
            continue
        chosen.update(dict.fromkeys((one.storage, *sorted(way.between))))
        needed |= way.start
        total += one.bytes
    return tuple(chosen)


# The longest recomputation sequence, including the saved storage; the native code has the same limit.
_DEEPEST = 4


@dataclass(frozen=True, slots=True)
class _Way:
    """How to compute a storage from resident ones: the time, the intermediates, and the inputs."""

    seconds: float
    between: frozenset[int]
    start: frozenset[int]


def _way_to(one: Made, by_id: Mapping[int, Made], deepest: int) -> _Way | None:
    if one.seconds is None or deepest == 0:
        return None
    seconds = one.seconds
    between: set[int] = set()
    start: set[int] = set()
    for i in one.inputs:
        before = by_id.get(i)
        if before is None or before.saved:
            start.add(i)
            continue
        way = _way_to(before, by_id, deepest - 1)
        if way is None:
            return None
        seconds += way.seconds
        between |= {i, *way.between}
        start |= way.start
    return _Way(seconds, frozenset(between), frozenset(start))
