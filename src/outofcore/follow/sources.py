"""Where an op comes from in the user's program, for messages: its module, and the user's line.

The native code asks for that while it is new which op comes when, and keeps it for ops of backward (``sources.h``).
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType

from torch import nn

from outofcore._torch_internals import BACKWARD_ENTRY_POINTS
from outofcore.capture.provenance import is_users_file

# A frame, and which line it is at; the innermost first.
Place = tuple[FrameType, int]

_INSTALLED = ("site-packages", "dist-packages")
_MODULE_CALL = nn.Module.__call__.__code__
_ENGINE = BACKWARD_ENTRY_POINTS[0][1]
IN_BACKWARD = " in the backward pass of "
_INTERRUPTED = 1  # ``kInterrupted`` in paging.cpp


def places_here() -> Iterator[Place]:
    """The frames on this thread's stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def places_of(trace: TracebackType | None) -> list[Place]:
    """The frames in which something was raised, and those that had called them."""
    raised: list[Place] = []
    callers = None if trace is None else trace.tb_frame.f_back
    while trace is not None:
        raised.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    raised.reverse()
    while callers is not None:
        raised.append((callers, callers.f_lineno))
        callers = callers.f_back
    return raised


def within_backward(places: Iterable[Place]) -> list[Place]:
    """Of some frames those that the autograd engine has called; all of them, if it does not run."""
    found: list[Place] = []
    for place in places:
        if place[0].f_code.co_name == _ENGINE:
            break
        found.append(place)
    return found


def line_of(places: Iterable[Place]) -> str:
    """The nearest ``file:line`` of the user's own code, or else of an installed package but PyTorch; or empty."""
    package = ""
    for frame, line in places:
        name = frame.f_code.co_filename
        if not is_users_file(name):
            continue
        if not any(folder in name for folder in _INSTALLED):
            return f"{name}:{line}"
        package = package or f"{name}:{line}"
    return package


class Sources:
    """Names modules as the user knows them.

    Args:
        models: tells the models of the loops that run, with what the names in them begin with.
    """

    def __init__(self, models: Callable[[], Iterable[tuple[str, nn.Module]]]) -> None:
        self._models = models
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._kept: dict[str, ctypes.Array[ctypes.c_char]] = {}
        self.ask = ctypes.CFUNCTYPE(ctypes.c_void_p)(self._answer)

    def module_of(self, places: Iterable[Place]) -> str:
        """The path of the innermost module that runs: in a model, or else in the outermost one; or empty."""
        running = [frame.f_locals.get("self") for frame, _ in places if frame.f_code is _MODULE_CALL]
        modules = [module for module in running if isinstance(module, nn.Module)]
        if not modules:
            return ""
        path = self._paths.get(modules[0])
        if path is None:
            path = self._paths[modules[0]] = self._path(modules[0], modules[-1])
        return path

    def _path(self, module: nn.Module, outermost: nn.Module) -> str:
        for prefix, root in (*self._models(), ("", outermost)):
            for path, one in root.named_modules():
                if one is module:
                    return prefix + path or type(module).__name__
        return type(module).__name__

    def of_backward(self) -> str | None:
        """Where an op comes from that runs now, as its op of backward is told to come from there."""
        places = within_backward(places_here())
        module, line = self.module_of(places), line_of(places)
        if not module and not line:
            return None
        return IN_BACKWARD + (module or "an op") + (f" at {line}" if line else "")

    def _answer(self) -> int | None:
        try:
            text = self.of_backward()
            if text is None:
                return None
            kept = self._kept.get(text)
            if kept is None:
                kept = self._kept[text] = ctypes.create_string_buffer(text.encode(errors="replace"))
            return ctypes.addressof(kept)
        except KeyboardInterrupt:
            return _INTERRUPTED
