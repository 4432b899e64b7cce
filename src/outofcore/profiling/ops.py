"""Measure the cost of each op in a few runs on scratch tensors, alone in memory.

Ops with the same target, shapes, strides, dtypes and constants are a family, of which one is measured (the idea of
FamilySeer, arXiv 2201.00194). Times on a busy machine are too long. So slowed repetitions are dropped, and slowed ops
are marked ``busy`` and measured again later.

The cache has families of PyTorch's own operators and optimizers, because the user's may change under the same name.
Limits: ops run on scratch values (``scratch``), so data-dependent speed is not seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter, thread_time, time
from typing import Annotated, Literal

import torch
from msgspec import Meta, Struct

from outofcore import _torch_internals as internals
from outofcore.analysis import LARGE_BYTES, SMALL_ALIGNMENT, is_large, placed_bytes
from outofcore.busy import BusyWatch, is_due, typical_seconds, was_busy
from outofcore.capture.captured import Call, Captured
from outofcore.capture.optimizers import PIECE_ELEMENTS
from outofcore.capture.patching import CAPTURE_LOCK
from outofcore.capture.refusals import refusal
from outofcore.costs import OpCost
from outofcore.errors import ArenaError, CaptureError, GraphError, OutOfCoreError
from outofcore.execution.arena import DeviceArena, ScopeTable
from outofcore.execution.backend import Backend, CpuBackend
from outofcore.execution.binding import BoundRun, bind, requests_by_scope
from outofcore.execution.interrupts import DeferredSignals
from outofcore.graph import Op, StepGraph
from outofcore.jsonfile import convert_json, refuse
from outofcore.planning.placement.requests import (
    Request,
    Requests,
    ResultStorage,
    Scratch,
    Unplanned,
    workspace_layout,
)
from outofcore.profiling.cache import Cache, Shelf
from outofcore.profiling.faithfulness import find_differences
from outofcore.profiling.scratch import ScratchContents, contents_to_try
from outofcore.program import Block, Program, Run
from outofcore.report.machine import this_machine
from outofcore.units import MIB, PAGE_BYTES, round_up

_log = logging.getLogger("outofcore.profiling")

# An op is repeated until its measurements add up to this, or number _REPEATS.
_ENOUGH_SECONDS = 0.03
_REPEATS = 5
# A longer op is measured once: the first step waits for it, and disturbances are relatively small.
_LONG_SECONDS = 0.1
# Ranges of plausible measurements; cached values outside are damaged.
_Seconds = Annotated[float, Meta(ge=0, le=1e6)]
_Bytes = Annotated[int, Meta(ge=0, le=1 << 44)]


@dataclass(frozen=True)
class OpProfile:
    cost: OpCost
    requests: Requests
    first_requests: Requests | None = None  # of its first run, where they differ


def profile_ops(
    captured: Captured,
    *,
    advance: Callable[[int, int], None] | None = None,
    measure_time: bool = True,
    cache: Cache | None = None,
    backend: Backend | None = None,
) -> tuple[OpProfile, ...]:
    """Measure the time and memory of every op of a captured step, once per family of equal ops.

    Random generators stay unchanged. ``advance`` is called with (families measured, families). With
    ``measure_time=False`` each family runs once, for its allocator requests only. Raises ``CaptureError`` if an op does
    not run on scratch contents, or returns other tensors than captured.
    """
    ops = range(len(captured.graph.ops))
    profiles = profile_selected(captured, ops, advance=advance, measure_time=measure_time, cache=cache, backend=backend)
    return tuple(profiles[index] for index in ops)


def profile_selected(
    captured: Captured,
    ops: Collection[int],
    *,
    advance: Callable[[int, int], None] | None = None,
    measure_time: bool = True,
    cache: Cache | None = None,
    backend: Backend | None = None,
) -> dict[int, OpProfile]:
    """Measure some ops of a captured step as ``profile_ops`` does; return their profiles by op index."""
    backend = backend or CpuBackend()
    profile_cache = ProfileCache(cache, backend.facts())
    # The first update of a parameter also allocates its state.
    families: dict[tuple[str, bool], list[int]] = {}
    for op in (captured.graph.ops[index] for index in ops):
        first_differs = captured.calls[op.id].rehearse_first is not None
        families.setdefault((op.family or f"#{op.id}", first_differs), []).append(op.id)
    profiles: dict[int, OpProfile] = {}
    with CAPTURE_LOCK, _preserve_generators(backend), _OpBench(captured, backend) as bench:
        try:
            for number, members in enumerate(families.values(), 1):
                # Interrupts take effect between two ops.
                with DeferredSignals("the measurement of an op"):
                    profile = bench.profile(members[0], measure_time, profile_cache)
                profiles.update(dict.fromkeys(members, profile))
                if advance is not None:
                    advance(number, len(families))
        finally:
            profile_cache.save()
    return profiles


@contextlib.contextmanager
def _preserve_generators(backend: Backend) -> Iterator[None]:
    states = [(generator, generator.get_state()) for generator in backend.generators()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


class _OpBench:
    """Measures one op at a time in scratch memory."""

    def __init__(self, captured: Captured, backend: Backend) -> None:
        self._captured = captured
        self._backend = backend
        self._dtypes: dict[int, torch.dtype] = {}
        for value in captured.values:
            self._dtypes.setdefault(value.storage, value.dtype)
        self._arena: DeviceArena | None = None
        self._recorder = backend.recorder()

    def __enter__(self) -> _OpBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        if self._arena is not None:
            if self._backend.driver is not None:
                # An interrupted op may be issued and still run.
                self._backend.driver.synchronize()
            self._arena.close()
            self._arena = None

    def _open_arena(self, count: int) -> DeviceArena:
        if self._arena is None or self._arena.bytes < count:
            self._release()
            try:
                self._arena = self._backend.arena(count + count // 4 + MIB, 1 << 62)
            except ArenaError:
                # Without the extra space it may still fit.
                self._arena = self._backend.arena(count, 1 << 62)
        return self._arena

    def profile(self, index: int, measure_time: bool, profile_cache: ProfileCache) -> OpProfile:
        """Return an op's cached or measured profile; zero seconds if the op cannot be measured alone."""
        captured = self._captured
        op, call = captured.graph.ops[index], captured.calls[index]
        if not op.touched or op.communicates or (not op.rerunnable and call.rehearse is None):
            return OpProfile(OpCost(0.0), Requests((), 0))
        first_differs = call.rehearse_first is not None
        cached = profile_cache.find(op, timed=measure_time, first_differs=first_differs, result_count=len(call.results))
        if cached is not None:
            return cached
        return profile_cache.add(op, self._measure(op, call, measure_time), timed=measure_time)

    def _measure(self, op: Op, call: Call, measure_time: bool) -> OpProfile:
        """Measure an op with the first scratch contents on which it runs; raises ``CaptureError`` if it never does."""
        failed: Exception | None = None
        try:
            for contents in contents_to_try(self._captured.device):
                try:
                    first = self._record(op, call.rehearse_first, contents) if call.rehearse_first is not None else None
                    requests = self._record(op, call.rehearse or call.func, contents)
                    with BusyWatch() as watch:
                        seconds = self._time(op, requests, contents) if measure_time else 0.0
                except (OutOfCoreError, MemoryError):
                    raise
                except Exception as error:
                    # Not every op runs on scratch contents: a factorisation may find its matrix singular.
                    failed = failed or error
                    continue
                workspace = max(requests.workspace_bytes, first.workspace_bytes if first else 0)
                # Other processes on the cores do not affect a device's clock.
                is_busy = measure_time and self._backend.timer is None and was_busy(watch.counted)
                return OpProfile(OpCost(seconds, workspace, int(is_busy)), requests, first)
            raise _measurement_error(op, failed) from failed
        finally:
            del failed  # its traceback refers to this frame, and so to the op's tensors

    def _plan_memory(self, op: Op, workspace: int) -> tuple[Program, int, int]:
        """Return a program that runs a single op, and the offsets where its arguments and all its memory end."""
        storages = self._captured.graph.storages
        blocks: list[Block] = []
        offset = 0
        # Existing storages come first, so that the rest of the arena can be discarded before the op runs.
        existing = [s for s in op.touched if s not in op.creates]
        block_of: dict[int, int] = {}
        arguments_end = 0
        for group in (existing, op.creates):
            for storage in group:
                count = placed_bytes(storages[storage].bytes)
                offset = _align(offset, count)
                block_of[storage] = len(blocks)
                blocks.append(Block(len(blocks), storage, count, 0, 0, True, offset))
                offset += count
            if group is existing:
                arguments_end = offset
        scratch = None
        if workspace:
            count = placed_bytes(workspace)
            offset = _align(offset, count)
            scratch = len(blocks)
            blocks.append(Block(scratch, None, count, 0, 0, True, offset))
            offset += count
        run = Run(op.id, tuple(block_of[s] for s in op.touched), scratch)
        return Program((run,), tuple(blocks), offset), arguments_end, offset

    def _bind(
        self, op: Op, requests: Requests, contents: ScratchContents | None
    ) -> tuple[BoundRun, DeviceArena, list[list[tuple[int, int | None]]], int]:
        """Bind an op's arguments to scratch memory; return the bound op and its memory."""
        program, arguments_end, end = self._plan_memory(op, requests.workspace_bytes)
        arena = self._open_arena(end)
        bound = bind(self._captured, program, arena)
        if contents is not None:
            for block in program.blocks:
                if block.storage is not None and block.storage not in op.creates:
                    self._fill(block.storage, arena, block, contents)
            contents.fill(bound.runs[0], self._captured.device)
        return bound.runs[0], arena, requests_by_scope(self._captured, program, {op.id: requests}), arguments_end

    def _fill(self, storage: int, arena: DeviceArena, block: Block, contents: ScratchContents) -> None:
        """Fill a storage's memory with its constant value, or with scratch contents if it is no constant."""
        captured = self._captured
        count = captured.graph.storages[storage].bytes
        if not count:
            return
        target = arena.view(block.offset, count)
        constant = captured.constants.get(storage)
        if constant is not None:
            target[: captured.unrounded_bytes(storage)].copy_(internals.view_storage_bytes(constant))
            return
        contents.fill_bytes(target, self._dtypes[storage])

    def _record(self, op: Op, func: Callable[..., object], contents: ScratchContents) -> Requests:
        """Run an op on scratch contents and check its results; return the memory that it requests."""
        captured = self._captured
        if self._backend.warms_up:
            # Libraries choose kernels at an op's first run, with memory that no later run needs.
            run = self._bind(op, Requests((), 0), contents)[0]
            with internals.below_autograd():
                func(*run.args, **run.kwargs)
        run, arena, _, arguments_end = self._bind(op, Requests((), 0), contents)
        arena.discard(arguments_end, arena.bytes - arguments_end)
        with internals.below_autograd():
            with self._recorder as recorder:
                out = func(*run.args, **run.kwargs)
                leaves = internals.result_leaves(out)
                for leaf, _, _, stride in run.results:
                    # With other strides than captured, the result is copied before it is laid out at its place.
                    result = leaves[leaf] if leaf < len(leaves) else None
                    if isinstance(result, torch.Tensor) and result.stride() != stride:
                        result.clone()
            self._check_results(op, leaves)
            pointers = {
                leaves[leaf].untyped_storage().data_ptr(): leaf
                for leaf, value in enumerate(captured.calls[op.id].results)
                if value is not None and leaves[leaf] is not None
            }
            return workspace_layout(recorder.events, pointers, captured.alignment)

    def _check_results(self, op: Op, results: Sequence[object]) -> None:
        """Raise ``CaptureError`` if an op's results differ from the captured ones; log harmless differences."""
        for difference in find_differences(self._captured, op, results):
            if difference.is_harmless:
                _log.info(
                    "the operator %s returns %s but was captured with %s", op.name, difference.real, difference.captured
                )
                continue
            raise refusal(
                f"result {difference.leaf} of the operator {op.name} is {difference.real}, and was captured as "
                f"{difference.captured}",
                "its fake implementation and its kernel return different tensors",
                "correct its fake or meta implementation (torch.library.register_fake), or use another operator",
                op.source,
            )

    def _time(self, op: Op, requests: Requests, contents: ScratchContents) -> float:
        """Return the typical seconds of an op, with its allocations at planned places."""
        # The recording left the arguments in the arena, unless a larger one is needed.
        grown = self._arena is None or self._plan_memory(op, requests.workspace_bytes)[2] > self._arena.bytes
        run, arena, planned, _ = self._bind(op, requests, contents if grown else None)
        func = self._captured.calls[op.id].rehearse or run.func
        scope_table = ScopeTable(arena, planned)

        def call() -> tuple[float, float]:
            # The thread must leave the scope even after an error, because the table is freed.
            try:
                scope_table.begin(0)
                cpu, start = thread_time(), perf_counter()
                out = func(*run.args, **run.kwargs)
                times = perf_counter() - start, thread_time() - cpu
                del out
                return times
            finally:
                scope_table.end()

        if self._backend.timer is not None:
            with internals.below_autograd():
                return self._backend.timer(call)
        runs: list[tuple[float, float]] = []
        with internals.below_autograd():
            while len(runs) <= _REPEATS and (len(runs) < 3 or sum(wall for wall, _ in runs[1:]) < _ENOUGH_SECONDS):
                runs.append(call())
                if runs[0][0] > _LONG_SECONDS:
                    break
        # The first run fills caches, which matters little for a long op; the recording has faulted pages in.
        return typical_seconds(runs[1:] or runs)


def _measurement_error(op: Op, error: Exception | None) -> CaptureError:
    first = (str(error) or type(error).__name__).splitlines()[0]
    return refusal(
        f"the operator {op.name} does not run on any scratch contents ({first})",
        "its memory must be measured before the first step, and it refuses constants, identity matrices and random "
        "numbers",
        "use an operator that returns errors in its results, such as torch.linalg.cholesky_ex, or call it before the "
        "step",
        op.source,
    )


def _align(offset: int, count: int) -> int:
    return round_up(offset, PAGE_BYTES if is_large(count) else SMALL_ALIGNMENT)


def machine_facts() -> dict[str, object]:
    """Return the facts about the machine and PyTorch on which all measurements depend."""
    machine = this_machine()
    return {
        "torch": torch.__version__,
        "cpu": machine.cpu,
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "threads": torch.get_num_threads(),
    }


def op_shelf(cache: Cache, device: Mapping[str, object] | None = None, kind: str = "ops") -> Shelf:
    """Return the cache file of op profiles, or of another ``kind``, for this machine, device and settings."""
    settings = {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": [internals.precision_of(torch.backends.mkldnn, op) for op in ("matmul", "conv")],
        "onednn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "large_bytes": LARGE_BYTES,
        "update_elements": PIECE_ELEMENTS,
        "results": "by leaf",  # numbering of the requests of results
        "places": "spread",  # index arguments
        "layouts": "of kernels",  # strides of results when arguments are not contiguous
    }
    return cache.shelf(kind, {**machine_facts(), **settings, **(device or {})})


def is_cacheable(op: Op) -> bool:
    """Return whether the name of an op's family means the same in every process."""
    is_torchs = op.name.startswith(("aten.", "fused.")) or (op.name.startswith("optimizer.") and not op.random)
    return is_torchs and bool(op.family) and " at 0x" not in op.family


class ProfileCache:
    """The cached profiles of ops, and new ones to be saved; without a cache ``find`` returns None."""

    def __init__(self, cache: Cache | None, device: Mapping[str, object] | None = None) -> None:
        self._shelf = None if cache is None else op_shelf(cache, device)
        self._cached = {} if self._shelf is None else self._shelf.read()
        self._new: dict[str, object] = {}
        self._stale_costs: dict[str, OpCost] = {}  # costs to be measured again

    def find(self, op: Op, *, timed: bool, first_differs: bool, result_count: int | None = None) -> OpProfile | None:
        """Return an op's cached profile; None if it is missing, outdated, or lacks a requested measurement."""
        value = self._cached.get(_key(op)) if is_cacheable(op) else None
        if value is None or self._shelf is None:
            return None
        file, entry_path = self._shelf.path, f"$.entries.{_key(op)}"
        try:
            cached = convert_json(value, _CachedProfile, file, entry_path)
            profile = cached.profile()
            requests = [
                *profile.requests.requests,
                *(profile.first_requests.requests if profile.first_requests else ()),
            ]
            leaves = [r.placement.key for r in requests if isinstance(r.placement, ResultStorage)]
            if result_count is not None and max(leaves, default=-1) >= result_count:
                refuse(file, entry_path, f"names a result beyond the {result_count} results of the op")
        except GraphError as error:
            _log.warning("measuring %s again, because its cached measurement cannot be used: %s", op.name, error)
            return None
        if (timed and cached.seconds is None) or first_differs != (profile.first_requests is not None):
            return None
        if timed and is_due(cached.busy, time() - cached.measured_at):
            self._stale_costs[_key(op)] = profile.cost
            return None
        return profile

    def add(self, op: Op, profile: OpProfile, *, timed: bool) -> OpProfile:
        """Store and return a measurement; an older, shorter time replaces a time measured on a busy machine."""
        before = self._stale_costs.get(_key(op))
        if before is not None and profile.cost.busy:
            cost = replace(profile.cost, seconds=min(before.seconds, profile.cost.seconds), busy=before.busy + 1)
            profile = replace(profile, cost=cost)
        if self._shelf is not None and is_cacheable(op):
            self._new[_key(op)] = _CachedProfile.of(profile, timed=timed)
        return profile

    def save(self) -> None:
        if self._shelf is not None:
            self._shelf.write(self._new)
            self._new = {}


def update_cached_profiles(
    cache: Cache,
    graph: StepGraph,
    profiles: Sequence[OpProfile],
    only: Collection[int] | None = None,
    device: Mapping[str, object] | None = None,
) -> None:
    """Cache a profile per op family, with the median time of its ops; ``only`` selects families by ops."""
    families_to_save = None if only is None else {graph.ops[index].family for index in only}
    families: dict[str, list[int]] = {}
    for op in graph.ops:
        if op.touched and is_cacheable(op) and (families_to_save is None or op.family in families_to_save):
            families.setdefault(op.family, []).append(op.id)
    profile_cache = ProfileCache(cache, device)
    for members in families.values():
        largest = max(members, key=lambda index: profiles[index].cost.workspace_bytes)
        seconds = statistics.median(profiles[index].cost.seconds for index in members)
        profile = profiles[largest]
        cost = replace(profile.cost, seconds=seconds)
        profile_cache.add(graph.ops[members[0]], replace(profile, cost=cost), timed=True)
    profile_cache.save()


def _key(op: Op) -> str:
    # An update of many small parameters has a name of thousands of characters.
    return f"{op.name}-{hashlib.sha256(op.family.encode()).hexdigest()[:24]}"


class _CachedRequest(Struct, array_like=True, forbid_unknown_fields=True):
    bytes: _Bytes
    kind: Literal["result", "scratch", "elsewhere"]
    position: _Bytes | None = None  # the number of the result, or the offset in scratch memory

    def __post_init__(self) -> None:
        if (self.position is None) != (self.kind == "elsewhere"):
            raise ValueError("must have bytes, a kind, and a position unless the kind is 'elsewhere'")

    @staticmethod
    def of(request: Request) -> _CachedRequest:
        match request.placement:
            case ResultStorage(key):
                return _CachedRequest(request.bytes, "result", key)
            case Scratch(offset):
                return _CachedRequest(request.bytes, "scratch", offset)
            case Unplanned():
                return _CachedRequest(request.bytes, "elsewhere")

    def request(self) -> Request:
        if self.position is None:
            return Request(self.bytes, Unplanned())
        return Request(self.bytes, ResultStorage(self.position) if self.kind == "result" else Scratch(self.position))


class _CachedRequests(Struct):
    bytes: _Bytes  # of scratch memory
    list: tuple[_CachedRequest, ...]

    def __post_init__(self) -> None:
        for item in self.list:
            if item.kind == "scratch" and (item.position or 0) + item.bytes > self.bytes:
                raise ValueError(f"a request is outside of the {self.bytes} bytes of scratch memory")

    @staticmethod
    def of(requests: Requests) -> _CachedRequests:
        return _CachedRequests(requests.workspace_bytes, tuple(map(_CachedRequest.of, requests.requests)))

    def requests(self) -> Requests:
        return Requests(tuple(item.request() for item in self.list), self.bytes)


class _CachedProfile(Struct, omit_defaults=True):
    """A cached profile; if ``seconds`` is None, only memory was measured."""

    seconds: _Seconds | None
    workspace_bytes: _Bytes
    requests: _CachedRequests
    first_requests: _CachedRequests | None = None
    busy: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    measured_at: Annotated[float, Meta(ge=0, le=1e12)] = 0.0  # seconds since the epoch; 0 unless busy

    def __post_init__(self) -> None:
        if max(self.requests.bytes, self.first_requests.bytes if self.first_requests else 0) > self.workspace_bytes:
            raise ValueError("workspace_bytes is less than the op's requests")

    @staticmethod
    def of(profile: OpProfile, *, timed: bool) -> _CachedProfile:
        first = profile.first_requests
        return _CachedProfile(
            profile.cost.seconds if timed else None,
            profile.cost.workspace_bytes,
            _CachedRequests.of(profile.requests),
            None if first is None else _CachedRequests.of(first),
            profile.cost.busy,
            time() if profile.cost.busy else 0.0,
        )

    def profile(self) -> OpProfile:
        first = self.first_requests
        cost = OpCost(self.seconds or 0.0, self.workspace_bytes, self.busy)
        return OpProfile(cost, self.requests.requests(), None if first is None else first.requests())
