"""Build the split step from the choices of ``search``.

An op becomes one piece if it stays whole, else a piece per part, with the ops that gather and copy. Pieces run depth
first, so no tensor exists as a whole in a chain of ops that are cut alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from math import prod
from typing import Any

import torch

from outofcore._torch_internals import FakeTensorMode, OpOverload, result_leaves
from outofcore.capture.assembly import drop_unused
from outofcore.capture.captured import Call, Captured, Ref, Value
from outofcore.capture.operators import (
    arguments_by_name,
    arrange_arguments,
    fake_result,
    family_text,
    written_arguments,
)
from outofcore.capture.optimizer_steps import call_of_update, family_of_update
from outofcore.capture.optimizers import OptimizerUpdate
from outofcore.capture.tables import covers, leaves_in, map_leaves
from outofcore.graph import Op, StepGraph
from outofcore.transforms.split.cells import CellMap
from outofcore.transforms.split.rules import rebase_indices
from outofcore.transforms.split.tensors import dense_like, named_refs, refs_of, with_tensors
from outofcore.transforms.split.ways import ArgumentName, ChosenSplit, Cut, OpSplit
from outofcore.transforms.split.writer import OpPiece, StepWriter, UnfitError, require

_aten = torch.ops.aten


@dataclass
class _Arguments:
    parts: dict[ArgumentName, Value] = field(default_factory=dict[ArgumentName, Value])
    # Arguments of which only the shape matters; their values have no storage.
    shapes: list[ArgumentName] = field(default_factory=list[ArgumentName])
    reads: list[int] = field(default_factory=list[int])
    discards: list[int] = field(default_factory=list[int])
    # Arguments written in place: the value in the original step, its cut, and the slice.
    written: list[tuple[int, Cut | None, Value]] = field(default_factory=list[tuple[int, Cut | None, Value]])


class StepBuilder:
    """Builds a split step from the chosen split of each op."""

    def __init__(
        self, captured: Captured, cell_map: CellMap, chosen: Mapping[int, ChosenSplit], limit: int | None
    ) -> None:
        self.captured, self.cell_map, self.chosen = captured, cell_map, chosen
        self.writer = StepWriter(captured, cell_map, limit)
        self.mode = FakeTensorMode()
        self._looked_up: dict[int, Value] = {}  # results of lookups, by op
        self._shapes: dict[str, list[tuple[Value, int] | None]] = {}

    def build(self) -> Captured:
        """Return the split step; raises ``LimitError`` for too many ops, ``UnfitError`` if a split is impossible."""
        rows: list[list[OpPiece]] = []
        for op in self.captured.graph.ops:
            choice = self.chosen.get(op.id)
            pieces = (
                [self._build_whole(op)]
                if choice is None
                else [self._build_part(op, choice, number) for number in range(len(choice.ends) - 1)]
            )
            if choice is not None and rows and rows[-1][-1].op in self.chosen:
                rows[-1] += pieces
            else:
                rows.append(pieces)
        ordered = [piece for row in rows for piece in _order_depth_first(row)]
        pairs = [pair for piece in ordered for pair in piece.ops]
        ops = tuple(replace(op, id=number) for number, (op, _) in enumerate(pairs))
        graph = StepGraph(tuple(self.writer.storages), ops, self.captured.graph.outputs)
        return drop_unused(
            replace(
                self.captured,
                graph=graph,
                calls=tuple(call for _, call in pairs),
                values=tuple(self.writer.values),
                ranges=self.writer.ranges,
            )
        )

    def _build_whole(self, op: Op) -> OpPiece:
        """Build an unsplit op, with ops that join its divided arguments and divide its results."""
        piece = self.writer.begin_piece(op)
        call, cuts = self.captured.calls[op.id], self.cell_map.cuts
        if not any(s in cuts for s in op.touched):
            for storage in op.mutates:
                self.writer.forget_copies(storage)
            piece.ops.append((op, call))
            return piece
        new_values: dict[int, int] = {}  # by value
        new_storages: dict[int, int] = {}  # by storage
        read_pairs: list[tuple[int, int]] = []
        for index in dict.fromkeys(ref.value for ref in refs_of(call)):
            value = self.captured.values[index]
            if value.storage in cuts and value.storage not in op.creates:
                part = self.writer.gather_argument(op, index, None, 0, 0)
                new_values[index] = self.writer.index_of(part)
                new_storages.setdefault(value.storage, part.storage)
                if value.storage in op.reads:
                    read_pairs.append((value.storage, part.storage))
        reads = [s for s in op.reads if s not in cuts] + [new for _, new in read_pairs]
        for index in (v for v in call.results if v is not None):
            value = self.captured.values[index]
            if value.storage in cuts:
                if value.storage not in new_storages:
                    new_storages[value.storage] = self.writer.new_storage(
                        self.writer.storages[value.storage].bytes, self.writer.storages[value.storage].name
                    )
                new_values[index] = self.writer.index_of(replace(value, storage=new_storages[value.storage]))
        for ref in refs_of(call):  # a result passed as an argument for its shape alone
            index = ref.value
            value = self.captured.values[index]
            if index not in new_values and value.storage in new_storages:
                new_values[index] = self.writer.index_of(replace(value, storage=new_storages[value.storage]))

        def moved_ref(ref: Ref) -> Ref:
            return Ref(new_values.get(ref.value, ref.value))

        args, kwargs = map_leaves((call.args, call.kwargs), moved_ref, Ref)
        results = tuple(None if v is None else new_values.get(v, v) for v in call.results)
        new = replace(
            op,
            reads=tuple(dict.fromkeys(reads)),
            creates=tuple(new_storages.get(s, s) for s in op.creates),
            family=family_text(op.name, args, kwargs, self.writer.values),
        )
        piece.ops.append((new, replace(call, args=args, kwargs=kwargs, results=results)))
        for storage in op.creates:
            if storage in cuts:
                dtype = next(v.dtype for v in self.captured.values if v.storage == storage)
                box = self.cell_map.axes[storage].whole_box()
                self.writer.scatter(op, storage, dtype, box, new_storages[storage])
                self.writer.whole_boxes[storage, box] = new_storages[storage], op.id
        return piece

    def _build_part(self, op: Op, choice: ChosenSplit, number: int) -> OpPiece:
        """Build part ``number`` of an op, with ops that copy its arguments and results where necessary."""
        if choice.split.is_update:
            return self._build_update_part(op, choice, number)
        if choice.split.is_lookup:
            return self._build_lookup_part(op, choice, number)
        piece = self.writer.begin_piece(op)
        split, call = choice.split, self.captured.calls[op.id]
        low, high = choice.ends[number : number + 2]
        func: Any = call.func  # only OpOverloads can be split so
        named = dict(arguments_by_name(func, call.args, call.kwargs))
        arguments = self._gather_arguments(op, split, written_arguments(func, named), low, high)
        parts, reads = arguments.parts, arguments.reads
        named = with_tensors(named, parts)
        if split.rebased_indices:
            index = arguments_by_name(func, call.args, call.kwargs)[split.rebased_indices].value
            parts[split.rebased_indices, -1] = named[split.rebased_indices] = self._rebase_indices(
                op, index, low, high, named["padding_idx"]
            )
            reads = [part.storage for name, part in parts.items() if name not in arguments.shapes]
        if split.adjust is not None:
            split.adjust(named, low, high)
        try:
            shapes = self._fake_results(func, call, named)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise UnfitError(op.id) from error
        results: list[int | None] = []
        unplaced: list[tuple[int, Cut | None, Value]] = []
        for place, index in enumerate(call.results):
            shape = shapes[place] if place < len(shapes) else None
            if index is None or shape is None or (place not in split.result_cuts and number):
                results.append(None)
                continue
            results.append(
                self.writer.place_result(op, index, split.result_cuts.get(place), shape, low, high, unplaced)
            )
        for name in arguments.shapes:
            part = self._shape_argument(op, parts[name], results, reads)
            if name[1] < 0:
                named[name[0]] = part
            else:
                named[name[0]] = [part if p == name[1] else i for p, i in enumerate(named[name[0]])]
        args, kwargs = self._place_arguments(func, call, named)
        new = Call(func, args, kwargs, tuple(results))
        self.writer.emit(
            op, new, reads, [part.storage for _, _, part in arguments.written], arguments.discards, op.name
        )
        for index, cut, part in arguments.written:
            self.writer.store_written(op, index, cut, part, low, high)
        for index, cut, result in unplaced:
            self.writer.store_result(op, index, cut, result, low, high)
        return piece

    def _gather_arguments(self, op: Op, split: OpSplit, written: frozenset[str], low: int, high: int) -> _Arguments:
        """Return the arguments of the part ``low:high``; ``written`` names arguments that the op writes in place."""
        arguments = _Arguments()
        for name, index in named_refs(self.captured.calls[op.id]):
            old = self.captured.values[index]
            cut = split.argument_cuts.get(name)
            if name[0] in split.shape_only or old.storage in op.creates:
                arguments.shapes.append(name)
                arguments.parts[name] = self._shape_of(old, cut, low, high)
                continue
            part = arguments.parts[name] = self.writer.gather_argument(op, index, cut, low, high)
            if old.storage in op.reads or (name[0] in written and not self._covers_storage(part)):
                arguments.reads.append(part.storage)
            if name[0] in written:
                arguments.written.append((index, cut, part))
                if old.storage in op.discards:
                    arguments.discards.append(part.storage)
        return arguments

    def _shape_argument(self, op: Op, shape_value: Value, results: Sequence[int | None], reads: list[int]) -> Value:
        """Return a value for an argument that only gives a shape: a result of equal layout, or new empty memory."""
        for index in results:
            if index is not None and self.writer.values[index].has_same_layout(shape_value):
                return self.writer.values[index]
        empty = replace(
            shape_value, storage=self.writer.new_storage(prod(shape_value.shape) * shape_value.dtype.itemsize, "shape")
        )
        self.writer.make_empty(op, empty)
        reads.append(empty.storage)
        return empty

    def _build_update_part(self, op: Op, choice: ChosenSplit, number: int) -> OpPiece:
        """Build the optimizer update of one range of a parameter."""
        piece = self.writer.begin_piece(op)
        split, call = choice.split, self.captured.calls[op.id]
        whole: Any = call.func
        low, high = choice.ends[number : number + 2]
        is_last = number == len(choice.ends) - 2
        update: OptimizerUpdate = whole.for_range(low, is_last=is_last)
        parts: list[Value] = []
        reads: list[int] = []
        mutates: list[int] = []
        for name, index in named_refs(call):
            old = self.captured.values[index]
            part = self.writer.gather_argument(op, index, split.argument_cuts.get(name), low, high)
            parts.append(part)
            reads.append(part.storage)
            if old.storage in op.mutates and (old.shape or is_last):
                mutates.append(part.storage)
        refs = [Ref(self.writer.index_of(part)) for part in parts]
        args = ([refs[0]], [refs[1]], [refs[2:]])
        update_op = replace(
            op,
            reads=tuple(dict.fromkeys(reads)),
            mutates=tuple(dict.fromkeys(mutates)),
            family=family_of_update(op.name, update, args, self.writer.values),
        )
        piece.ops.append((update_op, call_of_update(update, args)))
        for (name, index), part in zip(named_refs(call), parts, strict=True):
            if part.storage in mutates:
                self.writer.store_written(op, index, split.argument_cuts.get(name), part, low, high)
        return piece

    def _build_lookup_part(self, op: Op, choice: ChosenSplit, number: int) -> OpPiece:
        """Build ops that look up indices in one slice of an embedding table and merge the rows into the result."""
        piece = self.writer.begin_piece(op)
        call, (low, high) = self.captured.calls[op.id], choice.ends[number : number + 2]
        func: Any = call.func
        named = arguments_by_name(func, call.args, call.kwargs)
        table = self.writer.gather_argument(
            op, named["weight"].value, choice.split.argument_cuts["weight", -1], low, high
        )
        indices = self.writer.gather_argument(op, named["indices"].value, None, 0, 0)
        from_low = self._add_op(op, _aten.sub.Scalar, (indices, low), indices.shape, indices.dtype)
        last = number == len(choice.ends) - 2
        # Without the outer bounds, the first and the last part raise for invalid indices.
        bounds = (0 if number else None, None if last else high - low - 1)
        clamped = self._add_op(op, _aten.clamp.default, (from_low, *bounds), indices.shape, indices.dtype)
        index: Any = call.results[0]
        whole = self.captured.values[index]
        rows = self._add_op(op, _aten.embedding.default, (table, clamped), whole.shape, whole.dtype)
        target = self._looked_up.get(op.id)
        if target is None:
            target = whole
            if whole.storage in self.cell_map.cuts:
                target = replace(
                    whole, storage=self.writer.new_storage(self.writer.storages[whole.storage].bytes, "looked up")
                )
            self._looked_up[op.id] = target
            self.writer.make_empty(op, target)
            self.writer.copy(op, target, rows)
        else:
            is_in_slice = self._add_op(op, _aten.eq.Tensor, (from_low, clamped), indices.shape, torch.bool)
            column = replace(is_in_slice, shape=(*is_in_slice.shape, 1), stride=(*is_in_slice.stride, 1))
            chosen = self._add_op(op, _aten.where.self, (column, rows, target), whole.shape, whole.dtype)
            self.writer.copy(op, target, chosen)
        if last and target.storage != whole.storage:
            box = require(self.cell_map.axes[whole.storage].box_of(self.cell_map.places[index]), op)
            self.writer.scatter(op, whole.storage, whole.dtype, box, target.storage)
            self.writer.whole_boxes[whole.storage, box] = target.storage, op.id
        return piece

    def _rebase_indices(self, op: Op, index: int, low: int, high: int, left_out: int = -1) -> Value:
        """Add ops that make table indices relative to the slice ``low:high``; return the new indices."""
        indices = self.writer.gather_argument(op, index, None, 0, 0)

        def run(func: OpOverload, args: tuple[Any, ...]) -> Value:
            is_comparison = func in (_aten.ne.Tensor, _aten.eq.Scalar)
            return self._add_op(op, func, args, indices.shape, torch.bool if is_comparison else indices.dtype)

        return rebase_indices(indices, low, high, left_out, run)

    def _add_op(
        self, like: Op, func: OpOverload, args: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Value:
        """Add a helper op for the op ``like``, with one contiguous result; return the result."""
        result = Value(
            self.writer.new_storage(prod(shape) * dtype.itemsize, f"{like.module} part".strip()),
            dtype,
            shape,
            dense_like(shape, tuple(range(len(shape), 0, -1))),
        )
        refs = map_leaves(args, lambda value: Ref(self.writer.index_of(value)), Value)
        reads = [value.storage for value in leaves_in(args, Value)]
        self.writer.emit(like, Call(func, refs, {}, (self.writer.index_of(result),)), reads)
        return result

    def _covers_storage(self, value: Value) -> bool:
        return covers(value, self.writer.storages[value.storage].bytes)

    def _shape_of(self, value: Value, cut: Cut | None, low: int, high: int) -> Value:
        """Return a value with the layout of an argument, or of its slice if it is cut, but without a storage."""
        shape = value.shape if cut is None else cut.part_shape(value.shape, low, high)
        whole = value if cut is None else value.merge_dims(cut.dims)
        stride = dense_like(shape, whole.stride if whole is not None else value.stride)
        return Value(-1, value.dtype, shape, stride)

    def _fake_results(self, func: Any, call: Call, named: dict[str, Any]) -> list[tuple[Value, int] | None]:
        """Run a part on fake tensors; return the layout and storage bytes of each result."""
        args, kwargs = self._place_arguments(func, call, named, refs=False)
        texts: tuple[Any, dict[str, Any]] = _layout_texts((args, kwargs))
        key = family_text(str(func), texts[0], texts[1], [])
        if key not in self._shapes:

            def fake(value: Value) -> torch.Tensor:
                return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=self.captured.device)

            with self.mode, torch.no_grad():
                fake_args, fake_kwargs = map_leaves((args, kwargs), fake, Value)
                by_argument = arguments_by_name(func, fake_args, fake_kwargs)
                leaves = result_leaves(fake_result(func, by_argument, partial(func, *fake_args, **fake_kwargs)))
            self._shapes[key] = [
                (Value(-1, t.dtype, tuple(t.shape), t.stride()), t.untyped_storage().nbytes())
                if isinstance(t, torch.Tensor)
                else None
                for t in leaves
            ]
        return self._shapes[key]

    def _place_arguments(
        self, func: Any, call: Call, named: dict[str, Any], *, refs: bool = True
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments for ``call``; ``refs`` replaces values by references."""

        def ref(value: Value) -> Any:
            return Ref(self.writer.index_of(value)) if refs else value

        return map_leaves(arrange_arguments(func, call, named), ref, Value)


def _order_depth_first(pieces: Sequence[OpPiece]) -> list[OpPiece]:
    """Return pieces in an order that respects their dependencies and prefers pieces of later ops."""
    last_write: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    successors: list[list[int]] = [[] for _ in pieces]
    waits = [0] * len(pieces)
    for number, piece in enumerate(pieces):
        touched = {s for op, _ in piece.ops for s in op.touched}
        writes = {s for op, _ in piece.ops for s in op.mutates + op.creates}
        predecessors = {last_write[s] for s in touched if s in last_write}
        predecessors |= {reader for s in writes for reader in readers.get(s, ())}
        for neighbour in predecessors:
            successors[neighbour].append(number)
        waits[number] = len(predecessors)
        for storage in touched:
            if storage in writes:
                last_write[storage] = number
                readers[storage] = []
            else:
                readers.setdefault(storage, []).append(number)
    ready: list[tuple[int, int]] = []
    for number, piece in enumerate(pieces):
        if not waits[number]:
            heappush(ready, (-piece.op, number))
    ordered: list[OpPiece] = []
    while ready:
        _, number = heappop(ready)
        ordered.append(pieces[number])
        for neighbour in successors[number]:
            waits[neighbour] -= 1
            if not waits[neighbour]:
                heappush(ready, (-pieces[neighbour].op, neighbour))
    return ordered


def _layout_texts(tree: Any) -> Any:
    return map_leaves(tree, lambda value: f"{value.dtype}{value.shape}{value.stride}", Value)
