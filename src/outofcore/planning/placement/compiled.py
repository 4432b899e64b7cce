"""The compiled inner loops of placement (``placement.cpp``), built on first use and kept (see ``outofcore.compiling``).

The skyline and first fit give what the Python versions beside this file give, many times faster. Ejection and the
canonical search exist in compiled form only: without a compiler they are left out, and a line of the log says so.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import time
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outofcore.compiling import load_functions, native_callback
from outofcore.planning.placement.rectangles import Ints, Rectangles

_log = logging.getLogger("outofcore.planning")
_SOURCE = Path(__file__).with_name("placement.cpp")
# No sum may be contracted into another operation: skylines are compared to the last bit.
_FLAGS = ("-ffp-contract=off",)
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = {
    "best_fit": ((_POINTER, _POINTER, ctypes.c_double, _POINTER), None),
    "first_fit": ((_POINTER, _POINTER, _POINTER), None),
    "eject": ((_POINTER, _COUNT, _COUNT, _POINTER, _POINTER), None),
    "canonical": ((_POINTER, _COUNT, _POINTER, _COUNT, _COUNT, _POINTER, _POINTER, _POINTER), ctypes.c_int),
}


class Answer(Enum):
    """What the canonical search says."""

    NONE = 0  # there is no placement within the capacity
    FOUND = 1
    STOPPED = 2  # by its limits


class _Layout(ctypes.Structure):
    _fields_ = [(name, _COUNT) for name in ("count", "slots", "base")] + [
        (name, _POINTER) for name in ("sizes", "alignments", "begin", "end", "again", "over")
    ]


class Watch:
    """Stops a search at a deadline or on Ctrl-C, which the native code raises again as SIGINT."""

    def __init__(self, seconds: float | None) -> None:
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self.callback = native_callback(lambda: int(self.over), failed=1)

    @property
    def over(self) -> bool:
        """Whether the deadline is past."""
        return self.deadline is not None and time.monotonic() > self.deadline


class Compiled:
    """The functions of the library, on arrays."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def best_fit(self, rectangles: Rectangles, worth: NDArray[np.float64], snug: float) -> Ints:
        """As ``skyline.best_fit``."""
        offsets = np.zeros(len(rectangles), np.int64)
        worth = np.ascontiguousarray(worth, np.float64)
        self._library.outofcore_best_fit(_layout(rectangles), worth.ctypes.data, snug, offsets.ctypes.data)
        return offsets

    def first_fit(self, rectangles: Rectangles, order: Ints) -> Ints:
        """As ``first_fit.first_fit``."""
        offsets = np.zeros(len(rectangles), np.int64)
        order = np.ascontiguousarray(order, np.int64)
        self._library.outofcore_first_fit(_layout(rectangles), order.ctypes.data, offsets.ctypes.data)
        return offsets

    def eject(self, rectangles: Rectangles, offsets: Ints, goal: int, effort: int, watch: Watch) -> Ints:
        """Offsets that reach less high, or the same ones (see the package's description).

        Args:
            rectangles: what is placed.
            offsets: a placement.
            goal: the height at which to stop.
            effort: how many rectangles may be looked at, about.
            watch: asked now and then whether to stop.
        """
        offsets = offsets.copy()
        self._library.outofcore_eject(_layout(rectangles), goal, effort, watch.callback, offsets.ctypes.data)
        return offsets

    def canonical(
        self, rectangles: Rectangles, capacity: int, order: Ints, techniques: int, nodes: int, effort: int, watch: Watch
    ) -> tuple[Answer, Ints, int]:
        """One run of the canonical search (see ``canonical``): its answer, offsets if found, and the effort left."""
        offsets = np.zeros(len(rectangles), np.int64)
        order = np.ascontiguousarray(order, np.int64)
        left = _COUNT(effort)
        answer = self._library.outofcore_canonical(
            _layout(rectangles), capacity, order.ctypes.data, techniques, nodes, ctypes.byref(left), watch.callback,
            offsets.ctypes.data,
        )  # fmt: skip
        return Answer(answer), offsets, left.value


def _layout(rectangles: Rectangles) -> object:
    return ctypes.byref(_Layout(len(rectangles), rectangles.slots, rectangles.base, *rectangles.addresses))


@functools.cache
def load_compiled() -> Compiled | None:
    """The compiled functions of this process; None, and a line of the log, where they cannot be built."""
    library, reason = load_functions(_SOURCE, _FLAGS, _FUNCTIONS)
    if library is None:
        _log.debug("addresses are given by Python code, without search: %s", reason)
        return None
    return Compiled(library)
