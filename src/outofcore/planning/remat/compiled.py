"""Bindings of ``remat.cpp``: chains, and searches over them (compiled by ``outofcore.compiling``)."""

from __future__ import annotations

import ctypes
import functools
import weakref
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import isinf
from pathlib import Path

from outofcore.compiling import load_functions
from outofcore.planning.remat.contents import StepContents

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_WORD = 8
_FUNCTIONS = {
    "chains_open": ((_POINTER,), _POINTER),
    "chains_close": ((_POINTER,), None),
    "chain": ((_POINTER, _COUNT, _COUNT, _POINTER, ctypes.c_double, _POINTER, _POINTER, _POINTER), ctypes.c_int),
    "search_open": ((_POINTER, _POINTER), _POINTER),
    "search_close": ((_POINTER,), None),
    "anneal": ((_POINTER, _COUNT, _COUNT, _COUNT, ctypes.c_double, ctypes.c_uint64, _POINTER), None),
    "drop": ((_POINTER, _COUNT, _COUNT, _COUNT, _POINTER), None),
    "settle": ((_POINTER, _COUNT, _COUNT, _COUNT, _POINTER), None),
    "search_restore": ((_POINTER, _POINTER, _COUNT), None),
    "tuner_open": ((_POINTER, _POINTER, _POINTER), _POINTER),
    "tuner_close": ((_POINTER,), None),
    "tuner_begin": ((*(_POINTER,) * 6, ctypes.c_double, _COUNT), ctypes.c_int),
    "tuner_tune": ((_POINTER, _COUNT, ctypes.c_double, ctypes.c_uint64), None),
    "tuner_view": ((_POINTER, _POINTER), None),
}

_BY_CONTENT = ("maker", "born", "gone", "lasting", "size", "storage")
_BY_OP = ("fresh", "scratch", "workspace")


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _COUNT) for name in ("contents", "ops")),
        *((name, _POINTER) for name in (*_BY_CONTENT, "gaps_from", "gaps")),
        *(
            (name, _POINTER)
            for name in ("needs_from", "needs", "makes_from", "makes", *_BY_OP, "seconds", "home_seconds", "start")
        ),
    ]


class _FoundChain(ctypes.Structure):
    _fields_ = [
        ("seconds", ctypes.c_double),
        *((name, _COUNT) for name in ("bytes", "held", "ops", "made", "seen", "home")),
        ("list", _POINTER),
    ]


class _Gaps(ctypes.Structure):
    _fields_ = [
        *((name, _COUNT) for name in ("count", "free_count")),
        *((name, _POINTER) for name in ("end", "bytes", "content", "kind", "free", "alone", "held", "before")),
    ]


class _Best(ctypes.Structure):
    _fields_ = [
        ("seconds", ctypes.c_double),
        ("bytes", _COUNT),
        ("count", _COUNT),
        ("pairs", _POINTER),
    ]


class CompiledChains:
    """The chains of one step, found by the native library."""

    def __init__(self, contents: StepContents, gaps_of: Sequence[Sequence[int]], start: Sequence[int]) -> None:
        library = load_library()
        self._chain = library.outofcore_chain
        arrays: dict[str, array[int] | array[float]] = {
            **{name: array("q", getattr(contents, name)) for name in (*_BY_CONTENT, *_BY_OP)},
            **_lists("gaps", gaps_of),
            **_lists("needs", contents.needs),
            **_lists("makes", contents.makes),
            "seconds": array("d", contents.seconds),
            "home_seconds": array("d", contents.home_seconds),
            "start": array("q", start),
        }
        # The library keeps pointers to these arrays.
        self._arrays = arrays
        addresses = {name: values.buffer_info()[0] for name, values in arrays.items()}
        self.step = _Step(contents=len(contents.storage), ops=len(contents.seconds), **addresses)
        self._handle = library.outofcore_chains_open(ctypes.byref(self.step))
        weakref.finalize(self, library.outofcore_chains_close, self._handle)
        self._found = _FoundChain()
        self._out = ctypes.byref(self._found)

    def find_chain(
        self, at: int, targets: Sequence[int], max_seconds: float, kind: array[int], fetch: array[int]
    ) -> tuple[float, int, int, ChainLists] | None:
        """Return seconds, peak bytes, target bytes and lists of a chain that recomputes ``targets``, or None."""
        target_array = (_COUNT * len(targets))(*targets)
        if not self._chain(
            self._handle,
            at,
            len(targets),
            target_array,
            max_seconds,
            kind.buffer_info()[0],
            fetch.buffer_info()[0],
            self._out,
        ):
            return None
        result = self._found
        counts = result.ops, result.made, result.seen, result.home
        lists = ChainLists(ctypes.string_at(result.list, sum(counts) * _WORD), counts)
        return result.seconds, result.bytes, result.held, lists


class ChainLists:
    """The ops of a chain and the contents that it makes, depends on and copies in, in the library's layout."""

    __slots__ = ("_counts", "_raw")

    def __init__(self, raw: bytes, counts: tuple[int, int, int, int]) -> None:
        self._raw, self._counts = raw, counts

    @property
    def ops(self) -> int:
        return self._counts[0]

    def unpack(self) -> tuple[list[int], list[int], list[int], list[int]]:
        words = memoryview(self._raw).cast("q").tolist()
        ends = [0, *accumulate(self._counts)]
        ops, made_contents, seen_contents, home_contents = (words[first:last] for first, last in pairwise(ends))
        return ops, made_contents, seen_contents, home_contents


@dataclass(frozen=True, slots=True)
class BestState:
    """The best state within a limit that a search visited."""

    seconds: float  # of all chains
    bytes: int  # the most that large blocks take at an op
    pairs: array[int]  # the recomputed gaps, each followed by the op before which it is fetched


class CompiledSearch:
    """A state of one step's recomputation, and two searches that change it.

    *Annealing* (``anneal``; Kirkpatrick, Gelatt & Vecchi, "Optimization by simulated annealing", 1983) tries random
    changes of one gap, or of two that trade places. It minimises the seconds of recomputation plus a price for every
    byte above the limit at each op. Prices rise while an op is above the limit and fall otherwise, so the search passes
    through states that do not fit. The same seed and state give the same result.

    *Greedy* (``drop`` and ``settle``): see ``remat.selection``. The arguments are those of ``Gaps`` in ``search.h``.
    """

    def __init__(
        self,
        chains: CompiledChains,
        *,
        end: Sequence[int],
        sizes: Sequence[int],
        content: Sequence[int],
        kind: Sequence[int],
        free: Sequence[int],
        alone: Sequence[int],
        held: Sequence[int],
        before: Sequence[int],
    ) -> None:
        self._library = library = load_library()
        self._anneal, self._restore = library.outofcore_anneal, library.outofcore_search_restore
        lists = {"end": end, "bytes": sizes, "content": content, "kind": kind, "free": free}
        lists |= {"alone": alone, "held": held, "before": before}
        # The library keeps pointers to these arrays and to the arrays of the chains.
        self._chains, self._arrays = chains, {name: array("q", values) for name, values in lists.items()}
        addresses = {name: values.buffer_info()[0] for name, values in self._arrays.items()}
        self.gaps = _Gaps(count=len(end), free_count=len(free), **addresses)
        self._handle = library.outofcore_search_open(ctypes.byref(chains.step), ctypes.byref(self.gaps))
        weakref.finalize(self, library.outofcore_search_close, self._handle)
        self._best = _Best()

    def anneal(self, limit: int, changes: int, work: int, temperature: float, seed: int) -> BestState | None:
        """Search by simulated annealing; return the best state within the limit, or None if no state fits.

        At most ``changes`` are tried and ``work`` ops inspected. ``temperature`` is the initial one, in mean seconds of
        an op that may run again.
        """
        self._anneal(self._handle, limit, changes, work, temperature, seed, ctypes.byref(self._best))
        return self._read_fitting()

    def drop(self, limit: int, need_limit: int, max_runs: int) -> BestState | None:
        """Recompute more gaps, chosen greedily, until the state fits; None if it never fits."""
        self._library.outofcore_drop(self._handle, limit, need_limit, max_runs, ctypes.byref(self._best))
        return self._read_fitting()

    def settle(self, limit: int, need_limit: int, max_runs: int) -> BestState:
        """Recompute gaps earlier, or keep them resident, where that is faster and fits; return the state."""
        self._library.outofcore_settle(self._handle, limit, need_limit, max_runs, ctypes.byref(self._best))
        return self._read()

    def _read_fitting(self) -> BestState | None:
        """Return the best state that the last search found, or None if no state fitted."""
        return None if isinf(self._best.seconds) else self._read()

    def _read(self) -> BestState:
        best, pairs = self._best, array("q")
        if best.count:
            pairs.frombytes(ctypes.string_at(best.pairs, 2 * best.count * _WORD))
        return BestState(best.seconds, best.bytes, pairs)

    def restore(self, pairs: array[int]) -> None:
        """Go to the state that recomputes these gaps, in the format of ``BestState.pairs``."""
        self._restore(self._handle, pairs.buffer_info()[0], len(pairs) // 2)


def _lists(name: str, lists: Iterable[Sequence[int]]) -> dict[str, array[int]]:
    """Concatenate lists; return the array ``name`` and the array of the indices at which the lists begin."""
    lists = list(lists)
    return {
        f"{name}_from": array("q", accumulate(map(len, lists), initial=0)),
        name: array("q", chain.from_iterable(lists)),
    }


@functools.cache
def load_library() -> ctypes.CDLL:
    return load_functions(Path(__file__).with_name("remat.cpp"), _FUNCTIONS)
