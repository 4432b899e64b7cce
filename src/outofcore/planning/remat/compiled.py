"""The inner loop of chains, ``chains.cpp``; ``outofcore.compiling`` says when that file is compiled."""

from __future__ import annotations

import ctypes
import functools
import weakref
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path

from outofcore.compiling import load_functions
from outofcore.planning.remat.contents import Contents

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_WORD = 8
_FUNCTIONS = {
    "chains_open": ((_POINTER,), _POINTER),
    "chains_close": ((_POINTER,), None),
    "chain": ((_POINTER, _COUNT, _COUNT, _POINTER, ctypes.c_double, _POINTER, _POINTER, _POINTER), ctypes.c_int),
}

_BY_CONTENT = ("maker", "born", "gone", "lasting", "size", "storage")
_BY_OP = ("fresh", "scratch", "workspace")


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _COUNT) for name in ("contents", "ops")),
        *((name, _POINTER) for name in (*_BY_CONTENT, "gaps_from", "gaps")),
        *((name, _POINTER) for name in ("needs_from", "needs", "makes_from", "makes", *_BY_OP, "seconds", "start")),
    ]


class _Found(ctypes.Structure):
    _fields_ = [
        ("seconds", ctypes.c_double),
        *((name, _COUNT) for name in ("bytes", "held", "ops", "made", "seen", "home")),
        ("list", _POINTER),
    ]


class CompiledChains:
    """Chains of one step.

    Args:
        contents: of the step.
        gaps_of: by content, the gaps in which it is not used.
        start: by gap, the op after which it begins.

    Raises:
        StateError: as ``load_functions``.
    """

    def __init__(self, contents: Contents, gaps_of: Sequence[Sequence[int]], start: Sequence[int]) -> None:
        library = load_library()
        self._chain = library.outofcore_chain
        arrays: dict[str, array[int] | array[float]] = {
            **{name: array("q", getattr(contents, name)) for name in (*_BY_CONTENT, *_BY_OP)},
            **_lists("gaps", gaps_of),
            **_lists("needs", contents.needs),
            **_lists("makes", contents.makes),
            "seconds": array("d", contents.seconds),
            "start": array("q", start),
        }
        # The library reads them where they are.
        self._arrays = arrays
        addresses = {name: values.buffer_info()[0] for name, values in arrays.items()}
        step = _Step(contents=len(contents.storage), ops=len(contents.seconds), **addresses)
        self._handle = library.outofcore_chains_open(ctypes.byref(step))
        weakref.finalize(self, library.outofcore_chains_close, self._handle)
        self._found = _Found()
        self._out = ctypes.byref(self._found)

    def once(
        self, at: int, targets: Sequence[int], limit: float, kind: array[int], fetch: array[int]
    ) -> tuple[float, int, int, Lists] | None:
        """The seconds, bytes and bytes held of a chain in which each op runs once, and the rest of it; or None.

        Args:
            at: the op before which it runs.
            targets: the contents that it makes, in order.
            limit: seconds that it may take.
            kind: by gap, what becomes of its content.
            fetch: by gap, the op before which it comes back.
        """
        wanted = (_COUNT * len(targets))(*targets)
        if not self._chain(
            self._handle, at, len(targets), wanted, limit, kind.buffer_info()[0], fetch.buffer_info()[0], self._out
        ):
            return None
        found = self._found
        counts = found.ops, found.made, found.seen, found.home
        lists = Lists(ctypes.string_at(found.list, sum(counts) * _WORD), counts)
        return found.seconds, found.bytes, found.held, lists


class Lists:
    """The ops, contents made, contents seen and contents from home of a chain, as the library wrote them."""

    __slots__ = ("_counts", "_raw")

    def __init__(self, raw: bytes, counts: tuple[int, int, int, int]) -> None:
        self._raw, self._counts = raw, counts

    @property
    def ops(self) -> int:
        """How many there are."""
        return self._counts[0]

    def unpacked(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """The four lists."""
        words = memoryview(self._raw).cast("q").tolist()
        ends = [0, *accumulate(self._counts)]
        one, two, three, four = (words[first:last] for first, last in pairwise(ends))
        return one, two, three, four


def _lists(name: str, lists: Iterable[Sequence[int]]) -> dict[str, array[int]]:
    """Lists one after the other, and where each begins."""
    lists = list(lists)
    return {
        f"{name}_from": array("q", accumulate(map(len, lists), initial=0)),
        name: array("q", chain.from_iterable(lists)),
    }


@functools.cache
def load_library() -> ctypes.CDLL:
    """Load the library of this process.

    Raises:
        StateError: as ``load_functions``.
    """
    return load_functions(Path(__file__).with_name("chains.cpp"), _FUNCTIONS)
