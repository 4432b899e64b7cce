"""Derive the step of a deep model from that of a shallow one, if its layers are alike.

A decoder with 80 layers is captured with four blocks. The two in the middle must match op by op, and the deep model
repeats them. An op of a copy refers to storages of its own block, of a neighbouring block, or outside of all blocks.
Joint updates of small parameters are separated first and joined again afterwards.
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

# Blocks of a shallow model: the first, two that must match, the last.
KEPT_BLOCKS = 4
_FIRST, _ONE, _TWO, _LAST = range(KEPT_BLOCKS)
_UPDATE = "optimizer."
_STORAGE_FIELDS = ("reads", "mutates", "creates", "discards")


@dataclass(frozen=True)
class Stack:
    """The repeated part of a list of layers: ``blocks`` identical blocks of ``period`` layers each."""

    path: str  # of the list of layers
    first: int  # number of layers before the first block
    period: int  # number of layers in a block
    blocks: int  # number of blocks in the whole model

    @cached_property
    def _name_pattern(self) -> re.Pattern[str]:
        return re.compile(rf"{re.escape(self.path)}\.(\d+)(?![^. ])")

    def block_of(self, name: str) -> int | None:
        """Return the index of the block that contains the module or tensor with this name, or None."""
        match = self._name_pattern.match(name)
        layer = -1 if match is None else int(match[1]) - self.first
        return None if layer < 0 else layer // self.period

    def shift_name(self, name: str, by: int) -> str:
        """Return the name of a layer's counterpart ``by`` blocks later; return names of other modules unchanged."""
        match = self._name_pattern.match(name) if by else None
        if match is None:
            return name
        return f"{self.path}.{int(match[1]) + by * self.period}{name[match.end() :]}"

    def is_inside(self, module: str) -> bool:
        return not module or self.path.startswith(f"{module}.")


@dataclass(frozen=True)
class CostedStep:
    """The graph of a training step that was captured on the CPU, and its estimated costs on a device."""

    graph: StepGraph
    costs: Costs
    raising: frozenset[int] = frozenset()  # ops that may raise an error; no update moves before one


class _MismatchError(Exception):
    """The middle blocks of a shallow model differ, so they cannot be repeated."""


def deepen_step(step: CostedStep, stacks: Iterable[Stack], blocks: int | None = None) -> CostedStep | None:
    """Derive a deep model's step from a shallow model's by repeating middle blocks; None if the blocks differ.

    ``step`` has ``KEPT_BLOCKS`` blocks of each stack; the result has ``blocks`` (at least 3; None: ``stack.blocks``).
    """
    try:
        step = _join_updates_at_end(step)
        for stack in stacks:
            step = _BlockRepeater(step, stack).repeat((blocks or stack.blocks) - 2)
        return _chunk_and_hoist_updates(step)
    except _MismatchError:
        return None


def are_equal_steps(a_step: CostedStep, b_step: CostedStep) -> bool:
    """Return whether two steps have the same ops, sizes and costs; storage names and ids may differ."""
    first, first_costs, second, second_costs = a_step.graph, a_step.costs, b_step.graph, b_step.costs
    if len(first.ops) != len(second.ops) or len(first.outputs) != len(second.outputs):
        return False
    mapping: dict[int, int] = {}
    for a, b, cost, second_cost in zip(first.ops, second.ops, first_costs.ops, second_costs.ops, strict=True):
        if (a.name, a.rerunnable, a.random) != (b.name, b.rerunnable, b.random):
            return False
        if cost.workspace_bytes != second_cost.workspace_bytes or abs(cost.seconds - second_cost.seconds) > 1e-12:
            return False
        for field in _STORAGE_FIELDS:
            first_refs, second_refs = getattr(a, field), getattr(b, field)
            if len(first_refs) != len(second_refs):
                return False
            if a.name.startswith(_UPDATE):
                first_refs, second_refs = sorted(mapping.get(s, -1) for s in first_refs), sorted(second_refs)
                # No earlier op need have used a small storage.
                if -1 not in first_refs and first_refs != second_refs:
                    return False
                continue
            if any(mapping.setdefault(s, t) != t for s, t in zip(first_refs, second_refs, strict=True)):
                return False
    sizes = ((first.storages[s], second.storages[t]) for s, t in mapping.items())
    return len(set(mapping.values())) == len(mapping) and all((s.bytes, s.kind) == (t.bytes, t.kind) for s, t in sizes)


# Updates of small parameters


def _is_joint_update(graph: StepGraph, op: Op) -> bool:
    if not op.name.startswith(_UPDATE):
        return False
    sizes = [graph.storages[s].bytes for s in op.reads if graph.storages[s].kind is StorageKind.PARAMETER]
    return bool(sizes) and max(sizes) < traits_of(CPU).update_bytes.alone


def _reads_by_parameter(graph: StepGraph, op: Op) -> list[list[int]]:
    """Group the inputs of an optimizer update by parameter; each group begins with the parameter."""
    members = {graph.storages[s].name: [s] for s in op.reads if graph.storages[s].kind is StorageKind.PARAMETER}
    for s in op.reads:
        if graph.storages[s].kind is StorageKind.PARAMETER:
            continue
        owner = graph.storages[s].name.rpartition(".")[0]
        if owner not in members:
            raise _MismatchError
        members[owner].append(s)
    return sorted(members.values())


def _join_updates_at_end(step: CostedStep) -> CostedStep:
    """Merge the updates of small parameters into one op per kind of update, at the end of the step."""
    graph, costs = step.graph, step.costs.ops
    joint = [op for op in graph.ops if _is_joint_update(graph, op)]
    ids = {op.id for op in joint}
    parts = [_CostedOp(op, costs[op.id], op.id in step.raising) for op in graph.ops if op.id not in ids]
    for name in dict.fromkeys(op.name for op in joint):
        same_kind = [op for op in joint if op.name == name]
        members = sorted(member for op in same_kind for member in _reads_by_parameter(graph, op))
        mutates = {s for op in same_kind for s in op.mutates}
        reads = tuple(s for member in members for s in member)
        op = replace(same_kind[0], reads=reads, mutates=tuple(s for s in reads if s in mutates), module="")
        seconds = sum(costs[op.id].seconds - LAUNCH_SECONDS for op in same_kind)
        parts.append(_CostedOp(op, OpCost(LAUNCH_SECONDS + seconds)))
    return _build_step(graph.storages, parts, graph.outputs, step.costs)


def _chunk_and_hoist_updates(step: CostedStep) -> CostedStep:
    """Split merged updates into chunks of limited size, and move each update to the earliest possible place."""
    graph = step.graph
    parts: list[_CostedOp] = []
    # Sorted by the parameter at which the optimizer makes the update.
    updates: list[tuple[float, _CostedOp]] = []
    for op, cost in zip(graph.ops, step.costs.ops, strict=True):
        if _is_joint_update(graph, op):
            updates += _split_joint_update(graph, op, cost)
        elif op.name.startswith(_UPDATE):
            at = next((s for s in op.reads if graph.storages[s].kind is StorageKind.PARAMETER), len(graph.storages))
            updates.append((at, _CostedOp(op, cost, op.id in step.raising)))
        else:
            parts.append(_CostedOp(op, cost, op.id in step.raising))
    updates.sort(key=itemgetter(0))
    first = len(parts)
    parts += [part for _, part in updates]
    step = _renumber_states(_build_step(graph.storages, parts, graph.outputs, step.costs), first)
    graph = step.graph
    order = hoisted_order(graph, [op.id for op in graph.ops[first:] if not op.random], step.raising)
    hoisted = [_CostedOp(graph.ops[at], step.costs.ops[at], at in step.raising) for at in order]
    return _build_step(graph.storages, hoisted, graph.outputs, step.costs)


def _split_joint_update(graph: StepGraph, op: Op, cost: OpCost) -> list[tuple[float, _CostedOp]]:
    """Split a merged update into ops of limited size; return (key, op) pairs for sorting all updates."""
    max_bytes = traits_of(CPU).update_bytes.chunk
    kinds = (StorageKind.PARAMETER, StorageKind.OPTIMIZER_STATE)
    chunks: list[tuple[float, list[list[int]]]] = []
    chunk: list[list[int]] = []
    for member in _reads_by_parameter(graph, op):
        if _total_bytes(graph, (previous[0] for previous in chunk)) + graph.storages[member[0]].bytes > max_bytes:
            chunks.append((member[0] - 0.5, chunk))
            chunk = []
        chunk.append(member)
    chunks.append((inf, chunk))
    mutates, whole = set(op.mutates), _total_bytes(graph, op.reads)
    chunk_updates: list[tuple[float, _CostedOp]] = []
    for at, members in chunks:
        reads = [s for member in members for s in member]
        reads = [
            *(s for kind in kinds for s in reads if graph.storages[s].kind is kind),
            *(s for s in reads if graph.storages[s].kind not in kinds),
        ]
        module = graph.storages[members[0][0]].name.rpartition(".")[0]
        part = replace(op, reads=tuple(reads), mutates=tuple(s for s in reads if s in mutates), module=module)
        share = _total_bytes(graph, reads) / whole
        chunk_updates.append((at, _CostedOp(part, OpCost(LAUNCH_SECONDS + (cost.seconds - LAUNCH_SECONDS) * share))))
    return chunk_updates


def _renumber_states(step: CostedStep, first: int) -> CostedStep:
    """Renumber optimizer states in the order in which the ops from index ``first`` on read them."""
    graph, state_kind = step.graph, StorageKind.OPTIMIZER_STATE
    states = dict.fromkeys(s for op in graph.ops[first:] for s in op.reads if graph.storages[s].kind is state_kind)
    first_state = min(states, default=0)
    other_ids = [s.id for s in graph.storages if s.id not in states]
    order = [*(s for s in other_ids if s < first_state), *states, *(s for s in other_ids if s >= first_state)]
    new = {old: at for at, old in enumerate(order)}

    def numbers(old: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new[s] for s in old)

    parts = [
        _CostedOp(
            replace(op, **{field: numbers(getattr(op, field)) for field in _STORAGE_FIELDS}),
            cost,
            op.id in step.raising,
        )
        for op, cost in zip(graph.ops, step.costs.ops, strict=True)
    ]
    storages = tuple(replace(graph.storages[old], id=at) for at, old in enumerate(order))
    return _build_step(storages, parts, numbers(graph.outputs), step.costs)


def _total_bytes(graph: StepGraph, storages: Iterable[int]) -> int:
    return sum(graph.storages[s].bytes for s in storages)


@dataclass(frozen=True)
class _CostedOp:
    op: Op
    cost: OpCost
    raises: bool = False


def _build_step(
    storages: tuple[Storage, ...], parts: Sequence[_CostedOp], outputs: tuple[int, ...], costs: Costs
) -> CostedStep:
    """Build a step from ``parts`` (ops with their costs) in this order; all other costs come from ``costs``."""
    ops = tuple(part.op if part.op.id == at else replace(part.op, id=at) for at, part in enumerate(parts))
    return CostedStep(
        StepGraph(storages, ops, outputs),
        replace(costs, ops=tuple(part.cost for part in parts)),
        frozenset(at for at, part in enumerate(parts) if part.raises),
    )


# Blocks


class _BlockRepeater:
    """Replaces the two middle blocks of a step with any number of copies; raises ``_MismatchError`` if they differ."""

    def __init__(self, step: CostedStep, stack: Stack) -> None:
        self._step, self._stack = step, stack
        self._graph = graph = step.graph
        self._labels = self._label_ops()
        inner = [[op for op, label in zip(graph.ops, self._labels, strict=True) if label == b] for b in (_ONE, _TWO)]
        if not inner[0] or len(inner[0]) != len(inner[1]):
            raise _MismatchError
        pairs = list(zip(*inner, strict=True))
        # The index of each op within its block.
        self._index_in_block = {op.id: at for ops in inner for at, op in enumerate(ops)}
        # The block of each storage, and its role in the block.
        self._block: dict[int, int | None] = {}
        self._role: dict[int, object] = {}
        for s in graph.storages:
            creator = graph.creator.get(s.id)
            if creator is not None:
                self._block[s.id] = self._labels[creator]
                if creator in self._index_in_block:
                    self._role[s.id] = self._index_in_block[creator], graph.ops[creator].creates.index(s.id)
            else:
                block = stack.block_of(s.name) if s.kind in PERSISTENT_KINDS else None
                self._block[s.id] = block
                if block is not None:
                    self._role[s.id] = stack.shift_name(s.name, -block)
        self._check_storages_match()
        self._references = [self._match_ops(first, second) for first, second in pairs]

    def _label_ops(self) -> list[int | None]:
        """Return each op's block index (None: outside blocks); ops between blocks belong to the earlier block."""
        labels = [self._stack.block_of(op.module) for op in self._graph.ops]
        at = 0
        while at < len(labels):
            end = at
            while end < len(labels) and labels[end] is None and self._stack.is_inside(self._graph.ops[end].module):
                end += 1
            if at < end < len(labels) and at and labels[at - 1] is not None and labels[end] is not None:
                labels[at:end] = [labels[at - 1]] * (end - at)
            at = max(end, at + 1)
        if any(label is not None and label >= KEPT_BLOCKS for label in labels):
            raise _MismatchError
        return labels

    def _check_storages_match(self) -> None:
        """Raise ``_MismatchError`` if storages of the middle blocks differ in size or kind, or are outputs."""
        roles: list[dict[object, tuple[int, StorageKind]]] = [{}, {}]
        for s, block in self._block.items():
            if block in (_ONE, _TWO):
                storage = self._graph.storages[s]
                roles[block - _ONE][self._role[s]] = storage.bytes, storage.kind
        if roles[0] != roles[1] or any(self._block[s] in (_ONE, _TWO) for s in self._graph.outputs):
            raise _MismatchError

    def _match_ops(self, first: Op, second: Op) -> dict[str, list[tuple[int, int]]]:
        """Pair the storages of two matching ops, by field of ``Op``; raises ``_MismatchError`` if the ops differ."""
        costs = self._step.costs.ops
        alike = (first.name, first.rerunnable, first.random, first.family) == (
            second.name,
            second.rerunnable,
            second.random,
            second.family,
        )
        if not alike or costs[first.id] != costs[second.id]:
            raise _MismatchError
        pairs: dict[str, list[tuple[int, int]]] = {}
        for field in _STORAGE_FIELDS:
            first_refs, second_refs = getattr(first, field), getattr(second, field)
            if len(first_refs) != len(second_refs) or any(map(self._differ_in_role, first_refs, second_refs)):
                raise _MismatchError
            pairs[field] = list(zip(first_refs, second_refs, strict=True))
        return pairs

    def _differ_in_role(self, first_storage: int, second_storage: int) -> bool:
        """Return whether ``second_storage`` cannot take the place of ``first_storage`` one block later."""
        blocks = self._block[first_storage], self._block[second_storage]
        if first_storage == second_storage:
            return blocks[0] in (_ONE, _TWO)
        if blocks in ((_FIRST, _ONE), (_TWO, _LAST)):
            return self._graph.storages[first_storage].bytes != self._graph.storages[second_storage].bytes
        return blocks != (_ONE, _TWO) or self._role[first_storage] != self._role[second_storage]

    def repeat(self, count: int) -> CostedStep:
        """Return the step with ``count`` (at least 1) copies of a middle block in place of the two middle blocks."""
        graph, stack = self._graph, self._stack
        storages: list[Storage] = []
        new: dict[tuple[object, int | None], int] = {}
        blocks, roles = [self._block[s.id] for s in graph.storages], [self._role.get(s.id) for s in graph.storages]
        for s, copy_number in _repeated_order(blocks, roles, count, strict=False) or ():
            old = graph.storages[s]
            by = self._name_shift(self._block[s], copy_number, count)
            new[s if copy_number is None else self._role[s], copy_number] = len(storages)
            storages.append(replace(old, id=len(storages), name=stack.shift_name(old.name, by)))

        def storage_of_copy(pair: tuple[int, int], copy_number: int) -> int:
            """Return the new id of a copied op's storage; the op uses ``pair`` in the two middle blocks."""
            s, t = pair
            match self._block[s], self._block[t]:
                case (1, 2):
                    return new[self._role[s], copy_number]
                case (0, 1):
                    return new[s, None] if copy_number == 1 else new[self._role[t], copy_number - 1]
                case (2, 3):
                    return new[t, None] if copy_number == count else new[self._role[s], copy_number + 1]
                case _:
                    return new[s, None]

        def storages_of_uncopied(old_ids: tuple[int, ...], op_block: int | None) -> tuple[int, ...]:
            """Return the new storage ids of an op in ``op_block`` (None: outside blocks) that is not copied."""
            blocks = [self._block[s] for s in old_ids]
            if not {_ONE, _TWO} & set(blocks):
                return tuple(new[s, None] for s in old_ids)
            if op_block is not None:
                near, end = (_ONE, 1) if op_block == _FIRST else (_TWO, count)
                if (_ONE + _TWO - near) in blocks:
                    raise _MismatchError
                return tuple(new[(self._role[s], end) if self._block[s] == near else (s, None)] for s in old_ids)
            order = _repeated_order(blocks, [self._role.get(s) for s in old_ids], count)
            if order is None:
                raise _MismatchError
            return tuple(
                new[old_ids[at] if copy_number is None else self._role[old_ids[at]], copy_number]
                for at, copy_number in order
            )

        parts: list[_CostedOp] = []
        order = _repeated_order(self._labels, [self._index_in_block.get(op.id) for op in graph.ops], count)
        if order is None:
            raise _MismatchError
        for at, copy_number in order:
            op, cost, op_block = graph.ops[at], self._step.costs.ops[at], self._labels[at]
            module = stack.shift_name(op.module, self._name_shift(op_block, copy_number, count))
            if copy_number is not None:
                references = self._references[self._index_in_block[at]]
                fields = {
                    field: tuple(storage_of_copy(pair, copy_number) for pair in references[field])
                    for field in references
                }
            else:
                fields = {field: storages_of_uncopied(getattr(op, field), op_block) for field in _STORAGE_FIELDS}
                cost = self._scale_cost(op, cost, fields["reads"] + fields["mutates"], storages)
            new_op = replace(op, id=len(parts), module=module, **fields)
            parts.append(_CostedOp(new_op, cost, at in self._step.raising))
        outputs = tuple(new[s, None] for s in graph.outputs)
        return _build_step(tuple(storages), parts, outputs, self._step.costs)

    def _scale_cost(self, op: Op, cost: OpCost, new_ids: tuple[int, ...], storages: Sequence[Storage]) -> OpCost:
        """Return the cost of an op that is not copied, scaled to the bytes of its storages if their number changed."""
        before = dict.fromkeys(op.reads + op.mutates)
        after = dict.fromkeys(new_ids)
        if len(before) == len(after):
            return cost
        if any(is_large(self._graph.storages[s].bytes) for s in op.creates):
            # Its result grows with the number of layers, and so do all values derived from it.
            raise _MismatchError
        share = sum(storages[s].bytes for s in after) / max(_total_bytes(self._graph, before), 1)
        return replace(cost, seconds=LAUNCH_SECONDS + (cost.seconds - LAUNCH_SECONDS) * share)

    def _name_shift(self, block: int | None, k: int | None, count: int) -> int:
        if k is not None:
            return k - _ONE
        return count - 2 if block == _LAST else 0


def _repeated_order(
    blocks: Sequence[int | None], roles: Sequence[object], count: int, *, strict: bool = True
) -> list[tuple[int, int | None]] | None:
    """Order ops or storages so that ``count`` copies replace the two middle blocks; None if the blocks differ.

    Each result is an index into ``blocks``, and the number of the copy from 1 (None: not copied). Unless ``strict``,
    items of block one without a match are copied, and items of block two without a match are left out.
    """
    result: list[tuple[int, int | None]] = []
    at, total = 0, len(blocks)

    def end_of(start: int) -> int:
        end = start
        while end < total and blocks[end] == blocks[start]:
            end += 1
        return end

    while at < total:
        block, end = blocks[at], end_of(at)
        if block not in (_ONE, _TWO):
            result += [(item, None) for item in range(at, end)]
            at = end
            continue
        next_end = end_of(end) if end < total else end
        if end == total or blocks[end] != _ONE + _TWO - block or list(roles[at:end]) != list(roles[end:next_end]):
            if strict:
                return None
            if block == _ONE:
                result += [(item, k) for k in range(1, count + 1) for item in range(at, end)]
            at = end
            continue
        inner = range(at, end) if block == _ONE else range(end, next_end)
        ks = range(1, count + 1) if block == _ONE else range(count, 0, -1)
        result += [(item, k) for k in ks for item in inner]
        at = next_end
    return result
