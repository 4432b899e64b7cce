"""One captured and planned step on the CPU: its program bound to an arena, to be run again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outofcore import _torch_internals as internals
from outofcore.analysis import is_large, placed_bytes
from outofcore.analysis.requests import Requests
from outofcore.capture.captured import Captured, LeafKind, StateBinding
from outofcore.capture.optimizers import OptimizerUpdate, StateOwner, mark_stepped
from outofcore.errors import StateError
from outofcore.execution.arena import Arena, ScopeTable
from outofcore.execution.binding import Bound, bind, scopes, tensor_on
from outofcore.execution.cpu import CpuEngine
from outofcore.execution.slots import Slots
from outofcore.execution.state import State, StateKeeper
from outofcore.execution.surprises import requests_seen
from outofcore.graph import StorageKind
from outofcore.program import CopyIn, CopyOut, Program, Timeline

_NOTHING: dict[str, Any] = {}


@dataclass(frozen=True)
class _Placed:
    """What a runner needs while its program is the one in the arena."""

    arena: Arena
    bound: Bound
    table: ScopeTable
    first_table: ScopeTable | None  # while an update has yet to make its state
    slots: dict[int, int]


class Runner:
    """Runs one program.

    Args:
        captured: the step.
        program: placed and wired.
        requests: for each op what it asks of the allocator.
        first_requests: the same for the first run of ops that then ask for other memory.
        keeper: the states of all captures of this step.
        states: of this capture by storage, where the keeper has adopted it before.
    """

    def __init__(
        self,
        captured: Captured,
        program: Program,
        requests: Sequence[Requests],
        first_requests: dict[int, Requests],
        keeper: StateKeeper,
        states: dict[int, State] | None = None,
    ) -> None:
        self.captured = captured
        self.program = program
        self._requests = requests
        self._first_requests = first_requests
        self._keeper = keeper
        self._states = keeper.adopt(captured) if states is None else states
        self._placed: _Placed | None = None
        self._table: ScopeTable | None = None  # of the last run, if it was not the first of some update
        self._moved = {
            storage
            for i in program.instructions
            if isinstance(i, CopyOut | CopyIn) and (storage := program.blocks[i.block].storage) is not None
        }
        self._updates = [call.func for call in captured.calls if isinstance(call.func, OptimizerUpdate)]
        self._optimizers = list({id(u.optimizer): u.optimizer for u in self._updates}.values())
        self._gradients = {
            left.value: (captured.states[left.parameter], keeper.gradient(captured, left))
            for left in captured.gradients_left
        }
        self._cleared = [parameter_of(captured.states[i]) for i in captured.gradients_cleared]
        self._accumulated = [
            (binding, state)
            for binding in captured.states
            if binding.kind is StorageKind.GRADIENT
            for state in (self._states[captured.values[binding.value].storage],)
        ]
        self._owned = [(b, b.owner) for b in captured.states if isinstance(b.owner, StateOwner)]

    def replanned(self, program: Program, requests: Sequence[Requests]) -> Runner:
        """A runner of another program for the same capture, whose states are those of now."""
        return Runner(self.captured, program, requests, self._first_requests, self._keeper, self._states)

    def enter(self, arena: Arena, slots_of: Slots) -> None:
        """Make this runner's program the one in the arena; no other may be.

        Raises:
            SpillError: the home has no room for what moves.
            TransferError: a state could not be brought to its place.
        """
        graph = self.captured.graph
        ported = {self.captured.values[b.value].storage for b in self.captured.inputs}
        ported |= set(graph.outputs) | set(self._states)
        sizes = {s: placed_bytes(graph.storages[s].bytes) for s in sorted(self._moved - ported)}
        slots = slots_of.pool(sizes)
        for storage, state in self._states.items():
            if storage in self._moved:
                slots[storage] = self._keeper.slot(state)
        for index, (_, state) in self._gradients.items():
            if is_large(state.bytes):
                slots[self.captured.values[index].storage] = self._keeper.slot(state)
        bound = bind(self.captured, self.program, arena)
        table = ScopeTable(arena, scopes(self.captured, self.program, self._requests))
        first_table = None
        if self._first_requests:
            first = [self._first_requests.get(i, r) for i, r in enumerate(self._requests)]
            first_table = ScopeTable(arena, scopes(self.captured, self.program, first))
        for storage, value in self.captured.constants.items():
            self._load_constant(storage, value, arena)
        self._keeper.enter(self._states, self.program, arena)
        self._placed = _Placed(arena, bound, table, first_table, slots)

    def _load_constant(self, storage: int, constant: torch.Tensor, arena: Arena) -> None:
        for block in self.program.blocks:
            if block.storage == storage:
                count = self.captured.graph.storages[storage].bytes
                arena.view(block.offset, count).copy_(internals.storage_bytes(constant)[:count])

    @property
    def spilled(self) -> frozenset[int]:
        """The storages that the program moves between the arena and the home."""
        ported = {self.captured.values[b.value].storage for b in self.captured.inputs}
        return frozenset(self._moved - ported - set(self.captured.graph.outputs))

    def leave(self) -> None:
        """Take every state out of the arena."""
        if self._placed is not None:
            self._keeper.leave(self._placed.arena)
            self._placed = None

    def run(self, engine: CpuEngine, leaves: Sequence[Any]) -> tuple[Any, Timeline]:
        """Run one step.

        Args:
            engine: runs the instructions.
            leaves: the flattened arguments of the step, of the signature that was captured.

        Returns:
            What the user's step returns, in memory of its own, and when everything ran.
        """
        placed, captured = self._placed, self.captured
        if placed is None:
            raise StateError("the step was run before its program was in the arena")
        self._take_over()
        ports, results = self._ports(leaves)
        table = self._table = placed.table
        if placed.first_table is not None:
            if any(update.is_first() for update in self._updates):
                table, self._table = placed.first_table, None
            else:
                self._placed = placed = replace(placed, first_table=None)
                self._first_requests = {}
        timeline = engine.run(self.program, placed.bound, placed.arena, table, placed.slots, ports)
        self._show_gradients(results)
        self._publish()
        for optimizer in self._optimizers:
            mark_stepped(optimizer)
        returned: list[Any] = []
        for leaf in captured.outputs:
            match leaf.kind:
                case LeafKind.VALUE:
                    value = captured.values[leaf.index]
                    returned.append(tensor_on(results[value.storage], value))
                case LeafKind.STATE:
                    returned.append(self._keeper.tensor(captured.states[leaf.index]))
                case LeafKind.INPUT:
                    returned.append(leaves[leaf.index])
                case LeafKind.CONSTANT:
                    returned.append(leaf.constant)
        return internals.tree_unflatten(returned, captured.output_spec), timeline

    def surprises(self) -> dict[int, Requests]:
        """What ops asked for in the last run, those alone that asked for 64 KiB or more that no plan foresaw."""
        if self._placed is None or self._table is None:
            return {}
        found: dict[int, Requests] = {}
        for scope, events in self._table.surprises().items():
            run = self._placed.bound.runs[scope]
            seen = requests_seen(run, self._requests[run.op], events)
            # Of several runs of an op, the one that needs the most.
            if run.op not in found or seen.workspace_bytes > found[run.op].workspace_bytes:
                found[run.op] = seen
        return found

    def _ports(self, leaves: Sequence[Any]) -> tuple[dict[int, tuple[int, int]], dict[int, torch.Tensor]]:
        """The caller's memory: where inputs come from, and fresh memory where outputs go."""
        captured = self.captured
        storages = captured.graph.storages
        ports: dict[int, tuple[int, int]] = {}
        for binding in captured.inputs:
            storage = captured.values[binding.value].storage
            ports[storage] = (leaves[binding.leaf].data_ptr(), storages[storage].bytes)
        results: dict[int, torch.Tensor] = {}
        in_slots = {captured.values[index].storage for index, (_, s) in self._gradients.items() if is_large(s.bytes)}
        for storage in captured.graph.outputs:
            if storage in in_slots:
                continue
            results[storage] = torch.empty(storages[storage].bytes, dtype=torch.uint8)
            ports[storage] = (results[storage].data_ptr(), storages[storage].bytes)
        return ports, results

    def _show_gradients(self, results: dict[int, torch.Tensor]) -> None:
        for index, (parameter, state) in self._gradients.items():
            own = results.get(self.captured.values[index].storage)
            parameter_of(parameter).grad = self._keeper.arrived(state, own)
        for parameter in self._cleared:
            parameter.grad = None
        for binding, state in self._accumulated:
            if parameter_grad_owner(self.captured, binding).grad is None:
                self._keeper.forget(state)

    def _publish(self) -> None:
        """Let the user see optimizer state that an update brought into being."""
        for binding, owner in self._owned:
            entries = owner.optimizer.state[owner.parameter]
            tensor = self._keeper.tensor(binding)
            if entries.get(owner.name) is not tensor:
                entries[owner.name] = tensor

    def _take_over(self) -> None:
        """Take note of gradients and optimizer state that the user has put in place of the ones shown."""
        for binding, state in self._accumulated:
            self._keeper.rebind(state, binding, live_gradient(self.captured, binding))
        cleared = False
        for binding, owner in self._owned:
            live = owner.optimizer.state.get(owner.parameter, _NOTHING).get(owner.name)
            if live is None:
                cleared = True
            elif live is not self._keeper.tensor(binding):
                self._keeper.rebind(self._states[self.captured.values[binding.value].storage], binding, live)
        if cleared:
            for update in self._updates:
                update.forget()


def parameter_of(binding: StateBinding) -> torch.Tensor:
    """The user's own parameter of a binding.

    Raises:
        StateError: the binding is not that of a tensor that the user has.
    """
    if binding.tensor is None:
        raise StateError(f"{binding.key} is not a parameter of the model")
    return binding.tensor


def parameter_grad_owner(captured: Captured, binding: StateBinding) -> torch.Tensor:
    """The parameter whose gradient a GRADIENT binding is."""
    key = binding.key.removesuffix(".grad")
    return parameter_of(next(b for b in captured.states if b.key == key))


def live_gradient(captured: Captured, binding: StateBinding) -> torch.Tensor:
    """The gradient as the user has it now.

    Raises:
        StateError: there is none, although the step was captured with one.
    """
    gradient = parameter_grad_owner(captured, binding).grad
    if gradient is None:
        raise StateError(f"{binding.key} was there when the step was captured and is None now")
    return gradient
