"""Demand eviction: make room for an unplanned request while the op that made it runs.

The memory of an op may depend on values: a matrix exponential of larger numbers, an optimizer that factorises every
tenth step. Such a request gets an address in the arena's *annex*, which has addresses and no memory. For each of its
pages a page of the arena releases its memory: free pages first, then pages that the op does not touch. These are
evicted, and fetched when the op has ended, before any other instruction begins. Copies are paused meanwhile.

If too few pages can be evicted, the request is refused while the step can be undone: the step is planned again with the
request, and repeated. After parameters have been updated the step must end instead, and the op gets memory of a home.
The budget is exceeded only where no home has room.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from outofcore.capture.captured import Captured
from outofcore.compiling import native_callback
from outofcore.errors import OutOfCoreError, SpillError
from outofcore.execution.arena import Answer, Arena
from outofcore.execution.undo import StepProgress, Undo
from outofcore.graph import Op
from outofcore.program import Block, CopyIn, CopyOut, Program, Run
from outofcore.runtime.memory import advise_pages, tensor_with_release
from outofcore.runtime.slots import SlotPiece, Slots
from outofcore.units import PAGE_BYTES, format_bytes, round_up

_log = logging.getLogger("outofcore")

_Pages = npt.NDArray[np.uint8]


class _Page(IntEnum):
    FREE = 0
    EVICTABLE = 1  # may be evicted
    PINNED = 2  # in use by the running op


class DemandEviction:
    """Serves unplanned memory requests by evicting pages of the arena, to stay within the budget."""

    def __init__(
        self, captured: Captured, program: Program, arena: Arena, budget: int, slots: Sequence[Slots], undo: Undo
    ) -> None:
        self._captured, self._program, self._arena, self._budget = captured, program, arena, budget
        self._slots, self.undo = slots, undo
        self._instructions = [
            index for index, i in enumerate(program.instructions) if isinstance(i, Run) and not i.communicates
        ]  # by scope
        self._cached_users: list[list[int]] | None = None  # by block
        self._starts: array[float] = array("d")
        self._ends: array[float] = array("d")
        self._pause: Callable[[], object] = _do_nothing
        self._resume: Callable[[], object] = _do_nothing
        self._flag = ctypes.c_int64(0)
        self.flag = ctypes.addressof(self._flag)  # not 0 while active
        self.is_active = False  # whether the running op has been lent memory
        self.may_refuse = True  # False where other processes wait for the step to end
        self.refused_request: tuple[Op, int] | None = None  # op and bytes of this step's refused request
        self.error: OutOfCoreError | None = None  # the failed eviction behind it
        self.peak_bytes = self.evicted_bytes = self.overflow_bytes = 0
        self.has_lost_bytes = False  # whether evicted bytes could not be fetched
        self._overflowed_ops: set[int] = set()  # ops of this step
        self._pages: _Pages = np.zeros(0, np.uint8)
        self._evicted: list[tuple[int, int, SlotPiece]] = []  # offset in the arena, home, piece of its slot
        self._lent: dict[int, int] = {}  # bytes of the annex by address
        self._overflows: dict[int, tuple[torch.Tensor, Slots, int]] = {}  # memory of homes by address, and its slot
        # An op may keep memory beyond the step, as a cache of its own, and must never lose it.
        weakref.finalize(self, _keep_stranded, self._overflows).atexit = False
        this = weakref.ref(self)

        def serve(count: int, scope: int) -> int:
            lender = this()
            return Answer.REFUSE if lender is None else lender._serve(count, scope)

        # The garbage collector cannot see through a native callback, so it must not refer to ``self`` strongly.
        self._callback = native_callback(serve, ctypes.c_int64, ctypes.c_int64, failed=Answer.REFUSE)
        planned = round_up(program.arena_bytes, PAGE_BYTES)
        arena.discard(planned, arena.bytes - planned)
        arena.set_reserve(max(budget - planned, 0))

    @property
    def has_overflowed(self) -> bool:
        return bool(self._overflowed_ops)

    def begin(
        self, starts: array[float], ends: array[float], pause: Callable[[], object], resume: Callable[[], object]
    ) -> None:
        """Start to serve the unplanned memory requests of a step."""
        # Times of the instructions that have started and ended; 0 for others.
        self._starts, self._ends, self._pause, self._resume = starts, ends, pause, resume
        self.refused_request, self.error, self.has_lost_bytes = None, None, False
        self._overflowed_ops.clear()
        self._arena.set_lender(self._callback)

    def end(self) -> None:
        """Stop serving requests, and restore the arena."""
        self._arena.set_lender(None)
        try:
            self.restore()
        finally:
            self._pause = self._resume = _do_nothing

    def restore(self) -> None:
        """Fetch the pages that were evicted for the last op, then let the other queues continue."""
        if not self.is_active:
            return
        self._release_unused()
        self.has_lost_bytes = True
        try:
            for offset, home, piece in self._evicted:
                self._arena.load(offset, piece.bytes, self._slots[home].home, piece.offset)
            self.has_lost_bytes = False
        finally:
            for _, home, piece in self._evicted:
                self._slots[home].free(piece.offset, piece.bytes)
            self._evicted = []
            self.is_active, self._flag.value = False, 0
            self._resume()

    # Serving

    def _serve(self, count: int, scope: int) -> int:
        """Return an address for an unplanned request, or an ``Answer`` that refuses it or lets it exceed the budget."""
        try:
            address = self._lend(round_up(count, PAGE_BYTES), scope)
        except OutOfCoreError as error:
            self.error, address = error, None
        if address is not None:
            return address
        op = self._op_of_scope(scope)
        if self.may_refuse and self.undo.is_possible(StepProgress.from_times(self._starts, self._ends)):
            self.refused_request = op, count
            return Answer.REFUSE
        overflow = self._allocate_at_home(count)
        if op.id not in self._overflowed_ops:
            self._overflowed_ops.add(op.id)
            location = "is beyond the budget" if overflow is None else f"is in the home ({overflow[1]})"
            _log.warning(
                "%s asked for %s beyond its plan after parameters had been updated, which the budget of %s cannot "
                "hold; the step goes on with memory that %s, and the next step is planned with it; raise the budget",
                op.text,
                format_bytes(count),
                format_bytes(self._budget),
                location,
            )
        return Answer.EXCEED if overflow is None else overflow[0]

    def _allocate_at_home(self, count: int) -> tuple[int, str] | None:
        """Return the address of new memory in a home, and the home's name; None if no home has room."""
        for home_tensor, slots, _ in self._overflows.values():  # lets the system write out earlier requests
            slots.home.drop_cache(home_tensor)
        overflow = _create_overflow_memory(self._slots, count)
        if overflow is None:
            return None
        home_tensor, slots, _ = overflow
        self._overflows[home_tensor.data_ptr()] = overflow
        self.overflow_bytes += count
        return home_tensor.data_ptr(), slots.home.name

    def allocate_lasting(self, count: int) -> torch.Tensor | None:
        """Return memory of a home for new optimizer state; None if ordinary memory should be used."""
        if self._arena.counters().live_bytes + count <= self._arena.reserve:
            return None
        overflow = _create_overflow_memory(self._slots, count)
        if overflow is None:
            return None
        home_tensor, slots, offset = overflow
        self.overflow_bytes += count
        return tensor_with_release(home_tensor.data_ptr(), count, partial(_release_slot, slots, offset, home_tensor))

    def _op_of_scope(self, scope: int) -> Op:
        run = self._program.instructions[self._instructions[scope]]
        if not isinstance(run, Run):
            raise TypeError(f"scope {scope} is not that of an op; please report it")
        return self._captured.graph.ops[run.op]

    def _lend(self, count: int, scope: int) -> int | None:
        """Evict pages to make room for ``count`` bytes; return the address of the room, or None without enough."""
        self._activate()
        self._release_unused()
        address = self._find_address(count)
        occupied = int(np.count_nonzero(self._pages)) * PAGE_BYTES
        # Live bytes outside of the arena, such as a library's cache, cannot be evicted.
        used = occupied + sum(self._lent.values()) + self._arena.counters().live_bytes
        missing = max(used + count - self._budget, 0)
        if address is None or missing > int(np.count_nonzero(self._pages == _Page.EVICTABLE)) * PAGE_BYTES:
            return None
        self._evict(missing)
        self._lent[address] = count
        self.peak_bytes = max(self.peak_bytes, used + count - missing)
        return address

    def _activate(self) -> None:
        """Prepare to serve an op's first request: pause the copies and classify the arena's pages."""
        if self.is_active:
            return
        self._pause()
        self.is_active, self._flag.value = True, 1
        self._pages = self._classify_pages()
        for first, last in _page_runs(self._pages == _Page.FREE):
            self._arena.discard(first * PAGE_BYTES, (last - first) * PAGE_BYTES)

    def _release_unused(self) -> None:
        """Release lent memory that ops no longer use."""
        live = self._arena.lent_addresses()
        for address in [address for address in self._lent if address not in live]:
            advise_pages(address, self._lent.pop(address), mmap.MADV_DONTNEED)
        for address in [address for address in self._overflows if address not in live]:
            home_tensor, slots, offset = self._overflows.pop(address)
            slots.free(offset, home_tensor.numel())

    def _find_address(self, count: int) -> int | None:
        """Return the first free address for ``count`` bytes after the arena (in its annex), or None."""
        start = self._arena.address + self._arena.bytes
        end = start + self._arena.annex_bytes
        for address, size in sorted(self._lent.items()):
            if address - start >= count:
                break
            start = address + size
        return start if end - start >= count else None

    def _evict(self, count: int) -> None:
        """Copy ``count`` bytes of evictable pages to homes, and release the memory of the pages."""
        # The longest runs of pages take the fewest copies.
        for first, last in sorted(_page_runs(self._pages == _Page.EVICTABLE), key=lambda run: run[0] - run[1]):
            if count <= 0:
                return
            size = min((last - first) * PAGE_BYTES, round_up(count, PAGE_BYTES))
            home, pieces = self._take_slots(size)
            start = first * PAGE_BYTES
            for piece in pieces:
                self._arena.save(start, piece.bytes, self._slots[home].home, piece.offset)
                self._evicted.append((start, home, piece))
                self._arena.discard(start, piece.bytes)
                self._pages[start // PAGE_BYTES : (start + piece.bytes) // PAGE_BYTES] = _Page.FREE
                start += piece.bytes
            count -= size
            self.evicted_bytes += size

    def _take_slots(self, count: int) -> tuple[int, tuple[SlotPiece, ...]]:
        """Take ``count`` bytes at the nearest home with room; return (home, pieces), or raise ``SpillError``."""
        refusals: list[str] = []
        for home, slots in enumerate(self._slots):
            try:
                return home, slots.take_pieces(count)
            except SpillError as error:
                refusals.append(str(error))
        raise SpillError("; ".join(refusals) or "there is no home to evict pages to")

    # Contents of the arena

    def _classify_pages(self) -> _Pages:
        """Return for each page of the arena whether it is free, evictable or in use by an instruction."""
        pages = np.zeros(self._arena.bytes // PAGE_BYTES, np.uint8)
        # Small blocks share pages, so pinned pages are marked last.
        for block in self._program.blocks:
            if block.bytes and self._is_needed(block):
                pages[_page_range(block)] = _Page.EVICTABLE
        for index, instruction in enumerate(self._program.instructions):
            if self._starts[index] > 0 and self._ends[index] <= 0:
                for number in blocks_of(instruction):
                    block = self._program.blocks[number]
                    if block.bytes:
                        pages[_page_range(block)] = _Page.PINNED
        return pages

    def _is_needed(self, block: Block) -> bool:
        """Return whether a later instruction or the next step needs the bytes of a block."""
        users = self._users_by_block[block.id]
        if not block.wraps:
            waits = block.dies >= len(self._program.instructions) or self._has_unfinished_user(users)
            return self._starts[block.born] > 0 and waits
        if block.born == block.dies == 0 or self._starts[block.born] > 0:
            return True
        return self._has_unfinished_user([user for user in users if user < block.dies])

    def _has_unfinished_user(self, users: Sequence[int]) -> bool:
        """Return whether any of the instructions ``users`` has not ended; True if ``users`` is empty."""
        return not users or any(self._ends[user] <= 0 for user in users)

    @property
    def _users_by_block(self) -> list[list[int]]:
        """The instructions that use each block, by block id."""
        if self._cached_users is None:
            self._cached_users = [[] for _ in self._program.blocks]
            for index, instruction in enumerate(self._program.instructions):
                for number in blocks_of(instruction):
                    self._cached_users[number].append(index)
        return self._cached_users


def _page_range(block: Block) -> slice:
    return slice(block.offset // PAGE_BYTES, -(-(block.offset + block.bytes) // PAGE_BYTES))


def _create_overflow_memory(homes: Sequence[Slots], count: int) -> tuple[torch.Tensor, Slots, int] | None:
    """Take a slot at the first home with room; return (tensor, slots of the home, offset), or None."""
    for slots in homes:
        try:
            offset = slots.take(count)
        except SpillError:
            continue
        try:
            return slots.home.tensor_of(offset, count), slots, offset
        except OutOfCoreError:
            slots.free(offset, count)
    return None


def _release_slot(slots: Slots, offset: int, home_tensor: torch.Tensor) -> None:
    slots.free(offset, home_tensor.numel())


_stranded: list[object] = []  # memory that outlives its lender, kept until the process ends


def _keep_stranded(home_tensors: dict[int, tuple[torch.Tensor, Slots, int]]) -> None:
    """Keep memory that outlives its lender until the process ends."""
    if home_tensors:
        _stranded.append(home_tensors)


def blocks_of(instruction: Run | CopyIn | CopyOut) -> tuple[int, ...]:
    """Return the blocks that an instruction uses, including a workspace."""
    if not isinstance(instruction, Run):
        return (instruction.block,)
    return instruction.blocks if instruction.workspace is None else (*instruction.blocks, instruction.workspace)


def _page_runs(selected: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the runs of selected pages as (first, last + 1)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], selected.view(np.int8), [0]))))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]


def _do_nothing() -> None:
    """Stub of ``pause`` and ``resume`` between steps."""
