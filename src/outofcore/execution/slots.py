"""Which slot of a home belongs to what."""

from __future__ import annotations

from outofcore.execution.homes import HomeStore
from outofcore.units import PAGE_BYTES, round_up


class Slots:
    """Hands out slots of one home.

    States get slots for good. What never outlives a step gets slots in a pool that programs take
    turns with.

    Args:
        home: where the slots are; room is made for them as they are handed out.
    """

    def __init__(self, home: HomeStore) -> None:
        self.home = home
        self._pool: tuple[int, int] = (0, 0)  # start, bytes

    def reserve(self, count: int) -> int:
        """The offset of a new slot of ``count`` bytes.

        Raises:
            SpillError: the home has no room for it.
        """
        return self.home.reserve(round_up(count, PAGE_BYTES))

    def pool(self, sizes: dict[int, int]) -> dict[int, int]:
        """A slot for each key; they hold until the next call.

        Raises:
            SpillError: the home has no room for them.
        """
        total = sum(round_up(size, PAGE_BYTES) for size in sizes.values())
        if total > self._pool[1]:
            self._pool = (self.reserve(total), total)
        slots: dict[int, int] = {}
        at = self._pool[0]
        for key, size in sizes.items():
            slots[key] = at
            at += round_up(size, PAGE_BYTES)
        return slots

    def check(self, count: int) -> None:
        """Refuse ``count`` bytes more than have been handed out, before anything is changed.

        Raises:
            SpillError: the home has no room for them.
        """
        self.home.check(self.home.bytes + count)
