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
    by_id = {target.storage: target for target in made}
    candidates: list[tuple[float, Made, _Way]] = []
    for target in made:
        derivation = _way_to(target, by_id, _DEEPEST) if target.saved and target.bytes > 0 else None
        if derivation is not None and derivation.seconds / target.bytes < 2 / bytes_per_second:
            candidates.append((derivation.seconds / target.bytes, target, derivation))
    candidates.sort(key=lambda candidate: (candidate[0], candidate[1].storage))
    chosen: dict[int, None] = {}  # in order, with intermediates
    needed: set[int] = set()  # inputs of chosen storages, which must stay
    chosen_bytes = 0
    for _, target, derivation in candidates:
        if enough is not None and chosen_bytes >= enough:
            break
        if target.storage in needed or not derivation.start.isdisjoint(chosen):
            continue
        chosen.update(dict.fromkeys((target.storage, *sorted(derivation.between))))
        needed |= derivation.start
        chosen_bytes += target.bytes
    return tuple(chosen)


# The longest recomputation sequence, including the saved storage; the native code has the same limit.
_DEEPEST = 4


@dataclass(frozen=True, slots=True)
class _Way:
    """How to compute a storage from resident ones: the time, the intermediates, and the inputs."""

    seconds: float
    between: frozenset[int]
    start: frozenset[int]


def _way_to(target: Made, by_id: Mapping[int, Made], max_depth: int) -> _Way | None:
    if target.seconds is None or max_depth == 0:
        return None
    seconds = target.seconds
    intermediates: set[int] = set()
    inputs: set[int] = set()
    for i in target.inputs:
        source = by_id.get(i)
        if source is None or source.saved:
            inputs.add(i)
            continue
        derivation = _way_to(source, by_id, max_depth - 1)
        if derivation is None:
            return None
        seconds += derivation.seconds
        intermediates |= {i, *derivation.between}
        inputs |= derivation.start
    return _Way(seconds, frozenset(intermediates), frozenset(inputs))
