"""The table of axes along which each operator can be split.

A part is the same operator on slices of its arguments and makes a slice of its results: rows of a product, channels of
a norm, planes of a convolution with their neighbours. No sum is split. Operators that are not in the table, or draw
random numbers, stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd, prod
from typing import Any, TypeVar

import torch

from outofcore._torch_internals import OpOverload
from outofcore.analysis.chunks import GRAIN
from outofcore.capture.captured import Call, Value
from outofcore.capture.operators import arguments_by_name, is_random, traits, written_arguments
from outofcore.transforms.split.ways import Adjust, ArgumentName, CallView, Cut, OpSplit

T = TypeVar("T")

_aten = torch.ops.aten
# Preferred and smallest number of rows in a part of a product. Libraries work on blocks of rows; with fewer than the
# second number, rounding depends on the alignment of memory.
ROWS, _MIN_ROWS = 64, 16

Rule = Callable[[CallView], list[OpSplit]]


def splits_of(call: Call, values: Sequence[Value]) -> list[OpSplit]:
    """Return the possible splits of an op, the preferred one first; [] if it must stay whole."""
    func = call.func
    if not isinstance(func, OpOverload):
        return []
    named = arguments_by_name(func, call.args, call.kwargs)
    view = CallView(func, call, values, named)
    all_values = [*view.tensors().values(), *view.results().values()]
    if is_random(func, named) or any(v.foreign or v.conjugate or v.negated for v in all_values):
        return []
    rule = _RULES.get(func._schema.name)
    if rule is None and is_elementwise(func):
        rule = _split_elementwise
    splits = [] if rule is None else rule(view)
    return [split for split in splits if len(split.ends(2)) > 2]


# Elementwise operators that PyTorch does not tag as such.
_ELEMENTWISE = frozenset(
    f"aten::{name}"
    for name in (
        *("hardtanh_backward", "leaky_relu_backward", "elu_backward", "hardswish_backward", "softplus_backward"),
        *("hardsigmoid_backward", "mish_backward", "rsub", "copy_", "fill_", "_prelu_kernel"),
    )
)


def is_elementwise(func: OpOverload) -> bool:
    """Return whether each result element depends only on argument elements at the same position."""
    tagged = torch.Tag.pointwise in func.tags or func._schema.name in _ELEMENTWISE
    return tagged and not traits(func).reshapes


def _single_dim(dim: int) -> Cut:
    return Cut((dim, dim + 1))


# --- elementwise -----------------------------------------------------------------------------------------------------


def _split_elementwise(view: CallView) -> list[OpSplit]:
    """List the splits of an elementwise op along single dimensions and along merged leading dimensions."""
    written = written_arguments(view.func, view.named)
    results = view.results()
    tensors = view.tensors()
    shape_models = list(results.values()) or [v for (name, _), v in tensors.items() if name in written]
    if not shape_models or any(v.shape != shape_models[0].shape for v in shape_models):
        return []
    shape = shape_models[0].shape
    full = [name for name, value in tensors.items() if value.shape == shape]
    splits: list[OpSplit] = []
    # A memory format requires its number of dimensions, so they cannot be merged.
    has_memory_format = view.named.get("memory_format") in (torch.channels_last, torch.channels_last_3d)
    runs = [] if has_memory_format else [(0, end) for end in range(len(shape), 1, -1)]
    for first, end in [*runs, *((d, d + 1) for d in range(len(shape)))]:
        cuts: dict[ArgumentName, Cut] = {}
        fits = True
        for name, value in tensors.items():
            missing_dims = len(shape) - len(value.shape)
            dims = [d - missing_dims for d in range(first, end)]
            sizes = [value.shape[d] if d >= 0 else 1 for d in dims]
            if name in full or (len(dims) == 1 and dims[0] >= 0 and sizes[0] == shape[first] > 1):
                cuts[name] = Cut((dims[0], dims[0] + len(dims)))
            elif any(size != 1 for size in sizes) or (len(dims) > 1 and dims[-1] >= 0):
                fits = False
        extent = prod(shape[first:end])
        if fits and extent > 1:
            inner = prod(shape) // extent
            grain = GRAIN // gcd(GRAIN, inner)
            name = f"dimensions {first} to {end - 1}" if end - first > 1 else f"dimension {first}"
            result_cuts = {place: Cut((first, end)) for place in results}
            splits.append(OpSplit(name, extent, cuts, result_cuts, grain=grain))
    return splits


# --- operators with independent dimensions ---------------------------------------------------------------------------


def _independent_dims_rule(
    dims: Callable[[CallView], Sequence[tuple[int, int]]],
    arguments: Sequence[str],
    whole: Sequence[str] = (),
    adjust: Callable[[tuple[int, int]], Adjust | None] = lambda run: None,
) -> Rule:
    """Return a rule that splits an op along dimensions that all results and ``arguments`` share.

    ``whole`` arguments stay uncut. ``adjust`` makes the function that adapts constants such as sizes to a part."""

    def rule(view: CallView) -> list[OpSplit]:
        tensors = view.tensors()
        if any(name not in arguments and name not in whole for name, _ in tensors):
            return []
        splits: list[OpSplit] = []
        results = view.results()
        for first, end in dims(view):
            cut = Cut((first, end))
            shapes = {name: value.shape for name, value in tensors.items() if name[0] in arguments}
            extents = {prod(s[first:end]) for s in (*shapes.values(), *(v.shape for v in results.values()))}
            if len(extents) == 1 and results:
                result_cuts = dict.fromkeys(results, cut)
                name = f"dimension {first}" if end - first == 1 else f"dimensions {first} to {end - 1}"
                splits.append(
                    OpSplit(name, extents.pop(), dict.fromkeys(shapes, cut), result_cuts, adjust((first, end)))
                )
        return splits

    return rule


def _all_dims_but(argument: str) -> Callable[[CallView], list[tuple[int, int]]]:
    """Return a function that lists an argument's dimensions, as ranges, without the op's own ``dim``."""

    def dims(view: CallView) -> list[tuple[int, int]]:
        value = view.value(argument)
        if value is None or not value.shape:
            return []
        count = len(value.shape)
        joined_dims = view.named["dim"]
        joined_dims = {d % count for d in (joined_dims if isinstance(joined_dims, list | tuple) else [joined_dims])}
        lead = min(joined_dims, default=count)
        return [*([(0, lead)] if lead > 1 else []), *((d, d + 1) for d in range(count) if d not in joined_dims)]

    return dims


def _dims_before_spatial(argument: str, spatial: int) -> Callable[[CallView], list[tuple[int, int]]]:
    """Return a function that lists the dimensions of an argument, as ranges, without the last ``spatial`` ones."""

    def dims(view: CallView) -> list[tuple[int, int]]:
        value = view.value(argument)
        return [] if value is None else [(d, d + 1) for d in range(len(value.shape) - spatial)]

    return dims


def _resizing(name: str, dim: str = "") -> Callable[[tuple[int, int]], Adjust]:
    """Return a function that maps a range of dimensions to an ``Adjust`` that sets a part's sizes in ``name``."""
    return lambda run: partial(_resize, name=name, dim=dim, run=run)


def _resize(named: dict[str, Any], low: int, high: int, *, name: str, dim: str, run: tuple[int, int]) -> None:
    sizes = list(named[name])
    if dim:
        named[dim] = named[dim] % len(sizes)
        _renumber(named, low, high, dim=dim, run=run)
    sizes[run[0] : run[1]] = [high - low]
    named[name] = sizes


def _renumber(named: dict[str, Any], low: int, high: int, *, dim: str, run: tuple[int, int]) -> None:
    """Renumber the argument ``dim`` after the dimensions in the range ``run`` were merged into one."""
    if named[dim] >= run[1]:
        named[dim] -= run[1] - run[0] - 1


def _renumbering(run: tuple[int, int]) -> Adjust | None:
    """Return the ``Adjust`` that renumbers ``dim`` for merged dimensions; None if they are a single dimension."""
    return None if run[1] - run[0] == 1 else partial(_renumber, dim="dim", run=run)


def _scale_numbers(named: dict[str, Any], low: int, high: int, *, sizes: Mapping[str, int]) -> None:
    """Set arguments to multiples of a part's length; ``sizes`` has the factors by name."""
    named.update({name: (high - low) * size for name, size in sizes.items()})


def _set_length(named: dict[str, Any], low: int, high: int, *, name: str) -> None:
    named[name] = [high - low]


def _split_reduction(view: CallView) -> list[OpSplit]:
    """List the splits of a reduction along each dimension that is not reduced."""
    value, result = view.value("self"), view.result()
    if value is None or result is None or len(view.results()) != 1 or len(view.tensors()) != 1:
        return []
    count = len(value.shape)
    if not count:
        return []
    dims = view.named.get("dim")
    reduced_dims = {d % count for d in (dims if isinstance(dims, list | tuple) else [] if dims is None else [dims])}
    if not reduced_dims:
        return []
    splits: list[OpSplit] = []
    keeps_dims = bool(view.named.get("keepdim", False))
    for dim in range(count):
        if dim not in reduced_dims:
            result_dim = dim if keeps_dims else dim - sum(d < dim for d in reduced_dims)
            cuts = {("self", -1): _single_dim(dim)}
            splits.append(
                OpSplit(f"dimension {dim}", value.shape[dim], cuts, {0: _single_dim(result_dim)}, grain=GRAIN)
            )
    return splits


def _layer_norm_rule(argument: str, other_arguments: Sequence[str], whole: Sequence[str]) -> Rule:
    """Return a rule that splits a layer norm by its leading dimensions, or its weight gradients by columns."""

    def rule(view: CallView) -> list[OpSplit]:
        value = view.value(argument)
        mask = view.named.get("output_mask", [True])
        if value is None:
            return []
        if any(mask[1:]):
            return [] if mask[0] else _split_scale_gradients(view, value, [argument, *other_arguments])
        lead = len(value.shape) - len(view.named["normalized_shape"])
        runs = [*([(0, lead)] if lead > 1 else []), *((d, d + 1) for d in range(lead))]
        return _independent_dims_rule(lambda _: runs, [argument, *other_arguments], whole)(view)

    return rule


def _split_scale_gradients(view: CallView, value: Value, arguments: Sequence[str]) -> list[OpSplit]:
    """Return the split of layer norm parameter gradients by columns; [] if several dimensions are normalized."""
    last = len(value.shape) - 1
    if len(view.named["normalized_shape"]) != 1:
        return []

    cuts: dict[ArgumentName, Cut] = {}
    for name, tensor in view.tensors().items():
        if name[0] in arguments and tensor.shape == value.shape:
            cuts[name] = _single_dim(last)
        elif tensor.shape == value.shape[-1:]:
            cuts[name] = _single_dim(0)
    result_cuts = dict.fromkeys(view.results(), _single_dim(0))
    adjust = partial(_set_length, name="normalized_shape")
    return [OpSplit("columns", value.shape[last], cuts, result_cuts, adjust, grain=ROWS)]


# --- products --------------------------------------------------------------------------------------------------------


def _product_rule(first_name: str, second_name: str, added: str = "") -> Rule:
    """Return a rule that splits a matrix product by batch, rows or columns; ``added`` names an argument to add."""

    def rule(view: CallView) -> list[OpSplit]:
        first, second, result, addend = (
            view.value(first_name),
            view.value(second_name),
            view.result(),
            view.value(added),
        )
        if first is None or second is None or result is None:
            return []
        lead = len(result.shape) - 2

        def make_split(name: str, dim: int, cuts: dict[ArgumentName, Cut], grain: int) -> OpSplit | None:
            if addend is not None:
                addend_dim = dim - (len(result.shape) - len(addend.shape))
                if addend_dim >= 0 and addend.shape[addend_dim] == result.shape[dim] > 1:
                    cuts[added, -1] = _single_dim(addend_dim)
            return OpSplit(
                name, result.shape[dim], cuts, {0: _single_dim(dim)}, grain=grain, min_length=min(grain, _MIN_ROWS)
            )

        splits = [
            make_split("rows", lead, {(first_name, -1): _single_dim(lead)}, ROWS),
            make_split("columns", lead + 1, {(second_name, -1): _single_dim(lead + 1)}, ROWS),
        ]
        if lead:
            splits.insert(
                0, make_split("batch", 0, {(first_name, -1): _single_dim(0), (second_name, -1): _single_dim(0)}, 1)
            )
        return [split for split in splits if split is not None]

    return rule


def _split_linear(view: CallView) -> list[OpSplit]:
    """List the splits of a linear layer: by rows or by columns of its result."""
    first, weight, result = view.value("input"), view.value("weight"), view.result()
    if first is None or weight is None or result is None or len(weight.shape) != 2 or len(first.shape) < 2:
        return []
    last = len(first.shape) - 1
    cut = Cut((0, last))
    rows = [OpSplit("rows", prod(first.shape[:-1]), {("input", -1): cut}, {0: cut}, grain=ROWS, min_length=_MIN_ROWS)]
    cuts: dict[ArgumentName, Cut] = {("weight", -1): _single_dim(0)}
    if view.value("bias") is not None:
        cuts["bias", -1] = _single_dim(0)
    return [*rows, OpSplit("columns", weight.shape[0], cuts, {0: _single_dim(last)}, grain=ROWS, min_length=_MIN_ROWS)]


# --- convolutions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plane:
    """The kernel size, stride, padding and dilation of a convolution along its first spatial dimension."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def reach(self) -> int:
        return (self.kernel - 1) * self.dilation

    @property
    def has_disjoint_blocks(self) -> bool:
        return self.kernel == self.stride and not self.padding and self.dilation == 1


def _plane(view: CallView, weight: Value) -> _Plane:
    named = view.named
    first = [named[name][0] for name in ("stride", "padding", "dilation")]
    return _Plane(weight.shape[2], first[0], first[1], first[2])


def _set_padding(named: dict[str, Any], low: int, high: int, *, padding: int) -> None:
    named["padding"] = [padding, *named["padding"][1:]]


def _is_known_convolution(view: CallView, argument: str) -> bool:
    """Return whether a convolution has a batch dimension, and a stride and padding per spatial dimension."""
    value, weight = view.value(argument), view.value("weight")
    lists = (view.named.get(name) for name in ("stride", "padding", "dilation", "output_padding"))
    spatial = 0 if weight is None else len(weight.shape) - 2
    return (
        value is not None
        and spatial > 0
        and len(value.shape) == spatial + 2
        and all(isinstance(sizes, list | tuple) and len(sizes) == spatial for sizes in lists)
    )


def _split_convolution(view: CallView) -> list[OpSplit]:
    """List the splits of a convolution: by samples, first spatial dimension or output channels, where possible."""
    first, weight, result = view.value("input"), view.value("weight"), view.result()
    if first is None or weight is None or result is None or not _is_known_convolution(view, "input"):
        return []
    named, plane, transposed = view.named, _plane(view, weight), view.named["transposed"]
    splits = [OpSplit("batch", first.shape[0], {("input", -1): _single_dim(0)}, {0: _single_dim(0)})]
    if not transposed:
        after = plane.reach + 1 - plane.stride - plane.padding
        cut = Cut((2, 3), plane.stride, plane.padding, after)
        splits.append(
            OpSplit(
                "planes", result.shape[2], {("input", -1): cut}, {0: _single_dim(2)}, partial(_set_padding, padding=0)
            )
        )
    elif plane.has_disjoint_blocks and not named["output_padding"][0]:
        result_cuts = {0: Cut((2, 3), plane.stride)}
        splits.append(OpSplit("planes", first.shape[2], {("input", -1): _single_dim(2)}, result_cuts))
    if named["groups"] == 1:
        cuts: dict[ArgumentName, Cut] = {("weight", -1): _single_dim(1 if transposed else 0)}
        if view.value("bias") is not None:
            cuts["bias", -1] = _single_dim(0)
        splits.append(OpSplit("channels", result.shape[1], cuts, {0: _single_dim(1)}))
    return splits


def _split_convolution_backward(view: CallView) -> list[OpSplit]:
    """List the splits of a convolution's backward pass; [] if it computes input and weight gradients at once."""
    if view.value("grad_output") is None or not _is_known_convolution(view, "input"):
        return []
    computed = [bool(flag) for flag in view.named["output_mask"]]
    if computed[0] and not any(computed[1:]):
        return _split_input_gradient(view)
    return _split_weight_gradient(view) if computed[1] and not computed[0] else []


def _split_input_gradient(view: CallView) -> list[OpSplit]:
    """List the splits of a convolution's input gradient: by samples, first spatial dimension or input channels."""
    first, weight, gradient = view.value("input"), view.value("weight"), view.value("grad_output")
    if first is None or weight is None or gradient is None:
        return []
    named, plane, transposed = view.named, _plane(view, weight), view.named["transposed"]
    unread = frozenset({"input"})

    def make_split(name: str, extent: int, gradients: Cut, inputs: Cut, adjust: Adjust | None = None) -> OpSplit:
        cuts = {("grad_output", -1): gradients, ("input", -1): inputs}
        return OpSplit(name, extent, cuts, {0: inputs}, adjust, unread)

    splits = [make_split("batch", first.shape[0], _single_dim(0), _single_dim(0))]
    if plane.has_disjoint_blocks and not named["output_padding"][0]:
        if transposed:
            splits.append(make_split("planes", first.shape[2], Cut((2, 3), plane.stride), _single_dim(2)))
        elif first.shape[2] == gradient.shape[2] * plane.stride:
            splits.append(make_split("planes", gradient.shape[2], _single_dim(2), Cut((2, 3), plane.stride)))
    elif not transposed and plane.stride == 1:
        cut = Cut((2, 3), 1, plane.reach - plane.padding, plane.padding)
        splits.append(
            make_split("planes", first.shape[2], cut, _single_dim(2), partial(_set_padding, padding=plane.reach))
        )
    if named["groups"] == 1:
        cuts: dict[ArgumentName, Cut] = {
            ("input", -1): _single_dim(1),
            ("weight", -1): _single_dim(0 if transposed else 1),
        }
        splits.append(OpSplit("channels", first.shape[1], cuts, {0: _single_dim(1)}, None, unread))
    return splits


def _split_weight_gradient(view: CallView) -> list[OpSplit]:
    """List the splits of a convolution's weight and bias gradients: by output or input channels."""
    first, weight, gradient = view.value("input"), view.value("weight"), view.value("grad_output")
    if first is None or weight is None or gradient is None or view.named["groups"] != 1:
        return []
    transposed = view.named["transposed"]
    outputs, inputs = (_single_dim(1), _single_dim(0)) if transposed else (_single_dim(0), _single_dim(1))
    shorten_bias = None if view.named.get("bias_sizes") is None else partial(_set_length, name="bias_sizes")
    unread = frozenset({"weight"})
    result_cuts = {1: outputs} | ({2: _single_dim(0)} if view.result(2) is not None else {})
    by_output: dict[ArgumentName, Cut] = {("grad_output", -1): _single_dim(1), ("weight", -1): outputs}
    by_input: dict[ArgumentName, Cut] = {("input", -1): _single_dim(1), ("weight", -1): inputs}
    return [
        OpSplit("output channels", gradient.shape[1], by_output, result_cuts, shorten_bias, unread),
        OpSplit("input channels", first.shape[1], by_input, {1: inputs}, _compute_bias_once, unread),
    ]


def _compute_bias_once(named: dict[str, Any], low: int, high: int) -> None:
    if low:
        named["output_mask"] = [False, True, False]


# --- norms over a batch, losses, attention, tables -------------------------------------------------------------------


def _split_batch_norm(view: CallView) -> list[OpSplit]:
    """Return the split of a batch norm by channels, which have separate statistics; [] if it is impossible."""
    first = view.value("input")
    if first is None or len(first.shape) < 2:
        return []
    channels = first.shape[1]

    def cut(value: Value) -> Cut | None:
        if value.shape == first.shape:
            return _single_dim(1)
        return _single_dim(0) if value.shape == (channels,) else None

    cuts = {name: cut(value) for name, value in view.tensors().items()}
    cuts_by_result = {place: cut(value) for place, value in view.results().items()}
    argument_cuts = {name: cut_or_none for name, cut_or_none in cuts.items() if cut_or_none is not None}
    result_cuts = {place: cut_or_none for place, cut_or_none in cuts_by_result.items() if cut_or_none is not None}
    empty = [place for place, cut_or_none in cuts_by_result.items() if cut_or_none is None]
    if len(argument_cuts) < len(cuts) or any(prod(view.results()[place].shape) for place in empty):
        return []
    return [OpSplit("channels", channels, argument_cuts, result_cuts)]


def _group_norm_rule(arguments: Sequence[str], whole: Sequence[str]) -> Rule:
    """Return a rule that splits a group norm by groups, and its forward pass or input gradient also by samples."""

    def rule(view: CallView) -> list[OpSplit]:
        mask = view.named.get("output_mask", [True])
        by_samples: list[OpSplit] = []
        if mask[0] and not any(mask[1:]):
            set_samples = partial(_scale_numbers, sizes={"N": 1})
            by_samples = _independent_dims_rule(lambda _: [(0, 1)], arguments, whole, lambda _: set_samples)(view)
        return [*by_samples, *_split_by_groups(view)]

    return rule


def _split_by_groups(view: CallView) -> list[OpSplit]:
    """Return the split of a group norm by groups, which have separate statistics; [] if it is impossible."""
    first, groups = view.value("input"), view.named["group"]
    if first is None or len(first.shape) < 2 or first.shape[1] % groups:
        return []
    size = first.shape[1] // groups

    def cut(value: Value) -> Cut | None:
        if value.shape == first.shape:
            return Cut((1, 2), size)
        if value.shape == (first.shape[0], groups):
            return _single_dim(1)
        return Cut((0, 1), size) if value.shape == (first.shape[1],) else None

    cuts = {name: slice_cut for name, value in view.tensors().items() if (slice_cut := cut(value)) is not None}
    result_cuts = {place: slice_cut for place, value in view.results().items() if (slice_cut := cut(value)) is not None}
    if len(cuts) < len(view.tensors()) or len(result_cuts) < len(view.results()):
        return []
    return [OpSplit("groups", groups, cuts, result_cuts, partial(_scale_numbers, sizes={"C": size, "group": 1}))]


def _split_nll_backward(view: CallView) -> list[OpSplit]:
    """List the splits of a negative log-likelihood loss's backward pass: by rows or spatial dimensions."""
    first = view.value("self")
    if first is None or len(first.shape) < 2:
        return []
    splits: list[OpSplit] = []
    for dim in (0, *range(2, len(first.shape))):
        target_dim = max(dim - 1, 0)  # targets have no class dimension
        cuts: dict[ArgumentName, Cut] = {("self", -1): _single_dim(dim), ("target", -1): _single_dim(target_dim)}
        if view.named.get("reduction", 1) == 0:
            cuts["grad_output", -1] = _single_dim(target_dim)
        name = "rows" if dim == 0 else f"dimension {dim}"
        splits.append(OpSplit(name, first.shape[dim], cuts, {0: _single_dim(dim)}, None, frozenset({"self"})))
    return splits


def _split_attention(view: CallView) -> list[OpSplit]:
    """List the splits of attention: by batch or by heads, where possible."""
    query, key = view.value("query"), view.value("key")
    mask = view.value("attn_mask")
    if query is None or key is None or len(query.shape) != 4 or view.named.get("dropout_p", 0.0):
        return []
    splits: list[OpSplit] = []
    for dim, name in ((0, "batch"), (1, "heads")):
        cuts: dict[ArgumentName, Cut] = {}
        result_cuts: dict[int, Cut] = {}
        rows = (query.shape[0], query.shape[2], query.shape[1])  # of the sums, where heads are last

        def cut(value: Value, dim: int = dim, rows: tuple[int, ...] = rows) -> Cut | None:
            if len(value.shape) == 4 and value.shape[:2] == query.shape[:2]:
                return _single_dim(dim)
            if value.shape == rows and rows[1] != rows[2]:
                return _single_dim(0 if dim == 0 else 2)
            return None

        for item, value in view.tensors().items():
            if item[0] == "attn_mask":
                mask_dim = dim - (4 - len(value.shape))
                if mask_dim >= 0 and value.shape[mask_dim] > 1:
                    cuts[item] = _single_dim(mask_dim)
                continue
            part = cut(value)
            if part is not None:
                cuts[item] = part
        result_cuts = {place: part for place, value in view.results().items() if (part := cut(value)) is not None}
        uncut = [item for item in view.tensors() if item not in cuts and item[0] != "attn_mask"]
        if not uncut and len(result_cuts) == len(view.results()) and (mask is None or len(mask.shape) <= 4):
            splits.append(OpSplit(name, query.shape[dim], cuts, result_cuts))
    return splits


def _split_embedding(view: CallView) -> list[OpSplit]:
    """List the splits of an embedding lookup: by its indices, or by rows of the table."""
    indices = view.value("indices")
    if indices is None or not indices.shape:
        return []
    cut = Cut((0, len(indices.shape)))
    rows = OpSplit("rows", prod(indices.shape), {("indices", -1): cut}, {0: cut})
    table = view.value("weight")
    if table is None:
        return [rows]
    return [rows, OpSplit("words", table.shape[0], {("weight", -1): _single_dim(0)}, {}, is_lookup=True)]


def _split_embedding_backward(view: CallView) -> list[OpSplit]:
    """List the splits of an embedding table's gradient: by columns or by rows."""
    gradient = view.value("grad_output")
    if gradient is None:
        return []
    last = len(gradient.shape) - 1
    columns = OpSplit(
        "columns", gradient.shape[last], {("grad_output", -1): _single_dim(last)}, {0: _single_dim(1)}, grain=ROWS
    )
    if view.named["scale_grad_by_freq"]:  # it counts the indices of all parts
        return [columns]
    return [
        columns,
        OpSplit(
            "words", view.named["num_weights"], {}, {0: _single_dim(0)}, _rebase_arguments, rebased_indices="indices"
        ),
    ]


_EXCLUDED = -1  # an excluded index


def rebase_indices(
    indices: T, low: int, high: int, left_out: int, run: Callable[[OpOverload, tuple[Any, ...]], T]
) -> T:
    """Make table indices relative to a slice; ``left_out`` and indices outside the slice become -1."""
    from_low = run(_aten.sub.Scalar, (indices, low))
    is_outside = run(_aten.ne.Tensor, (from_low, run(_aten.clamp.default, (from_low, 0, high - low - 1))))
    rebased_indices = run(_aten.masked_fill.Scalar, (from_low, is_outside, _EXCLUDED))
    if low <= left_out < high:
        rebased_indices = run(
            _aten.masked_fill.Scalar, (rebased_indices, run(_aten.eq.Scalar, (indices, left_out)), _EXCLUDED)
        )
    return rebased_indices


def _rebase_arguments(named: dict[str, Any], low: int, high: int) -> None:
    indices = named["indices"]
    if isinstance(indices, torch.Tensor):
        named["indices"] = rebase_indices(indices, low, high, named["padding_idx"], lambda func, args: func(*args))
    named["num_weights"], named["padding_idx"] = high - low, _EXCLUDED


def _split_concatenation(view: CallView) -> list[OpSplit]:
    """List the splits of a concatenation along each dimension except the concatenated one."""
    tensors, result = view.tensors(), view.result()
    if result is None or any(len(value.shape) != len(result.shape) for value in tensors.values()):
        return []
    joined = view.named.get("dim", 0) % len(result.shape)
    return [
        OpSplit(f"dimension {dim}", size, dict.fromkeys(tensors, _single_dim(dim)), {0: _single_dim(dim)})
        for dim, size in enumerate(result.shape)
        if dim != joined
    ]


_UPSAMPLED = ("nearest2d", "nearest3d", "bilinear2d", "trilinear3d", "bicubic2d")
_RULES: dict[str, Rule] = {
    "aten::_softmax": _independent_dims_rule(_all_dims_but("self"), ["self"], (), _renumbering),
    "aten::_log_softmax": _independent_dims_rule(_all_dims_but("self"), ["self"], (), _renumbering),
    "aten::_safe_softmax": _independent_dims_rule(_all_dims_but("self"), ["self"], (), _renumbering),
    "aten::cumsum": _independent_dims_rule(_all_dims_but("self"), ["self"], (), _renumbering),
    "aten::cumprod": _independent_dims_rule(_all_dims_but("self"), ["self"], (), _renumbering),
    "aten::_softmax_backward_data": _independent_dims_rule(
        _all_dims_but("grad_output"), ["grad_output", "output"], (), _renumbering
    ),
    "aten::_log_softmax_backward_data": _independent_dims_rule(
        _all_dims_but("grad_output"), ["grad_output", "output"], (), _renumbering
    ),
    "aten::gather": _independent_dims_rule(_all_dims_but("self"), ["self", "index"], (), _renumbering),
    "aten::sum": _split_reduction,
    "aten::mean": _split_reduction,
    "aten::amax": _split_reduction,
    "aten::amin": _split_reduction,
    "aten::logsumexp": _split_reduction,
    "aten::linalg_vector_norm": _split_reduction,
    "aten::slice_backward": _independent_dims_rule(
        _all_dims_but("grad_output"), ["grad_output"], (), _resizing("input_sizes", "dim")
    ),
    "aten::clone": _split_elementwise,
    "aten::_to_copy": _split_elementwise,
    "aten::native_layer_norm": _layer_norm_rule("input", [], ["weight", "bias"]),
    "aten::native_layer_norm_backward": _layer_norm_rule("input", ["grad_out", "mean", "rstd"], ["weight", "bias"]),
    "aten::_fused_rms_norm": _layer_norm_rule("input", [], ["weight"]),
    "aten::native_group_norm": _group_norm_rule(["input"], ["weight", "bias"]),
    "aten::native_group_norm_backward": _group_norm_rule(["grad_out", "input", "mean", "rstd"], ["weight"]),
    "aten::native_batch_norm": _split_batch_norm,
    "aten::native_batch_norm_backward": _split_batch_norm,
    "aten::cudnn_batch_norm": _split_batch_norm,
    "aten::mm": _product_rule("self", "mat2"),
    "aten::bmm": _product_rule("self", "mat2"),
    "aten::addmm": _product_rule("mat1", "mat2", "self"),
    "aten::baddbmm": _product_rule("batch1", "batch2", "self"),
    "aten::linear": _split_linear,
    "aten::convolution": _split_convolution,
    "aten::convolution_backward": _split_convolution_backward,
    "aten::nll_loss_backward": _split_nll_backward,
    "aten::nll_loss2d_backward": _split_nll_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _split_attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _split_attention,
    "aten::embedding": _split_embedding,
    "aten::embedding_dense_backward": _split_embedding_backward,
    "aten::cat": _split_concatenation,
    **{
        f"aten::{name}{spatial}d{ending}": _independent_dims_rule(_dims_before_spatial("self", spatial), arguments)
        for spatial in (2, 3)
        for name, ending, arguments in (
            ("max_pool", "_with_indices", ["self"]),
            ("max_pool", "_with_indices_backward", ["grad_output", "self", "indices"]),
            ("avg_pool", "", ["self"]),
            ("avg_pool", "_backward", ["grad_output", "self"]),
            ("_adaptive_avg_pool", "", ["self"]),
            ("_adaptive_avg_pool", "_backward", ["grad_output", "self"]),
        )
    },
    **{
        f"aten::upsample_{mode}": _independent_dims_rule(_dims_before_spatial("self", int(mode[-2])), ["self"])
        for mode in _UPSAMPLED
    },
    **{
        f"aten::upsample_{mode}_backward": _independent_dims_rule(
            _dims_before_spatial("grad_output", int(mode[-2])), ["grad_output"], (), _resizing("input_size")
        )
        for mode in _UPSAMPLED
    },
}
