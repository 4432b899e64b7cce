"""What an ATen operator does to its arguments, read from its schema."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from outofcore._torch_internals import OpOverload
from outofcore.capture.captured import Ref, Value

# Operators that write all of their first argument and do not look at what it held. Of its other
# arguments nothing is said here: where one of them aliases the first, it is read in its own right.
_OVERWRITES = frozenset(
    (
        *("aten::zero_", "aten::fill_", "aten::copy_", "aten::normal_", "aten::uniform_", "aten::bernoulli_"),
        *("aten::random_", "aten::exponential_", "aten::geometric_", "aten::log_normal_", "aten::cauchy_"),
        *("aten::_foreach_zero_", "aten::_foreach_copy_"),
    )
)
# Operators that write arguments in place although their schema does not say so: the names of those
# arguments, and of the flag without which they do not (empty: they always do).
_STATISTICS = ("running_mean", "running_var")
_HIDDEN_WRITES = {
    "aten::native_batch_norm": (_STATISTICS, "training"),
    "aten::cudnn_batch_norm": (_STATISTICS, "training"),
    "aten::miopen_batch_norm": (_STATISTICS, "training"),
    "aten::batch_norm_gather_stats": (_STATISTICS, ""),
    "aten::batch_norm_gather_stats_with_counts": (_STATISTICS, ""),
    "aten::batch_norm_update_stats": (_STATISTICS, ""),
    "aten::mkldnn_rnn_layer_backward": (("workspace",), ""),
}
# Operators of which nothing but the statistics themselves depends on the statistics that they update.
_UPDATES_STATISTICS = frozenset(
    (
        *("aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_batch_norm_with_update"),
        *("aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::batch_norm_update_stats"),
        *("aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts"),
    )
)
_SPLIT_TYPES = frozenset({"List[Tensor]", "List[number]", "List[float]"})


@dataclass(frozen=True)
class Traits:
    """What a schema says of an operator.

    Attributes:
        names: of its arguments, in order, keyword-only ones included.
        written: places of the arguments that it may write in place.
        out: places of those that are ``out=`` arguments, which it overwrites.
        overwrites: whether it overwrites argument 0 without reading it.
        hidden: places of arguments that it writes without saying so, if ``flag`` is set (or always, if the
            flag is -1).
        flag: the place of that flag.
        statistics: places of arguments that, where they are written, matter to nothing else that it makes.
        random: whether it draws from a generator.
        reshapes: whether it changes the metadata of its first argument.
    """

    names: tuple[str, ...]
    written: frozenset[int]
    out: frozenset[int]
    overwrites: bool
    hidden: tuple[int, ...]
    flag: int
    statistics: frozenset[int]
    random: bool
    reshapes: bool


@functools.lru_cache(maxsize=4096)
def traits(func: OpOverload) -> Traits:
    """The traits of an operator."""
    arguments = func._schema.arguments
    names = tuple(a.name for a in arguments)
    written = frozenset(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
    name = func._schema.name
    hidden, flag = _HIDDEN_WRITES.get(name, ((), ""))
    return Traits(
        names=names,
        written=written,
        out=frozenset(i for i, a in enumerate(arguments) if a.is_out),
        overwrites=name in _OVERWRITES,
        hidden=tuple(names.index(argument) for argument in hidden),
        flag=names.index(flag) if flag else -1,
        statistics=frozenset(names.index(a) for a in _STATISTICS) if name in _UPDATES_STATISTICS else frozenset(),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        reshapes=torch.Tag.inplace_view in func.tags,
    )


def bind(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, Any]]:
    """The arguments given, each with its place in the schema."""
    names = traits(func).names
    return [*enumerate(args), *((names.index(key), value) for key, value in kwargs.items())]


def by_name(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments given, by their names in the schema."""
    names = traits(func).names
    return {names[place]: item for place, item in bind(func, args, kwargs)}


def written_places(func: OpOverload, bound: list[tuple[int, Any]]) -> frozenset[int]:
    """The places of the arguments that this very call may write in place."""
    facts = traits(func)
    if not facts.hidden:
        return facts.written
    if facts.flag >= 0 and not dict(bound).get(facts.flag):
        return facts.written
    return facts.written | frozenset(facts.hidden)


def is_random(func: OpOverload, bound: list[tuple[int, Any]]) -> bool:
    """Whether this very call draws from a generator: attention without dropout does not."""
    facts = traits(func)
    if not facts.random:
        return False
    given = dict(bound)
    return not ("dropout_p" in facts.names and given.get(facts.names.index("dropout_p"), 0.0) == 0.0)


def is_overwritten(func: OpOverload, place: int) -> bool:
    """Whether the argument at a place, if written, is written over as a whole and not read."""
    facts = traits(func)
    return place in facts.out or (facts.overwrites and place == 0)


def splits(func: OpOverload, bound: list[tuple[int, Any]]) -> frozenset[int]:
    """The places of a ``_foreach_`` operator's arguments that have one entry for each tensor."""
    arguments = func._schema.arguments
    given = dict(bound)
    length = len(given[0])
    return frozenset(
        place
        for place, value in given.items()
        if str(arguments[place].type) in _SPLIT_TYPES and isinstance(value, list | tuple) and len(value) == length
    )


def family_text(name: str, args: Any, kwargs: dict[str, Any], values: list[Value]) -> str:
    """A name shared by the calls that cost the same: operator, tensor metadata and constants."""
    items = [_argument_text(item, values) for item in args]
    items += [f"{key}={_argument_text(item, values)}" for key, item in sorted(kwargs.items())]
    return f"{name}({', '.join(items)})"


def _argument_text(item: Any, values: list[Value]) -> str:
    if isinstance(item, Ref):
        return value_text(values[item.value])
    if isinstance(item, list | tuple):
        return "[" + ",".join(_argument_text(part, values) for part in item) + "]"
    if isinstance(item, torch.Generator):
        return "generator"
    return repr(item)


def value_text(value: Value) -> str:
    """A value's dtype, shape and strides, such as ``float32[2,3]{3,1}``; with ``*`` if conjugate, ``-`` if negated."""
    dtype = str(value.dtype).removeprefix("torch.")
    shape, stride = ",".join(map(str, value.shape)), ",".join(map(str, value.stride))
    return f"{dtype}[{shape}]{{{stride}}}{'*' * value.conjugate}{'-' * value.negated}"
