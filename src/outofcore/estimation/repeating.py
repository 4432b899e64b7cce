"""The step of a deep model from that of a shallow one, where layers are alike.

A decoder of eighty layers is captured with four of them: the first and the last have other neighbours, and the two in
between have to match each other op by op. What the deep model has more is copies of those two. An op of a copy refers
to storages as they do: to its own block's, to those of the block before or after, or to what lies outside of blocks.
Updates of small parameters are joined across layers, so they are taken apart first, and joined again by the same rule.

Nothing is guessed: where the two blocks differ, or an op fits none of this, there is no answer, and the deep model has
to be captured itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from operator import itemgetter

from outofcore.analysis import is_large
from outofcore.analysis.hoisting import hoisted_order
from outofcore.capture.captured import CPU
from outofcore.capture.device_traits import traits_of
from outofcore.costs import Costs, OpCost
from outofcore.graph import PERSISTENT_KINDS, Op, StepGraph, Storage, StorageKind
from outofcore.presets import LAUNCH_SECONDS

# Blocks that a shallow model keeps: the first, two that have to match, the last.
KEPT = 4
_FIRST, _ONE, _TWO, _LAST = range(KEPT)
_UPDATE = "optimizer."
_NAMING_STORAGES = ("reads", "mutates", "creates", "discards")


@dataclass(frozen=True)
class Stack:
    """Layers of a model that are alike, in blocks.

    Attributes:
        path: of the list of layers within the model.
        first: number of layers before those that are alike.
        period: layers of a block: each is like the one of the same place in the block before.
        blocks: how many there are in the whole model.
    """

    path: str
    first: int
    period: int
    blocks: int

    @cached_property
    def _named(self) -> re.Pattern[str]:
        return re.compile(rf"{re.escape(self.path)}\.(\d+)(?![^. ])")

    def block(self, name: str) -> int | None:
        """Return the block that a module or tensor of this name belongs to; None: it is outside of all."""
        found = self._named.match(name)
        layer = -1 if found is None else int(found[1]) - self.first
        return None if layer < 0 else layer // self.period

    def moved(self, name: str, by: int) -> str:
        """Return the name of the same thing so many blocks further on."""
        found = self._named.match(name) if by else None
        if found is None:
            return name
        return f"{self.path}.{int(found[1]) + by * self.period}{name[found.end() :]}"

    def holds(self, module: str) -> bool:
        """Return whether all blocks lie within a module."""
        return not module or self.path.startswith(f"{module}.")


@dataclass(frozen=True)
class Step:
    """A captured step with what it costs.

    Attributes:
        graph: captured on the CPU.
        costs: of its ops on a device.
        raising: ops that may raise an error, above which no update moves.
    """

    graph: StepGraph
    costs: Costs
    raising: frozenset[int] = frozenset()


class _UnlikeError(Exception):
    """The blocks do not match."""


def deepened(step: Step, stacks: Iterable[Stack], blocks: int | None = None) -> Step | None:
    """Return the step of the deep model, given that of one which keeps ``KEPT`` blocks of each stack.

    Args:
        step: the shallow step.
        stacks: the layers that are alike, with how many blocks there are.
        blocks: how many to make of each instead, three at least.

    Returns:
        None where the blocks do not match.
    """
    try:
        step = _updates_last(step)
        for stack in stacks:
            step = _Blocks(step, stack).repeated((blocks or stack.blocks) - 2)
        return _updates_joined(step)
    except _UnlikeError:
        return None


def same_step(one: Step, other: Step) -> bool:
    """Return whether two steps do the same with storages of the same sizes, in the same order and time.

    Names, numbers of storages, and the order of what an update is given may differ.
    """
    first, its, second, others = one.graph, one.costs, other.graph, other.costs
    if len(first.ops) != len(second.ops) or len(first.outputs) != len(second.outputs):
        return False
    there: dict[int, int] = {}
    for a, b, cost, its_cost in zip(first.ops, second.ops, its.ops, others.ops, strict=True):
        if (a.name, a.rerunnable, a.random) != (b.name, b.rerunnable, b.random):
            return False
        if cost.workspace_bytes != its_cost.workspace_bytes or abs(cost.seconds - its_cost.seconds) > 1e-12:
            return False
        for field in _NAMING_STORAGES:
            left, right = getattr(a, field), getattr(b, field)
            if len(left) != len(right):
                return False
            if a.name.startswith(_UPDATE):
                left, right = sorted(there.get(s, -1) for s in left), sorted(right)
                # Small ones, which nothing else may have used before.
                if -1 not in left and left != right:
                    return False
                continue
            if any(there.setdefault(s, t) != t for s, t in zip(left, right, strict=True)):
                return False
    sizes = ((first.storages[s], second.storages[t]) for s, t in there.items())
    return len(set(there.values())) == len(there) and all((s.bytes, s.kind) == (t.bytes, t.kind) for s, t in sizes)


# Updates of small parameters


def _is_joint_update(graph: StepGraph, op: Op) -> bool:
    """Return whether an op updates parameters that are updated together for being small."""
    if not op.name.startswith(_UPDATE):
        return False
    sizes = [graph.storages[s].bytes for s in op.reads if graph.storages[s].kind is StorageKind.PARAMETER]
    return bool(sizes) and max(sizes) < traits_of(CPU).update_bytes.alone


def _members(graph: StepGraph, op: Op) -> list[list[int]]:
    """Return what an update reads, parameter by parameter: it, its state, its gradient."""
    found = {graph.storages[s].name: [s] for s in op.reads if graph.storages[s].kind is StorageKind.PARAMETER}
    for s in op.reads:
        if graph.storages[s].kind is StorageKind.PARAMETER:
            continue
        owner = graph.storages[s].name.rpartition(".")[0]
        if owner not in found:
            raise _UnlikeError
        found[owner].append(s)
    return sorted(found.values())


def _updates_last(step: Step) -> Step:
    """Join all updates of small parameters, at the end of the step."""
    graph, costs = step.graph, step.costs.ops
    joint = [op for op in graph.ops if _is_joint_update(graph, op)]
    ids = {op.id for op in joint}
    parts = [_Part(op, costs[op.id], op.id in step.raising) for op in graph.ops if op.id not in ids]
    for name in dict.fromkeys(op.name for op in joint):
        those = [op for op in joint if op.name == name]
        members = sorted(member for op in those for member in _members(graph, op))
        mutates = {s for op in those for s in op.mutates}
        reads = tuple(s for member in members for s in member)
        op = replace(those[0], reads=reads, mutates=tuple(s for s in reads if s in mutates), module="")
        more = sum(costs[op.id].seconds - LAUNCH_SECONDS for op in those)
        parts.append(_Part(op, OpCost(LAUNCH_SECONDS + more)))
    return _step_of(graph.storages, parts, graph.outputs, step.costs)


def _updates_joined(step: Step) -> Step:
    """Cut joint updates as a capture does, and move all up to where their gradients are final."""
    graph = step.graph
    parts: list[_Part] = []
    # By the parameter that an update is made at, as an optimizer goes through them.
    updates: list[tuple[float, _Part]] = []
    for op, cost in zip(graph.ops, step.costs.ops, strict=True):
        if _is_joint_update(graph, op):
            updates += _chunks(graph, op, cost)
        elif op.name.startswith(_UPDATE):
            at = next((s for s in op.reads if graph.storages[s].kind is StorageKind.PARAMETER), len(graph.storages))
            updates.append((at, _Part(op, cost, op.id in step.raising)))
        else:
            parts.append(_Part(op, cost, op.id in step.raising))
    updates.sort(key=itemgetter(0))
    first = len(parts)
    parts += [part for _, part in updates]
    step = _with_states_in_order(_step_of(graph.storages, parts, graph.outputs, step.costs), first)
    graph = step.graph
    order = hoisted_order(graph, [op.id for op in graph.ops[first:] if not op.random], step.raising)
    found = [_Part(graph.ops[at], step.costs.ops[at], at in step.raising) for at in order]
    return _step_of(graph.storages, found, graph.outputs, step.costs)


def _chunks(graph: StepGraph, op: Op, cost: OpCost) -> list[tuple[float, _Part]]:
    """Return the updates that a joint one consists of, each with the parameter at which it is full."""
    most = traits_of(CPU).update_bytes.chunk
    kinds = (StorageKind.PARAMETER, StorageKind.OPTIMIZER_STATE)
    chunks: list[tuple[float, list[list[int]]]] = []
    chunk: list[list[int]] = []
    for member in _members(graph, op):
        if _bytes(graph, (other[0] for other in chunk)) + graph.storages[member[0]].bytes > most:
            chunks.append((member[0] - 0.5, chunk))
            chunk = []
        chunk.append(member)
    chunks.append((inf, chunk))
    mutates, whole = set(op.mutates), _bytes(graph, op.reads)
    found: list[tuple[float, _Part]] = []
    for at, members in chunks:
        reads = [s for member in members for s in member]
        reads = [
            *(s for kind in kinds for s in reads if graph.storages[s].kind is kind),
            *(s for s in reads if graph.storages[s].kind not in kinds),
        ]
        module = graph.storages[members[0][0]].name.rpartition(".")[0]
        part = replace(op, reads=tuple(reads), mutates=tuple(s for s in reads if s in mutates), module=module)
        share = _bytes(graph, reads) / whole
        found.append((at, _Part(part, OpCost(LAUNCH_SECONDS + (cost.seconds - LAUNCH_SECONDS) * share))))
    return found


def _with_states_in_order(step: Step, first: int) -> Step:
    """Number the state of optimizers as the updates from op ``first`` on make it, in a row."""
    graph, made = step.graph, StorageKind.OPTIMIZER_STATE
    states = dict.fromkeys(s for op in graph.ops[first:] for s in op.reads if graph.storages[s].kind is made)
    place = min(states, default=0)
    others = [s.id for s in graph.storages if s.id not in states]
    order = [*(s for s in others if s < place), *states, *(s for s in others if s >= place)]
    new = {old: at for at, old in enumerate(order)}

    def numbers(old: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new[s] for s in old)

    parts = [
        _Part(
            replace(op, **{field: numbers(getattr(op, field)) for field in _NAMING_STORAGES}),
            cost,
            op.id in step.raising,
        )
        for op, cost in zip(graph.ops, step.costs.ops, strict=True)
    ]
    storages = tuple(replace(graph.storages[old], id=at) for at, old in enumerate(order))
    return _step_of(storages, parts, numbers(graph.outputs), step.costs)


def _bytes(graph: StepGraph, storages: Iterable[int]) -> int:
    return sum(graph.storages[s].bytes for s in storages)


@dataclass(frozen=True)
class _Part:
    op: Op
    cost: OpCost
    raises: bool = False


def _step_of(storages: tuple[Storage, ...], parts: Sequence[_Part], outputs: tuple[int, ...], costs: Costs) -> Step:
    """Return the step of ops in this order, with the homes of other costs."""
    ops = tuple(part.op if part.op.id == at else replace(part.op, id=at) for at, part in enumerate(parts))
    return Step(
        StepGraph(storages, ops, outputs),
        replace(costs, ops=tuple(part.cost for part in parts)),
        frozenset(at for at, part in enumerate(parts) if part.raises),
    )


# Blocks


class _Blocks:
    """A step with ``KEPT`` blocks of a stack, of which the two in the middle match."""

    def __init__(self, step: Step, stack: Stack) -> None:
        self._step, self._stack = step, stack
        self._graph = graph = step.graph
        self._labels = self._labelled()
        inner = [[op for op, label in zip(graph.ops, self._labels, strict=True) if label == b] for b in (_ONE, _TWO)]
        if not inner[0] or len(inner[0]) != len(inner[1]):
            raise _UnlikeError
        pairs = list(zip(*inner, strict=True))
        # The number of each op within its block.
        self._place = {op.id: at for ops in inner for at, op in enumerate(ops)}
        # What each storage is to its block, and where it belongs.
        self._block: dict[int, int | None] = {}
        self._role: dict[int, object] = {}
        for s in graph.storages:
            made = graph.creator.get(s.id)
            if made is not None:
                self._block[s.id] = self._labels[made]
                if made in self._place:
                    self._role[s.id] = self._place[made], graph.ops[made].creates.index(s.id)
            else:
                block = stack.block(s.name) if s.kind in PERSISTENT_KINDS else None
                self._block[s.id] = block
                if block is not None:
                    self._role[s.id] = stack.moved(s.name, -block)
        self._check_storages()
        self._ways = [self._checked(one, two) for one, two in pairs]

    def _labelled(self) -> list[int | None]:
        """Return the block of each op. What has no module of its own belongs to the block that it follows."""
        labels = [self._stack.block(op.module) for op in self._graph.ops]
        at = 0
        while at < len(labels):
            end = at
            while end < len(labels) and labels[end] is None and self._stack.holds(self._graph.ops[end].module):
                end += 1
            if at < end < len(labels) and at and labels[at - 1] is not None and labels[end] is not None:
                labels[at:end] = [labels[at - 1]] * (end - at)
            at = max(end, at + 1)
        if any(label is not None and label >= KEPT for label in labels):
            raise _UnlikeError
        return labels

    def _check_storages(self) -> None:
        """Refuse two blocks in the middle whose storages differ."""
        known: list[dict[object, tuple[int, StorageKind]]] = [{}, {}]
        self._found: dict[tuple[int, object], int] = {}
        for s, block in self._block.items():
            if block in (_ONE, _TWO):
                storage = self._graph.storages[s]
                known[block - _ONE][self._role[s]] = storage.bytes, storage.kind
                self._found[block, self._role[s]] = s
        if known[0] != known[1] or any(self._block[s] in (_ONE, _TWO) for s in self._graph.outputs):
            raise _UnlikeError

    def _checked(self, one: Op, two: Op) -> dict[str, list[tuple[int, int]]]:
        """Return how two ops that match refer to storages: pairs of those of the one and of the other."""
        costs = self._step.costs.ops
        alike = (one.name, one.rerunnable, one.random, one.family) == (two.name, two.rerunnable, two.random, two.family)
        if not alike or costs[one.id] != costs[two.id]:
            raise _UnlikeError
        found: dict[str, list[tuple[int, int]]] = {}
        for field in _NAMING_STORAGES:
            left, right = getattr(one, field), getattr(two, field)
            if len(left) != len(right) or any(map(self._differ, left, right)):
                raise _UnlikeError
            found[field] = list(zip(left, right, strict=True))
        return found

    def _differ(self, s: int, t: int) -> bool:
        """Return whether blocks one and two do not refer to these storages in the same way."""
        blocks = self._block[s], self._block[t]
        if s == t:
            return blocks[0] in (_ONE, _TWO)
        if blocks in ((_FIRST, _ONE), (_TWO, _LAST)):
            return self._graph.storages[s].bytes != self._graph.storages[t].bytes
        return blocks != (_ONE, _TWO) or self._role[s] != self._role[t]

    def repeated(self, count: int) -> Step:
        """Return the step with so many blocks in place of the two in the middle; one at least."""
        graph, stack = self._graph, self._stack
        storages: list[Storage] = []
        new: dict[tuple[object, int | None], int] = {}
        blocks, roles = [self._block[s.id] for s in graph.storages], [self._role.get(s.id) for s in graph.storages]
        for s, k in _order(blocks, roles, count, strict=False) or ():
            old = graph.storages[s]
            by = self._shift(self._block[s], k, count)
            new[s if k is None else self._role[s], k] = len(storages)
            storages.append(replace(old, id=len(storages), name=stack.moved(old.name, by)))

        def inner(pair: tuple[int, int], k: int) -> int:
            s, t = pair
            match self._block[s], self._block[t]:
                case (1, 2):
                    return new[self._role[s], k]
                case (0, 1):
                    return new[s, None] if k == 1 else new[self._role[t], k - 1]
                case (2, 3):
                    return new[t, None] if k == count else new[self._role[s], k + 1]
                case _:
                    return new[s, None]

        def outer(refs: tuple[int, ...], label: int | None) -> tuple[int, ...]:
            blocks = [self._block[s] for s in refs]
            if not {_ONE, _TWO} & set(blocks):
                return tuple(new[s, None] for s in refs)
            if label is not None:
                near, end = (_ONE, 1) if label == _FIRST else (_TWO, count)
                if (_ONE + _TWO - near) in blocks:
                    raise _UnlikeError
                return tuple(new[(self._role[s], end) if self._block[s] == near else (s, None)] for s in refs)
            order = _order(blocks, [self._role.get(s) for s in refs], count)
            if order is None:
                raise _UnlikeError
            return tuple(new[refs[at] if k is None else self._role[refs[at]], k] for at, k in order)

        parts: list[_Part] = []
        order = _order(self._labels, [self._place.get(op.id) for op in graph.ops], count)
        if order is None:
            raise _UnlikeError
        for at, k in order:
            op, cost, label = graph.ops[at], self._step.costs.ops[at], self._labels[at]
            module = stack.moved(op.module, self._shift(label, k, count))
            if k is not None:
                ways = self._ways[self._place[at]]
                made = {field: tuple(inner(pair, k) for pair in ways[field]) for field in ways}
            else:
                made = {field: outer(getattr(op, field), label) for field in _NAMING_STORAGES}
                cost = self._stretched(op, cost, made["reads"] + made["mutates"], storages)
            new_op = replace(op, id=len(parts), module=module, **made)
            parts.append(_Part(new_op, cost, at in self._step.raising))
        outputs = tuple(new[s, None] for s in graph.outputs)
        return _step_of(tuple(storages), parts, outputs, self._step.costs)

    def _stretched(self, op: Op, cost: OpCost, used: tuple[int, ...], storages: Sequence[Storage]) -> OpCost:
        """Return what an op costs that is now given the storages of more blocks, one after the other."""
        before = dict.fromkeys(op.reads + op.mutates)
        after = dict.fromkeys(used)
        if len(before) == len(after):
            return cost
        if any(is_large(self._graph.storages[s].bytes) for s in op.creates):
            # As large as there are layers, and so is what is made of it.
            raise _UnlikeError
        share = sum(storages[s].bytes for s in after) / max(_bytes(self._graph, before), 1)
        return replace(cost, seconds=LAUNCH_SECONDS + (cost.seconds - LAUNCH_SECONDS) * share)

    def _shift(self, block: int | None, k: int | None, count: int) -> int:
        """Return by how many blocks a name moves."""
        if k is not None:
            return k - _ONE
        return count - 2 if block == _LAST else 0


def _order(
    blocks: Sequence[int | None], roles: Sequence[object], count: int, *, strict: bool = True
) -> list[tuple[int, int | None]] | None:
    """Return the order of items with ``count`` blocks instead of the two in the middle; None if those do not match.

    Items are by index, with the number of the block (from one on) for those of the middle, of which the first stands
    for all. Block two follows block one or comes before it, so the others follow one another in the same direction. If
    not ``strict``, items that do not match item by item are taken where block one has them.
    """
    found: list[tuple[int, int | None]] = []
    at, total = 0, len(blocks)

    def end_of(start: int) -> int:
        end = start
        while end < total and blocks[end] == blocks[start]:
            end += 1
        return end

    while at < total:
        block, end = blocks[at], end_of(at)
        if block not in (_ONE, _TWO):
            found += [(item, None) for item in range(at, end)]
            at = end
            continue
        other = end_of(end) if end < total else end
        if end == total or blocks[end] != _ONE + _TWO - block or list(roles[at:end]) != list(roles[end:other]):
            if strict:
                return None
            if block == _ONE:
                found += [(item, k) for k in range(1, count + 1) for item in range(at, end)]
            at = end
            continue
        one = range(at, end) if block == _ONE else range(end, other)
        ks = range(1, count + 1) if block == _ONE else range(count, 0, -1)
        found += [(item, k) for k in ks for item in one]
        at = other
    return found
