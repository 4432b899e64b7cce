"""The pass that fuses several ops into one: those that ``analysis.fusing`` finds, as far as they can be compiled.

It comes before all other passes, so that they, the planner, the simulator, the validator and the engines see ordinary
ops and storages. Large results reuse the memory of an argument that nobody needs any more (as in ``passes.reuse``).

PyTorch's own elementwise operators, reductions, norms, softmax and losses are fused. Products, convolutions, attention,
random ops and custom operators are not. On the CPU neither are ops whose own kernels are faster than Inductor's: norms
but for the forward pass of batch norm, and sums over the rows of a matrix (figures: the guide to compiled kernels).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from outofcore._torch_internals import OpOverload
from outofcore.analysis.fusing import ops_to_fuse
from outofcore.analysis.gaps import LARGE_BYTES
from outofcore.capture.assembly import compacted
from outofcore.capture.captured import Call, Captured, Ref, Value, with_ops
from outofcore.capture.device_traits import traits_of
from outofcore.capture.operators import by_name, written_arguments
from outofcore.capture.tables import covers, leaves_in, map_leaves
from outofcore.graph import Op
from outofcore.progress import Tell, silent
from outofcore.transforms.kernels import BATCH_NORM, REWRITTEN, Kernels, Recipe, described, functional_of
from outofcore.transforms.passes import may_be_overwritten

_DTYPES = frozenset(
    {
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    }
)
_NORMS = ("native_batch_norm", "native_layer_norm", "native_group_norm")
_SOFTMAXES = ("_softmax", "_log_softmax")
_LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
# Elementwise and not tagged so, or written by Inductor as loops over elements and nothing else.
_FUSED = frozenset(
    f"aten::{name}"
    for name in (
        *(f"{norm}{part}" for norm in _NORMS for part in ("", "_backward")),
        *(f"{softmax}{part}" for softmax in _SOFTMAXES for part in ("", "_backward_data")),
        *(f"{loss}{part}" for loss in _LOSSES for part in ("", "_backward")),
        *("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"),
        *("_to_copy", "ones_like", "zeros_like", "full", "full_like", "new_zeros", "new_full", "new_ones"),
        *("elu_backward", "hardswish", "hardswish_backward", "hardsigmoid_backward", "leaky_relu_backward"),
        *("hardtanh_backward", "log_sigmoid_forward", "log_sigmoid_backward", "glu", "glu_backward", "rsub"),
    )
)
# On the CPU PyTorch's own kernels of these go through memory once where Inductor's go twice.
_OWN_ON_CPU = frozenset(
    (
        "aten::native_batch_norm_backward",
        *(f"aten::{norm}{part}" for norm in ("native_layer_norm", "native_group_norm") for part in ("", "_backward")),
    )
)
# On the CPU their functions take much longer than memory does, and are faster as Inductor writes them.
_ALONE_ON_CPU = frozenset({"aten::gelu", "aten::gelu_backward", "aten::tanh", "aten::tanh_"})
_TAGS = (torch.Tag.pointwise, torch.Tag.reduction)


def fused(captured: Captured, kernels: Kernels, tell: Tell = silent, *, least: int = LARGE_BYTES) -> Captured:
    """Fuse ops where Inductor can write one kernel for them; the bits are Inductor's.

    New kernels are added to ``kernels``. Two ops are fused only over a storage of at least ``least`` bytes.
    """
    pairs = list(zip(captured.graph.ops, captured.calls, strict=True))
    fusible, alone, scratch = [op.id for op, call in pairs if _is_fusible(captured, op, call)], list[int](), {}
    if traits_of(captured.device).knows_faster_kernels:
        fusible = [op for op in fusible if _is_worth_it(captured, captured.calls[op])]
        alone = [op for op in fusible if _is_worth_it_alone(captured.calls[op])]
        scratch = _known_scratch(captured)
    groups = ops_to_fuse(captured.graph, fusible, alone=alone, scratch=scratch, least=least)
    made = [_Fusion(captured, group, least) for group in groups]
    found = kernels.of([fusion.recipe for fusion in made], tell)
    kept = [fusion for fusion in made if fusion.recipe.text in found]
    if not kept:
        return captured
    last = {fusion.ops[-1]: fusion for fusion in kept}
    gone = {op for fusion in kept for op in fusion.ops}
    instead: dict[int, int] = {}
    ops: list[tuple[Op, Call]] = []
    for op, call in pairs:
        fusion = last.get(op.id)
        if fusion is not None:
            for storage, other in fusion.over.items():
                instead[storage] = instead.get(other, other)
            kernel = found[fusion.recipe.text]
            family = f"{fusion.recipe.text}, {kernel.threads} threads"
            refs = tuple(Ref(value) for value in fusion.inputs)
            ops.append((replace(fusion.op, family=family), Call(kernel, refs, {}, fusion.results)))
        elif op.id not in gone:
            ops.append((op, call))
    return compacted(with_ops(captured, ops), instead)


def fusing(capture: Callable[..., Captured], kernels: Kernels | None, tell: Tell = silent) -> Callable[..., Captured]:
    """Return ``capture`` followed by fusing; ``capture`` itself without ``kernels``."""
    return capture if kernels is None else lambda **given: fused(capture(**given), kernels, tell)


def _known_scratch(captured: Captured) -> dict[int, int]:
    """Return lower bounds in bytes of the scratch memory of ops, known without measuring.

    oneDNN copies the arguments of a convolution to another layout, and the gradient of batch norm is
    computed in two parts.
    """
    storages = captured.graph.storages
    return {
        op.id: max((storages[s].bytes for s in op.reads), default=0)
        for op in captured.graph.ops
        if op.name.startswith(("aten.convolution", "aten.native_batch_norm_backward."))
    }


def _is_fusible(captured: Captured, op: Op, call: Call) -> bool:
    func: Any = call.func
    if not isinstance(func, OpOverload) or func.namespace != "aten" or call.rehearse is not None:
        return False
    if op.random or op.communicates or not op.rerunnable or not op.touched:
        return False
    name = func._schema.name
    functional = functional_of(func) if name.endswith("_") else func
    tagged = functional is not None and any(tag in functional.tags for tag in _TAGS)
    if not tagged and name not in _FUSED and name not in REWRITTEN:
        return False
    named = by_name(func, call.args, call.kwargs)
    written = [named[name] for name in written_arguments(func, named) if isinstance(named.get(name), Ref)]
    if written and not name.endswith("_") and name != BATCH_NORM:
        return False
    if {captured.values[ref.value].storage for ref in written} != set(op.mutates):
        return False
    if not all(_covers(captured, captured.values[ref.value]) for ref in written):
        return False
    created = {captured.values[result].storage for result in call.results if result is not None}
    return created == set(op.creates) and all(map(_is_plain, _values_of(captured, call)))


def _is_worth_it(captured: Captured, call: Call) -> bool:
    """Return whether measurements found Inductor's loops no slower than PyTorch's own kernel."""
    func: Any = call.func
    name = func._schema.name
    if name in _OWN_ON_CPU:
        return False
    given = by_name(func, call.args, call.kwargs)
    first = next((captured.values[item.value] for item in given.values() if isinstance(item, Ref)), None)
    if first is None:
        return True
    long = [dim for dim, size in enumerate(first.shape) if size > 1]
    innermost = min(long, key=first.stride.__getitem__, default=0)
    if name == BATCH_NORM:
        return innermost != 1  # else it is laid out with channels last
    if torch.Tag.reduction in func.tags:
        dims = given.get("dim")
        reduced = [dims] if isinstance(dims, int) else list(dims or range(len(first.shape)))
        return innermost in [dim % max(len(first.shape), 1) for dim in reduced]
    return True


def _is_worth_it_alone(call: Call) -> bool:
    func: Any = call.func
    given = by_name(func, call.args, call.kwargs)
    return func._schema.name in _ALONE_ON_CPU and given.get("approximate", "none") == "none"


def _values_of(captured: Captured, call: Call) -> Iterator[Value]:
    for ref in leaves_in((call.args, call.kwargs), Ref):
        yield captured.values[ref.value]
    for result in call.results:
        if result is not None:
            yield captured.values[result]


def _is_plain(value: Value) -> bool:
    odd = value.foreign or value.conjugate or value.negated
    return not odd and value.dtype in _DTYPES and prod(value.shape) > 0


def _covers(captured: Captured, value: Value) -> bool:
    return covers(value, captured.graph.storages[value.storage].bytes)


class _Fusion:
    """Ops of a step that become one.

    ``over`` maps storages that the ops create and others use to the argument whose memory they reuse. ``op`` is the
    replacement, without a family.
    """

    def __init__(self, captured: Captured, ops: Sequence[int], least: int) -> None:
        self._captured = captured
        self.ops = tuple(ops)
        graph = captured.graph
        members = [graph.ops[op] for op in ops]
        calls = [captured.calls[op] for op in ops]
        self._created = dict.fromkeys(storage for op in members for storage in op.creates)
        mutated = dict.fromkeys(s for op in members for s in op.mutates if s not in self._created)
        reads = tuple(dict.fromkeys(self._read_first(members)))
        self.inputs = self._given(calls, mutated)
        made = [value for call in calls for value in call.results if value is not None]
        seen = [v for v in dict.fromkeys(made) if self._is_seen(captured.values[v].storage)]
        self.over = self._over(seen, mutated, least)
        self.results = tuple(v for v in seen if captured.values[v].storage not in self.over)
        self.recipe = self._recipe(calls, mutated)
        discarded = self._discarded(members)
        heaviest = max(members, key=lambda op: sum(graph.storages[s].bytes for s in op.touched))
        self.op = Op(
            ops[-1],
            self.recipe.name,
            reads,
            (*mutated, *self.over.values()),
            tuple(captured.values[value].storage for value in self.results),
            module=heaviest.module,
            source=heaviest.source,
            discards=tuple(s for s in mutated if s in discarded),
            module_class=heaviest.module_class,
        )

    def _read_first(self, members: Sequence[Op]) -> Iterator[int]:
        """Yield the storages from outside whose former contents matter."""
        overwritten: set[int] = set()
        for op in members:
            yield from (s for s in op.reads if s not in self._created and s not in overwritten)
            overwritten.update(s for s in op.mutates if s not in op.reads)

    def _given(self, calls: Sequence[Call], mutated: dict[int, None]) -> tuple[int, ...]:
        """Return the values used from outside; of a storage that is written, only the value that is written."""
        values = self._captured.values
        bases: dict[int, int] = {}
        found: dict[int, None] = {}
        for call in calls:
            func: Any = call.func
            named = by_name(func, call.args, call.kwargs)
            for name in sorted(written_arguments(func, named)):
                ref = named.get(name)
                if isinstance(ref, Ref):
                    bases.setdefault(values[ref.value].storage, ref.value)
        for call in calls:
            for ref in leaves_in((call.args, call.kwargs), Ref):
                storage = values[ref.value].storage
                if storage in mutated:
                    found[bases[storage]] = None
                elif storage not in self._created:
                    found[ref.value] = None
        return tuple(found)

    def _is_seen(self, storage: int) -> bool:
        """Return whether other ops or the user read a storage that these ops make."""
        graph = self._captured.graph
        return storage in graph.outputs or not set(self.ops).issuperset(graph.uses[storage])

    def _over(self, seen: Sequence[int], mutated: dict[int, None], least: int) -> dict[int, int]:
        graph, values = self._captured.graph, self._captured.values
        of: dict[int, list[int]] = {}
        for index in self.inputs:
            of.setdefault(values[index].storage, []).append(index)
        free = [
            (storage, values[indices[0]])
            for storage, indices in of.items()
            if len(indices) == 1
            and storage not in mutated
            and may_be_overwritten(graph, storage)
            and graph.uses[storage][-1] in self.ops
        ]
        found: dict[int, int] = {}
        for index in seen:
            result = values[index]
            size = graph.storages[result.storage].bytes
            if size < least or result.storage in graph.outputs or not _covers(self._captured, result):
                continue
            for place, (storage, value) in enumerate(free):
                alike = (value.dtype, value.layout()) == (result.dtype, result.layout())
                if alike and graph.storages[storage].bytes == size:
                    found[result.storage] = storage
                    del free[place]
                    break
        return found

    def _discarded(self, members: Sequence[Op]) -> set[int]:
        """Return the storages that one of the ops discards and no other touches."""
        found = {storage for op in members for storage in op.discards}
        return {s for s in found if sum(s in op.touched for op in members) == 1}

    def _recipe(self, calls: Sequence[Call], mutated: dict[int, None]) -> Recipe:
        values: dict[int, int] = {}
        storages: dict[int, int] = {}

        def number(index: int) -> int:
            storage = self._captured.values[index].storage
            storages.setdefault(storage, len(storages))
            return values.setdefault(index, len(values))

        inputs = tuple(number(index) for index in self.inputs)
        local: list[Call] = []
        for call in calls:
            args, kwargs = map_leaves((call.args, call.kwargs), lambda ref: Ref(number(ref.value)), Ref)
            results = tuple(None if result is None else number(result) for result in call.results)
            local.append(Call(call.func, args, kwargs, results))
        place = {self._captured.values[index].storage: place for place, index in enumerate(self.inputs)}
        written = [(place[storage], storages[storage]) for storage in mutated]
        written += [(place[other], storages[storage]) for storage, other in self.over.items()]
        found = Recipe(
            tuple(local),
            tuple(
                replace(self._captured.values[old], storage=storages[self._captured.values[old].storage])
                for old in values
            ),
            inputs,
            tuple(written),
            tuple(values[result] for result in self.results),
            self._captured.device,
        )
        return replace(found, text=described(found))
