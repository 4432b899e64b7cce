"""The host home of a CUDA device: slots in pinned memory, so that copies run beside everything else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise

from outofcore.execution.host import HostHome
from outofcore.execution.memory import unmap
from outofcore.units import format_bytes


class PinnedHome(HostHome):
    """Slots in one slab of host memory that is pinned where it lies, slot by slot, to the page.

    No allocator of pinned memory stands between, which would round sizes up to powers of two. Where the system pins no
    more, slots from there on are pageable, and a warning says so: copies to and from them are slower, and the host
    waits for them.

    Args:
        pin: pins whole pages from an address on; False if it could not.
        unpin: undoes that, by the address.
        limit: as for ``HostHome``.

    Raises:
        SpillError: the system will not reserve the addresses.
    """

    def __init__(
        self, pin: Callable[[int, int], bool], unpin: Callable[[int], object], limit: int | None = None
    ) -> None:
        pinned: list[int] = []

        def release(address: int, count: int) -> None:
            for piece in pinned:
                unpin(piece)
            unmap(address, count)

        super().__init__(limit, release)
        self._pin = pin
        self._unpin = unpin
        self._addresses = pinned
        self._seams: list[int] = []  # offsets where one pinned piece ends and the next one begins
        self._refused = False

    @property
    def identity(self) -> str:
        """All pinned memory is alike; so is all that could not be pinned."""
        return "host" if self._refused else "host-pinned"

    @property
    def pinned(self) -> bool:
        """Whether all slots so far are pinned."""
        return not self._refused

    def ensure(self, count: int) -> None:
        """See ``HomeStore.ensure``: what one call adds is pinned in one piece, and no copy may span two."""
        before = self.bytes
        super().ensure(count)
        added = self.bytes - before
        if not added or self._refused:
            return
        address = self._opened().address + before
        if before:
            self._seams.append(before)
        if self._pin(address, added):
            self._addresses.append(address)
            return
        self._refused = True
        warnings.warn(
            f"the system does not pin {format_bytes(added)} of host memory beyond {format_bytes(before)}; copies will "
            "be slower and make the host wait: raise the limit on locked memory (ulimit -l), or lower host_budget",
            stacklevel=2,
        )

    def unbroken(self, offset: int, count: int) -> list[tuple[int, int]]:
        """The bytes [offset, offset + count) as stretches (offset, bytes) that each lie in one pinned piece.

        A copy that spans two pieces is refused by CUDA (cudaErrorInvalidValue).
        """
        cuts = [seam for seam in self._seams if offset < seam < offset + count]
        edges = [offset, *cuts, offset + count]
        return [(start, end - start) for start, end in pairwise(edges)]

    def sibling(self, count: int) -> PinnedHome:
        """See ``HomeStore.sibling``: another slab, pinned as well."""
        return PinnedHome(self._pin, self._unpin, count)
