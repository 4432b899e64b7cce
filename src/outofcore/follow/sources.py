"""Find where an op comes from in the user's program, for messages; sources.h asks while the order is new."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType

from torch import nn

from outofcore._torch_internals import BACKWARD_ENTRY_POINTS
from outofcore.capture.provenance import graph_node, is_user_file, join
from outofcore.compiling import native_callback

# A frame and its current line.
FramePlace = tuple[FrameType, int]

_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_MODULE_CALL = nn.Module.__call__.__code__
_ENGINE = BACKWARD_ENTRY_POINTS[0][1]
IN_BACKWARD = " in the backward pass of "
# Stands for an op outside of any module.
_AN_OP = "an op"


def current_places() -> Iterator[FramePlace]:
    """Yield the frames of this thread's stack. A caller must not keep them: they keep their variables alive."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def places_of(trace: TracebackType | None) -> Iterator[FramePlace]:
    """Yield the frames of a traceback, innermost first, and then the callers of its outermost frame."""
    raised: list[FramePlace] = []
    callers = None if trace is None else trace.tb_frame.f_back
    while trace is not None:
        raised.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    yield from reversed(raised)
    while callers is not None:
        yield callers, callers.f_lineno
        callers = callers.f_back


def forward_place(text: str) -> str:
    """Convert a text of ``of_backward`` to one for the forward pass, such as " in 0 (Linear) at a.py:3"."""
    module = text.removeprefix(IN_BACKWARD)
    if module == text:
        return text
    return module.removeprefix(_AN_OP) if module.startswith(_AN_OP + " at ") else " in " + module


class Sources:
    """Finds the module of an op and the user's line that called it."""

    def __init__(self, models: Callable[[], Iterable[tuple[str, nn.Module]]]) -> None:
        self._models = models  # of running loops, with the prefixes of their names
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._buffers: dict[str, ctypes.Array[ctypes.c_char]] = {}
        empty_text = self._buffers[""] = ctypes.create_string_buffer(b"")
        self.callback = native_callback(self._describe_to_native, failed=ctypes.addressof(empty_text))

    def find(self, frames: Iterable[FramePlace], *, beyond_backward: bool = True) -> tuple[str, str]:
        """Return an op's module, as path and class, and the user's ``file:line``; empty texts if unknown.

        The path starts at a loop's model, or else at the outermost running module. In a ``torch.fx.GraphModule`` it
        ends with the node. Lines of installed packages count only if no other line is found. The search ends at a call
        of the autograd engine, unless ``beyond_backward``.
        """
        innermost = outermost = None
        user_line = package_line = node = ""
        in_backward = False
        for frame, number in frames:
            code = frame.f_code
            in_backward |= code.co_name == _ENGINE
            if in_backward and not beyond_backward:
                break
            if innermost is None and not in_backward:
                node = node or graph_node(code.co_filename, number)
            if code is _MODULE_CALL and not in_backward:
                outermost = frame.f_locals["self"]
                innermost = innermost or outermost
            if is_user_file(code.co_filename):
                line = f"{code.co_filename}:{number}"
                if not any(folder in code.co_filename for folder in _PACKAGE_FOLDERS):
                    user_line = user_line or line
                package_line = package_line or line
        if innermost is None or outermost is None:
            return node, user_line or package_line
        path, kind = join(self._path(innermost, outermost), node), type(innermost).__name__
        return f"{path} ({kind})" if path else kind, user_line or package_line

    def _path(self, module: nn.Module, outermost: nn.Module) -> str:
        """Return a module's path within a loop's model, or else within ``outermost``; empty if unknown."""
        cached = self._paths.get(module)
        if cached is None:
            roots = (*self._models(), ("", outermost))
            paths = (prefix + path for prefix, root in roots for path, child in root.named_modules() if child is module)
            cached = self._paths[module] = next(paths, "")
        return cached

    def of_backward(self) -> str:
        """Return a text with the module and the user's line of the current backward op; empty if unknown."""
        module, line = self.find(current_places(), beyond_backward=False)
        if not module and not line:
            return ""
        return IN_BACKWARD + (module or _AN_OP) + (f" at {line}" if line else "")

    def _describe_to_native(self) -> int:
        """Return the address of ``of_backward()`` as a C string that is never freed."""
        text = self.of_backward()
        buffer = self._buffers.get(text)
        if buffer is None:
            buffer = self._buffers[text] = ctypes.create_string_buffer(text.encode(errors="replace"))
        return ctypes.addressof(buffer)
