"""The Python values that a captured step has read, and whether one has changed.

Before each call native code compares them by identity; a different object is then compared by value. If several values
share a word in memory that changes with each, such as their dict's version, only that word is compared
(``capture.words``). ``capture.signature`` covers parameters, buffers and flags.

Limits: files, the clock, state in extension modules, contents of arrays above 64 KiB and of containers above 4096
items, and tensors, which must be arguments.
"""

from __future__ import annotations

import builtins
import collections
import contextvars
import enum
import functools
import gc
import itertools
import logging
import sys
import threading
import types
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from outofcore.capture.effects import MAX_SEARCHED_ITEMS, slots_of
from outofcore.capture.reads import Origin, Reads, load_compare_library, names_of, origin_of
from outofcore.capture.words import EntryKind, word_address, word_at


@dataclass(frozen=True)
class _ComparisonLimits:
    """Limits on the work before each call."""

    items: int = 65536  # the items of longer lists and sets are not compared
    small_dict: int = 64  # of larger dicts, only items under keys that the code names are compared
    array_bytes: int = 65536  # the contents of larger arrays are not compared
    entries: int = 500_000  # with more entries, each call counts as changed


_MOST = _ComparisonLimits()
_ABSENT = object()
_PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    range,
    slice,
)
_SCALARS = (int, float, complex, bool, str, bytes, torch.device, torch.Size, range)
# Objects without numbers, or of the system.
_NOT_SEARCHED = (logging.Logger, logging.Handler, torch.Generator, types.CodeType, types.FrameType, types.CoroutineType)
_MODULE_TABLES = frozenset(("_parameters", "_buffers", "_modules", "training"))
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__")


class Snapshot:
    """The Python values that a captured step can read, recorded to detect changes before later calls."""

    def __init__(self, reads: Reads, roots: Iterable[tuple[str, Any]], parameters: Iterable[tuple[str, Any]]) -> None:
        walk = _ValueWalk(reads)
        for label, parameter in parameters:
            for name in _TENSOR_HOOKS:
                walk.add_attribute(parameter, name, f"the hooks of {label}")
            walk.add_tensor_attributes(parameter, label)
        for label, root in roots:
            walk.enqueue(root, label)
        walk.add_globals()
        walk.run()
        self._is_whole = len(walk.entries) < _MOST.entries
        groups: dict[int, list[_Entry]] = {}
        alone: list[_Entry] = []
        for entry in walk.entries:
            kind, owner, key, *_ = entry
            word = word_address(kind, owner, key)
            (alone if word is None else groups.setdefault(word, [])).append(entry)
        self._entries = [entry for group in groups.values() for entry in group] + alone
        self._first_without_word = len(self._entries) - len(alone)  # index of the first entry without a word
        self._table = np.array(
            [
                (kind, id(owner), id(key), 0 if value is _ABSENT else id(value), count)
                for kind, owner, key, value, count, _ in self._entries
            ],
            np.int64,
        ).reshape(-1, 5)
        ends = itertools.accumulate(map(len, groups.values()))
        # Words are stored inverted, so the first comparison finds them changed, compares their entries and stores them.
        self._words = np.array(
            [(word, ~word_at(word), end - len(groups[word]), end) for word, end in zip(groups, ends, strict=True)],
            np.int64,
        ).reshape(-1, 4)

    def __len__(self) -> int:
        return len(self._entries)

    def change(self) -> str | None:
        """Describe the first value that has changed since the snapshot; None if all values are equal."""
        if not self._is_whole:
            return f"the step can read more than {_MOST.entries} values, so that not all of them are compared"
        library, start, count = load_compare_library(), self._first_without_word, len(self._entries)
        table, words = self._table.ctypes.data, self._words.ctypes.data
        while (place := library.outofcore_first_change_by_words(table, words, len(self._words))) >= 0:
            description = self._compare_by_value(place)
            if description is not None:
                return description
        while (start := library.outofcore_first_change(table, count, start)) < count:
            description = self._compare_by_value(start)
            if description is not None:
                return description
            start += 1
        return None

    def _compare_by_value(self, index: int) -> str | None:
        """Describe how the value of entry ``index`` has changed; None if the new value is equal."""
        kind, owner, key, before, count, label = self._entries[index]
        match kind:
            case EntryKind.SIZE:
                names, keys = before
                if _readable_keys(owner, names) != keys:
                    return f"{label} has other items or attributes"
                count = dict.__len__(owner)
            case EntryKind.ITEM | EntryKind.ATTRIBUTE | EntryKind.CELL:
                now = _current_value(kind, owner, key)
                if not _is_equal(before, now):
                    return f"{label} {_describe_change(before, now)}"
                before = now
            case EntryKind.LIST:
                now = tuple(owner)
                if not _are_equal(before, now):
                    return f"{label} has other items"
                before = now
            case EntryKind.TYPE:
                return f"{label} has become a {type(owner).__name__}"
            case EntryKind.CALL:
                return f"the contents of {label} changed"
        self._entries[index] = kind, owner, key, before, count, label
        self._table[index, 3:] = 0 if before is _ABSENT else id(before), count
        return None


_Entry = tuple[EntryKind, Any, Any, Any, int, str]


def _current_value(kind: EntryKind, owner: Any, key: Any) -> Any:
    """Return the current value of an entry, or ``_ABSENT`` if it has been removed."""
    if kind is EntryKind.ITEM:
        return dict.get(owner, key, _ABSENT)
    if kind is EntryKind.CELL:
        try:
            return owner.cell_contents
        except ValueError:
            return _ABSENT
    return getattr(owner, key, _ABSENT)


def _is_equal(before: Any, now: Any) -> bool:
    """Return whether two values are the same object or equal plain values."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(now, torch.Tensor):
        return False
    if isinstance(now, tuple):
        return _are_equal(before, now)
    if isinstance(now, types.MethodType):  # each lookup creates a new object
        return before.__func__ is now.__func__ and before.__self__ is now.__self__
    if isinstance(now, np.generic):
        return bool(before == now) or bool(before != before and now != now)  # noqa: PLR0124 - only nan differs from itself
    if isinstance(now, float) and before == 0.0 == now:
        return str(before) == str(now)
    return isinstance(now, _SCALARS) and (before == now or (before != before and now != now))  # noqa: PLR0124


def _are_equal(before: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(before) == len(now) and all(a is b or _is_equal(a, b) for a, b in zip(before, now, strict=True))


def _describe_change(before: Any, now: Any) -> str:
    def show(value: Any) -> str:
        if value is _ABSENT:
            return "nothing"
        return repr(value)[:80] if isinstance(value, (*_PLAIN, np.generic)) else f"a {type(value).__name__}"

    if show(before) == show(now):
        return f"is another {type(now).__name__}"
    return f"changed from {show(before)} to {show(now)}"


def _readable_keys(table: dict[Any, Any], names: frozenset[str] | None) -> frozenset[Any]:
    """Return the keys of ``table`` that are in ``names`` or are no text; all keys if ``names`` is None."""
    return frozenset(key for key in table if names is None or key in names or not isinstance(key, str))


class _ValueWalk:
    """Searches the user's objects for values under names that the step's code loads, and records them."""

    def __init__(self, reads: Reads) -> None:
        self.entries: list[_Entry] = []
        self._reads = reads
        self._codes = reads.codes
        of_user = [names_of(code) for code, _, origin in reads.codes.values() if origin is Origin.USER]
        of_torch = [names_of(code) for code, _, origin in reads.codes.values() if origin is Origin.TORCH]
        self._user_names: frozenset[str] = frozenset().union(*(names.attributes for names in of_user))
        self._all_names: frozenset[str] = self._user_names.union(*(names.attributes for names in of_torch))
        self._keys: frozenset[str] = frozenset().union(*(names.keys for names in of_user))
        self._user_keys = self._keys | self._user_names  # some objects expose their items as attributes
        self._seen: dict[int, Any] = {}
        self._functions: set[int] = set()  # ids of code with a function that was found
        self._classes: set[type] = set()
        # Value, label, and whether keys of dicts inside it are left out if the step's code does not contain them.
        self._stack: list[tuple[Any, str, bool]] = []

    # Entries

    def _add_entry(self, kind: EntryKind, owner: Any, key: Any, value: Any, label: str, count: int = 0) -> None:
        self.entries.append((kind, owner, key, value, count, label))

    def _add_value(
        self, kind: EntryKind, owner: Any, key: Any, value: Any, label: str, *, only_named_keys: bool = False
    ) -> None:
        """Record a value, and queue it so that its contents are searched later."""
        if isinstance(value, torch.Tensor) and not (kind is EntryKind.CELL or isinstance(value, nn.Parameter)):
            return  # the entry would keep it alive, and a tensor must be an argument
        self._add_entry(kind, owner, key, value, label)
        if not isinstance(value, _PLAIN):
            self._stack.append((value, label, only_named_keys))

    def add_attribute(self, owner: Any, name: str, label: str) -> None:
        """Record an attribute that is not in the ``__dict__`` of its object."""
        value = getattr(owner, name, _ABSENT)
        self._add_entry(EntryKind.ATTRIBUTE, owner, name, value, label)
        if value is not _ABSENT and not isinstance(value, (*_PLAIN, torch.Tensor)):
            self._stack.append((value, label, False))

    def add_tensor_attributes(self, tensor: torch.Tensor, label: str) -> None:
        attributes: Any = tensor.__dict__
        if attributes:
            self._visit_dict(attributes, label, self._user_names)

    def _add_size(self, table: dict[Any, Any], names: frozenset[str] | None, label: str) -> None:
        self._add_entry(EntryKind.SIZE, table, None, (names, _readable_keys(table, names)), label, dict.__len__(table))

    # Traversal

    def enqueue(self, value: Any, label: str) -> None:
        self._stack.append((value, label, False))

    def run(self) -> None:
        """Search all queued values, and then each function that has run but was not found among them."""
        self._search_queued()
        # Functions that have run but were not found, since their owners are outside of the step.
        inner = {id(c) for code, _, _ in self._codes.values() for c in code.co_consts if isinstance(c, types.CodeType)}
        unfound = [
            code
            for key, (code, module_globals, _) in self._codes.items()
            if code.co_freevars
            and not (key in self._functions or key in inner)
            # All functions that a standard library decorator wraps share its code.
            and str(module_globals.get("__name__", "")).partition(".")[0] not in (*sys.stdlib_module_names, "torch")
        ]
        for function in gc.get_referrers(*unfound) if unfound else ():
            if isinstance(function, types.FunctionType):
                self.enqueue(function, function.__qualname__)
        self._search_queued()

    def _search_queued(self) -> None:
        """Search queued values until the queue is empty or the limit on entries is reached."""
        while self._stack and len(self.entries) < _MOST.entries:
            value, label, named = self._stack.pop()
            if isinstance(value, (*_PLAIN, torch.Tensor, *_NOT_SEARCHED)) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            self._visit_parts(value, label, only_named_keys=named)

    def add_globals(self) -> None:
        """Record the module globals that the code loads, and queue their values and the imported modules."""
        names: dict[int, tuple[dict[str, Any], set[str], Origin]] = {}
        for code, module_globals, origin in self._codes.values():
            names.setdefault(id(module_globals), (module_globals, set(), origin))[1].update(names_of(code).globals)
            for module in names_of(code).imports if origin is Origin.USER else ():
                for qualified in (module, f"{module_globals.get('__package__') or ''}.{module}"):
                    self.enqueue(sys.modules.get(qualified), qualified)
            if origin is Origin.USER and names_of(code).finds_modules:
                names[id(module_globals)][1].update(self._user_keys)
        for module_globals, named, origin in names.values():
            module = str(module_globals.get("__name__", ""))
            for name in sorted(named):
                label = name if module == "__main__" else f"{module}.{name}"
                if name in module_globals:
                    value = module_globals[name]
                    self._add_entry(EntryKind.ITEM, module_globals, name, value, label)
                    if origin is Origin.USER or isinstance(value, dict | list | types.ModuleType):
                        self.enqueue(value, label)
                elif hasattr(builtins, name):
                    self._add_entry(EntryKind.ITEM, module_globals, name, _ABSENT, label)

    def _visit_parts(self, value: Any, label: str, *, only_named_keys: bool) -> None:
        """Record or queue the contents of a value, as its type requires."""
        if isinstance(value, types.FunctionType):
            self._visit_function(value, label)
        elif isinstance(value, types.MethodType):
            self._stack += [(value.__self__, label.rpartition(".")[0] or label, False), (value.__func__, label, False)]
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            self.enqueue(value.__self__, label)
        elif isinstance(value, types.ModuleType):
            self._visit_module(value, label)
        elif isinstance(value, type):
            for kind in value.__mro__:
                self._visit_class(kind)
        elif isinstance(value, functools.partial):
            self._stack += [(v, label, False) for v in (value.func, value.args, value.keywords)]
            self._visit_instance(value, label)
        elif isinstance(value, property):
            self._stack += [(f, label, False) for f in (value.fget, value.fset) if f is not None]
        elif isinstance(value, staticmethod | classmethod):
            self.enqueue(value.__func__, label)
        elif isinstance(value, functools.cached_property):
            self.enqueue(value.func, label)
        elif isinstance(value, threading.local):
            attributes: Any = value.__dict__
            self._visit_dict(attributes, label, self._user_names)
        elif isinstance(value, weakref.ref):
            self.enqueue(value(), label)
        elif isinstance(value, types.MappingProxyType):
            self._stack += [(mapping, label, only_named_keys) for mapping in gc.get_referents(value)]
        else:
            self._visit_contents(value, label, only_named_keys=only_named_keys)
            if type(value) not in (dict, list, tuple, set, frozenset, collections.OrderedDict, collections.defaultdict):
                self._visit_instance(value, label)

    def _visit_function(self, function: types.FunctionType, label: str) -> None:
        """Record a function's attributes and, if the function has run, its closure and defaults."""
        if id(function.__code__) in self._codes:
            self._functions.add(id(function.__code__))
            for name in _FUNCTION_PARTS:
                if getattr(function, name) is not None:
                    self.add_attribute(function, name, label if name == "__code__" else f"a default of {label}")
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                self._add_value(EntryKind.CELL, cell, None, _current_value(EntryKind.CELL, cell, None), name)
        if function.__dict__:
            self._visit_dict(function.__dict__, label, self._user_names)

    def _visit_module(self, module: types.ModuleType, label: str) -> None:
        """Record each attribute of a module with a name that the step's code loads."""
        origin = origin_of(module.__name__)
        if origin is Origin.OTHER and module.__name__.partition(".")[0] in sys.stdlib_module_names:
            return
        for name in self._all_names.intersection(vars(module)):
            value = vars(module)[name]
            self._add_entry(EntryKind.ITEM, vars(module), name, value, f"{label}.{name}")
            if isinstance(value, types.ModuleType) or (origin is Origin.USER and not isinstance(value, _PLAIN)):
                self.enqueue(value, f"{label}.{name}")

    def _visit_class(self, kind: type) -> None:
        """Record each attribute of a class with a name that the step's code loads."""
        if kind in self._classes or origin_of(str(kind.__module__)) is Origin.OTHER:
            return
        self._classes.add(kind)
        # The dict itself, not the read-only view in ``__dict__``.
        namespace = next((d for d in gc.get_referents(vars(kind)) if isinstance(d, dict)), None)
        if namespace is not None:
            self._visit_dict(
                namespace, kind.__qualname__, self._all_names if issubclass(kind, nn.Module) else self._user_names
            )

    def _visit_instance(self, value: Any, label: str) -> None:
        """Record attributes of an object, and of its classes, under names that the step's code loads."""
        kind = type(value)
        origin = origin_of(str(kind.__module__))
        is_module = isinstance(value, nn.Module)
        if origin is Origin.OTHER and not is_module and not isinstance(value, Optimizer):
            return
        for base in kind.__mro__:
            self._visit_class(base)
        names: frozenset[str] | None = self._all_names if is_module else self._user_names
        if id(value) in self._reads.fully_read:
            names = None
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            if not isinstance(value, Optimizer):
                self._add_entry(EntryKind.TYPE, value, None, kind, label)
            if value.__dict__ is attributes:  # some classes return a new dict each time
                self._add_entry(EntryKind.ATTRIBUTE, value, "__dict__", attributes, label)
            self._visit_dict(attributes, label, names, only_named_keys=isinstance(value, Optimizer))
        if is_module:
            for name, child in value._modules.items():
                if child is not None:
                    self.enqueue(child, f"{label}.{name}")
        for name in slots_of(kind):
            if not name.startswith("__") and (names is None or name in names):
                self.add_attribute(value, name, f"{label}.{name}")

    def _visit_dict(
        self, attributes: dict[str, Any], label: str, names: frozenset[str] | None, *, only_named_keys: bool = False
    ) -> None:
        """Record the entries of a ``__dict__`` under the given names; without ``names``, record all entries."""
        self._add_size(attributes, names, label)
        for name, value in list(attributes.items()):
            if (names is None or name in names) and name not in _MODULE_TABLES and not _is_dunder(name):
                self._add_value(
                    EntryKind.ITEM, attributes, name, value, f"{label}.{name}", only_named_keys=only_named_keys
                )

    def _visit_contents(self, value: Any, label: str, *, only_named_keys: bool) -> None:
        """Record the items of a container or array, unless it is too large."""
        if isinstance(value, dict):
            self._visit_items(value, label, only_named_keys=only_named_keys)
        elif isinstance(value, list):
            if len(value) <= _MOST.items:
                self._add_entry(EntryKind.LIST, value, None, tuple(value), label, len(value))
            self._enqueue_items(value, label, only_named_keys=only_named_keys)
        elif isinstance(value, tuple | frozenset):
            self._enqueue_items(value, label, only_named_keys=only_named_keys)
        elif isinstance(value, set | collections.deque | bytearray | array):
            if len(value) <= _MOST.items:
                before = list(value)
                self._add_check(lambda: _are_equal(before, list(value)), value, label)
            if not isinstance(value, bytearray | array):
                self._enqueue_items(value, label, only_named_keys=only_named_keys)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _MOST.array_bytes and not value.dtype.hasobject:
                self._add_call(lambda: (value.shape, value.tobytes()), value, label)
        elif isinstance(value, contextvars.ContextVar):
            self._add_call(lambda: id(value.get(None)), value, label)

    def _add_call(self, read: Callable[[], Any], value: Any, label: str) -> None:
        before = read()
        self._add_check(lambda: read() == before, value, label)

    def _add_check(self, is_same: Callable[[], bool], value: Any, label: str) -> None:
        self._add_entry(EntryKind.CALL, value, None, is_same, label)

    def _enqueue_items(self, values: Iterable[Any], label: str, *, only_named_keys: bool) -> None:
        if len(values) <= MAX_SEARCHED_ITEMS:  # type: ignore[arg-type]
            self._stack += [
                (v, f"{label}[{k}]", only_named_keys)
                for k, v in enumerate(values)
                if not isinstance(v, (*_PLAIN, torch.Tensor))
            ]

    def _visit_items(self, table: dict[Any, Any], label: str, *, only_named_keys: bool) -> None:
        """Record the items of a dict that the step's code may look up."""
        is_complete = not only_named_keys and (len(table) <= _MOST.small_dict or id(table) in self._reads.fully_read)
        keys = self._keys if only_named_keys else self._user_keys
        names = None if is_complete else keys
        self._add_size(table, names, label)
        if len(table) > MAX_SEARCHED_ITEMS:
            pairs: Iterable[tuple[Any, Any]] = [(k, table[k]) for k in keys.intersection(table)]
        else:
            pairs = list(dict.items(table))
        for key, value in pairs:
            text = key.decode(errors="replace") if isinstance(key, bytes) else key
            if is_complete or not isinstance(text, str) or text in keys:
                self._add_value(EntryKind.ITEM, table, key, value, f"{label}[{key!r}]", only_named_keys=only_named_keys)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in ("__call__", "__getattr__", "__getitem__")
