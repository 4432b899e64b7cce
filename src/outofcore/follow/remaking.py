"""Which saved tensors are worth making again, where no plan has decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Made:
    """A storage of a loop, and how it came about.

    Attributes:
        storage: its id in the loop's history.
        bytes: its size.
        seconds: that the ops took which made it, together; None: they cannot be run again.
        inputs: the storages that these ops start from.
        saved: whether autograd saved it for backward.
    """

    storage: int
    bytes: int
    seconds: float | None
    inputs: tuple[int, ...]
    saved: bool


def worth_making_again(
    made: Sequence[Made], bytes_per_second: float, *, enough: int | None = None, share: float = 1.0
) -> tuple[int, ...]:
    """Choose storages that autograd need not keep.

    One is chosen if its ops take less time than to copy it home and back, and if all that they start from is kept
    anyway: because autograd has saved it and it is not chosen itself, or because it was there before, such as a
    parameter. The ones that take the least time for a byte come first. No recipe then holds what would be free
    otherwise, and none needs another one.

    Args:
        made: what a step makes and saves.
        bytes_per_second: of the home, in one direction.
        enough: stop once so many bytes are chosen; None: choose all that pays.
        share: of the time of the copies that making again may take.

    Returns:
        ids of storages, in the order of the choice.

    Raises:
        ValueError: ``bytes_per_second`` or ``share`` is not positive.

    >>> hidden = Made(1, 1 << 20, 0.5, (0,), True)
    >>> active = Made(2, 1 << 20, 0.0001, (1,), True)  # an activation function of ``hidden``
    >>> worth_making_again([hidden, active], bytes_per_second=1e9)
    (2,)
    """
    if not bytes_per_second > 0 or not share > 0:
        raise ValueError(f"bytes_per_second and share must be positive, and are {bytes_per_second} and {share}")
    by_id = {one.storage: one for one in made}
    candidates: list[tuple[float, Made]] = []
    for one in made:
        if one.saved and one.bytes > 0 and one.seconds is not None:
            cost = one.seconds / one.bytes
            if cost < share * 2 / bytes_per_second:
                candidates.append((cost, one))
    candidates.sort(key=lambda pair: (pair[0], pair[1].storage))
    chosen: dict[int, Made] = {}
    needed: set[int] = set()  # by what was chosen: has to stay
    total = 0
    for _, one in candidates:
        if enough is not None and total >= enough:
            break
        if one.storage in needed or any(_goes(by_id.get(i)) or i in chosen for i in one.inputs):
            continue
        chosen[one.storage] = one
        needed.update(one.inputs)
        total += one.bytes
    return tuple(chosen)


def _goes(one: Made | None) -> bool:
    """Whether a storage may be gone when backward comes; what was there before is kept by its owner."""
    return one is not None and not one.saved
