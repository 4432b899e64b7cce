"""Replay a captured step op by op in plain memory and check every promise of its graph.

The reference for executors: slow, simple and without a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from outofcore._torch_internals import mark_stepped, result_leaves
from outofcore.capture import Captured, LeafKind, OptimizerUpdate, Ref, StateOwner
from outofcore.capture.captured import Value
from outofcore.graph import StorageKind

GARBAGE = 0xA5


class Replay:
    """An interpreter of one captured step on the user's parameters, buffers and optimizer state.

    Attributes:
        mismatches: differences between real and fake results: op name, property, fake value, real value.
    """

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.bytes: dict[int, torch.UntypedStorage] = {}
        self.mismatches: list[tuple[str, str, Any, Any]] = []
        graph = captured.graph
        for binding in captured.states:
            value = captured.values[binding.value]
            if binding.tensor is not None:
                real = binding.tensor
                assert (real.dtype, tuple(real.shape), real.stride()) == (value.dtype, value.shape, value.stride)
                storage = real.untyped_storage()
                assert storage.nbytes() == graph.storages[value.storage].bytes
                assert real.storage_offset() == value.offset
                self.bytes.setdefault(value.storage, storage)
            else:
                self.bytes[value.storage] = garbage(graph.storages[value.storage].bytes)
        for storage, tensor in captured.constants.items():
            self.bytes[storage] = tensor.untyped_storage()
        self._last_use = {s: uses[-1] for s, uses in enumerate(graph.uses) if uses}
        freed_at_end = graph.persistent | set(graph.outputs) | set(captured.constants) | set(captured.ranges)
        freed_at_end |= {captured.values[binding.value].storage for binding in captured.inputs}
        self._freed_at_end = freed_at_end

    def tensor(self, value: int | Value) -> torch.Tensor:
        value_layout = self.captured.values[value] if isinstance(value, int) else value
        empty = torch.empty(0, dtype=value_layout.dtype)
        empty.set_(self.bytes[value_layout.storage], value_layout.offset, value_layout.shape, value_layout.stride)
        tensor = empty.conj() if value_layout.conjugate else empty
        return torch._neg_view(tensor) if value_layout.negated else tensor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        captured = self.captured
        graph = captured.graph
        leaves = pytree.tree_leaves((args, kwargs))
        for binding in captured.inputs:
            storage = captured.values[binding.value].storage
            self.bytes[storage] = garbage(graph.storages[storage].bytes)
            self.tensor(binding.value).copy_(leaves[binding.leaf].detach())
        for storage in captured.ranges:
            self.bytes[storage] = garbage(graph.storages[storage].bytes)
            as_bytes(self.bytes[storage]).copy_(self._home(storage))
        with torch.no_grad():
            for op in graph.ops:
                self._run(op)
        for storage in captured.ranges:
            self._home(storage).copy_(as_bytes(self.bytes.pop(storage)))
        mutated = {storage for op in graph.ops for storage in op.mutates}
        for binding in captured.inputs:
            if captured.values[binding.value].storage in mutated:
                leaves[binding.leaf].detach().copy_(self.tensor(binding.value))
        result = self._result(leaves)
        self._set_user_state()
        for storage in set(self.bytes) - graph.persistent - set(captured.constants):
            del self.bytes[storage]
        return result

    def _home(self, storage: int) -> torch.Tensor:
        """Return the bytes of a range within the state that contains it between steps."""
        range_, count = self.captured.ranges[storage], self.captured.graph.storages[storage].bytes
        assert not self.captured.graph.uses[range_.whole]
        return as_bytes(self.bytes[range_.whole])[range_.offset : range_.offset + count]

    def _run(self, op: Any) -> None:
        captured, graph = self.captured, self.captured.graph
        call = captured.calls[op.id]
        for storage in set(op.mutates) - set(op.reads):
            fill(self.bytes[storage])  # the graph claims that the op does not read these
        for storage in op.creates:  # an argument may use the result's memory if only its shape matters
            self.bytes[storage] = garbage(graph.storages[storage].bytes)
        untouched = {s: checksum(self.bytes[s]) for s in op.reads if s not in op.mutates}
        args, kwargs = self._materialize(call.args), self._materialize(call.kwargs)
        out = call.func(*args, **kwargs)
        for storage, before in untouched.items():
            assert checksum(self.bytes[storage]) == before, f"{op.name} wrote storage {storage}, which it only reads"
        results = result_leaves(out) if call.results else []
        assert len(results) == len(call.results), op.name
        argument_storages = {
            t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        created: set[int] = set()
        for real, index in zip(results, call.results, strict=True):
            if not isinstance(real, torch.Tensor):
                self._compare(op, "undefined", index, None)
                continue
            aliases = real.untyped_storage()._cdata in argument_storages
            if index is None:
                # A kernel may return outputs that its output mask excludes.
                masked = any(isinstance(arg, list) and False in arg for arg in call.args)
                self._compare(op, "aliases an argument", True, aliases or masked)
                continue
            value = captured.values[index]
            self._compare(op, "aliases an argument", False, aliases)
            facts = (real.dtype, tuple(real.shape), real.stride(), real.storage_offset(), real.is_conj(), real.is_neg())
            expected = (value.dtype, value.shape, value.stride, value.offset, value.conjugate, value.negated)
            self._compare(op, "window", expected, facts)
            count = real.untyped_storage().nbytes()
            self._compare(op, "bytes", graph.storages[value.storage].bytes, count)
            if facts == expected and not aliases:
                self.bytes[value.storage] = real.untyped_storage()
            else:
                self.bytes[value.storage] = garbage(graph.storages[value.storage].bytes)
                self.tensor(value).copy_(real)
            created.add(value.storage)
        assert created == set(op.creates), op.name
        for storage in op.touched:
            if self._last_use[storage] == op.id and storage not in self._freed_at_end:
                del self.bytes[storage]

    def _compare(self, op: Any, property_name: str, fake: Any, real: Any) -> None:
        if fake != real:
            self.mismatches.append((op.name, property_name, fake, real))

    def _materialize(self, tree: Any) -> Any:
        if isinstance(tree, Ref):
            return self.tensor(tree.value)
        if isinstance(tree, list):
            return [self._materialize(item) for item in tree]
        if type(tree) is tuple:
            return tuple(self._materialize(item) for item in tree)
        if isinstance(tree, dict):
            return {key: self._materialize(item) for key, item in tree.items()}
        return tree

    def _result(self, leaves: Sequence[Any]) -> Any:
        filled: list[Any] = []
        for leaf in self.captured.outputs:
            match leaf.kind:
                case LeafKind.VALUE:
                    filled.append(self.tensor(leaf.index).clone())
                case LeafKind.STATE:
                    filled.append(self.captured.states[leaf.index].tensor)
                case LeafKind.INPUT:
                    filled.append(leaves[leaf.index])
                case LeafKind.CONSTANT:
                    filled.append(leaf.constant)
        return pytree.tree_unflatten(filled, self.captured.output_spec)

    def _set_user_state(self) -> None:
        captured = self.captured
        for remaining_gradient in captured.gradients_left:
            parameter = captured.states[remaining_gradient.parameter].tensor
            assert parameter is not None
            parameter.grad = self.tensor(remaining_gradient.value).clone()
        for place in captured.gradients_cleared:
            parameter = captured.states[place].tensor
            assert parameter is not None
            parameter.grad = None
        for binding in captured.states:
            if binding.kind is StorageKind.OPTIMIZER_STATE:
                assert isinstance(binding.owner, StateOwner)
                owner = binding.owner
                if binding.tensor is None:
                    owner.optimizer.state[owner.parameter][owner.name] = self.tensor(binding.value)
        for optimizer in {
            id(c.func): c.func.optimizer for c in captured.calls if isinstance(c.func, OptimizerUpdate)
        }.values():
            mark_stepped(optimizer)


def garbage(count: int) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(count)
    fill(storage)
    return storage


def fill(storage: torch.UntypedStorage) -> None:
    if storage.nbytes():
        as_bytes(storage).fill_(GARBAGE)


def checksum(storage: torch.UntypedStorage) -> bytes:
    return as_bytes(storage).numpy().tobytes() if storage.nbytes() else b""


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
