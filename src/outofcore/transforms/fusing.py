"""The pass that fuses groups of ops (found by ``analysis.fusing``) into compiled kernels.

It runs before all other passes. Fused are PyTorch's own elementwise operators, reductions, norms, softmax and losses;
not products, convolutions, attention, random ops and custom operators. The CPU keeps PyTorch's kernels where they are
faster than Inductor's: norms other than batch norm's forward pass, and sums over the rows of a matrix.
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
from outofcore.capture.assembly import drop_unused
from outofcore.capture.captured import Call, Captured, Ref, Value, with_ops
from outofcore.capture.device_traits import traits_of
from outofcore.capture.operators import arguments_by_name, written_arguments
from outofcore.capture.tables import covers, leaves_in, map_leaves
from outofcore.graph import Op
from outofcore.progress import ProgressCallback, ignore_progress
from outofcore.transforms.kernels import (
    BATCH_NORM,
    FILL_OPERATORS,
    Kernels,
    Recipe,
    describe_recipe,
    functional_counterpart,
)
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
# Elementwise operators without the tag, and operators that Inductor compiles to plain loops over elements.
_ALSO_FUSIBLE = frozenset(
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
# PyTorch's CPU kernels read memory once where Inductor's read it twice.
_FASTER_UNFUSED_ON_CPU = frozenset(
    (
        "aten::native_batch_norm_backward",
        *(f"aten::{norm}{part}" for norm in ("native_layer_norm", "native_group_norm") for part in ("", "_backward")),
    )
)
# Bound by arithmetic on the CPU, where Inductor's kernel for a single op is faster than PyTorch's.
_FASTER_ALONE_ON_CPU = frozenset({"aten::gelu", "aten::gelu_backward", "aten::tanh", "aten::tanh_"})
_TAGS = (torch.Tag.pointwise, torch.Tag.reduction)


def fuse_ops(
    captured: Captured, kernels: Kernels, tell: ProgressCallback = ignore_progress, *, min_bytes: int = LARGE_BYTES
) -> Captured:
    """Replace groups of ops that share storages of at least ``min_bytes`` by fused kernels from ``kernels``."""
    pairs = list(zip(captured.graph.ops, captured.calls, strict=True))
    fusible, alone, scratch = [op.id for op, call in pairs if _is_fusible(captured, op, call)], list[int](), {}
    if traits_of(captured.device).has_kernel_measurements:
        fusible = [op for op in fusible if _is_faster_fused(captured, captured.calls[op])]
        alone = [op for op in fusible if _is_faster_compiled_alone(captured.calls[op])]
        scratch = _scratch_bounds(captured)
    groups = ops_to_fuse(captured.graph, fusible, alone=alone, scratch=scratch, min_bytes=min_bytes)
    fusions = [_Fusion(captured, group, min_bytes) for group in groups]
    compiled = kernels.compile_all([fusion.recipe for fusion in fusions], tell)
    compilable = [fusion for fusion in fusions if fusion.recipe.text in compiled]
    if not compilable:
        return captured
    last = {fusion.ops[-1]: fusion for fusion in compilable}
    fused_ops = {op for fusion in compilable for op in fusion.ops}
    reused: dict[int, int] = {}
    ops: list[tuple[Op, Call]] = []
    for op, call in pairs:
        fusion = last.get(op.id)
        if fusion is not None:
            for storage, reused_input in fusion.reused_inputs.items():
                reused[storage] = reused.get(reused_input, reused_input)
            kernel = compiled[fusion.recipe.text]
            family = f"{fusion.recipe.text}, {kernel.threads} threads"
            refs = tuple(Ref(value) for value in fusion.inputs)
            ops.append((replace(fusion.op, family=family), Call(kernel, refs, {}, fusion.results)))
        elif op.id not in fused_ops:
            ops.append((op, call))
    return drop_unused(with_ops(captured, ops), reused)


def capture_and_fuse(
    capture: Callable[..., Captured], kernels: Kernels | None, tell: ProgressCallback = ignore_progress
) -> Callable[..., Captured]:
    """Return a capture function that also fuses ops; without ``kernels``, return ``capture`` itself."""
    return capture if kernels is None else lambda **arguments: fuse_ops(capture(**arguments), kernels, tell)


def _scratch_bounds(captured: Captured) -> dict[int, int]:
    """Return lower bounds of the scratch bytes of convolutions and batch norm gradients, by op id."""
    # oneDNN copies convolution arguments to another layout; batch norm's gradient needs a similar copy.
    storages = captured.graph.storages
    return {
        op.id: max((storages[s].bytes for s in op.reads), default=0)
        for op in captured.graph.ops
        if op.name.startswith(("aten.convolution", "aten.native_batch_norm_backward."))
    }


def _is_fusible(captured: Captured, op: Op, call: Call) -> bool:
    """Return whether a fused kernel may compute an op; the conditions are in the module's docstring."""
    func: Any = call.func
    if not isinstance(func, OpOverload) or func.namespace != "aten" or call.rehearse is not None:
        return False
    if op.random or op.communicates or not op.rerunnable or not op.touched:
        return False
    name = func._schema.name
    functional = functional_counterpart(func) if name.endswith("_") else func
    tagged = functional is not None and any(tag in functional.tags for tag in _TAGS)
    if not tagged and name not in _ALSO_FUSIBLE and name not in FILL_OPERATORS:
        return False
    named = arguments_by_name(func, call.args, call.kwargs)
    written = [named[name] for name in written_arguments(func, named) if isinstance(named.get(name), Ref)]
    if written and not name.endswith("_") and name != BATCH_NORM:
        return False
    if {captured.values[ref.value].storage for ref in written} != set(op.mutates):
        return False
    if not all(_covers_storage(captured, captured.values[ref.value]) for ref in written):
        return False
    created = {captured.values[result].storage for result in call.results if result is not None}
    return created == set(op.creates) and all(map(_is_plain, _values_of(captured, call)))


def _is_faster_fused(captured: Captured, call: Call) -> bool:
    """Return whether we measured Inductor's kernel to be at least as fast as PyTorch's for such an op."""
    func: Any = call.func
    name = func._schema.name
    if name in _FASTER_UNFUSED_ON_CPU:
        return False
    named = arguments_by_name(func, call.args, call.kwargs)
    first = next((captured.values[item.value] for item in named.values() if isinstance(item, Ref)), None)
    if first is None:
        return True
    long_dims = [dim for dim, size in enumerate(first.shape) if size > 1]
    innermost = min(long_dims, key=first.stride.__getitem__, default=0)
    if name == BATCH_NORM:
        return innermost != 1  # 1 means channels last
    if torch.Tag.reduction in func.tags:
        dims = named.get("dim")
        reduced = [dims] if isinstance(dims, int) else list(dims or range(len(first.shape)))
        return innermost in [dim % max(len(first.shape), 1) for dim in reduced]
    return True


def _is_faster_compiled_alone(call: Call) -> bool:
    func: Any = call.func
    named = arguments_by_name(func, call.args, call.kwargs)
    return func._schema.name in _FASTER_ALONE_ON_CPU and named.get("approximate", "none") == "none"


def _values_of(captured: Captured, call: Call) -> Iterator[Value]:
    for ref in leaves_in((call.args, call.kwargs), Ref):
        yield captured.values[ref.value]
    for result in call.results:
        if result is not None:
            yield captured.values[result]


def _is_plain(value: Value) -> bool:
    """Return whether a value is a non-empty tensor on the device with a data type that kernels support."""
    is_special = value.foreign or value.conjugate or value.negated
    return not is_special and value.dtype in _DTYPES and prod(value.shape) > 0


def _covers_storage(captured: Captured, value: Value) -> bool:
    return covers(value, captured.graph.storages[value.storage].bytes)


class _Fusion:
    """A group of ops to fuse, the recipe of their kernel, and the op that replaces them."""

    def __init__(self, captured: Captured, ops: Sequence[int], min_bytes: int) -> None:
        self._captured = captured
        self.ops = tuple(ops)
        graph = captured.graph
        members = [graph.ops[op] for op in ops]
        calls = [captured.calls[op] for op in ops]
        self._created = dict.fromkeys(storage for op in members for storage in op.creates)
        mutated = dict.fromkeys(s for op in members for s in op.mutates if s not in self._created)
        reads = tuple(dict.fromkeys(self._storages_read_first(members)))
        self.inputs = self._find_inputs(calls, mutated)
        results = [value for call in calls for value in call.results if value is not None]
        outputs = [v for v in dict.fromkeys(results) if self._is_used_outside(captured.values[v].storage)]
        # Created storages that reuse the memory of an input: their ids and the input's.
        self.reused_inputs = self._choose_reused_inputs(outputs, mutated, min_bytes)
        self.results = tuple(v for v in outputs if captured.values[v].storage not in self.reused_inputs)
        self.recipe = self._make_recipe(calls, mutated)
        discarded = self._find_discarded(members)
        heaviest = max(members, key=lambda op: sum(graph.storages[s].bytes for s in op.touched))
        self.op = Op(
            ops[-1],
            self.recipe.name,
            reads,
            (*mutated, *self.reused_inputs.values()),
            tuple(captured.values[value].storage for value in self.results),
            module=heaviest.module,
            source=heaviest.source,
            discards=tuple(s for s in mutated if s in discarded),
            module_class=heaviest.module_class,
        )

    def _storages_read_first(self, members: Sequence[Op]) -> Iterator[int]:
        """Yield storages from outside of the group that its ops read before they overwrite them."""
        overwritten: set[int] = set()
        for op in members:
            yield from (s for s in op.reads if s not in self._created and s not in overwritten)
            overwritten.update(s for s in op.mutates if s not in op.reads)

    def _find_inputs(self, calls: Sequence[Call], mutated: dict[int, None]) -> tuple[int, ...]:
        """Return the values that the kernel reads or writes in place, one value per written storage."""
        values = self._captured.values
        bases: dict[int, int] = {}
        inputs: dict[int, None] = {}
        for call in calls:
            func: Any = call.func
            named = arguments_by_name(func, call.args, call.kwargs)
            for name in sorted(written_arguments(func, named)):
                ref = named.get(name)
                if isinstance(ref, Ref):
                    bases.setdefault(values[ref.value].storage, ref.value)
        for call in calls:
            for ref in leaves_in((call.args, call.kwargs), Ref):
                storage = values[ref.value].storage
                if storage in mutated:
                    inputs[bases[storage]] = None
                elif storage not in self._created:
                    inputs[ref.value] = None
        return tuple(inputs)

    def _is_used_outside(self, storage: int) -> bool:
        graph = self._captured.graph
        return storage in graph.outputs or not set(self.ops).issuperset(graph.uses[storage])

    def _choose_reused_inputs(self, outputs: Sequence[int], mutated: dict[int, None], min_bytes: int) -> dict[int, int]:
        """Map storages of large results to input storages of equal layout that these results may overwrite."""
        graph, values = self._captured.graph, self._captured.values
        values_by_storage: dict[int, list[int]] = {}
        for index in self.inputs:
            values_by_storage.setdefault(values[index].storage, []).append(index)
        free = [
            (storage, values[indices[0]])
            for storage, indices in values_by_storage.items()
            if len(indices) == 1
            and storage not in mutated
            and may_be_overwritten(graph, storage)
            and graph.uses[storage][-1] in self.ops
        ]
        reused: dict[int, int] = {}
        for index in outputs:
            result = values[index]
            size = graph.storages[result.storage].bytes
            if size < min_bytes or result.storage in graph.outputs or not _covers_storage(self._captured, result):
                continue
            for position, (storage, value) in enumerate(free):
                same_layout = (value.dtype, value.layout()) == (result.dtype, result.layout())
                if same_layout and graph.storages[storage].bytes == size:
                    reused[result.storage] = storage
                    del free[position]
                    break
        return reused

    def _find_discarded(self, members: Sequence[Op]) -> set[int]:
        """Return the storages that one op of the group discards and no other op of it touches."""
        discarded = {storage for op in members for storage in op.discards}
        return {s for s in discarded if sum(s in op.touched for op in members) == 1}

    def _make_recipe(self, calls: Sequence[Call], mutated: dict[int, None]) -> Recipe:
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
        written += [(place[reused_input], storages[storage]) for storage, reused_input in self.reused_inputs.items()]
        recipe = Recipe(
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
        return replace(recipe, text=describe_recipe(recipe))
