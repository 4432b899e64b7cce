"""Compile several ops into one kernel with Inductor and its on-disk cache.

Inductor's options are fixed: no autotuning, static sizes, the current thread count. So a kernel is the same in every
process with the same versions on the same kind of machine. Its bits differ from the single operators': it computes
chains in half precision in full precision, and adds in another order.
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
from outofcore.analysis.windows import Derivation, derive_window
from outofcore.capture.captured import Call, Ref, Value
from outofcore.capture.operators import arguments_by_name, value_text, written_arguments
from outofcore.capture.patching import CAPTURE_LOCK
from outofcore.capture.tables import map_leaves
from outofcore.progress import ProgressCallback, ignore_progress
from outofcore.transforms.compiled_ahead import compile_ahead

_log = logging.getLogger("outofcore")
_aten = torch.ops.aten

BATCH_NORM = "aten::native_batch_norm"
# In-place operators without an out-of-place counterpart of the same arguments.
FILL_OPERATORS = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})


@dataclass(frozen=True)
class Recipe:
    """The ops that a kernel computes, with values and storages numbered by first use."""

    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    written: tuple[tuple[int, int], ...]  # position of each written input, and the storage of its new contents
    results: tuple[int, ...]
    device: torch.device
    text: str = ""  # recipes with the same text are equal

    @property
    def name(self) -> str:
        names = list(dict.fromkeys(str(call.func).split(".")[1] for call in self.calls))
        return "fused." + "+".join(names[:_NAMES]) + (f"+{len(names) - _NAMES}" if len(names) > _NAMES else "")


_NAMES = 4  # operators listed in the name of a kernel
_CACHED_SECONDS = 0.5  # upper bound for loading a kernel from Inductor's cache


def describe_recipe(recipe: Recipe) -> str:
    """Return a text that is equal for all recipes of the same computation."""
    values = [
        f"%{index}=s{value.storage}+{value.offset}:{value_text(value)}" for index, value in enumerate(recipe.values)
    ]
    calls = [
        f"{call.func}({_argument_text(list(call.args))}; {_argument_text(sorted(call.kwargs.items()))})"
        f"->{list(call.results)}"
        for call in recipe.calls
    ]
    summary = f"given {list(recipe.inputs)}, written {list(recipe.written)}, returned {list(recipe.results)}"
    return f"{recipe.device}: {' '.join(values)}; {'; '.join(calls)}; {summary}"


def _argument_text(item: Any) -> str:
    if isinstance(item, Ref):
        return f"%{item.value}"
    if isinstance(item, list | tuple):
        return "[" + ",".join(map(_argument_text, item)) + "]"
    return repr(item)


class Kernel:
    """A compiled recipe: a function from input tensors to a tuple of result tensors."""

    def __init__(self, recipe: Recipe, threads: int, run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]):
        self.recipe = recipe
        self.threads = threads
        self._run = run

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._run(list(tensors))


class NotFusibleError(Exception):
    """A recipe cannot be traced; only logged."""


@dataclass
class Kernels:
    """The kernels of a step, each compiled once; with ``compiles=False`` they can be planned but not run."""

    compiles: bool = True
    _compiled: dict[tuple[str, int], Kernel | None] = field(default_factory=dict[tuple[str, int], Kernel | None])
    _is_compiler_missing: bool = False

    def compile_all(self, recipes: Iterable[Recipe], tell: ProgressCallback = ignore_progress) -> Mapping[str, Kernel]:
        """Compile recipes and return the kernels by recipe text, without recipes that fail to compile."""
        threads = torch.get_num_threads()
        by_text = {recipe.text: recipe for recipe in recipes}
        new = [recipe for text, recipe in by_text.items() if (text, threads) not in self._compiled]
        with contextlib.ExitStack() as stack:
            for number, recipe in enumerate(new):
                if self._is_compiler_missing:
                    break
                tell("compile kernels", number, len(new))
                begin = time.monotonic()
                self._compiled[recipe.text, threads] = self._compile(recipe, threads)
                # The first kernel of a process always takes seconds; the second shows whether kernels are cached.
                if number == 1 and self.compiles and time.monotonic() - begin > _CACHED_SECONDS:
                    stack.enter_context(compile_ahead(new[number + 1 :], threads))
        if new:
            tell("compile kernels", len(new), len(new))
        kernels = {text: self._compiled.get((text, threads)) for text in by_text}
        return {text: kernel for text, kernel in kernels.items() if kernel is not None}

    def _compile(self, recipe: Recipe, threads: int) -> Kernel | None:
        """Return the compiled kernel; None if it cannot be compiled."""
        if not self.compiles:
            return Kernel(recipe, threads, _refuse_to_run)
        try:
            with CAPTURE_LOCK:
                return Kernel(recipe, threads, compile_recipe(recipe, threads))
        except CompilerMissingError as error:
            self._is_compiler_missing = True
            _log.warning(
                "kernels='inductor' cannot compile kernels: %s. The step runs with PyTorch's own kernels, "
                "and rounds as they do",
                error,
            )
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            _log.warning(
                "%s is not fused because Inductor failed: %s: %s", recipe.name, type(error).__name__, first_line
            )
        return None


def _refuse_to_run(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    raise RuntimeError("a kernel that was only planned (compiles=False) cannot run; please report this")


def compile_recipe(recipe: Recipe, threads: int) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Compile a recipe or load it from Inductor's cache; raises ``CompilerMissingError`` without a compiler."""
    inputs = [(recipe.values[index], recipe.device) for index in recipe.inputs]
    layouts = [(value.shape, value.stride, value.offset, value.dtype, device) for value, device in inputs]
    return compile_traced(_TracedRecipe(recipe), layouts, threads)


class _TracedRecipe:
    """A recipe as a function for Inductor to trace; it copies new contents to its inputs only at the end."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        targets = {place for place, _ in recipe.written}
        # All values of a changing storage are views of one window.
        self.written_storages = {recipe.values[recipe.inputs[place]].storage for place in targets}

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        recipe = self.recipe
        self.untouched: dict[int, torch.Tensor] = {}
        self.contents: dict[int, tuple[torch.Tensor, Value]] = {}
        for index, tensor in zip(recipe.inputs, inputs, strict=True):
            value = recipe.values[index]
            if value.storage in self.written_storages:
                self.contents[value.storage] = tensor, value
            else:
                self.untouched[index] = tensor
        for call in recipe.calls:
            self._run(call)
        returned: list[torch.Tensor] = []
        for index in recipe.results:
            result = self._tensor_of(index)
            stride = recipe.values[index].stride
            returned.append(result if result.stride() == stride else force_strides(result, stride))
        final_contents = [
            (place, self._view_contents(storage, recipe.inputs[place])) for place, storage in recipe.written
        ]
        for place, contents in final_contents:
            _aten.copy_.default(inputs[place], contents)
        return tuple(returned)

    def _view_contents(self, storage: int, index: int) -> torch.Tensor:
        tensor, value = self.contents[storage]
        return _view_as(tensor, value, self.recipe.values[index])

    def _tensor_of(self, index: int) -> torch.Tensor:
        if index in self.untouched:
            return self.untouched[index]
        return self._view_contents(self.recipe.values[index].storage, index)

    def _run(self, call: Call) -> None:
        """Run a call without writing in place; record its results and the new contents of written arguments."""
        func: Any = call.func
        args, kwargs = map_leaves((call.args, call.kwargs), lambda ref: self._tensor_of(ref.value), Ref)
        tensors = arguments_by_name(func, args, kwargs)
        refs = arguments_by_name(func, call.args, call.kwargs)
        results, written = _run_functional(func, args, kwargs, tensors)
        for leaf, index in enumerate(call.results):
            if index is not None:
                self._set_contents(index, results[leaf])
        for name in written_arguments(func, refs):
            ref = refs.get(name)
            if isinstance(ref, Ref):
                self._set_contents(ref.value, written[name])

    def _set_contents(self, index: int, tensor: torch.Tensor) -> None:
        """Set the contents of a value's storage; raises ``NotFusibleError`` if shape or data type differ."""
        value = self.recipe.values[index]
        if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
            raise NotFusibleError(
                f"the kernel computes {tensor.dtype} {tuple(tensor.shape)}, but the step needs {value_text(value)}"
            )
        self.contents[value.storage] = tensor, value


def _view_as(tensor: torch.Tensor, value: Value, target: Value) -> torch.Tensor:
    """Return a tensor viewed in the layout of ``target``; raises ``NotFusibleError`` if there is no such view."""
    if value.layout() == target.layout() and value.dtype == target.dtype:
        return tensor
    view = None if value.dtype != target.dtype else derive_window(value.window(), target.window())
    if view is None:
        raise NotFusibleError(f"{value_text(target)} is not a view of {value_text(value)}")
    return derive_view(tensor, view)


def derive_view(tensor: torch.Tensor, view: Derivation) -> torch.Tensor:
    """Apply the view operations in ``view`` to a tensor."""
    tensor = tensor.permute(view.order).reshape(view.factors)
    for dim, (first, count) in enumerate(view.ranges):
        if count != view.factors[dim]:
            tensor = tensor.narrow(dim, first, count)
    target_factors = [place for place in view.places if place is not None]
    other_factors = [place for place in range(len(view.factors)) if place not in target_factors]  # of size 1
    tensor = tensor.permute([*target_factors, *other_factors])
    for _ in other_factors:
        tensor = tensor.squeeze(-1)
    for dim, place in enumerate(view.places):
        if place is None:
            tensor = tensor.unsqueeze(dim)
    return tensor.expand(view.shape)


def functional_counterpart(func: OpOverload) -> OpOverload | None:
    """Return the out-of-place overload of an in-place operator; None if it does not exist."""
    name = func._schema.name.partition("::")[2]
    packet = getattr(_aten, name[:-1], None) if name.endswith("_") else None
    if packet is None:
        return None
    types = [str(argument.type) for argument in func._schema.arguments]
    for overload in packet.overloads():
        candidate: OpOverload = getattr(packet, overload)
        arguments = candidate._schema.arguments
        if [str(argument.type) for argument in arguments] == types and not any(a.is_out for a in arguments):
            return candidate
    return None


def _run_functional(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], named: dict[str, Any]
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Run an operator without writing in place; return its results, and new contents of arguments by name."""
    name = func._schema.name
    if name == BATCH_NORM:
        return _run_batch_norm(named)
    if not name.endswith("_"):
        result = func(*args, **kwargs)
        return [result] if isinstance(result, torch.Tensor) else list(result), {}
    target: torch.Tensor = named["self"]
    if name == "aten::copy_":
        written = _aten.clone.default(named["src"].to(target.dtype).expand(target.shape))
    elif name in FILL_OPERATORS:
        number = named.get("value", 0)
        options = {"dtype": target.dtype, "device": target.device}
        if isinstance(number, torch.Tensor):
            written = _aten.clone.default(number.to(target.dtype).expand(target.shape))
        else:
            written = _aten.full.default(list(target.shape), number, **options)
    else:
        counterpart = functional_counterpart(func)
        if counterpart is None:
            raise NotFusibleError(f"{func} writes in place and has no out-of-place overload")
        written = counterpart(*args, **kwargs).to(target.dtype)
    return [None], {"self": written}


def _run_batch_norm(named: dict[str, Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Run a batch norm without writing in place; return its results, and its new running statistics by name."""
    weight, bias = named.get("weight"), named.get("bias")
    mean, variance = named.get("running_mean"), named.get("running_var")
    options = named["training"], named["momentum"], named["eps"]
    if mean is None or variance is None:
        return list(_aten._native_batch_norm_legit.no_stats(named["input"], weight, bias, *options)), {}
    results = _aten._native_batch_norm_legit_functional.default(named["input"], weight, bias, mean, variance, *options)
    return list(results[:3]), {"running_mean": results[3], "running_var": results[4]}
