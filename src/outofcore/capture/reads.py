"""Find which Python values a step can read, from the code that runs during its capture.

Python does not report attribute reads. But each running code object lists the names that it loads, and a value without
such a name is not read. TorchDynamo interprets bytecode and guards each load; this module runs the code unchanged, and
every value under a loaded name counts as read.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from outofcore.compiling import load_functions


class Origin(Enum):
    USER = "user"  # of the user or an installed package; may read any object
    TORCH = "torch"  # of PyTorch's modules; reads modules and its own globals
    OTHER = "other"  # below PyTorch's operators, in the standard library or here; reads no user values


# Packages of PyTorch with code that reads attributes of modules. Its other code handles only tensors.
_TORCH_MODULES = (
    "torch.nn.",
    "torch.ao.",
    "torch.optim.",
    "torch.distributions.",
    "torch.amp.",
    "torch.utils.checkpoint",
)
# Standard library packages that read attributes of their arguments.
_READING_PACKAGES = frozenset(
    ("argparse", "collections", "contextlib", "copy", "dataclasses", "enum", "functools", "operator", "os", "types")
)
# Code that loads one of these may read any attribute of an object, or any item.
_READS_ATTRIBUTES = frozenset(
    (
        *("vars", "__dict__", "asdict", "astuple", "attrgetter", "copy", "deepcopy", "dir", "fields", "eval", "exec"),
        *("__getstate__", "__getattribute__"),
    )
)
_READS_ITEMS = frozenset(("items", "values", "copy", "dict", "format_map", "itemgetter", "keys"))
_READS_BY_NAME = frozenset(("getattr", "hasattr", "attrgetter", "methodcaller", "__getattribute__", "__getattr__"))
# Code that loads one of these may find a module by its name.
_FINDS_MODULES = frozenset(("modules", "import_module", "__import__", "globals", "eval", "exec"))
_LOADS_ATTRIBUTE = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM", "DELETE_ATTR"))
_NOT_SEARCHED = (int, float, str, bytes, type(None), ModuleType, type, torch.Tensor)
_LOADS_GLOBAL = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))


@dataclass(frozen=True)
class Names:
    """The names that a code object loads: attributes, item keys, globals and imports."""

    attributes: frozenset[str]
    keys: frozenset[str]
    globals: frozenset[str]
    all_attributes: bool  # it may read any attribute, by computed names
    all_items: bool
    imports: frozenset[str]
    finds_modules: bool  # it may find modules without an import statement


@functools.lru_cache(maxsize=65536)
def names_of(code: CodeType) -> Names:
    """Return the names that a function's code may look up, not counting nested functions."""
    attributes, globals_, text, imports, matches = set[str](), set[str](), set[str](), set[str](), False
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        matches = matches or instruction.opname == "MATCH_CLASS"
        if instruction.opname in _LOADS_ATTRIBUTE and isinstance(name, str):
            attributes.add(name)
        elif instruction.opname in _LOADS_GLOBAL:
            globals_.add(name)
        elif instruction.opname == "IMPORT_NAME":
            imports.add(name)
    _collect_text(code.co_consts, text)
    loaded = attributes | globals_
    all_attributes = not _READS_ATTRIBUTES.isdisjoint(loaded) or _reads_computed_names(code, globals_)
    if matches or not _READS_BY_NAME.isdisjoint(loaded):
        attributes |= text
    all_items = not _READS_ITEMS.isdisjoint(loaded)
    finds_modules = not _FINDS_MODULES.isdisjoint(loaded)
    return Names(
        frozenset(attributes),
        frozenset(text),
        frozenset(globals_),
        all_attributes,
        all_items,
        frozenset(imports | text if finds_modules else imports),
        finds_modules,
    )


def _collect_text(values: tuple[Any, ...] | frozenset[Any], text: set[str]) -> None:
    """Add all strings and bytes in ``values``, also in nested tuples and sets, to ``text``."""
    for value in values:
        if isinstance(value, str):
            text.add(value)
        elif isinstance(value, bytes):
            text.add(value.decode(errors="replace"))
        elif isinstance(value, tuple | frozenset):
            _collect_text(value, text)


def _reads_computed_names(code: CodeType, globals_: set[str]) -> bool:
    """Return whether code uses ``getattr`` or ``hasattr`` with a name that is not a constant."""
    if _READS_BY_NAME.isdisjoint(globals_):
        return False
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "PRECALL", "PUSH_NULL", "NOP")]
    for place, instruction in enumerate(instructions):
        if instruction.opname != "LOAD_GLOBAL" or instruction.argval not in ("getattr", "hasattr"):
            continue
        # The object is loaded first, possibly by a chain of attributes, then the name, and possibly a default.
        opnames = [i.opname for i in instructions[place + 2 :] if i.opname not in ("LOAD_ATTR", "COPY", "KW_NAMES")]
        if opnames[:1] != ["LOAD_CONST"] or not any(name.startswith("CALL") for name in opnames[1:3]):
            return True
    return False


@functools.cache
def origin_of(module: str) -> Origin:
    """Classify a module by its name: as USER (with installed packages), TORCH (``torch.nn`` and others), or OTHER."""
    package = module.partition(".")[0]
    if package == "outofcore":
        return Origin.USER if module.startswith("outofcore.zoo") else Origin.OTHER
    if package == "torch":
        return Origin.TORCH if f"{module}.".startswith(_TORCH_MODULES) else Origin.OTHER
    if package in sys.stdlib_module_names:
        return Origin.USER if package in _READING_PACKAGES else Origin.OTHER
    return Origin.USER


def _do_nothing() -> None:
    """Default of ``pause`` and ``resume`` outside of recordings."""


@dataclass
class Reads:
    """The Python code that has run during a capture, except between ``pause`` and ``resume``."""

    # Code of the user and of PyTorch's modules, with its globals.
    codes: dict[int, tuple[CodeType, dict[str, Any], Origin]] = field(
        default_factory=dict[int, tuple[CodeType, dict[str, Any], Origin]]
    )
    # Objects, by id, of which any attribute or item may have been read.
    fully_read: dict[int, Any] = field(default_factory=dict[int, Any])
    pause: Callable[[], object] = _do_nothing
    resume: Callable[[], object] = _do_nothing
    _kept_alive: list[CodeType] = field(default_factory=list[CodeType])

    def clear(self) -> None:
        self.codes.clear()
        self.fully_read.clear()
        self._kept_alive.clear()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the code that this thread runs, with garbage collection turned off."""
        previous, collects = sys.getprofile(), gc.isenabled()
        library, record_frame = load_compare_library(), self._record_frame
        library.outofcore_forget_code()
        self.pause, self.resume = (partial(library.outofcore_tell_of_code, to) for to in (None, id(record_frame)))
        gc.disable()
        self.resume()
        try:
            yield
        finally:
            self.pause()
            self.pause = self.resume = _do_nothing
            if collects:
                gc.enable()
            # Profilers of the standard library are objects that install themselves.
            if previous is not None and hasattr(previous, "enable"):
                previous.enable()  # type: ignore[attr-defined]
            elif previous is not None:
                sys.setprofile(previous)

    def _record_frame(self, frame: FrameType) -> bool:
        """Record the code of a called function; return whether its later calls must be reported too."""
        code = frame.f_code
        if id(code) not in self.codes:
            origin = origin_of(str(frame.f_globals.get("__name__", "")))
            if origin is Origin.OTHER:
                self._kept_alive.append(code)  # so that its id is not reused
                return False
            self.codes[id(code)] = code, frame.f_globals, origin
        _, globals_, origin = self.codes[id(code)]
        names = names_of(code)
        if origin is not Origin.USER or not (names.all_attributes or names.all_items):
            return False
        for value in (*frame.f_locals.values(), *[globals_.get(name) for name in names.globals]):
            attributes = getattr(value, "__dict__", {}) if not isinstance(value, _NOT_SEARCHED) else {}
            # The code may read these attributes and then any of theirs.
            for item in (value, *[attributes[name] for name in names.attributes if name in attributes]):
                if not isinstance(item, _NOT_SEARCHED) and (names.all_attributes or isinstance(item, dict)):
                    self.fully_read[id(item)] = item
        return True


@functools.cache
def load_compare_library() -> ctypes.PyDLL:
    """Load the compiled functions of ``reads.cpp``, which compare snapshots and report code that runs."""
    functions = {
        "first_change": ((ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64), ctypes.c_int64),
        "first_change_by_words": ((ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64),
        "forget_code": ((), None),
        "tell_of_code": ((ctypes.c_void_p,), None),
    }
    return load_functions(Path(__file__).with_name("reads.cpp"), functions, ctypes.PyDLL)
