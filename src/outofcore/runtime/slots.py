"""Allocate slots in the pages of a home."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from outofcore.costs import Costs
from outofcore.errors import GraphError, SpillError
from outofcore.graph import StepGraph
from outofcore.lowering.slots import SlotReuse, assign_slots, permanent_slots, slot_bytes
from outofcore.program import Program
from outofcore.units import PAGE_BYTES, round_up

if TYPE_CHECKING:  # homes need PyTorch, but this module does not
    from outofcore.runtime.homes import HomeStore


@dataclass(frozen=True, slots=True)
class SlotPiece:
    offset: int
    bytes: int


def share_page(first: Sequence[SlotPiece], second: Sequence[SlotPiece]) -> bool:
    return any(a.offset < b.offset + b.bytes and b.offset < a.offset + a.bytes for a in first for b in second)


class Slots:
    """Allocates and frees slots in one home, at the lowest free pages.

    A slot that the user sees between steps has consecutive pages. Other slots may be in several pieces, so that a home
    of limited size can be filled to the last page.
    """

    def __init__(self, home: HomeStore) -> None:
        self.home = home
        # Sorted (start, end) of free pages; two entries are adjacent only at an edge of the home.
        self._free: list[tuple[int, int]] = []
        self._end = 0

    @property
    def end(self) -> int:
        """The first page that was never allocated; from here on, pages read as zeros."""
        return self._end

    @property
    def allocated_bytes(self) -> int:
        return self._end - sum(end - start for start, end in self._free)

    def take(self, count: int) -> int:
        """Allocate consecutive pages and return their offset; raises ``SpillError`` if the home cannot grow."""
        count = round_up(count, PAGE_BYTES)
        for index, (start, end) in enumerate(self._free):
            if end - start >= count:
                self._free[index : index + 1] = [(start + count, end)] if end - start > count else []
                return start
        return self._extend(count)

    def take_pieces(self, count: int) -> tuple[SlotPiece, ...]:
        """Allocate pages for ``count`` bytes, in pieces if necessary; raises ``SpillError`` if the home cannot grow."""
        count = round_up(count, PAGE_BYTES)
        if any(end - start >= count for start, end in self._free):
            return (SlotPiece(self.take(count), count),)
        try:
            return (SlotPiece(self._extend(count), count),)
        except SpillError:
            if self.home.edges and self._end < self.home.bytes:
                self._free_gap(self.home.bytes)
            if not self._free:
                raise
        pieces: list[SlotPiece] = []
        while count and self._free:
            start, end = self._free.pop(0)
            used = min(count, end - start)
            pieces.append(SlotPiece(start, used))
            if used < end - start:
                self._free.insert(0, (start + used, end))
            count -= used
        try:
            if count:
                pieces.append(SlotPiece(self._extend(count), count))
        except SpillError:
            for piece in pieces:
                self.free(piece.offset, piece.bytes)
            raise
        return tuple(pieces)

    def grow_ahead(self, count: int) -> None:
        """Grow a home that consists of stretches to ``count`` bytes at once, if memory permits."""
        if self.home.edges:
            with contextlib.suppress(SpillError):  # an allocation will raise it
                self.home.ensure(max(self._end, count))

    def _extend(self, count: int) -> int:
        """Grow the home, allocate ``count`` bytes at its end, and return their offset."""
        edges = self.home.edges
        has_free_tail = bool(self._free) and self._free[-1][1] == self._end and self._end not in edges
        first = start = self._free[-1][0] if has_free_tail else self._end
        for edge in edges:  # no slot crosses an edge
            if first < edge < first + count:
                first = edge
        self.home.grow(first + count)
        if first == start and has_free_tail:
            self._free.pop()
        elif first > start:
            self._free_gap(first)
        self._end = first + count
        return first

    def _free_gap(self, first: int) -> None:
        """Move the end of the allocated pages up to ``first``, and free the skipped pages."""
        cuts = [edge for edge in self.home.edges if self._end < edge < first]
        for start, end in pairwise([self._end, *cuts, first]):
            self._end = end
            self.free(start, end - start)

    def is_range(self, offset: int) -> bool:
        """Return whether a slot was created as a range of another file. True even after it has moved to the home."""
        files = self.home.files
        return files is not None and files.is_range(offset)

    def is_in_file(self, offset: int) -> bool:
        """Return whether a slot's bytes are still in another file, which is never written."""
        files = self.home.files
        return files is not None and files.is_in_file(offset)

    def was_written(self, offset: int) -> bool:
        """Return whether the user has changed a slot that is in another file, so that the file is outdated."""
        files = self.home.files
        return files is not None and files.is_in_file(offset) and files.is_written(offset)

    def move_to_home(self, offset: int) -> None:
        """Move a slot from a file, such as a checkpoint, to the home, unless it is there already."""
        files = self.home.files
        if files is None or not files.is_in_file(offset):
            return
        count = round_up(files.needed_bytes(offset), PAGE_BYTES)
        pages = (self.take(count), count)
        with contextlib.ExitStack() as undo:
            undo.callback(self.free, *pages)
            self.home.move_range(offset, pages)
            undo.pop_all()

    def free(self, offset: int, count: int) -> None:
        """Free a slot, and any pages that it occupies in the home."""
        files = self.home.files
        if files is not None and files.is_range(offset):
            pages = files.release(offset)
            if pages is None:
                return
            offset, count = pages
        start, end, edges = offset, offset + round_up(count, PAGE_BYTES), self.home.edges
        index = bisect_left(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end and end not in edges:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start and start not in edges:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))


@dataclass(frozen=True)
class SlotLayout:
    """The home pages of a program's temporary slots: ``pieces`` by index of the copy, and all ``pages`` by home."""

    pieces: Mapping[int, tuple[SlotPiece, ...]]
    pages: tuple[tuple[SlotPiece, ...], ...]

    def free(self, slots: Sequence[Slots]) -> None:
        for pieces, home in zip(self.pages, slots, strict=True):
            for piece in pieces:
                home.free(piece.offset, piece.bytes)


def allocate_slots(graph: StepGraph, costs: Costs, program: Program, slots: Sequence[Slots]) -> SlotLayout:
    """Allocate home pages for the temporary slots of a program; raises ``SpillError`` or ``GraphError``."""
    # Pages that were freed within the step; the homes still count them as allocated.
    spare: list[list[SlotPiece]] = [[] for _ in slots]
    allocated: list[list[SlotPiece]] = [[] for _ in slots]
    pieces: dict[int, tuple[SlotPiece, ...]] = {}
    order = _assign_temporary_slots(graph, costs, program)
    try:
        for turn in order:
            home, count = turn.slot.home, slot_bytes(graph.storages[turn.slot.storage].bytes)
            for slot in turn.freed:
                spare[home] += pieces[slot.copy_out]
            own_pieces: list[SlotPiece] = []
            while count and spare[home]:
                # Prefer a piece that is large enough, so that slots stay whole.
                place = next((i for i, piece in enumerate(spare[home]) if piece.bytes >= count), 0)
                piece = spare[home].pop(place)
                used = min(count, piece.bytes)
                own_pieces.append(SlotPiece(piece.offset, used))
                if used < piece.bytes:
                    spare[home].append(SlotPiece(piece.offset + used, piece.bytes - used))
                count -= used
            if count:
                fresh = slots[home].take_pieces(count)
                allocated[home] += fresh
                own_pieces += fresh
            pieces[turn.slot.copy_out] = tuple(own_pieces)
    except SpillError:
        SlotLayout({}, tuple(map(tuple, allocated))).free(slots)
        raise
    by_copy = {index: pieces[turn.slot.copy_out] for turn in order for index in turn.slot.copies}
    return SlotLayout(by_copy, tuple(map(tuple, allocated)))


def needed_bytes(graph: StepGraph, costs: Costs, program: Program) -> list[int]:
    """Return the bytes that a program needs at each home; raises ``GraphError`` if a home is too small."""
    needed = [0] * max(len(costs.homes), 1)
    for storage, home in permanent_slots(graph, program).items():
        needed[home] += slot_bytes(graph.storages[storage].bytes)
    spare = [0] * len(needed)
    for turn in _assign_temporary_slots(graph, costs, program):
        home, size = turn.slot.home, slot_bytes(graph.storages[turn.slot.storage].bytes)
        spare[home] += sum(slot_bytes(graph.storages[slot.storage].bytes) for slot in turn.freed)
        needed[home] += max(size - spare[home], 0)
        spare[home] -= min(size, spare[home])
    return needed


def _assign_temporary_slots(graph: StepGraph, costs: Costs, program: Program) -> list[SlotReuse]:
    """Plan which temporary slots reuse freed ones; raises ``GraphError`` if a home is too small."""
    order = assign_slots(graph, costs, program)
    if order is None:
        raise GraphError(
            "the plan needs more bytes at a home than its capacity; give the home more bytes, or plan fewer evictions "
            "to it"
        )
    return order
