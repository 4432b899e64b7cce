"""Optimizer updates as opaque ops that run the optimizer's own code on a few parameters at a time.

Each op steps a shadow of the user's optimizer that has only the op's parameters, with the same arithmetic as eager
PyTorch. Each call reads the group settings again, so a scheduler's changes take effect.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from outofcore._torch_internals import empty_step_hooks, plain_optimizer_step
from outofcore.capture.device_traits import traits_of
from outofcore.capture.tables import leaves_in
from outofcore.errors import StateError

# Elements of a piece: 1 MiB of each tensor in float32.
PIECE_ELEMENTS = 1 << 18

# These update an element from the same element of each tensor, and from counts.
_ELEMENTWISE = frozenset({SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop})
# With narrower dtypes PyTorch rounds differently at the end of a range, so ranges would change the bits.
_DTYPES = frozenset({torch.float32, torch.float64})
# Settings that update all parameters in one call, or in native code that needs no pieces.
_SINGLE_CALL_SETTINGS = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class UpdatePiece:
    """A parameter of an update, or a range of one, with its gradient and state."""

    member: int  # index of the parameter in its update
    parameter: torch.Tensor
    gradient: torch.Tensor | None
    states: tuple[torch.Tensor, ...]  # counts are copies, except in the last piece
    unplaced: dict[str, Any]  # state that has no planned tensor


def pieces_of(optimizer: Optimizer, group: int, whole: UpdatePiece) -> list[UpdatePiece]:
    """Divide a parameter's update into pieces; return ``[whole]`` if it must not be divided."""
    if not _can_be_cut(optimizer, optimizer.param_groups[group], whole):
        return [whole]
    count = whole.parameter.numel()

    def slice_of(tensor: torch.Tensor, start: int) -> torch.Tensor:
        if tensor.ndim == 0:
            return tensor.clone() if start + PIECE_ELEMENTS < count else tensor
        return tensor.view(-1).narrow(0, start, min(PIECE_ELEMENTS, count - start))

    return [
        UpdatePiece(
            whole.member,
            slice_of(whole.parameter, start),
            None if whole.gradient is None else slice_of(whole.gradient, start),
            tuple(slice_of(tensor, start) for tensor in whole.states),
            dict(whole.unplaced),
        )
        for start in range(0, count, PIECE_ELEMENTS)
    ]


def _updates_one_by_one(optimizer: Optimizer, settings: dict[str, Any]) -> bool:
    """Return whether an optimizer with these settings updates elementwise, one parameter after the other."""
    return type(optimizer) in _ELEMENTWISE and not any(settings.get(name) for name in _SINGLE_CALL_SETTINGS)


def _can_be_cut(optimizer: Optimizer, settings: dict[str, Any], whole: UpdatePiece) -> bool:
    """Return whether a parameter's update can be divided into pieces without changing its bits."""
    parameter, gradient = whole.parameter, whole.gradient
    if (
        parameter.numel() < 2 * PIECE_ELEMENTS
        or not _updates_one_by_one(optimizer, settings)
        or not traits_of(parameter.device).updates_ranges
        or parameter.dtype not in _DTYPES
        or parameter.ndim == 0
        or gradient is None
        or any(isinstance(value, torch.Tensor) for value in whole.unplaced.values())
    ):
        return False
    return all(
        tensor.layout is torch.strided
        and tensor.shape == parameter.shape
        and tensor.dtype == parameter.dtype
        and tensor.device == parameter.device
        and tensor.is_contiguous()
        for tensor in (parameter, gradient, *(state for state in whole.states if state.ndim))
    )


Tensors = Sequence[torch.Tensor]
States = Sequence[Sequence[torch.Tensor]]

# Attributes of a shadow that differ from the user's optimizer.
_SHADOWED = frozenset({"state", "param_groups", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"})


@dataclass(frozen=True)
class StateOwner:
    """The key of a state tensor: ``optimizer.state[parameter][name]``."""

    optimizer: Optimizer
    parameter: torch.Tensor
    name: str


@dataclass(frozen=True)
class Member:
    """One parameter of an update, or a range of one."""

    parameter: torch.Tensor  # the user's object
    group: int
    names: tuple[str, ...]  # of its state
    start: int = 0  # first element of the range
    # The last range in the step. Only it changes counts and other shared state, because all ranges must read the old
    # values.
    is_last: bool = True
    rank: tuple[int, int] = (0, 0)  # order in which the optimizer's step creates the state of parameters
    order: tuple[str, ...] = ()  # order in which it creates the entries of one state

    def key(self, name: str) -> tuple[int, str, int]:
        return id(self.parameter), name, self.start


def updates_independently(optimizer: Optimizer) -> bool:
    """Return whether an optimizer updates each parameter from its own gradient and state only."""
    # The classes of ``torch.optim`` do. Other classes declare it with an attribute ``outofcore_independent = True``.
    # Without it, one op updates all parameters, which must then be on the device together.
    return is_torch_optimizer(optimizer) or bool(getattr(optimizer, "outofcore_independent", False))


def updates_elementwise(optimizer: Optimizer) -> bool:
    """Return whether updates depend only on the same element of each tensor, and on counts."""
    # A range of a parameter is then updated like the whole. Classes outside of ``torch.optim`` declare it with an
    # attribute ``outofcore_elementwise = True``.
    return type(optimizer) in _ELEMENTWISE or bool(getattr(optimizer, "outofcore_elementwise", False))


def is_torch_optimizer(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]


def run_shadow(
    optimizer: Optimizer, parameters: Sequence[tuple[int, torch.Tensor]], states: Sequence[dict[str, Any]]
) -> Optimizer:
    """Run one step of a copy of an optimizer on the given parameters and state, and return the copy."""
    kind = type(optimizer)
    shadow: Optimizer = object.__new__(kind)
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)
    shadow.__dict__.update(empty_step_hooks(optimizer))
    groups: dict[int, list[torch.Tensor]] = {}
    for index, leaf in parameters:
        groups.setdefault(index, []).append(leaf)
    shadow.param_groups = [{**optimizer.param_groups[index], "params": members} for index, members in groups.items()]
    shadow.state = defaultdict(dict)
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            shadow.state[key] = value
    for (_, leaf), entry in zip(parameters, states, strict=True):
        if entry:  # else the optimizer initialises the state
            shadow.state[leaf] = entry
    with torch.no_grad():
        plain_optimizer_step(kind)(shadow)
    return shadow


class OptimizerUpdate:
    """The function of an update op: updates a few parameters as the optimizer's ``step`` would.

    If a state tensor does not exist yet, the optimizer initialises it and the result is copied into the tensor passed.
    State that is no tensor, or is on another device (a step count on the CPU), stays in ``optimizer.state``.
    """

    def __init__(self, optimizer: Optimizer, members: Sequence[Member], created: set[tuple[int, str, int]]) -> None:
        self.optimizer = optimizer
        self.members = tuple(members)
        self._created = created  # keys of existing state; shared by the updates of a capture
        self.forget_count = 0  # calls of ``forget``
        # Set if the optimizer keeps state that it did not keep, or kept differently, at capture. That state stays in
        # ``optimizer.state``, outside of the plan, until the step is captured again.
        self.needs_recapture = False

    @classmethod
    def join(cls, updates: Sequence[OptimizerUpdate]) -> OptimizerUpdate:
        """Return one update of the parameters of several updates, which share a capture and an optimizer."""
        first = updates[0]
        return cls(first.optimizer, [member for update in updates for member in update.members], first._created)

    def can_update_ranges(self) -> bool:
        """Return whether this update has a single parameter and can run range by range, with unchanged bits."""
        if len(self.members) != 1:
            return False
        (member,) = self.members
        one_by_one = _updates_one_by_one(self.optimizer, self.optimizer.param_groups[member.group])
        # A count that is a plain number is no storage, so no dependency would order its change after all ranges.
        counts = self.optimizer.state.get(member.parameter, {}).values()
        if not all(value is None or isinstance(value, torch.Tensor) for value in counts):
            return False
        return one_by_one and member.parameter.dtype in _DTYPES and member.start == 0 and member.is_last

    def for_range(self, start: int, *, is_last: bool) -> OptimizerUpdate:
        (member,) = self.members
        return OptimizerUpdate(self.optimizer, [replace(member, start=start, is_last=is_last)], self._created)

    @property
    def name(self) -> str:
        return f"optimizer.{type(self.optimizer).__name__}"

    def creates_state(self) -> bool:
        return not all(all(self._existing(member)) for member in self.members)

    def forget(self) -> None:
        """Mark created state as missing, so that the next call creates it. Keep tensors in ``optimizer.state``."""
        self.forget_count += 1
        for member in self.members:
            self._created.difference_update(map(member.key, member.names))

    def created_state(self) -> Iterator[tuple[int, str]]:
        """Yield (parameter id, state name) of each state tensor that updates of this capture have created."""
        return ((parameter, name) for parameter, name, _ in self._created)

    def optimizer_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the parameters' state tensors; for an optimizer from outside PyTorch, also its other tensors."""
        optimizer = self.optimizer
        for member in self.members:
            yield from leaves_in(optimizer.state.get(member.parameter, {}))
        if is_torch_optimizer(optimizer):
            return
        for key, value in optimizer.state.items():
            if not isinstance(key, torch.Tensor):
                yield from leaves_in(value)
        for group in optimizer.param_groups:
            yield from leaves_in([value for name, value in group.items() if name != "params"])
        yield from leaves_in([value for name, value in optimizer.__dict__.items() if name not in _SHADOWED])

    def _existing(self, member: Member) -> list[bool]:
        """Return for each state name of a member whether that state exists."""
        entries = self.optimizer.state.get(member.parameter, {})
        return [
            member.key(name) in self._created or isinstance(entries.get(name), torch.Tensor) for name in member.names
        ]

    def bind(self, params: Tensors, grads: Sequence[torch.Tensor | None], states: States) -> BoundUpdate:
        return BoundUpdate(self, params, grads, states)

    def _unplaced_entries(self, member: Member) -> dict[str, Any]:
        """Return a member's state that has no planned tensor. It is a deep copy, except for the last range."""
        entries = self.optimizer.state.get(member.parameter, {})
        unplaced = {n: v for n, v in entries.items() if n not in member.names or not isinstance(v, torch.Tensor)}
        return unplaced if member.is_last else copy.deepcopy(unplaced)

    def __call__(self, params: Tensors, grads: Sequence[torch.Tensor | None], states: States) -> None:
        """Update ``params`` and ``states`` in place; raise ``StateError`` if the layout of a range's state changes."""
        present = [self._existing(member) for member in self.members]
        entries_of_members = [self._unplaced_entries(member) for member in self.members]
        shadow, remaining = self._run(params, grads, states, present, entries_of_members)
        for member, entries in zip(self.members, remaining, strict=True):
            self._created.update(member.key(name) for name in member.names if name not in entries)
            unplaced = _without_missing(entries)
            if unplaced and member.is_last:
                self.optimizer.state[member.parameter].update(unplaced)
        if not is_torch_optimizer(self.optimizer):
            self._copy_attributes(shadow)

    def _run(
        self,
        params: Tensors,
        grads: Sequence[torch.Tensor | None],
        states: States,
        state_exists: list[list[bool]],
        unplaced_entries: list[dict[str, Any]],
    ) -> tuple[Optimizer, list[dict[str, Any]]]:
        """Update all parameters by optimizer copies; return the last copy, and state without a planned tensor."""
        pieces: list[UpdatePiece] = []
        rows = zip(self.members, params, grads, states, state_exists, unplaced_entries, strict=True)
        for index, (member, param, grad, tensors, has_state, entries) in enumerate(rows):
            # Counts must change with the last range only.
            given_states = [tensor if tensor.ndim or member.is_last else tensor.clone() for tensor in tensors]
            whole = UpdatePiece(index, param, grad, tuple(given_states), dict(entries))
            is_uniform = all(has_state) or not any(has_state)  # else the missing state may be created differently
            pieces += pieces_of(self.optimizer, member.group, whole) if is_uniform else [whole]
        # New state is copied to its tensor. Piece by piece, only a small part exists twice.
        one_by_one = len(pieces) > len(self.members) and not all(map(all, state_exists))
        unplaced: list[dict[str, Any]] = [{} for _ in self.members]
        shadow = self.optimizer
        for batch in [[piece] for piece in pieces] if one_by_one else [pieces]:
            shadow = self._step(batch, state_exists, unplaced)
        return shadow, unplaced

    def _step(
        self, pieces: Sequence[UpdatePiece], state_exists: list[list[bool]], unplaced: list[dict[str, Any]]
    ) -> Optimizer:
        """Update ``pieces`` with a copy of the optimizer; put state without a planned tensor into ``unplaced``."""
        leaves = [as_leaf(piece.parameter, piece.gradient) for piece in pieces]
        entries: list[dict[str, Any]] = []
        for piece in pieces:
            states = zip(self.members[piece.member].names, piece.states, state_exists[piece.member], strict=True)
            entries.append(piece.unplaced | {name: tensor for name, tensor, has_state in states if has_state})
        groups = [self.members[piece.member].group for piece in pieces]
        shadow = run_shadow(self.optimizer, list(zip(groups, leaves, strict=True)), entries)
        with torch.no_grad():
            for piece, leaf in zip(pieces, leaves, strict=True):
                if leaf.data_ptr() != piece.parameter.data_ptr():
                    piece.parameter.copy_(leaf)
                state, device = dict(shadow.state.get(leaf) or {}), piece.parameter.device
                unplaced[piece.member] = self._store_state(
                    self.members[piece.member], state, piece.states, device, piece.unplaced
                )
                leaf.grad = None
        return shadow

    def _store_state(
        self,
        member: Member,
        entries: dict[str, Any],
        tensors: Tensors,
        device: torch.device,
        user_state: dict[str, Any],
    ) -> dict[str, Any]:
        """Copy a member's new state into its planned tensors; return the remaining entries."""
        for name, tensor in zip(member.names, tensors, strict=True):
            created = entries.setdefault(name, _MISSING)
            if created is None or created is _MISSING:
                continue
            if not isinstance(created, torch.Tensor) or created.shape != tensor.shape or created.dtype != tensor.dtype:
                self._require_recapture(member, name)
                continue
            if created is not tensor:
                tensor.copy_(created)
            del entries[name]
        for name, created in entries.items():
            if isinstance(created, torch.Tensor) and created.device == device and created is not user_state.get(name):
                self._require_recapture(member, name)
        return entries

    def _require_recapture(self, member: Member, name: str) -> None:
        """Request a new capture of the step; raise ``StateError`` if ``member`` is only a range of a parameter."""
        if member.start or not member.is_last:
            raise StateError(
                f"{type(self.optimizer).__name__} has created state {name!r}, or changed its shape or dtype, since the "
                "step was captured: state of a parameter that is updated range by range must stay as it was; remove "
                "the optimizer's attribute outofcore_elementwise"
            )
        self.needs_recapture = True

    def _copy_attributes(self, shadow: Optimizer) -> None:
        """Copy changed attributes, settings and shared state from ``shadow`` to the user's optimizer."""
        for name, value in shadow.__dict__.items():
            if name not in _SHADOWED and self.optimizer.__dict__.get(name) is not value:
                self.optimizer.__dict__[name] = value
        indices = dict.fromkeys(member.group for member in self.members)
        for index, group in zip(indices, shadow.param_groups, strict=True):
            self.optimizer.param_groups[index].update({k: v for k, v in group.items() if k != "params"})
        for key, value in shadow.state.items():
            if not isinstance(key, torch.Tensor):
                self.optimizer.state[key] = value


# Updates run in another order than the parameters, and state becomes visible when the step ends.
class StateOrder:
    """Sorts state that updates have created into the order in which the optimizer's own step creates it."""

    def __init__(self, updates: Sequence[OptimizerUpdate]) -> None:
        self._members: dict[int, tuple[Optimizer, dict[int, Member]]] = {}
        for update in updates:
            _, members = self._members.setdefault(id(update.optimizer), (update.optimizer, {}))
            for member in update.members:
                first = members.setdefault(id(member.parameter), member)
                if member.rank < first.rank:
                    members[id(member.parameter)] = member
        self._before: dict[int, dict[Any, list[Any]]] | None = None
        self._creates_state = False

    def begin(self, *, creates_state: bool) -> None:
        """Record which optimizer state exists before a step, so that ``end`` can find new state."""
        self._before, self._creates_state = None, creates_state
        if creates_state or any(
            m.parameter not in o.state for o, members in self._members.values() for m in members.values()
        ):
            self._before = {
                number: {key: list(entry) if isinstance(entry, dict) else [] for key, entry in optimizer.state.items()}
                for number, (optimizer, _) in self._members.items()
            }

    def end(self) -> None:
        """Sort the state added since ``begin`` into the order in which the optimizer would create it."""
        for number, before in (self._before or {}).items():
            optimizer, members = self._members[number]
            if not self._creates_state and len(optimizer.state) == len(before):
                continue
            ranks = {parameter: member.rank for parameter, member in members.items()}
            _sort_added(optimizer.state, before, lambda key, ranks=ranks: ranks.get(id(key)))
            for member in members.values():
                entry = optimizer.state.get(member.parameter)
                if isinstance(entry, dict):
                    places = {name: (0, place) for place, name in enumerate(member.order)}
                    _sort_added(entry, before.get(member.parameter, ()), places.get)
        self._before = None


def _sort_added(
    table: dict[Any, Any], before: Container[Any], rank_of: Callable[[Any], tuple[int, int] | None]
) -> None:
    """Sort the added entries of a table by rank; entries without a rank keep their position."""
    added = [key for key in table if key not in before]
    ranked = iter(sorted([key for key in added if rank_of(key) is not None], key=lambda key: rank_of(key) or (0, 0)))
    for key in [key if rank_of(key) is None else next(ranked) for key in added]:
        table[key] = table.pop(key)


class Rehearsal:
    """Runs an update on scratch tensors, to measure it without changing the user's optimizer."""

    def __init__(self, update: OptimizerUpdate) -> None:
        self._update = update
        self.creates_state = update.creates_state()  # whether the next real update creates state
        self._unplaced: list[dict[str, Any]] | None = None

    # An update that creates state allocates differently.
    def run_first(self, params: Tensors, grads: Sequence[torch.Tensor | None], states: States) -> None:
        """Run the update as if no state existed. Later calls reuse state that it creates outside of ``states``."""
        members = self._update.members
        absent = [[False] * len(member.names) for member in members]
        self._unplaced = self._run(params, grads, states, absent, [{} for _ in members])

    def __call__(self, params: Tensors, grads: Sequence[torch.Tensor | None], states: States) -> None:
        members = self._update.members
        if self._unplaced is None and self.creates_state:
            self.run_first(params, grads, states)
        # Uninitialised counts could overflow in the optimizer's arithmetic.
        for tensor in (tensor for tensors in states for tensor in tensors if tensor.ndim == 0):
            tensor.fill_(1)
        unplaced = (
            self._unplaced
            if self._unplaced is not None
            else [self._update._unplaced_entries(member) for member in members]
        )
        present = [[True] * len(member.names) for member in members]
        self._run(params, grads, states, present, [copy.deepcopy(entries) for entries in unplaced])

    def _run(self, params: Tensors, grads: Sequence[torch.Tensor | None], states: States, *state_args: Any) -> Any:
        """Run the update without changing ``needs_recapture``, and return any state outside of ``states``."""
        before = self._update.needs_recapture
        try:
            return [_without_missing(entry) for entry in self._update._run(params, grads, states, *state_args)[1]]
        finally:
            self._update.needs_recapture = before  # a rehearsal must not change it


class BoundUpdate:
    """An update op bound to fixed tensors. Its calls share one copy of the user's optimizer, the shadow.

    Settings and the user's state are read at each call. Calls run the unbound update while state is missing, for
    parameters updated in pieces, and for classes outside of ``torch.optim``.
    """

    def __init__(
        self, update: OptimizerUpdate, params: Tensors, grads: Sequence[torch.Tensor | None], states: States
    ) -> None:
        self._update = update
        self.name, self.optimizer_tensors = update.name, update.optimizer_tensors
        self._params, self._grads, self._states = tuple(params), tuple(grads), tuple(map(tuple, states))
        self._placed = [dict(zip(m.names, rows, strict=True)) for m, rows in zip(update.members, states, strict=True)]
        self._is_reusable = self._can_reuse_shadow()
        self._shadow: Optimizer | None = None  # set when all state exists
        self._leaves: list[torch.nn.Parameter] = []
        self._groups: dict[int, list[torch.nn.Parameter]] = {}
        self._addresses: list[int] = []
        self._forget_count = 0
        # The user's state entries for each parameter, and those without a bound tensor, as of the last look.
        self._entries: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._unplaced: list[tuple[dict[str, Any], str]] = []
        self._unplaced_values: list[Any] = []
        self._values: list[Any] = []  # all state passed to the optimizer's code

    def __call__(self, *_: Any) -> None:
        """Update the bound tensors; arguments are ignored."""
        update, shadow = self._update, self._shadow
        if shadow is not None and self._forget_count == update.forget_count:
            self._step(shadow)
            return
        can_keep = self._is_reusable and not update.creates_state()
        update(self._params, self._grads, self._states)
        if can_keep:
            self._make_shadow()

    def _can_reuse_shadow(self) -> bool:
        """Return whether all calls can step the same copy of the optimizer."""
        update, groups = self._update, self._update.optimizer.param_groups
        rows = zip(update.members, self._params, self._grads, self._states, strict=True)
        if not all(member.is_last for member in update.members):
            return False
        return is_torch_optimizer(update.optimizer) and not any(
            _can_be_cut(update.optimizer, groups[member.group], UpdatePiece(place, param, grad, states, {}))
            for place, (member, param, grad, states) in enumerate(rows)
        )

    def _make_shadow(self) -> None:
        """Create an empty optimizer as the shadow, and assign the bound parameters to its parameter groups."""
        update = self._update
        self._forget_count = update.forget_count
        self._leaves = [as_leaf(param, grad) for param, grad in zip(self._params, self._grads, strict=True)]
        self._addresses = [param.data_ptr() for param in self._params]
        self._groups = {}
        for member, leaf in zip(update.members, self._leaves, strict=True):
            self._groups.setdefault(member.group, []).append(leaf)
        self._entries = []
        self._shadow = object.__new__(type(update.optimizer))
        self._shadow.state = defaultdict(dict)

    def _step(self, shadow: Optimizer) -> None:
        """Step the shadow with the user's current settings and state."""
        update = self._update
        optimizer, state = update.optimizer, shadow.state
        entries = [optimizer.state.get(member.parameter) or _NO_STATE for member in update.members]
        if not self._is_unchanged(entries):
            self._store_entries(entries, state)
        self._entries = []  # an error during the step must not leave it valid
        shadow.__dict__.update(optimizer.__dict__)
        shadow.__dict__.pop("step", None)
        shadow.__dict__.update(empty_step_hooks(optimizer))
        shadow.state = state
        shadow.param_groups = [
            {**optimizer.param_groups[index], "params": list(leaves)} for index, leaves in self._groups.items()
        ]
        with torch.no_grad():
            plain_optimizer_step(type(optimizer))(shadow)
            pointers = [leaf.data_ptr() for leaf in self._leaves]
            if pointers != self._addresses or not _are_identical(list(_values_of(state)), self._values):
                self._copy_back(pointers, entries, state)
                return
        self._entries = entries

    def _is_unchanged(self, current: list[dict[str, Any]]) -> bool:
        """Return whether the user's optimizer state is unchanged since ``_store_entries``."""
        return (
            _are_identical(current, self._entries)
            and list(map(len, current)) == self._lengths
            and _are_identical([entries.get(name) for entries, name in self._unplaced], self._unplaced_values)
        )

    def _store_entries(self, user_entries: list[dict[str, Any]], state: dict[Any, dict[str, Any]]) -> None:
        """Set the shadow's state from the user's state and the bound tensors; save the values to detect changes."""
        for leaf, entries, placed in zip(self._leaves, user_entries, self._placed, strict=True):
            state[leaf] = {**entries, **placed}
        self._lengths = list(map(len, user_entries))
        pairs = list(zip(user_entries, self._placed, strict=True))
        self._unplaced = [(entries, name) for entries, placed in pairs for name in entries if name not in placed]
        self._unplaced_values = [entries[name] for entries, name in self._unplaced]
        self._values = list(_values_of(state))

    def _copy_back(
        self, new_addresses: list[int], user_entries: list[dict[str, Any]], state: dict[Any, dict[str, Any]]
    ) -> None:
        """If the step has put new tensors in place of bound tensors, copy their values into the bound tensors."""
        for index, leaf in enumerate(self._leaves):
            if new_addresses[index] != self._addresses[index]:
                self._params[index].copy_(leaf)
                self._shadow = None  # the leaf no longer uses the bound memory
            created, placed, entries = state[leaf], self._placed[index], user_entries[index]
            for name, value in created.items():
                if value is not placed.get(name) and value is not entries.get(name):
                    self._copy_replaced_state(index, created)
                    break

    def _copy_replaced_state(self, index: int, created: dict[str, Any]) -> None:
        """Copy a member's new optimizer state into its planned tensors."""
        update, member, param = self._update, self._update.members[index], self._params[index]
        remaining = _without_missing(
            update._store_state(member, dict(created), self._states[index], param.device, _NO_STATE)
        )
        if remaining:
            update.optimizer.state[member.parameter].update(remaining)


_NO_STATE: dict[str, Any] = {}
_MISSING = object()  # marks state that an optimizer has not created


def _without_missing(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if value is not _MISSING}


def _values_of(state: dict[Any, dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable([entries.values() for entries in state.values()])


def _are_identical(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))


def as_leaf(tensor: torch.Tensor, grad: torch.Tensor | None) -> torch.nn.Parameter:
    """Return a parameter that shares a tensor's memory and has the gradient ``grad``, as optimizers expect."""
    leaf = torch.nn.Parameter(tensor.detach(), requires_grad=tensor.is_floating_point() or tensor.is_complex())
    leaf.grad = grad
    return leaf
