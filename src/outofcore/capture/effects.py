"""Changes that a step makes to Python objects, recorded at capture and repeated after each run.

A captured step runs no Python, so this is right only while the code reads the same values (``capture.snapshot``).
"""

from __future__ import annotations

import collections
import functools
import random
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from outofcore._torch_internals import FakeTensor
from outofcore.capture.provenance import codes_of, is_installed
from outofcore.capture.reads import Origin, origin_of

# Larger lists and dicts, and further containers, are not searched, because that would take too long.
MAX_SEARCHED_ITEMS = 4096
_MAX_CONTAINERS = 100_000
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque, collections.Counter)
_LEAVES = (int, float, complex, bool, str, bytes, type(None), torch.Tensor, torch.dtype, torch.device, types.CodeType)


@dataclass(frozen=True)
class OutsideVariable:
    """A global, closure variable, class attribute or slot that the step can reach, and its value before."""

    label: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    before: Any


@dataclass
class SavedContainer:
    """A dict, list, set or deque of the user, with a copy of its items before the step."""

    label: str
    live: Any
    before: Any

    @classmethod
    def of(cls, label: str, live: Any) -> SavedContainer:
        return cls(label, live, _copy(live))

    def has_changed(self) -> bool:
        """Return whether items were added, removed or replaced since the copy was made."""
        live, before = self.live, self.before
        if len(live) != len(before):
            return True
        if isinstance(live, dict):
            return any(dict.get(live, name, live) is not value for name, value in dict.items(before))
        if isinstance(live, list | deque):
            return any(new is not old for new, old in zip(live, before, strict=True))
        return any(item not in before for item in live)

    def restore(self) -> None:
        if self.has_changed():
            _assign_items(self.live, self.before)


@dataclass(frozen=True)
class PositionSource:
    """A random generator of Python or NumPy, or an iterator, and its position before the step."""

    label: str
    read: Callable[[], Any]
    write: Callable[[Any], Any] | None  # None if the position cannot be restored
    before: Any

    def has_moved(self) -> bool:
        return bool(self.read() != self.before)

    def restore(self) -> None:
        if self.write is not None and self.has_moved():
            self.write(self.before)


def _state_setter(bits: Any, state: Any) -> Callable[[Any], None]:
    return lambda _: setattr(bits, "state", state)


def _describe_position(iterator: Iterator[Any]) -> Any:
    """Describe an iterator's position, without advancing it, for comparison with a later description."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        if frame is None:
            return None
        return frame.f_lasti, {
            name: repr(v) if isinstance(v, int | float) else id(v) for name, v in frame.f_locals.items()
        }
    hint = getattr(iterator, "__length_hint__", None)
    return repr(iterator) if hint is None else hint()


# Changes one container or variable.
Effect = Callable[[], None]


def effect_of(container: SavedContainer, ignored_keys: Iterable[Any] = ()) -> Effect | None:
    """Return a function that repeats a container's changes; None if there are no changes."""
    live, before, after = container.live, container.before, _copy(container.live)
    if isinstance(live, dict):
        gone = set(before).difference(after, ignored_keys)
        new = {
            key: value
            for key, value in dict.items(after)
            if dict.get(before, key, before) is not value and key not in ignored_keys
        }
        if not gone and not new:
            return None

        def apply() -> None:
            for key in gone:
                live.pop(key, None)
            live.update(new)

        return apply
    if not container.has_changed():
        return None
    begins_alike = isinstance(live, list | deque) and all(a is b for a, b in zip(before, after, strict=False))
    if begins_alike and len(after) > len(before):
        added = list(after)[len(before) :]
        return lambda: live.extend(added)
    return lambda: _assign_items(live, after)


def _copy(live: Any) -> Any:
    # A subclass may override copy() and read its items.
    return dict(live) if isinstance(live, dict) else live.copy()


def _assign_items(live: Any, items: Any) -> None:
    """Replace all items of a list, deque, dict or set by ``items``."""
    if isinstance(live, list):
        live[:] = items
    elif isinstance(live, deque):
        live.clear()
        live.extend(items)
    else:
        live.clear()
        live.update(items)


def contains_fake(value: Any, depth: int = 4) -> bool:
    """Return whether a value contains a fake tensor; search at most ``depth`` levels deep."""
    if isinstance(value, FakeTensor):
        return True
    if depth == 0 or isinstance(value, (*_LEAVES, nn.Module, type, types.ModuleType)):
        return False
    inside = _children_of(value)
    return len(inside) <= MAX_SEARCHED_ITEMS and any(contains_fake(item, depth - 1) for item in inside)


def _children_of(value: Any) -> list[Any]:
    """Return the items of a container (the values of a dict) and the values of an object's attributes."""
    children: list[Any] = []
    if isinstance(value, dict):
        children += dict.values(value)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        children += value
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        children += attributes.values()
    return children


class ReachableState:
    """The containers, variables and iterators that a step's code can reach, except in installed packages."""

    def __init__(self) -> None:
        self.variables: list[OutsideVariable] = []
        self.containers: list[SavedContainer] = []
        self.sources: list[PositionSource] = []
        self._seen: dict[int, Any] = {}
        self._stack: list[tuple[str, Any]] = []

    def skip(self, objects: Iterable[Any]) -> None:
        self._seen.update((id(obj), obj) for obj in objects)

    def reach(self, values: Iterable[tuple[str, Any]]) -> None:
        """Record the containers, variables and iterators that can be reached from (label, value) pairs."""
        self._stack += values
        while self._stack and len(self.containers) < _MAX_CONTAINERS:
            label, value = self._stack.pop()
            if isinstance(value, _LEAVES) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            self._stack += self._visit(label, value)

    def _visit(self, label: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Record a value if it can change, and yield (label, value) for each value inside it."""
        if isinstance(value, types.FunctionType):
            yield from self._visit_function(value)
        elif isinstance(value, types.MethodType):
            yield label.rpartition(".")[0] or label, value.__self__
            yield label, value.__func__
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            yield label.rpartition(".")[0] or label, value.__self__
        elif isinstance(value, functools.partial):
            yield from ((label, part) for part in (value.func, value.args, value.keywords))
        elif isinstance(value, property):
            yield label, value.fget
        elif isinstance(value, staticmethod | classmethod):
            yield label, value.__func__
        elif isinstance(value, type):
            yield from self._visit_class(value)
        elif type(value) in _CONTAINERS:
            if len(value) <= MAX_SEARCHED_ITEMS:
                self.containers.append(SavedContainer.of(label, value))
                items = value.items() if isinstance(value, dict) else enumerate(value)
                yield from ((f"{label}[{key!r}]", item) for key, item in items if not isinstance(item, _LEAVES))
        elif isinstance(value, tuple | frozenset):
            if len(value) <= MAX_SEARCHED_ITEMS:
                yield from ((label, item) for item in value)
        elif isinstance(value, random.Random):
            self.sources.append(PositionSource(label, value.getstate, value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator | np.random.RandomState):
            bits = value.bit_generator if isinstance(value, np.random.Generator) else value._bit_generator
            self.sources.append(
                PositionSource(label, lambda: repr(bits.state), _state_setter(bits, bits.state), repr(bits.state))
            )
        elif isinstance(value, Iterator) and not isinstance(value, nn.Module):
            read = functools.partial(_describe_position, value)
            self.sources.append(PositionSource(label, read, None, read()))
        elif not isinstance(value, types.ModuleType | nn.Module | Optimizer):
            yield from self._visit_object(label, value)

    def _visit_object(self, label: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Record an object's attributes, and yield (label, value) of the attributes and of the object's classes."""
        kind = type(value)
        if origin_of(str(kind.__module__)) is Origin.OTHER:
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._seen[id(attributes)] = attributes
            self.containers.append(SavedContainer.of(label, attributes))
            yield from ((f"{label}.{name}", item) for name, item in attributes.items() if not isinstance(item, _LEAVES))
        for base in kind.__mro__:
            yield base.__qualname__, base
        for name in slots_of(kind):
            if not name.startswith("__") and hasattr(value, name):
                yield from self._visit_variable(
                    f"{label}.{name}", functools.partial(getattr, value, name), functools.partial(setattr, value, name)
                )
        if isinstance(value, dict) and len(value) <= MAX_SEARCHED_ITEMS:  # a subclass of dict
            yield from ((f"{label}[{key!r}]", item) for key, item in dict.items(value))

    def _visit_class(self, kind: type) -> Iterator[tuple[str, Any]]:
        """Record the variables of a user's class, and yield (label, value) of each variable and method."""
        if not _is_user_module(str(kind.__module__)):
            return
        for name, item in list(vars(kind).items()):
            if isinstance(item, types.FunctionType | staticmethod | classmethod | property):
                yield f"{kind.__qualname__}.{name}", item
            elif not name.startswith("__"):
                read, write = functools.partial(getattr, kind, name), functools.partial(setattr, kind, name)
                yield from self._visit_variable(f"{kind.__qualname__}.{name}", read, write)

    def _visit_function(self, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        """Record a function's variables, and yield (label, value) of each object that it refers to."""
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            yield wrapped.__qualname__ if hasattr(wrapped, "__qualname__") else "", wrapped
        if not _is_user_module(str(function.__globals__.get("__name__", ""))) and function.__closure__ is None:
            return
        code, module = function.__code__, function.__globals__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                cell.cell_contents  # noqa: B018 - an empty cell raises when it is read
            except ValueError:
                continue
            read = functools.partial(getattr, cell, "cell_contents")
            yield from self._visit_variable(name, read, functools.partial(setattr, cell, "cell_contents"))
        if function.__dict__:
            self.containers.append(SavedContainer.of(function.__qualname__, function.__dict__))
            yield from function.__dict__.items()
        for item in (function.__defaults__ or (), function.__kwdefaults__ or ()):
            yield f"a default of {function.__qualname__}", item
        if not _is_user_module(str(module.get("__name__", ""))):
            return
        for name in dict.fromkeys(name for nested in codes_of(code) for name in nested.co_names):
            if name in module:
                read, write = functools.partial(module.get, name), functools.partial(module.__setitem__, name)
                yield from self._visit_variable(name, read, write)

    def _visit_variable(
        self, label: str, read: Callable[[], Any], write: Callable[[Any], None]
    ) -> Iterator[tuple[str, Any]]:
        value = read()
        self.variables.append(OutsideVariable(label, read, write, value))
        yield label, value


def slots_of(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _is_user_module(module: str) -> bool:
    return origin_of(module) is Origin.USER and not is_installed(module)
