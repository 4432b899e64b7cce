"""Bindings of ``placement.cpp`` (compiled by ``outofcore.compiling``)."""

from __future__ import annotations

import ctypes
import functools
import time
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outofcore.compiling import load_functions, native_callback
from outofcore.planning.placement.rectangles import Ints, Rectangles

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = {
    "best_fit": ((_POINTER, _POINTER, ctypes.c_double, _POINTER), None),
    "first_fit": ((_POINTER, _POINTER, _POINTER), None),
    "eject": ((_POINTER, _COUNT, _COUNT, _POINTER, _POINTER), None),
    "canonical": ((_POINTER, _COUNT, _POINTER, _COUNT, _COUNT, _POINTER, _POINTER, _POINTER), ctypes.c_int),
}


class CanonicalResult(Enum):
    NONE = 0  # no placement within the capacity exists
    FOUND = 1
    STOPPED = 2  # the limits of effort or time were reached


class _Layout(ctypes.Structure):
    _fields_ = [(name, _COUNT) for name in ("count", "slots", "base")] + [
        (name, _POINTER) for name in ("sizes", "alignments", "begin", "end", "again", "over")
    ]


class Deadline:
    """Stops a search at a deadline or on Ctrl-C, which the native code raises again as SIGINT."""

    def __init__(self, seconds: float | None) -> None:
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self.callback = native_callback(lambda: int(self.has_passed), failed=1)

    @property
    def has_passed(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline


@functools.cache
def load_library() -> ctypes.CDLL:
    return load_functions(Path(__file__).with_name("placement.cpp"), _FUNCTIONS)


def best_fit(rectangles: Rectangles, worth: NDArray[np.float64], shared_end_worth: float = 0.0) -> Ints:
    """Return offsets by the best-fit rule (see ``packing.best_fit``).

    The lowest place gets the fitting rectangle with the most ``worth``, plus ``shared_end_worth`` for each end that it
    shares with the place. A gap counts as held, unless the rectangle is held at the first and the last moment.
    """
    offsets = np.zeros(len(rectangles), np.int64)
    worth = np.ascontiguousarray(worth, np.float64)
    load_library().outofcore_best_fit(_layout(rectangles), worth.ctypes.data, shared_end_worth, offsets.ctypes.data)
    return offsets


def first_fit(rectangles: Rectangles, order: Ints) -> Ints:
    """Place the rectangles in ``order``, each at the lowest free offset; return the offsets."""
    offsets = np.zeros(len(rectangles), np.int64)
    order = np.ascontiguousarray(order, np.int64)
    load_library().outofcore_first_fit(_layout(rectangles), order.ctypes.data, offsets.ctypes.data)
    return offsets


def eject(rectangles: Rectangles, offsets: Ints, goal: int, effort: int, deadline: Deadline) -> Ints:
    """Return a lower placement by ejection, or the same offsets without success; stop at height ``goal``."""
    offsets = offsets.copy()
    load_library().outofcore_eject(_layout(rectangles), goal, effort, deadline.callback, offsets.ctypes.data)
    return offsets


def canonical_run(
    rectangles: Rectangles, capacity: int, order: Ints, techniques: int, nodes: int, effort: int, deadline: Deadline
) -> tuple[CanonicalResult, Ints, int]:
    """Search for a placement over at most ``nodes`` nodes; return the result, the offsets and the effort left."""
    offsets = np.zeros(len(rectangles), np.int64)
    order = np.ascontiguousarray(order, np.int64)
    effort_left = _COUNT(effort)
    answer = load_library().outofcore_canonical(
        _layout(rectangles), capacity, order.ctypes.data, techniques, nodes, ctypes.byref(effort_left),
        deadline.callback, offsets.ctypes.data,
    )  # fmt: skip
    return CanonicalResult(answer), offsets, effort_left.value


def _layout(rectangles: Rectangles) -> object:
    return ctypes.byref(_Layout(len(rectangles), rectangles.slots, rectangles.base, *rectangles.addresses))
