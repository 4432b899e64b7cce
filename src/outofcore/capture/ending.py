"""What a step leaves when it ends: results, gradients, and state bound to other tensors than before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outofcore._torch_internals import FakeTensor, tree_flatten
from outofcore.capture.assembly import Ending
from outofcore.capture.captured import LeafKind, OutputLeaf
from outofcore.capture.guard import Guard
from outofcore.capture.mirror import Mirror, Mirrored
from outofcore.capture.tables import Tables, covers
from outofcore.errors import CaptureError
from outofcore.graph import StorageKind

RunOp = Callable[..., torch.Tensor]


def read_ending(result: Any, mirror: Mirror, tables: Tables, guard: Guard, run: RunOp) -> Ending:
    """Look at what the step has left, and record the ops that bring it into the form that a graph can leave.

    ``run(func, *args)`` runs an ATen operator on fakes and records it.

    Raises:
        CaptureError: state would be left in a form that the next step could not start from.
    """
    _check_flags(mirror)
    _put_back_state(mirror, tables, guard, run)
    ending = Ending()
    _read_gradients(ending, mirror, tables, run)
    leaves, ending.spec = tree_flatten(result)
    ending.leaves = [_leaf(leaf, mirror, tables, run) for leaf in leaves]
    return ending


def check_inputs(mirror: Mirror, tables: Tables) -> None:
    """Refuse a step that writes into an argument whose memory another argument or state shares.

    Raises:
        CaptureError: the write would not be seen through the other one.
    """
    written = {storage for op in tables.ops for storage in op.mutates}
    for storage, entry in mirror.sharing_inputs().items():
        if storage in written:
            raise CaptureError(
                f"the step writes into argument {entry.name}, whose memory another argument, parameter or buffer "
                "shares: the other one would not see it; pass a clone(), or do not write in place"
            )
    for entry in mirror.inputs:
        if entry.fake.grad is not None:
            raise CaptureError(
                f"the step leaves a gradient in argument {entry.name}: it could not be found there after the next "
                "step; use torch.autograd.grad and return the gradient"
            )


def _check_flags(mirror: Mirror) -> None:
    for state in mirror.states:
        if state.fake.requires_grad != state.requires_grad:
            raise CaptureError(
                f"the step leaves requires_grad of {state.name} at {state.fake.requires_grad}, not as it was: the "
                "next step would be another one; set it back at the end of the step, or set it before the step"
            )


def _put_back_state(mirror: Mirror, tables: Tables, guard: Guard, run: RunOp) -> None:
    """Copy what parameters and buffers are now into the storages that they had before the step."""
    by_real = {id(state.real): state for state in mirror.states}
    moved: list[tuple[Mirrored, torch.Tensor]] = []
    for path, old, bound in guard.rebound_buffers():
        state, new = by_real.get(id(old)), mirror.fakes.get(id(bound), bound)
        if state is None or not isinstance(new, FakeTensor):
            raise CaptureError(
                f"the step replaces the buffer {path} by {'nothing' if new is None else 'a tensor from outside'}: the "
                "graph would go on with the old one; copy_() into it instead"
            )
        moved.append((state, new))
    replaced = {id(state) for state, _ in moved}
    moved += [(state, state.fake) for state in mirror.states if id(state) not in replaced]
    changed = [(state, now) for state, now in moved if tables.storage_of(now) != tables.values[state.value].storage]
    for state, now in changed:
        if now.shape != state.alias.shape or now.dtype != state.alias.dtype or now.device != state.alias.device:
            raise CaptureError(
                f"the step replaces {state.name} by a {now.dtype} tensor of shape {tuple(now.shape)}; it was "
                f"{state.alias.dtype} of shape {tuple(state.alias.shape)}: the next step would be another one; keep "
                "the shape and dtype, or return the new tensor"
            )
    # Where states change places, all are read before any is written.
    own = {tables.values[state.value].storage for state, _ in changed}
    sources = [
        run(torch.ops.aten.clone.default, now.detach()) if tables.storage_of(now) in own else now.detach()
        for _, now in changed
    ]
    for (state, _), source in zip(changed, sources, strict=True):
        run(torch.ops.aten.copy_.default, state.alias, source)


def _read_gradients(ending: Ending, mirror: Mirror, tables: Tables, run: RunOp) -> None:
    taken: set[int] = set()
    for place, state in enumerate(mirror.states):
        if state.kind is not StorageKind.PARAMETER or not state.fake.is_leaf:
            continue
        grad = state.fake.grad
        if grad is None:
            ending.cleared.append(place)
            continue
        storage = tables.storage_of(grad)
        before = mirror.gradients.get(place)
        if before is not None and tables.values[before.value].storage == storage:
            continue
        value = tables.value_of(grad)
        entry = tables.storages[storage]
        if not entry.created or storage in taken or not covers(tables.values[value], entry.bytes):
            value = tables.value_of(run(torch.ops.aten.clone.default, grad.detach()))
            storage = tables.values[value].storage
            entry = tables.storages[storage]
        taken.add(storage)
        entry.kind, entry.name = StorageKind.GRADIENT, f"{state.name}.grad"
        ending.gradients[place] = value


def _leaf(leaf: Any, mirror: Mirror, tables: Tables, run: RunOp) -> OutputLeaf:
    if not isinstance(leaf, torch.Tensor):
        if any(isinstance(item, FakeTensor) for item in getattr(leaf, "__dict__", {}).values()):
            raise CaptureError(
                f"the step returns a {type(leaf).__name__} with tensors inside, which cannot be taken apart: return "
                "the tensors in a tuple, list or dict, or register the class with torch.utils._pytree"
            )
        return OutputLeaf(LeafKind.CONSTANT, constant=leaf)
    fake = mirror.fakes.get(id(leaf), leaf)
    if not isinstance(fake, FakeTensor):
        return OutputLeaf(LeafKind.CONSTANT, constant=leaf)
    storage, value = tables.storage_of(fake), tables.value_of(fake)
    for entry in mirror.inputs:
        if entry.fake is fake:
            return OutputLeaf(LeafKind.INPUT, entry.leaf)
    for place, state in enumerate((*mirror.states, *mirror.gradients.values())):
        if state.value == value:
            return OutputLeaf(LeafKind.STATE, place)
    if not tables.storages[storage].created:
        value = tables.value_of(run(torch.ops.aten.clone.default, fake.detach()))
        storage = tables.values[value].storage
    if tables.storages[storage].kind is StorageKind.ACTIVATION:
        tables.storages[storage].kind = StorageKind.OUTPUT
    return OutputLeaf(LeafKind.VALUE, value)
