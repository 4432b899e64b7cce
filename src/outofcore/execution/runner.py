"""Run a captured and planned step again and again, with its program bound to an arena."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from outofcore import _torch_internals as internals
from outofcore._torch_internals import mark_stepped
from outofcore.capture.captured import Captured, LeafKind
from outofcore.capture.optimizers import OptimizerUpdate, StateOrder
from outofcore.costs import Costs
from outofcore.errors import OutOfCoreError, StateError
from outofcore.execution.aliases import OptimizerStates, PersistentState, StatePlace
from outofcore.execution.arena import Arena, DeviceArena, ScopeTable
from outofcore.execution.binding import BoundProgram, BoundRun, bind, requests_by_scope, tensor_on
from outofcore.execution.demand_eviction import DemandEviction
from outofcore.execution.engines import Engine, Port
from outofcore.execution.gradients import StepGradients
from outofcore.execution.model_state import StateKeeper
from outofcore.execution.stopping import find_updates, finish_state_copies, is_state_complete, matches_plain_pytorch
from outofcore.execution.undo import Undo
from outofcore.graph import Op
from outofcore.planning.placement.requests import AllocatorEvent, EventKind, Requests, ResultStorage, workspace_layout
from outofcore.program import CopyIn, CopyOut, Program, Run, Timeline
from outofcore.runtime.slots import SlotLayout, SlotPiece, allocate_slots, needed_bytes


class UpdateError(Exception):
    """Wraps an exception of an optimizer's code, which is its ``__cause__``; never reaches the user."""


@dataclass(frozen=True)
class _PlacedProgram:
    """A program in an arena, with the tables, slots and undo information of its runs."""

    arena: DeviceArena
    bound: BoundProgram
    table: ScopeTable
    first_table: ScopeTable | None  # until all updates have created their state
    layout: SlotLayout
    slots: dict[int, tuple[SlotPiece, ...]]  # by the index of a copy
    home_copies: dict[int, int]  # slot offsets of storages that are evicted without a copy
    undo: Undo
    lasting_slots: tuple[tuple[int, SlotPiece], ...]  # home and piece of the slots that outlive the step
    lender: DemandEviction | None  # serves requests beyond the plan


class Runner:
    """Runs the steps of one program in an arena."""

    def __init__(
        self,
        captured: Captured,
        program: Program,
        costs: Costs,
        requests: Sequence[Requests],
        first_requests: dict[int, Requests],
        keeper: StateKeeper,
        states: dict[int, PersistentState] | None = None,
        budget: int = 0,
    ) -> None:
        self.captured = captured
        self.program = program
        self._costs = costs
        self._budget = budget
        self._requests = requests
        self._first_requests = first_requests  # of ops that request other memory in their first run
        self._keeper = keeper
        self._generation = keeper.generation
        self._states = keeper.register(captured) if states is None else states
        self._placed: _PlacedProgram | None = None
        self._last_binding: BoundProgram | None = None  # the binding to the last arena, which still exists
        self._ran_first = False  # whether the last run was the first of some update
        self._has_begun = False  # whether the last run reached its first instruction
        self._makes_state = False  # whether the last run had to create optimizer state
        self._table: ScopeTable | None = None  # of the last run
        self._updates = [call.func for call in captured.calls if isinstance(call.func, OptimizerUpdate)]
        self._state_order = StateOrder(self._updates)
        self._optimizers = list({id(u.optimizer): u.optimizer for u in self._updates}.values())
        self._gradients = StepGradients(captured, program, keeper, self._states)
        self._optimizer_states = OptimizerStates(captured)
        written = {storage for op in captured.graph.ops for storage in op.mutates}
        written |= {part.whole for storage, part in captured.ranges.items() if storage in written}
        self._written_states = {id(state) for storage, state in self._states.items() if storage in written}

    @property
    def states(self) -> dict[int, PersistentState]:
        return self._states

    def is_current(self) -> bool:
        """Return whether the state keeper still tracks this runner's states; otherwise a new runner is needed."""
        return self._generation == self._keeper.generation

    def enter(self, arena: DeviceArena) -> None:
        """Move the program's states to their places, and prepare the arena to run the program."""
        keeper = self._keeper
        for slots in keeper.slots:
            slots.home.start()
        with contextlib.ExitStack() as undo:
            undo.callback(keeper.moves.leave_arena, arena)  # after an error no state is in the arena
            bound = self._last_binding
            if bound is None or bound.arena is not arena:
                bound = bind(self.captured, self.program, arena, max(len(keeper.slots), 1))
            self._adopt_replacements()
            needed = needed_bytes(self.captured.graph, self._costs, self.program)
            for slots, count in zip(keeper.slots, needed, strict=False):
                slots.grow_ahead(count)
            wholes = {part.whole for part in self.captured.ranges.values()}
            keeper.moves.enter(self._states, self.program, arena, self.captured.graph.frozen - wholes)
            offsets_at_home = self._ensure_persistent_slots()
            layout = allocate_slots(self.captured.graph, self._costs, self.program, keeper.slots)
            undo.callback(layout.free, keeper.slots)
            self._placed = self._place(arena, bound, offsets_at_home, layout)
            undo.pop_all()

    def _place(
        self, arena: DeviceArena, bound: BoundProgram, offsets_at_home: dict[int, int], layout: SlotLayout
    ) -> _PlacedProgram:
        """Load constants into the arena, and build the tables and slots that runs of the program need."""
        slots = dict(layout.pieces)
        for index, instruction in enumerate(self.program.instructions):
            if isinstance(instruction, CopyOut | CopyIn) and index not in slots:
                block = self.program.blocks[instruction.block]
                if block.storage in offsets_at_home:
                    slots[index] = (SlotPiece(offsets_at_home[block.storage], block.bytes),)
        workspaces = self._workspaces() if arena.is_synchronous else []
        table = ScopeTable(arena, requests_by_scope(self.captured, self.program, self._requests), workspaces)
        first_table = None
        if self._first_requests:
            first = [self._first_requests.get(i, r) for i, r in enumerate(self._requests)]
            first_table = ScopeTable(arena, requests_by_scope(self.captured, self.program, first), workspaces)
        self._load_constants(arena)
        lasting_slots = tuple(
            (instruction.home, slots[index][0])
            for index, instruction in enumerate(self.program.instructions)
            if isinstance(instruction, CopyOut) and index in slots and index not in layout.pieces
        )
        undo = Undo(self.captured, self.program, slots)
        lender = None
        if isinstance(arena, Arena) and arena.annex_bytes:
            lender = DemandEviction(self.captured, self.program, arena, self._budget, self._keeper.slots, undo)
            arena.lender = lender
        copies = {storage: offsets_at_home[storage] for storage in self.program.clean}
        return _PlacedProgram(arena, bound, table, first_table, layout, slots, copies, undo, lasting_slots, lender)

    def _workspaces(self) -> list[tuple[int, int]]:
        """Return the (bytes, offset in the arena) of each op's workspace; (0, 0) for an op without one."""
        runs = [i for i in self.program.instructions if isinstance(i, Run) and not i.communicates]
        blocks = [None if run.workspace is None else self.program.blocks[run.workspace] for run in runs]
        return [(0, 0) if block is None else (block.bytes, block.offset) for block in blocks]

    def _ensure_persistent_slots(self) -> dict[int, int]:
        """Return the slot of each storage that keeps a slot from step to step; take slots that are missing."""
        slots: dict[int, int] = {}
        for storage, state in self._states.items():
            if state.place is StatePlace.HOME or storage in self.program.clean:
                slots[storage] = self._keeper.moves.ensure_slot(state)
        for storage, state in self._gradients.states_at_home().items():
            slots[storage] = self._keeper.moves.ensure_slot(state)
        for storage, part in self.captured.ranges.items():
            slots[storage] = self._keeper.moves.ensure_slot(self._states[part.whole]) + part.offset
        return slots

    def _load_constants(self, arena: DeviceArena) -> None:
        """Copy the constants on the step's device into their blocks in the arena."""
        foreign = {value.storage for value in self.captured.values if value.foreign}
        for block in self.program.blocks:
            constant = None if block.storage is None else self.captured.constants.get(block.storage)
            if block.storage is not None and constant is not None and block.storage not in foreign:
                count = self.captured.unrounded_bytes(block.storage)
                arena.view(block.offset, count).copy_(internals.view_storage_bytes(constant)[:count])

    def yield_arena(self) -> None:
        """Stop using the arena, but leave the states in it for the next program."""
        if self._placed is not None:
            self._placed.layout.free(self._keeper.slots)
            self._last_binding = self._placed.bound
            self._placed = self._table = None

    def release_arena(self) -> None:
        self.yield_arena()
        self._last_binding = None

    def run(self, engine: Engine, argument_leaves: Sequence[Any], *, may_refuse: bool = True) -> tuple[Any, Timeline]:
        """Run one step; return the result of the user's function, and the timeline.

        With ``may_refuse`` a request beyond the budget fails a step that can be undone. Raises ``UpdateError`` if an
        optimizer's code raised; all other instructions of the step have run.
        """
        placed, captured = self._placed, self.captured
        if placed is None:
            raise StateError("the step was run before its program was in the arena; please report it")
        self._has_begun = False
        to_publish = self._makes_state = self._adopt_replacements()
        self._keeper.read_shared()
        self._state_order.begin(creates_state=to_publish)
        ports, results = self._connect_caller_memory(argument_leaves)
        table = self._table = placed.table
        self._ran_first = False
        if placed.first_table is not None:
            if any(update.creates_state() for update in self._updates):
                table = self._table = placed.first_table
                self._ran_first = True
            else:
                self._placed = placed = replace(placed, first_table=None)
                self._first_requests = {}
        for slots in self._keeper.slots:
            slots.home.start()
        self._keeper.moves.move_written_states()
        placed = self._update_home_copies(placed)
        lender = self._lender
        if lender is not None:
            lender.may_refuse = may_refuse
        placed.undo.begin(placed.arena)
        self._has_begun = True
        try:
            timeline = engine.run(placed.bound, table, placed.slots, ports)
        except Exception as error:
            self._name_op(engine, error)
            raise
        for replica in captured.replicas:
            replica.apply()
        self._check_after_run()
        self._keeper.write_shared(self._written_states)
        self._gradients.assign(placed.arena, results)
        if to_publish:
            self._show_new_state()
        if engine.update_failure is not None:
            self._state_order.end()
            raise UpdateError from engine.update_failure
        self._state_order.end()
        for optimizer in self._optimizers:
            mark_stepped(optimizer)
        return self._build_result(argument_leaves, results), timeline

    def _build_result(self, argument_leaves: Sequence[Any], results: dict[int, torch.Tensor]) -> Any:
        """Return the result of the user's function, built from the tensors of this run."""
        captured = self.captured
        returned: list[Any] = []
        for leaf in captured.outputs:
            match leaf.kind:
                case LeafKind.VALUE:
                    value = captured.values[leaf.index]
                    returned.append(tensor_on(results[value.storage], value))
                case LeafKind.STATE:
                    returned.append(self._keeper.user_tensor(captured.states[leaf.index]))
                case LeafKind.INPUT:
                    returned.append(argument_leaves[leaf.index])
                case LeafKind.CONSTANT:
                    returned.append(leaf.constant)
        return internals.tree_unflatten(returned, captured.output_spec)

    @property
    def _lender(self) -> DemandEviction | None:
        return None if self._placed is None else self._placed.lender

    @property
    def refused_request(self) -> tuple[Op, int] | None:
        """The op that made a refused request in the last run, and the request's bytes; None without a refusal."""
        return None if self._lender is None else self._lender.refused_request

    @property
    def has_overflowed(self) -> bool:
        """Whether ops of the last run got memory of a home, or memory beyond the budget."""
        return self._lender is not None and self._lender.has_overflowed

    @property
    def eviction_error(self) -> OutOfCoreError | None:
        """The error that kept eviction from serving a request of the last run, or None."""
        return None if self._lender is None else self._lender.error

    def _name_op(self, engine: Engine, error: Exception) -> None:
        """Add a note to an error that names the op that was running."""
        progress = engine.read_progress()
        if progress is None:
            return
        half_way = [
            instruction
            for instruction, started, ended in zip(
                self.program.instructions, progress.started, progress.finished, strict=True
            )
            if isinstance(instruction, Run) and started and not ended
        ]
        if len(half_way) == 1:
            op = self.captured.graph.ops[half_way[0].op]
            error.add_note(f"Raised by {op.text}.")

    def _update_home_copies(self, placed: _PlacedProgram) -> _PlacedProgram:
        """Update home copies of states that the user has changed; return the program with its current slots."""
        for storage in self.program.clean:
            self._keeper.moves.update_home_copy(self._states[storage], placed.arena)
        copies = {storage: self._keeper.moves.ensure_slot(self._states[storage]) for storage in self.program.clean}
        moved = {storage: slot for storage, slot in copies.items() if slot != placed.home_copies[storage]}
        if not moved:
            return placed
        slots = dict(placed.slots)
        for index, instruction in enumerate(self.program.instructions):
            if isinstance(instruction, CopyIn) and index not in placed.layout.pieces:
                block = self.program.blocks[instruction.block]
                if block.storage in moved:
                    slots[index] = (SlotPiece(moved[block.storage], block.bytes),)
        undo = Undo(self.captured, self.program, slots)
        if self._lender is not None:
            self._lender.undo = undo
        self._placed = replace(placed, slots=slots, home_copies=copies, undo=undo)
        return self._placed

    def undo(self, engine: Engine) -> bool:
        """Restore the model to the start of the last run; return False if that is impossible."""
        if self._placed is None or not self._has_begun:
            return True
        progress = engine.read_progress()
        if progress is None or (self._lender is not None and self._lender.has_lost_bytes):
            return False
        self._gradients.detach_from_arena()
        return self._placed.undo.undo(self._placed.arena, self._keeper.slots, progress)

    def may_stop(self, engine: Engine) -> bool:
        """Return whether the running step may be interrupted, because no optimizer update has begun."""
        if not self._has_begun:
            return True
        progress = engine.read_progress()
        return progress is not None and not any(progress.started[i] for i in find_updates(self.captured, self.program))

    def finish_like_pytorch(self, engine: Engine) -> bool:
        """Leave the model as plain PyTorch would after the same error; return False if that is impossible."""
        placed, captured, program = self._placed, self.captured, self.program
        progress = engine.read_progress()
        if placed is None or progress is None or (self._lender is not None and self._lender.has_lost_bytes):
            return False
        if not (is_state_complete(captured, program, progress) and matches_plain_pytorch(captured, program, progress)):
            return False
        self._gradients.detach_from_arena()
        finish_state_copies(captured, program, placed.slots, placed.arena, self._keeper.slots, progress)
        self._keeper.write_shared(self._written_states)
        if self._makes_state:
            self._show_new_state()
        self._state_order.end()
        return True

    def _check_after_run(self) -> None:
        """Raise an error if another thread has moved a tensor, or if a written slot is damaged."""
        moved = self._keeper.find_displaced()
        if moved:
            raise StateError(
                f"{', '.join(moved[:3])}{' and others' if len(moved) > 3 else ''} got other memory while the step ran, "
                "from another step or another thread; let one step at a time run over a model"
            )
        for home, piece in self._placed.lasting_slots if self._placed is not None else ():
            self._keeper.slots[home].home.check_last_write(piece.offset)

    @property
    def first_ops(self) -> Set[int]:
        """The ids of ops with other memory requests in their first run; empty unless the last run was a first one."""
        return self._first_requests.keys() if self._ran_first else frozenset()

    def find_unplanned_requests(self) -> dict[int, Requests]:
        """Return the observed memory requests of ops that exceeded their plan in the last run, by op."""
        if self._placed is None or self._table is None:
            return {}
        requests: dict[int, Requests] = {}
        for scope, events in self._table.take_unplanned_events().items():
            run = self._placed.bound.runs[scope]
            planned = self._requests[run.op]
            if self._ran_first:
                planned = self._first_requests.get(run.op, planned)
            observed = derive_requests(run, planned, events, self.captured.alignment)
            # Of several runs of an op, the largest workspace counts.
            if run.op not in requests or observed.workspace_bytes > requests[run.op].workspace_bytes:
                requests[run.op] = observed
        return requests

    def _connect_caller_memory(self, argument_leaves: Sequence[Any]) -> tuple[dict[int, Port], dict[int, torch.Tensor]]:
        """Return the caller's memory for inputs and outputs, and the new output tensors, both by storage."""
        captured = self.captured
        ports: dict[int, Port] = {}
        for binding in captured.inputs:
            storage = captured.values[binding.value].storage
            leaf = argument_leaves[binding.leaf]
            ports[storage] = Port(leaf.data_ptr(), captured.unrounded_bytes(storage), leaf)
        results: dict[int, torch.Tensor] = {}
        elsewhere = self._gradients.storages_in_arena() | self._gradients.states_at_home().keys()
        for storage in captured.graph.outputs:
            if storage in elsewhere:
                continue
            count = captured.unrounded_bytes(storage)
            result = results[storage] = torch.empty(count, dtype=torch.uint8, device=captured.device)
            ports[storage] = Port(result.data_ptr(), count, result)
        return ports, results

    def _show_new_state(self) -> None:
        """Put the state that updates have created into the user's optimizers."""
        created = {
            key for update in {id(u.optimizer): u for u in self._updates}.values() for key in update.created_state()
        }
        for binding, owner, tensor in self._optimizer_states.find_replaced(self._keeper.user_tensor):
            if tensor is not None or (id(owner.parameter), owner.name) not in created:
                continue  # its update was skipped, or its state has other keys now
            owner.optimizer.state[owner.parameter][owner.name] = self._keeper.user_tensor(binding)

    def is_outdated(self) -> bool:
        """Return whether the step must be captured again: its optimizer state is gone or has another layout."""
        return self._optimizer_states.has_changed(begun=self._has_begun) or any(
            update.needs_recapture for update in self._updates
        )

    def _adopt_replacements(self) -> bool:
        """Adopt gradients and optimizer state that the user replaced; return whether optimizer state was cleared."""
        self._gradients.adopt_replacements()
        cleared = False
        for binding, _, tensor in self._optimizer_states.find_replaced(self._keeper.user_tensor):
            if tensor is None:
                cleared = True
            else:
                self._keeper.rebind(self._states[self.captured.values[binding.value].storage], binding, tensor)
        if cleared:
            for update in self._updates:
                update.forget()
        return cleared


def derive_requests(run: BoundRun, planned: Requests, events: Sequence[AllocatorEvent], alignment: int) -> Requests:
    """Derive an op's memory requests for the next plan from the allocator events of one run."""
    sizes: dict[int, int] = {}  # bytes by pointer, in order of the requests
    for event in events:
        if event.kind is EventKind.ALLOCATE:
            sizes[event.pointer] = event.bytes
        else:
            sizes.pop(event.pointer, None)
    addresses = {leaf: address for leaf, address, *_ in run.results}
    pointers: dict[int, int] = {}
    missing: list[tuple[int, int]] = []
    for request in planned.requests:
        if isinstance(request.placement, ResultStorage) and request.placement.key in addresses:
            address = addresses[request.placement.key]
            if sizes.get(address) == request.bytes:
                pointers[address] = request.placement.key
                del sizes[address]
            else:
                missing.append((request.placement.key, request.bytes))
    # A result that was served elsewhere is recognized by its size.
    for leaf, count in missing:
        matching = next((pointer for pointer, size in sizes.items() if size == count), None)
        if matching is not None:
            pointers[matching] = leaf
            del sizes[matching]
    return workspace_layout(events, pointers, alignment)
