"""Choose the saved tensors that are worth recomputing, where no plan has decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Made:
    """A storage of a loop, and how it was computed.

    Attributes:
        storage: its id in the loop's history.
        seconds: of the ops that computed it, together; None: they cannot run again.
        inputs: the storages that these ops start from.
        saved: whether autograd saved it for backward.
    """

    storage: int
    bytes: int
    seconds: float | None
    inputs: tuple[int, ...]
    saved: bool


def worth_making_again(made: Sequence[Made], bytes_per_second: float, *, enough: int | None = None) -> tuple[int, ...]:
    """Choose storages that autograd need not keep; return their ids in order, each followed by intermediate ones.

    One is chosen if its ops take less time than to copy it home and back, and if all their inputs are kept anyway:
    autograd has saved them and they are not chosen themselves, or they existed before, such as a parameter.
    Intermediates that were not saved are recomputed too, from at most three storages in a row. The ones that take the
    least time for a byte come first. So no recipe keeps alive what would be free otherwise.

    Args:
        bytes_per_second: of the home, in one direction.
        enough: stop once so many bytes are chosen; None: choose all that pays.

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
    chosen: dict[int, None] = {}  # in order, with what is made on the way
    needed: set[int] = set()  # by what was chosen: has to stay
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


# Storages that are made one from the other for one that was saved, itself included; the native code goes this far.
_DEEPEST = 4


@dataclass(frozen=True, slots=True)
class _Way:
    """How to compute a storage from kept ones: its time, the intermediates, and the inputs."""

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
