"""Compile several ops into one kernel with PyTorch's own compiler, Inductor, and keep it in its cache.

The captured ATen operators are compiled as they are. Options fix all choices of Inductor: no autotuning, static sizes,
and the current number of threads. So a kernel is the same in every process with the same versions on the same kind of
machine, wherever its tensors lie.

Limits: the bits are Inductor's own, not those of the single operators. It computes chains in half precision in full
precision throughout, and adds up in another order.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outofcore._torch_internals import CompilerMissingError, OpOverload, compile_traced, force_strides
from outofcore.analysis.windows import Derivation, derivation
from outofcore.capture.captured import Call, Ref, Value
from outofcore.capture.operators import by_name, value_text, written_arguments
from outofcore.capture.patching import TURN
from outofcore.capture.tables import map_leaves
from outofcore.progress import Tell, silent
from outofcore.transforms.compiled_ahead import compiling_ahead

_log = logging.getLogger("outofcore")
_aten = torch.ops.aten

BATCH_NORM = "aten::native_batch_norm"
# Written in place, and made anew by no operator of the same arguments.
REWRITTEN = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})


@dataclass(frozen=True)
class Recipe:
    """The ops that a kernel computes, on values and storages numbered by first use.

    ``written`` lists, for each input that is written, its place and the storage whose contents it receives. Recipes
    with the same ``text`` are equal.
    """

    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    written: tuple[tuple[int, int], ...]
    results: tuple[int, ...]
    device: torch.device
    text: str = ""

    @property
    def name(self) -> str:
        """A readable name such as ``fused.native_batch_norm+relu_``."""
        names = list(dict.fromkeys(str(call.func).split(".")[1] for call in self.calls))
        return "fused." + "+".join(names[:_NAMES]) + (f"+{len(names) - _NAMES}" if len(names) > _NAMES else "")


_NAMES = 4  # of operators in the name of a kernel
_CACHED_SECONDS = 0.5  # that a kernel takes at most which is in Inductor's cache


def described(recipe: Recipe) -> str:
    values = [
        f"%{index}=s{value.storage}+{value.offset}:{value_text(value)}" for index, value in enumerate(recipe.values)
    ]
    calls = [
        f"{call.func}({_text(list(call.args))}; {_text(sorted(call.kwargs.items()))})->{list(call.results)}"
        for call in recipe.calls
    ]
    ends = f"given {list(recipe.inputs)}, written {list(recipe.written)}, returned {list(recipe.results)}"
    return f"{recipe.device}: {' '.join(values)}; {'; '.join(calls)}; {ends}"


def _text(item: Any) -> str:
    if isinstance(item, Ref):
        return f"%{item.value}"
    if isinstance(item, list | tuple):
        return "[" + ",".join(map(_text, item)) + "]"
    return repr(item)


class Kernel:
    """A compiled recipe: called with the tensors of its inputs, returns a tuple of its results."""

    def __init__(self, recipe: Recipe, threads: int, run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]):
        self.recipe = recipe
        self.threads = threads
        self._run = run

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._run(list(tensors))


class NotFusibleError(Exception):
    """A recipe cannot be traced; never reaches the user."""


@dataclass
class Kernels:
    """The kernels of a step, each compiled once.

    With ``compiles`` False they can be planned but not run, for a device that is not here.
    """

    compiles: bool = True
    _known: dict[tuple[str, int], Kernel | None] = field(default_factory=dict[tuple[str, int], Kernel | None])
    _missing: bool = False

    def of(self, recipes: Iterable[Recipe], tell: Tell = silent) -> Mapping[str, Kernel]:
        """Return the kernels of recipes by their text; log and leave out those that cannot be compiled."""
        threads = torch.get_num_threads()
        wanted = {recipe.text: recipe for recipe in recipes}
        new = [recipe for text, recipe in wanted.items() if (text, threads) not in self._known]
        with contextlib.ExitStack() as stack:
            for number, recipe in enumerate(new):
                if self._missing:
                    break
                tell("compile kernels", number, len(new))
                begin = time.monotonic()
                self._known[recipe.text, threads] = self._made(recipe, threads)
                # The first kernel of a process takes seconds in any case; the second tells whether they are cached.
                if number == 1 and self.compiles and time.monotonic() - begin > _CACHED_SECONDS:
                    stack.enter_context(compiling_ahead(new[number + 1 :], threads))
        if new:
            tell("compile kernels", len(new), len(new))
        found = {text: self._known.get((text, threads)) for text in wanted}
        return {text: kernel for text, kernel in found.items() if kernel is not None}

    def _made(self, recipe: Recipe, threads: int) -> Kernel | None:
        if not self.compiles:
            return Kernel(recipe, threads, _not_compiled)
        try:
            with TURN:
                return Kernel(recipe, threads, compiled(recipe, threads))
        except CompilerMissingError as error:
            self._missing = True
            _log.warning(
                "kernels='inductor' was asked for, and nothing can be compiled: %s. The step runs with PyTorch's own "
                "kernels, and with their numbers",
                error,
            )
        except Exception as error:
            said = str(error).strip().partition("\n")[0]
            _log.warning("%s stays unfused, as Inductor refuses it: %s: %s", recipe.name, type(error).__name__, said)
        return None


def _not_compiled(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    raise RuntimeError("a kernel that was made for an estimate was run; please report it")


def compiled(recipe: Recipe, threads: int) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Compile a recipe with Inductor for a number of threads, or load it from Inductor's cache.

    Raises ``CompilerMissingError`` without a compiler, and whatever Inductor raises if it cannot compile the recipe.
    """
    given = [(recipe.values[index], recipe.device) for index in recipe.inputs]
    layouts = [(value.shape, value.stride, value.offset, value.dtype, device) for value, device in given]
    return compile_traced(_Traced(recipe), layouts, threads)


class _Traced:
    """Run a recipe with functional operators, writing in place only at the end: this is what Inductor traces."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        targets = {place for place, _ in recipe.written}
        # The storages whose contents change have one window that all others are made of.
        self.changing = {recipe.values[recipe.inputs[place]].storage for place in targets}

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        recipe = self.recipe
        self.plain: dict[int, torch.Tensor] = {}
        self.contents: dict[int, tuple[torch.Tensor, Value]] = {}
        for index, tensor in zip(recipe.inputs, given, strict=True):
            value = recipe.values[index]
            if value.storage in self.changing:
                self.contents[value.storage] = tensor, value
            else:
                self.plain[index] = tensor
        for call in recipe.calls:
            self._run(call)
        returned: list[torch.Tensor] = []
        for index in recipe.results:
            result = self._read(index)
            stride = recipe.values[index].stride
            returned.append(result if result.stride() == stride else force_strides(result, stride))
        ends = [(place, self._contents_as(storage, recipe.inputs[place])) for place, storage in recipe.written]
        for place, contents in ends:
            _aten.copy_.default(given[place], contents)
        return tuple(returned)

    def _contents_as(self, storage: int, index: int) -> torch.Tensor:
        """Return the contents of a storage, viewed with the layout of a value (of this storage or of another)."""
        tensor, lies = self.contents[storage]
        return _viewed(tensor, lies, self.recipe.values[index])

    def _read(self, index: int) -> torch.Tensor:
        if index in self.plain:
            return self.plain[index]
        return self._contents_as(self.recipe.values[index].storage, index)

    def _run(self, call: Call) -> None:
        func: Any = call.func
        args, kwargs = map_leaves((call.args, call.kwargs), lambda ref: self._read(ref.value), Ref)
        given = by_name(func, args, kwargs)
        named = by_name(func, call.args, call.kwargs)
        results, written = _functional(func, args, kwargs, given)
        for leaf, index in enumerate(call.results):
            if index is not None:
                self._write(index, results[leaf])
        for name in written_arguments(func, named):
            ref = named.get(name)
            if isinstance(ref, Ref):
                self._write(ref.value, written[name])

    def _write(self, index: int, tensor: torch.Tensor) -> None:
        value = self.recipe.values[index]
        if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
            raise NotFusibleError(f"{value_text(value)} was to be made, and {tensor.dtype} {tuple(tensor.shape)} is")
        self.contents[value.storage] = tensor, value


def _viewed(tensor: torch.Tensor, lies: Value, wanted: Value) -> torch.Tensor:
    if lies.layout() == wanted.layout() and lies.dtype == wanted.dtype:
        return tensor
    found = None if lies.dtype != wanted.dtype else derivation(lies.window(), wanted.window())
    if found is None:
        raise NotFusibleError(f"{value_text(wanted)} is no view of {value_text(lies)}")
    return derived(tensor, found)


def derived(tensor: torch.Tensor, how: Derivation) -> torch.Tensor:
    tensor = tensor.permute(how.order).reshape(how.factors)
    for dim, (first, count) in enumerate(how.ranges):
        if count != how.factors[dim]:
            tensor = tensor.narrow(dim, first, count)
    shown = [place for place in how.places if place is not None]
    hidden = [place for place in range(len(how.factors)) if place not in shown]  # of one element each
    tensor = tensor.permute([*shown, *hidden])
    for _ in hidden:
        tensor = tensor.squeeze(-1)
    for dim, place in enumerate(how.places):
        if place is None:
            tensor = tensor.unsqueeze(dim)
    return tensor.expand(how.shape)


def functional_of(func: OpOverload) -> OpOverload | None:
    """Return the functional counterpart of an in-place operator with the same arguments; None if there is none."""
    name = func._schema.name.partition("::")[2]
    packet = getattr(_aten, name[:-1], None) if name.endswith("_") else None
    if packet is None:
        return None
    wanted = [str(argument.type) for argument in func._schema.arguments]
    for overload in packet.overloads():
        other: OpOverload = getattr(packet, overload)
        arguments = other._schema.arguments
        if [str(argument.type) for argument in arguments] == wanted and not any(a.is_out for a in arguments):
            return other
    return None


def _functional(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any]
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return the results of an operator, and what it would have written by argument name."""
    name = func._schema.name
    if name == BATCH_NORM:
        return _batch_norm(given)
    if not name.endswith("_"):
        result = func(*args, **kwargs)
        return [result] if isinstance(result, torch.Tensor) else list(result), {}
    target: torch.Tensor = given["self"]
    if name == "aten::copy_":
        made = _aten.clone.default(given["src"].to(target.dtype).expand(target.shape))
    elif name in REWRITTEN:
        number = given.get("value", 0)
        likewise = {"dtype": target.dtype, "device": target.device}
        if isinstance(number, torch.Tensor):
            made = _aten.clone.default(number.to(target.dtype).expand(target.shape))
        else:
            made = _aten.full.default(list(target.shape), number, **likewise)
    else:
        other = functional_of(func)
        if other is None:
            raise NotFusibleError(f"{func} writes in place, and nothing returns what it writes")
        made = other(*args, **kwargs).to(target.dtype)
    return [None], {"self": made}


def _batch_norm(given: dict[str, Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    weight, bias = given.get("weight"), given.get("bias")
    mean, variance = given.get("running_mean"), given.get("running_var")
    how = given["training"], given["momentum"], given["eps"]
    if mean is None or variance is None:
        return list(_aten._native_batch_norm_legit.no_stats(given["input"], weight, bias, *how)), {}
    found = _aten._native_batch_norm_legit_functional.default(given["input"], weight, bias, mean, variance, *how)
    return list(found[:3]), {"running_mean": found[3], "running_var": found[4]}
