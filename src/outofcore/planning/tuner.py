"""Tuning: a local search over the residencies of all gaps, judged by the schedule of their copies.

The schedule is found by one pass over the step that counts time and bytes. Copies out start at once, one after the
other on the link to their home; an op waits for copies if it needs their room. Copies in run in the order of use, each
before the first op from which on its room is free up to its use. So a prefetch delays no op, and a link is idle only if
there is no room. A pass needs the start of each op and the bytes flowing out then, so it takes them from the last pass:
prefetches start as late as that allows, less a slack.

A chain reads its inputs when it runs. So an offloaded gap must be back when the first chain reads it, and then stays;
or each chain copies it in for itself (kind ``OFFLOADED``). Such copies precede prefetches and overlap the chain's runs.

A final gap is a copy out like any other. A gradient that the step leaves may instead be resident until the step ends.

A *change* keeps, offloads or recomputes one gap, often one that ops waited for. If an op then lacks bytes, gaps around
it are offloaded or fetched later. Changes that do not slow the step are kept. The loops are in ``tuner.h``; a change
takes 10 to 150 µs.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from outofcore.costs import Costs
from outofcore.lowering.slots import slot_bytes
from outofcore.plan import Decision, Residency
from outofcore.planning.problem import ON_DEVICE, Ints
from outofcore.planning.remat.chains import RECOMPUTED, Choices
from outofcore.planning.remat.compiled import load_library

# The least cost of a second of copying, in seconds of the step. Of equally fast plans, the plan with fewer copies wins.
_COPY_WEIGHT = 0.002
# No op, or no home.
_NEVER = -1

_POINTER, _COUNT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_INTS = (
    "storage", "segment", "first_content", "slot",
    "cyclic", "arriving", "fetched", "final", "fixed", "frozen", "arrives",
)  # fmt: skip


class _Transfers(ctypes.Structure):
    _fields_ = [
        *((name, _COUNT) for name in ("homes", "limit")),
        ("weight", _REAL),
        *((name, _POINTER) for name in (*_INTS, "homes_from", "homes_of", "in_seconds", "out_seconds", "capacity")),
    ]


class _View(ctypes.Structure):
    _fields_ = [
        *((name, _REAL) for name in ("value", "seconds", "copied")),
        *((name, _POINTER) for name in ("kind", "fetch", "home", "open", "release", "arrival", "starts", "waited")),
    ]


@dataclass(frozen=True)
class TunerState:
    """The residency of each gap."""

    kind: array[int]  # by gap, as in ``Choices``; ``OFFLOADED`` if each chain copies it in
    fetch: array[int]  # by gap, the op before which it is fetched if it is recomputed
    home: array[int]  # by gap, the index of its home, or ``problem.ON_DEVICE``, if it is not recomputed


@dataclass(frozen=True)
class TunedState:
    """A state with the schedule of its copies."""

    state: TunerState
    decisions: tuple[Decision, ...]
    staying: tuple[int, ...]  # the gradients that stay on the device until the next step begins
    seconds: float
    copy_seconds: float  # seconds of all copies
    value: float  # seconds by which states are compared: of the step, and a small share of copying
    wait_seconds: dict[int, float]  # for gaps that ops waited for, the seconds of waiting
    starts: tuple[float, ...]  # the second at which each op starts, and the end of the last one


class Tuner:
    """A local search over the residencies and copy schedules of a step; it starts without recomputation."""

    def __init__(self, choices: Choices) -> None:
        self._problem = problem = choices.problem
        library = self._library = load_library()
        infos, graph, homes = problem.gaps, problem.graph, problem.homes
        storages = [graph.storages[info.gap.storage] for info in infos]
        capacity = [_NEVER if home.bytes is None else home.bytes for home in homes]
        if homes[0].bytes is not None:
            capacity[0] = max(homes[0].bytes - problem.first_home_bytes, 0)
        homes_from = [0]
        for info in infos:
            homes_from.append(homes_from[-1] + len(info.homes))
        ints: dict[str, Sequence[int]] = {
            "storage": [info.gap.storage for info in infos],
            "segment": [info.segment for info in infos],
            "first_content": [choices.contents.first[info.gap.storage] for info in infos],
            "slot": [slot_bytes(storage.bytes) for storage in storages],
            "cyclic": [info.cyclic for info in infos],
            "arriving": [info.arriving for info in infos],
            "fetched": [info.fetched for info in infos],
            "final": [info.final for info in infos],
            "fixed": [problem.is_at_first_home(storage.id) for storage in storages],
            "frozen": [storage.id in graph.frozen for storage in storages],
            "arrives": [storage.arrives for storage in storages],
            "homes_from": homes_from,
            "homes_of": [home for info in infos for home in info.homes],
            "capacity": capacity,
        }
        arrays: dict[str, array[int] | array[float]] = {name: array("q", values) for name, values in ints.items()}
        arrays["in_seconds"] = array("d", [home.in_seconds(info.copied_bytes) for info in infos for home in homes])
        arrays["out_seconds"] = array("d", [home.out_seconds(info.copied_bytes) for info in infos for home in homes])
        # The library keeps pointers to these arrays and to the arrays of the search.
        self._arrays, self._search = arrays, choices.open_search()
        addresses = {name: values.buffer_info()[0] for name, values in arrays.items()}
        transfers = _Transfers(homes=len(homes), limit=problem.limit, weight=copy_weight(problem.costs), **addresses)
        self._handle = library.outofcore_tuner_open(
            ctypes.byref(choices.compiled.step), ctypes.byref(self._search.gaps), ctypes.byref(transfers)
        )
        weakref.finalize(self, library.outofcore_tuner_close, self._handle)
        self._view = _View()

    def begin(
        self,
        state: TunerState,
        slack: float,
        passes: int,
        spared: Ints | None = None,
        forced_offloads: Set[int] = frozenset(),
    ) -> TunedState | None:
        """Start from a state and schedule its copies, with repairs until the step fits; None if that fails.

        Args:
            slack: how much earlier than just in time a copy in may start, in multiples of its own seconds.
            passes: maximum number of scheduling passes.
            spared: shape (ops,), bytes to leave free at each op, if the op by itself allows it.
            forced_offloads: storages that may not be resident between two uses.
        """
        count = len(self._problem.graph.ops)
        spared_bytes = array("q", bytes(8 * count) if spared is None else spared.astype(np.int64).tobytes())
        must_leave = array(
            "q",
            [
                info.must_leave or (info.gap.storage in forced_offloads and bool(info.homes))
                for info in self._problem.gaps
            ],
        )
        lists = (_address(values) for values in (state.kind, state.fetch, state.home, spared_bytes, must_leave))
        return self.read() if self._library.outofcore_tuner_begin(self._handle, *lists, slack, passes) else None

    def tune(self, tries: int, recompute_share: float = 0.5, seed: int = 0) -> TunedState:
        """Try random changes to the state, and keep changes that do not slow the step down."""
        self._library.outofcore_tuner_tune(self._handle, tries, recompute_share, seed)
        return self.read()

    def read(self) -> TunedState:
        """Return the present state with the schedule of its copies."""
        view, count = self._read_view(), len(self._problem.graph.ops)
        waited = _doubles(view.waited, len(self._problem.gaps))
        state, decisions = self._state(view), self._decisions(view)
        decided = {decision.gap.storage for decision in decisions}
        return TunedState(
            state,
            decisions,
            tuple(
                info.gap.storage
                for info in self._problem.gaps
                if info.final and not info.must_leave and info.gap.storage not in decided
            ),
            view.seconds,
            view.copied,
            view.value,
            {g: seconds for g, seconds in enumerate(waited) if seconds},
            tuple(_doubles(view.starts, count + 1)),
        )

    def _read_view(self) -> _View:
        self._library.outofcore_tuner_view(self._handle, ctypes.byref(self._view))
        return self._view

    def _ints(self, address: int) -> array[int]:
        return _ints(address, len(self._problem.gaps))

    def _state(self, view: _View) -> TunerState:
        return TunerState(self._ints(view.kind), self._ints(view.fetch), self._ints(view.home))

    def _decisions(self, view: _View) -> tuple[Decision, ...]:
        """Convert the state of the native search to decisions; gaps that are kept on the device have no decision."""
        n, decisions = len(self._problem.graph.ops), list[Decision]()
        kind, fetch, home = (self._ints(address) for address in (view.kind, view.fetch, view.home))
        is_open, release, arrival = (self._ints(address) for address in (view.open, view.release, view.arrival))
        for g, info in enumerate(self._problem.gaps):
            gap = info.gap
            if info.arriving:
                decisions.append(Decision(gap, Residency.OFFLOAD, 0, arrival[g], home[g]))
            elif kind[g] == RECOMPUTED:
                decisions.append(Decision(gap, Residency.RECOMPUTE, gap.start + 1, fetch[g]))
            elif is_open[g] and home[g] != ON_DEVICE:
                fetch_at = gap.end if arrival[g] == _NEVER else arrival[g] + (n if info.cyclic else 0)
                released = n if release[g] == _NEVER else release[g]
                decisions.append(
                    Decision(gap, Residency.OFFLOAD, max(min(released, n, fetch_at), gap.start + 1), fetch_at, home[g])
                )
        return tuple(sorted(decisions, key=lambda decision: decision.gap))


def copy_weight(costs: Costs) -> float:
    """Return the cost of a second of copying, in seconds of the step."""
    return max(_COPY_WEIGHT, *(home.compute_slowdown for home in costs.homes))


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]


def _ints(address: int, count: int) -> array[int]:
    values = array("q")
    if count:
        values.frombytes(ctypes.string_at(address, 8 * count))
    return values


def _doubles(address: int, count: int) -> array[float]:
    values = array("d")
    if count:
        values.frombytes(ctypes.string_at(address, 8 * count))
    return values
