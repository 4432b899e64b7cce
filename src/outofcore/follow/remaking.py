"""Choose the saved tensors that are worth recomputing when no plan has decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComputedStorage:
    """A storage of a loop, and how it was computed."""

    storage: int  # its id in the loop's history
    bytes: int
    seconds: float | None  # total of the ops that computed it; None if they cannot run again
    inputs: tuple[int, ...]  # the storages that these ops start from
    saved: bool  # whether autograd saved it for the backward pass


def choose_recomputed(
    storages: Sequence[ComputedStorage], bytes_per_second: float, *, target_bytes: int | None = None
) -> tuple[int, ...]:
    """Return the ids of storages to recompute, each followed by the ids of its intermediate results.

    A storage qualifies if recomputing it is faster than copying it home and back, each way at ``bytes_per_second``, and
    if each of its inputs is persistent, or is saved and not recomputed. Up to three unsaved intermediates in a row are
    recomputed too. The lowest time per byte comes first, until ``target_bytes`` are chosen (None: no limit).
    """
    if not bytes_per_second > 0:
        raise ValueError(f"bytes_per_second must be positive, and is {bytes_per_second}")
    by_id = {target.storage: target for target in storages}
    candidates: list[tuple[float, ComputedStorage, _Derivation]] = []
    for target in storages:
        derivation = _derive(target, by_id, _MAX_DEPTH) if target.saved and target.bytes > 0 else None
        if derivation is not None and derivation.seconds / target.bytes < 2 / bytes_per_second:
            candidates.append((derivation.seconds / target.bytes, target, derivation))
    candidates.sort(key=lambda candidate: (candidate[0], candidate[1].storage))
    chosen: dict[int, None] = {}  # in order, with intermediates
    required_inputs: set[int] = set()  # inputs of chosen storages, which must stay
    chosen_bytes = 0
    for _, target, derivation in candidates:
        if target_bytes is not None and chosen_bytes >= target_bytes:
            break
        if target.storage in required_inputs or not derivation.inputs.isdisjoint(chosen):
            continue
        chosen.update(dict.fromkeys((target.storage, *sorted(derivation.intermediates))))
        required_inputs |= derivation.inputs
        chosen_bytes += target.bytes
    return tuple(chosen)


# The longest recomputation sequence, including the saved storage; the native code has the same limit.
_MAX_DEPTH = 4


@dataclass(frozen=True, slots=True)
class _Derivation:
    """How to compute a storage from resident ones: the time, the intermediates, and the inputs."""

    seconds: float
    intermediates: frozenset[int]
    inputs: frozenset[int]


def _derive(target: ComputedStorage, by_id: Mapping[int, ComputedStorage], max_depth: int) -> _Derivation | None:
    """Return how to recompute a storage in chains of at most ``max_depth`` ops; None if impossible."""
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
        derivation = _derive(source, by_id, max_depth - 1)
        if derivation is None:
            return None
        seconds += derivation.seconds
        intermediates |= {i, *derivation.intermediates}
        inputs |= derivation.inputs
    return _Derivation(seconds, frozenset(intermediates), frozenset(inputs))
