"""The update of an optimizer as opaque ops: the optimizer's own code, on the tensors of a few parameters at a time.

The arithmetic of ``optimizer.step()`` is not traced. Each op runs the user's optimizer class on a shadow of the user's
optimizer that has only the op's parameters. So an op computes what plain PyTorch computes. Settings that change between
steps (a learning rate set by a scheduler) take effect, for each call reads the groups again.
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

from outofcore._torch_internals import plain_optimizer_step, without_hooks
from outofcore.capture.device_traits import traits_of
from outofcore.capture.tables import leaves_in
from outofcore.errors import StateError

# Elements of a piece: 1 MiB of each tensor in float32.
PIECE_ELEMENTS = 1 << 18

# What these compute for an element depends on nothing but that element of each tensor, and on counts.
_ELEMENTWISE = frozenset({SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop})
# In narrower ones PyTorch rounds otherwise where a range ends than within it, so where ranges end has to stay.
_DTYPES = frozenset({torch.float32, torch.float64})
# Settings with which all parameters are gone over at once, or in native code that needs no help.
_AT_ONCE = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class Piece:
    """A parameter of an update, or a range of one.

    ``member`` is the index of the parameter in its update. ``states`` holds copies of counts, except for the last
    piece. ``own`` is state that the update does not place.
    """

    member: int
    parameter: torch.Tensor
    gradient: torch.Tensor | None
    states: tuple[torch.Tensor, ...]
    own: dict[str, Any]


def pieces_of(optimizer: Optimizer, group: int, whole: Piece) -> list[Piece]:
    """Cut a parameter into the pieces in which it is updated: one, unless it is long and any range gives the same bits.

    ``whole`` holds the parameter and its state, which each range may have yet to make by itself.
    """
    if not _can_be_cut(optimizer, optimizer.param_groups[group], whole):
        return [whole]
    count = whole.parameter.numel()

    def part(tensor: torch.Tensor, start: int) -> torch.Tensor:
        if tensor.ndim == 0:
            return tensor.clone() if start + PIECE_ELEMENTS < count else tensor
        return tensor.view(-1).narrow(0, start, min(PIECE_ELEMENTS, count - start))

    return [
        Piece(
            whole.member,
            part(whole.parameter, start),
            None if whole.gradient is None else part(whole.gradient, start),
            tuple(part(tensor, start) for tensor in whole.states),
            dict(whole.own),
        )
        for start in range(0, count, PIECE_ELEMENTS)
    ]


def _goes_one_by_one(optimizer: Optimizer, settings: dict[str, Any]) -> bool:
    """Return whether an optimizer computes each element by itself, and one parameter after the other."""
    return type(optimizer) in _ELEMENTWISE and not any(settings.get(name) for name in _AT_ONCE)


def _can_be_cut(optimizer: Optimizer, settings: dict[str, Any], whole: Piece) -> bool:
    parameter, gradient = whole.parameter, whole.gradient
    if (
        parameter.numel() < 2 * PIECE_ELEMENTS
        or not _goes_one_by_one(optimizer, settings)
        or not traits_of(parameter.device).updates_ranges
        or parameter.dtype not in _DTYPES
        or parameter.ndim == 0
        or gradient is None
        or any(isinstance(value, torch.Tensor) for value in whole.own.values())
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

# Attributes of a shadow that are not those of the user's optimizer.
_SHADOWED = frozenset({"state", "param_groups", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"})


@dataclass(frozen=True)
class StateOwner:
    """Where the user finds a tensor of optimizer state: ``optimizer.state[parameter][name]``."""

    optimizer: Optimizer
    parameter: torch.Tensor
    name: str


@dataclass(frozen=True)
class Member:
    """One parameter of an update, or a range of one: the user's own object, its group, and the names of its state.

    ``start`` is the range's first element. ``is_last`` marks the last range in the step: counts and other shared state
    change with that one alone, since all ranges must find them unchanged. ``rank`` and ``order`` give the order in
    which the optimizer's own step makes the state of parameters and the entries of one state.
    """

    parameter: torch.Tensor
    group: int
    names: tuple[str, ...]
    start: int = 0
    is_last: bool = True
    rank: tuple[int, int] = (0, 0)
    order: tuple[str, ...] = ()

    def key(self, name: str) -> tuple[int, str, int]:
        """Identify the member's range of a state tensor."""
        return id(self.parameter), name, self.start


def updates_each_alone(optimizer: Optimizer) -> bool:
    """Return whether an optimizer updates each parameter from its own gradient and state only.

    The classes of ``torch.optim`` do. Any other class declares it with a true attribute ``outofcore_independent``; else
    all its parameters are updated in one op, which is always right but needs all of them on the device at once.
    """
    return is_torchs_own(optimizer) or bool(getattr(optimizer, "outofcore_independent", False))


def updates_elementwise(optimizer: Optimizer) -> bool:
    """Return whether each element of a parameter depends only on that of its gradient and state, and on counts.

    Many classes of ``torch.optim`` do, and then a range of a parameter is updated as the whole is. Any other class
    declares it with a true attribute ``outofcore_elementwise``.
    """
    return type(optimizer) in _ELEMENTWISE or bool(getattr(optimizer, "outofcore_elementwise", False))


def is_torchs_own(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]


def run_shadow(
    optimizer: Optimizer, leaves: Sequence[tuple[int, torch.Tensor]], entries: Sequence[dict[str, Any]]
) -> Optimizer:
    """Run the step of an optimizer's class on other parameters than its own, and return the shadow that has stepped.

    ``leaves`` has for each parameter the index of its group and a leaf tensor with its ``.grad``; ``entries`` its
    state. An empty entry makes the optimizer initialise it.
    """
    kind = type(optimizer)
    shadow: Optimizer = object.__new__(kind)
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)
    shadow.__dict__.update(without_hooks(optimizer))
    groups: dict[int, list[torch.Tensor]] = {}
    for index, leaf in leaves:
        groups.setdefault(index, []).append(leaf)
    shadow.param_groups = [{**optimizer.param_groups[index], "params": members} for index, members in groups.items()]
    shadow.state = defaultdict(dict)
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            shadow.state[key] = value
    for (_, leaf), own in zip(leaves, entries, strict=True):
        if own:
            shadow.state[leaf] = own
    with torch.no_grad():
        plain_optimizer_step(kind)(shadow)
    return shadow


class OptimizerUpdate:
    """Updates a few parameters of an optimizer as its own ``step`` would: the ``func`` of a ``Call``.

    Called with a list of parameters, one of gradients and one of lists of state tensors, and keeps none of them. While
    the user's ``optimizer.state`` has no entry for a state tensor, the optimizer initialises it and the result is
    copied into the tensor given. State that is no tensor, or is on another device than the parameter (a step count on
    the CPU), stays in the user's ``optimizer.state``.

    Attributes:
        members: the parameters, in the order of the arguments.
        forgotten: how often ``forget`` was called.
        is_outgrown: whether the optimizer keeps state that it did not keep, or kept otherwise, when the step was
            captured. It is in the user's ``optimizer.state``, as in plain PyTorch, and takes memory outside of the plan
            until the step is captured again.
    """

    def __init__(self, optimizer: Optimizer, members: Sequence[Member], created: set[tuple[int, str, int]]) -> None:
        """``created`` holds the keys of state that already exists; a capture's updates share it."""
        self.optimizer = optimizer
        self.members = tuple(members)
        self._created = created
        self.forgotten = 0
        self.is_outgrown = False

    @classmethod
    def joined(cls, updates: Sequence[OptimizerUpdate]) -> OptimizerUpdate:
        """Join the updates of several parameters of one capture and one optimizer, in their order."""
        first = updates[0]
        return cls(first.optimizer, [member for update in updates for member in update.members], first._created)

    def has_ranges(self) -> bool:
        """Return whether ranges of its only parameter can be updated with the same bits as the whole."""
        if len(self.members) != 1:
            return False
        (member,) = self.members
        one_by_one = _goes_one_by_one(self.optimizer, self.optimizer.param_groups[member.group])
        # A count that is a plain number is no storage: nothing would say that its change has to come last.
        counts = self.optimizer.state.get(member.parameter, {}).values()
        if not all(value is None or isinstance(value, torch.Tensor) for value in counts):
            return False
        return one_by_one and member.parameter.dtype in _DTYPES and member.start == 0 and member.is_last

    def of_range(self, start: int, *, is_last: bool) -> OptimizerUpdate:
        """Return the update of the range of the only parameter that begins with element ``start``."""
        (member,) = self.members
        return OptimizerUpdate(self.optimizer, [replace(member, start=start, is_last=is_last)], self._created)

    @property
    def name(self) -> str:
        return f"optimizer.{type(self.optimizer).__name__}"

    def is_first(self) -> bool:
        return not all(all(self._present(member)) for member in self.members)

    def forget(self) -> None:
        """Make the state again at the next call, unless it is in the user's ``optimizer.state``."""
        self.forgotten += 1
        for member in self.members:
            self._created.difference_update(map(member.key, member.names))

    def made(self) -> Iterator[tuple[int, str]]:
        """Yield the state that updates of the capture have made in its place: parameter id and name."""
        return ((parameter, name) for parameter, name, _ in self._created)

    def kept_by_optimizer(self) -> Iterator[torch.Tensor]:
        """Yield tensors in the user's optimizer's state, settings and attributes, except parameters."""
        optimizer = self.optimizer
        for member in self.members:
            yield from leaves_in(optimizer.state.get(member.parameter, {}))
        if is_torchs_own(optimizer):
            return
        for key, value in optimizer.state.items():
            if not isinstance(key, torch.Tensor):
                yield from leaves_in(value)
        for group in optimizer.param_groups:
            yield from leaves_in([value for name, value in group.items() if name != "params"])
        yield from leaves_in([value for name, value in optimizer.__dict__.items() if name not in _SHADOWED])

    def _present(self, member: Member) -> list[bool]:
        entries = self.optimizer.state.get(member.parameter, {})
        return [
            member.key(name) in self._created or isinstance(entries.get(name), torch.Tensor) for name in member.names
        ]

    def on(self, params: Tensors, grads: Sequence[torch.Tensor | None], states: States) -> UpdateOn:
        """Bind the update to tensors that stay the same from call to call."""
        return UpdateOn(self, params, grads, states)

    def _own_entries(self, member: Member) -> dict[str, Any]:
        entries = self.optimizer.state.get(member.parameter, {})
        own = {n: v for n, v in entries.items() if n not in member.names or not isinstance(v, torch.Tensor)}
        return own if member.is_last else copy.deepcopy(own)

    def __call__(self, params: Tensors, grads: Sequence[torch.Tensor | None], states: States) -> None:
        """Update ``params`` and ``states`` in place.

        Raises ``StateError`` if the optimizer made state of a range that it did not make when the step was captured.
        """
        present = [self._present(member) for member in self.members]
        own = [self._own_entries(member) for member in self.members]
        shadow, left = self._run(params, grads, states, present, own)
        for member, entries in zip(self.members, left, strict=True):
            self._created.update(member.key(name) for name in member.names if name not in entries)
            rest = _without_unmade(entries)
            if rest and member.is_last:
                self.optimizer.state[member.parameter].update(rest)
        if not is_torchs_own(self.optimizer):
            self._mirror(shadow)

    def _run(
        self,
        params: Tensors,
        grads: Sequence[torch.Tensor | None],
        states: States,
        present: list[list[bool]],
        own: list[dict[str, Any]],
    ) -> tuple[Optimizer, list[dict[str, Any]]]:
        """Step once on the tensors given; return the shadow and the state that is in none of them."""
        pieces: list[Piece] = []
        given = zip(self.members, params, grads, states, present, own, strict=True)
        for index, (member, param, grad, tensors, has, kept) in enumerate(given):
            # Counts change with the last range alone.
            given_states = [tensor if tensor.ndim or member.is_last else tensor.clone() for tensor in tensors]
            whole = Piece(index, param, grad, tuple(given_states), dict(kept))
            settled = all(has) or not any(has)  # else the state that is there says nothing of how the rest is made
            pieces += pieces_of(self.optimizer, member.group, whole) if settled else [whole]
        # State that is made is copied to its place, and should not be there twice for all pieces at once.
        one_by_one = len(pieces) > len(self.members) and not all(map(all, present))
        left: list[dict[str, Any]] = [{} for _ in self.members]
        shadow = self.optimizer
        for together in [[piece] for piece in pieces] if one_by_one else [pieces]:
            shadow = self._step(together, present, left)
        return shadow, left

    def _step(self, pieces: Sequence[Piece], present: list[list[bool]], left: list[dict[str, Any]]) -> Optimizer:
        """Step once on these pieces, whose state is ``present`` or not, and put their remaining state into ``left``."""
        leaves = [as_leaf(piece.parameter, piece.gradient) for piece in pieces]
        entries: list[dict[str, Any]] = []
        for piece in pieces:
            there = zip(self.members[piece.member].names, piece.states, present[piece.member], strict=True)
            entries.append(piece.own | {name: tensor for name, tensor, has in there if has})
        groups = [self.members[piece.member].group for piece in pieces]
        shadow = run_shadow(self.optimizer, list(zip(groups, leaves, strict=True)), entries)
        with torch.no_grad():
            for piece, leaf in zip(pieces, leaves, strict=True):
                if leaf.data_ptr() != piece.parameter.data_ptr():
                    piece.parameter.copy_(leaf)
                made, device = dict(shadow.state.get(leaf) or {}), piece.parameter.device
                left[piece.member] = self._adopt(self.members[piece.member], made, piece.states, device, piece.own)
                leaf.grad = None
        return shadow

    def _adopt(
        self, member: Member, entries: dict[str, Any], given: Tensors, device: torch.device, own: dict[str, Any]
    ) -> dict[str, Any]:
        """Copy state that the optimizer has made or replaced into the tensors given, and return the rest.

        ``own`` stays with the user: also what another step has made for a parameter that has no gradient here. In the
        rest, None or ``_UNMADE`` stands for state still to be made. Raises ``StateError`` if state without a place is
        that of a range, which the user could not see.
        """
        for name, tensor in zip(member.names, given, strict=True):
            made = entries.setdefault(name, _UNMADE)
            if made is None or made is _UNMADE:
                continue
            if not isinstance(made, torch.Tensor) or made.shape != tensor.shape or made.dtype != tensor.dtype:
                self._outgrow(member, name)
                continue
            if made is not tensor:
                tensor.copy_(made)
            del entries[name]
        for name, made in entries.items():
            if isinstance(made, torch.Tensor) and made.device == device and made is not own.get(name):
                self._outgrow(member, name)
        return entries

    def _outgrow(self, member: Member, name: str) -> None:
        if member.start or not member.is_last:
            raise StateError(
                f"{type(self.optimizer).__name__} keeps its state {name!r} otherwise than when the step was captured, "
                "and updates a parameter range by range; leave out its attribute outofcore_elementwise"
            )
        self.is_outgrown = True

    def _mirror(self, shadow: Optimizer) -> None:
        """Copy what the step changed besides tensors, such as a count in an attribute, to the user's optimizer."""
        for name, value in shadow.__dict__.items():
            if name not in _SHADOWED and self.optimizer.__dict__.get(name) is not value:
                self.optimizer.__dict__[name] = value
        indices = dict.fromkeys(member.group for member in self.members)
        for index, group in zip(indices, shadow.param_groups, strict=True):
            self.optimizer.param_groups[index].update({k: v for k, v in group.items() if k != "params"})
        for key, value in shadow.state.items():
            if not isinstance(key, torch.Tensor):
                self.optimizer.state[key] = value


class StateOrder:
    """Puts state that updates have made into the order in which the step of its optimizer makes it.

    Updates do not run in the order of the parameters, and state tensors become visible when the step ends.
    """

    def __init__(self, updates: Sequence[OptimizerUpdate]) -> None:
        self._members: dict[int, tuple[Optimizer, dict[int, Member]]] = {}
        for update in updates:
            _, members = self._members.setdefault(id(update.optimizer), (update.optimizer, {}))
            for member in update.members:
                known = members.setdefault(id(member.parameter), member)
                if member.rank < known.rank:
                    members[id(member.parameter)] = member
        self._before: dict[int, dict[Any, list[Any]]] | None = None
        self._is_made = False

    def begin(self, *, is_made: bool) -> None:
        """Record the state before a step; ``is_made``: the step will make state tensors."""
        self._before, self._is_made = None, is_made
        if is_made or any(
            m.parameter not in o.state for o, members in self._members.values() for m in members.values()
        ):
            self._before = {
                number: {key: list(own) if isinstance(own, dict) else [] for key, own in optimizer.state.items()}
                for number, (optimizer, _) in self._members.items()
            }

    def end(self) -> None:
        """Order what has been added since."""
        for number, before in (self._before or {}).items():
            optimizer, members = self._members[number]
            if not self._is_made and len(optimizer.state) == len(before):
                continue
            ranks = {parameter: member.rank for parameter, member in members.items()}
            _order(optimizer.state, before, lambda key, ranks=ranks: ranks.get(id(key)))
            for member in members.values():
                own = optimizer.state.get(member.parameter)
                if isinstance(own, dict):
                    places = {name: (0, place) for place, name in enumerate(member.order)}
                    _order(own, before.get(member.parameter, ()), places.get)
        self._before = None


def _order(table: dict[Any, Any], before: Container[Any], rank_of: Callable[[Any], tuple[int, int] | None]) -> None:
    """Order by rank what was added to a table; entries without a rank stay in their place."""
    added = [key for key in table if key not in before]
    ranked = iter(sorted([key for key in added if rank_of(key) is not None], key=lambda key: rank_of(key) or (0, 0)))
    for key in [key if rank_of(key) is None else next(ranked) for key in added]:
        table[key] = table.pop(key)


class Rehearsal:
    """Runs an update on scratch tensors without touching the user's optimizer: the ``rehearse`` of a ``Call``.

    A call rehearses an update of existing state, the usual case; ``first`` one that makes its state, which allocates
    differently. ``makes_state`` tells whether the next real update makes state.
    """

    def __init__(self, update: OptimizerUpdate) -> None:
        self._update = update
        self.makes_state = update.is_first()
        self._left: list[dict[str, Any]] | None = None

    def first(self, params: Tensors, grads: Sequence[torch.Tensor | None], states: States) -> None:
        members = self._update.members
        absent = [[False] * len(member.names) for member in members]
        self._left = self._run(params, grads, states, absent, [{} for _ in members])

    def __call__(self, params: Tensors, grads: Sequence[torch.Tensor | None], states: States) -> None:
        members = self._update.members
        if self._left is None and self.makes_state:
            self.first(params, grads, states)
        # Counts that happen to be garbage could overflow in the optimizer's arithmetic.
        for tensor in (tensor for given in states for tensor in given if tensor.ndim == 0):
            tensor.fill_(1)
        left = self._left if self._left is not None else [self._update._own_entries(member) for member in members]
        present = [[True] * len(member.names) for member in members]
        self._run(params, grads, states, present, [copy.deepcopy(entries) for entries in left])

    def _run(self, params: Tensors, grads: Sequence[torch.Tensor | None], states: States, *given: Any) -> Any:
        before = self._update.is_outgrown
        try:
            return [_without_unmade(left) for left in self._update._run(params, grads, states, *given)[1]]
        finally:
            self._update.is_outgrown = before  # nothing of it is kept


class UpdateOn:
    """An ``OptimizerUpdate`` bound to tensors that stay the same: the optimizer's arguments are built once and kept.

    Settings and the user's own state are read at each call. While state has yet to be made, and where parameters are
    updated in pieces or the class is not PyTorch's own, it calls the update itself. It keeps the tensors given, which
    are those of one arena.
    """

    def __init__(
        self, update: OptimizerUpdate, params: Tensors, grads: Sequence[torch.Tensor | None], states: States
    ) -> None:
        self._update = update
        self.name, self.kept_by_optimizer = update.name, update.kept_by_optimizer
        self._params, self._grads, self._states = tuple(params), tuple(grads), tuple(map(tuple, states))
        self._placed = [dict(zip(m.names, own, strict=True)) for m, own in zip(update.members, states, strict=True)]
        self._kept = self._may_be_kept()
        self._shadow: Optimizer | None = None  # as soon as all state is there
        self._leaves: list[torch.nn.Parameter] = []
        self._groups: dict[int, list[torch.nn.Parameter]] = {}
        self._addresses: list[int] = []
        self._forgotten = 0
        # What the user's optimizer has for each parameter, and of that what stays with the user: as it was last seen.
        self._own: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._others: list[tuple[dict[str, Any], str]] = []
        self._other_values: list[Any] = []
        self._values: list[Any] = []  # all state that the optimizer's code is given

    def __call__(self, *_: Any) -> None:
        """Update the bound tensors, whatever the arguments are."""
        update, shadow = self._update, self._shadow
        if shadow is not None and self._forgotten == update.forgotten:
            self._step(shadow)
            return
        settled = self._kept and not update.is_first()
        update(self._params, self._grads, self._states)
        if settled:
            self._keep()

    def _may_be_kept(self) -> bool:
        update, groups = self._update, self._update.optimizer.param_groups
        given = zip(update.members, self._params, self._grads, self._states, strict=True)
        if not all(member.is_last for member in update.members):
            return False
        return is_torchs_own(update.optimizer) and not any(
            _can_be_cut(update.optimizer, groups[member.group], Piece(place, param, grad, own, {}))
            for place, (member, param, grad, own) in enumerate(given)
        )

    def _keep(self) -> None:
        update = self._update
        self._forgotten = update.forgotten
        self._leaves = [as_leaf(param, grad) for param, grad in zip(self._params, self._grads, strict=True)]
        self._addresses = [param.data_ptr() for param in self._params]
        self._groups = {}
        for member, leaf in zip(update.members, self._leaves, strict=True):
            self._groups.setdefault(member.group, []).append(leaf)
        self._own = []
        self._shadow = object.__new__(type(update.optimizer))
        self._shadow.state = defaultdict(dict)

    def _step(self, shadow: Optimizer) -> None:
        update = self._update
        optimizer, state = update.optimizer, shadow.state
        own = [optimizer.state.get(member.parameter) or _NOTHING for member in update.members]
        if not self._is_as_seen(own):
            self._look_at(own, state)
        self._own = []  # until this has come to its end
        shadow.__dict__.update(optimizer.__dict__)
        shadow.__dict__.pop("step", None)
        shadow.__dict__.update(without_hooks(optimizer))
        shadow.state = state
        shadow.param_groups = [
            {**optimizer.param_groups[index], "params": list(leaves)} for index, leaves in self._groups.items()
        ]
        with torch.no_grad():
            plain_optimizer_step(type(optimizer))(shadow)
            pointers = [leaf.data_ptr() for leaf in self._leaves]
            if pointers != self._addresses or not _are(list(_values_of(state)), self._values):
                self._bring_back(pointers, own, state)
                return
        self._own = own

    def _is_as_seen(self, own: list[dict[str, Any]]) -> bool:
        """Return whether the user's optimizer has for each parameter what it had at the last look."""
        return (
            _are(own, self._own)
            and list(map(len, own)) == self._lengths
            and _are([entries.get(name) for entries, name in self._others], self._other_values)
        )

    def _look_at(self, own: list[dict[str, Any]], state: dict[Any, dict[str, Any]]) -> None:
        for leaf, entries, placed in zip(self._leaves, own, self._placed, strict=True):
            state[leaf] = {**entries, **placed}
        self._lengths = list(map(len, own))
        pairs = list(zip(own, self._placed, strict=True))
        self._others = [(entries, name) for entries, placed in pairs for name in entries if name not in placed]
        self._other_values = [entries[name] for entries, name in self._others]
        self._values = list(_values_of(state))

    def _bring_back(self, pointers: list[int], own: list[dict[str, Any]], state: dict[Any, dict[str, Any]]) -> None:
        """Copy state that the optimizer has made again to its place."""
        for place, leaf in enumerate(self._leaves):
            if pointers[place] != self._addresses[place]:
                self._params[place].copy_(leaf)
                self._shadow = None  # the leaf is another tensor now
            made, placed, entries = state[leaf], self._placed[place], own[place]
            for name, value in made.items():
                if value is not placed.get(name) and value is not entries.get(name):
                    self._take_over(place, made)
                    break

    def _take_over(self, place: int, made: dict[str, Any]) -> None:
        """Copy state that the optimizer has put in place of a given tensor to that tensor."""
        update, member, param = self._update, self._update.members[place], self._params[place]
        left = _without_unmade(update._adopt(member, dict(made), self._states[place], param.device, _NOTHING))
        if left:
            update.optimizer.state[member.parameter].update(left)


_NOTHING: dict[str, Any] = {}
_UNMADE = object()  # in place of state that an optimizer has not made


def _without_unmade(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if value is not _UNMADE}


def _values_of(state: dict[Any, dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable([entries.values() for entries in state.values()])


def _are(some: list[Any], others: list[Any]) -> bool:
    """Return whether these are the same objects, one by one."""
    return len(some) == len(others) and all(map(is_, some, others))


def as_leaf(tensor: torch.Tensor, grad: torch.Tensor | None) -> torch.nn.Parameter:
    """Return a parameter with a gradient on the memory of a tensor, as an optimizer expects in its groups."""
    leaf = torch.nn.Parameter(tensor.detach(), requires_grad=tensor.is_floating_point() or tensor.is_complex())
    leaf.grad = grad
    return leaf
