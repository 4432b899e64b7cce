"""The interface to CUDA: every call of ``torch.cuda`` that runs a step is in this file.

Written against torch 2.11 (https://docs.pytorch.org/docs/2.11/cuda.html). A stream waits for the last recording of an
event, so each step can record the same marks. Copies do not block the host where host memory is pinned.

Host functions in a stream (cudaLaunchHostFunc) post the transfers to and from a disk. They must not call CUDA or wait
for it, and may run one after the other. So each direction has its own thread, and its stream waits for the thread
(cuStreamWaitValue32): see ``lanes.cpp``. Where streams cannot do so, the host function makes the transfer itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import statistics
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from outofcore import _torch_internals as internals
from outofcore.analysis import LARGE_BYTES
from outofcore.errors import ArenaError, DeviceError, InputError, OutOfCoreError, StateError, TransferError
from outofcore.execution.arena import ArenaCounters, install, read_counters
from outofcore.execution.binding import BoundProgram, BoundRun
from outofcore.execution.cuda.interface import Action, DeviceCopy, FileTransfer, RecordMark, Stream, Tape, WaitForMark
from outofcore.execution.cuda.staging import Posted, check_transfers, create_transfer
from outofcore.runtime.homes import HomeStore, PinnedHome
from outofcore.runtime.native import Flavor, load_native
from outofcore.units import MIB, PAGE_BYTES, format_bytes, round_up

_log = logging.getLogger("outofcore")

_PORTABLE = 1  # cudaHostRegisterPortable
_LINE_BYTES = 128
_REPEATS = 5
# Cycles that the device idles while the host issues the timed work: some milliseconds.
_IDLE_CYCLES = 8_000_000


@dataclass(frozen=True)
class CachingAllocator:
    """Sizes that PyTorch's caching allocator uses, in bytes."""

    alignment: int = 512  # of allocations; kernels are chosen by it
    segment: int = 2 * MIB  # it takes multiples from the device for requests below 1 MiB and from 10 MiB on
    middle_segment: int = 20 * MIB  # the same for requests between


ALLOCATOR = CachingAllocator()


class CudaDriver:
    """One CUDA device, by default the current one; raises ``InputError`` if there is no such device."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise InputError(
                f"device {str(device)!r} was asked for, and PyTorch sees no CUDA device here; "
                "see `outofcore doctor`, or leave 'device' out to run on the CPU"
            )
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise InputError(
                f"there is no device cuda:{index}: PyTorch sees {torch.cuda.device_count()} of them, numbered from 0; "
                "name one of these"
            )
        self.device = torch.device("cuda", index)
        # By number; the first is the user's own stream.
        self._streams: list[Any] = [
            torch.cuda.current_stream(self.device),
            *(torch.cuda.Stream(self.device) for _ in list(Stream)[1:]),
        ]
        self._transfers: list[Posted] = []  # transfers of this step
        # CUDA's stream handles, by number.
        self._handles = (ctypes.c_void_p * len(Stream))(*(stream.cuda_stream for stream in self._streams))
        self._lanes: _Lanes | None = None  # threads for transfers, made with the first buffers
        self._workspace_stream: int | None = None  # the stream that libraries have allocated workspaces for
        self._capture_stream: Any = None  # the stream on which graphs are made
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs in use, which share a pool of memory
        self._event_seconds: float | None = None  # seconds between two adjacent events

    def open_arena(self, count: int, reserve: int) -> CudaArena:
        return CudaArena(count, self.device, reserve)

    @contextlib.contextmanager
    def step(self, bound: BoundProgram | None) -> Iterator[None]:
        """Make this device current for one step, with the user's current stream as the compute stream."""
        with torch.cuda.device(self.device):
            compute = torch.cuda.current_stream(self.device)
            self._streams[Stream.COMPUTE] = compute
            self._handles[Stream.COMPUTE] = compute.cuda_stream
            if bound is not None and compute.cuda_stream != self._workspace_stream:
                # A library's workspace for another stream is not a planned request of the step.
                self._make_workspaces()
            yield

    def launch(self, run: BoundRun | None, call: Callable[[], object], stream: Stream = Stream.COMPUTE) -> None:
        """Call a function that issues an op or a collective, with ``stream`` as the current stream."""
        if stream is Stream.COMPUTE:
            call()
            return
        # NCCL waits for the current stream, which then waits for NCCL. (Never run: this needs two GPUs.)
        with torch.cuda.stream(self._streams[stream]):
            call()

    def make_launcher(self, run: BoundRun, call: Callable[[], object], stream: Stream) -> Callable[[], object]:
        return call if stream is Stream.COMPUTE else functools.partial(self.launch, run, call, stream)

    def copy(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        action = _Action(_Kind.COPY, _stream_index(stream), target.data_ptr(), source.data_ptr(), target.numel())
        self._check_status(self._issue_one(action))

    def copy_user_memory(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._streams[stream]):
            target.copy_(source, non_blocking=True)

    def make_tape(self, actions: Sequence[Action]) -> Tape:
        """Return a callable that issues all the actions by one native call."""
        transfers = [self._create_transfer(action) for action in actions if isinstance(action, FileTransfer)]
        remaining = iter(transfers)
        array = (_Action * len(actions))(*(self._to_native(action, remaining) for action in actions))
        issue, handles, check = load_native(Flavor.CUDA).outofcore_issue, self._handles, self._check_status
        pointer, count = ctypes.c_void_p(ctypes.addressof(array)), ctypes.c_int64(len(actions))
        # The owners of the addresses live as long as the tape.
        owners = (array, transfers, tuple(actions))

        def keep_transfers() -> None:
            if owners[1]:
                self._transfers += owners[1]

        def play() -> None:
            status = issue(pointer, count, handles)
            if status:
                check(status)
            keep_transfers()

        function = ctypes.cast(issue, ctypes.c_void_p).value or 0
        native = (function, ctypes.addressof(array), len(actions), ctypes.addressof(handles))
        return Tape(play, native, keep_transfers if transfers else None, check)

    def capture_graph(self, call: Callable[[], object]) -> Callable[[], object] | None:
        """Capture ``call`` as a CUDA graph; return a function that replays it, or None if the capture fails."""
        # The capture has its own stream, since the default one cannot be captured. Graphs share a pool of memory for
        # off-plan requests, as each reads only memory of the pool that it has written itself.
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self.device)
            with torch.cuda.stream(self._capture_stream):
                self._make_workspaces()
            self.synchronize()
        graph, sharing = torch.cuda.CUDAGraph(), next(iter(self._graphs), None)
        with torch.cuda.stream(self._capture_stream):
            try:
                graph.capture_begin(None if sharing is None else sharing.pool(), capture_error_mode="thread_local")
                try:
                    call()
                finally:
                    graph.capture_end()
            except (RuntimeError, OutOfCoreError) as error:
                _log.info("issuing ops one by one, since no CUDA graph can be captured: %s", error)
                return None
        self._graphs.add(graph)
        return graph.replay

    def _to_native(self, action: Action, remaining: Iterator[Posted]) -> _Action:
        """Convert an action to native form; a file transfer uses the next item of ``remaining``."""
        match action:
            case WaitForMark(stream, mark):
                return _Action(_Kind.WAIT, _stream_index(stream), self._event_handle(mark))
            case RecordMark(stream, mark):
                return _Action(_Kind.RECORD, _stream_index(stream), self._event_handle(mark))
            case DeviceCopy(stream, _, target, source):
                return _Action(_Kind.COPY, _stream_index(stream), target.data_ptr(), source.data_ptr(), target.numel())
            case FileTransfer(stream):
                return _Action(_Kind.TRANSFER, _stream_index(stream), ctypes.addressof(next(remaining)))

    def _event_handle(self, mark: Any) -> int:
        """Return CUDA's handle of an event, which PyTorch creates when the event is first recorded."""
        if not mark.cuda_event:
            mark.record(self._streams[Stream.COMPUTE])
        return int(mark.cuda_event)

    def _create_transfer(self, move: FileTransfer) -> Posted:
        memory = move.memory
        writes, lane = move.stream is Stream.WRITE, self._lane(move.stream)
        return create_transfer(move.home, move.offset, memory.data_ptr(), memory.numel(), writes=writes, lane=lane)

    def _lane(self, stream: Stream) -> int | None:
        """Return the native transfer thread of a stream, or None."""
        return None if self._lanes is None else self._lanes.by_stream.get(stream)

    def _issue_one(self, action: _Action) -> int:
        issue = load_native(Flavor.CUDA).outofcore_issue
        return int(issue(ctypes.byref(action), ctypes.c_int64(1), self._handles))

    def _check_status(self, status: int) -> None:
        if status:
            message = load_native(Flavor.CUDA).outofcore_cuda_error(status).decode()
            raise DeviceError(f"the device {self.device} failed: CUDA error {status}: {message}")

    def allocate_staging(self, count: int) -> torch.Tensor:
        """Return page-aligned host memory for transfers to and from files, pinned if possible."""
        if self._lanes is None:
            with torch.cuda.device(self.device):
                streams = {s: self._streams[s].cuda_stream for s in (Stream.WRITE, Stream.READ)}
                self._lanes = _Lanes(load_native(Flavor.CUDA), self.device, streams)
            if len(self._lanes.by_stream) < 2:
                _log.info("disk reads and writes do not overlap: streams of this device cannot wait for threads")
        home = PinnedHome(self.pin, self.unpin, round_up(count, PAGE_BYTES))
        home.ensure(count)
        return home.tensor_of(0, count)  # it keeps the memory

    def transfer(self, stream: Stream, index: int, home: HomeStore, offset: int, memory: torch.Tensor) -> None:
        """Issue a file read or write, depending on ``stream``; raise ``TransferError`` if the device refuses."""
        work = self._create_transfer(FileTransfer(stream, index, home, offset, memory))
        self._transfers.append(work)  # keeps it alive until it has run
        if status := self._issue_one(_Action(_Kind.TRANSFER, _stream_index(stream), ctypes.addressof(work))):
            raise TransferError(
                f"the device {self.device} does not take a transfer to or from the spill file (CUDA error {status}); "
                "leave 'home' out, so that host memory alone is used"
            )

    def create_mark(self, *, timed: bool = False) -> Any:
        return torch.cuda.Event(enable_timing=timed)

    def record(self, stream: Stream, mark: Any) -> None:
        mark.record(self._streams[stream])

    def wait(self, stream: Stream, mark: Any) -> None:
        self._streams[stream].wait_event(mark)

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000

    def finish(self, *, host: bool) -> None:
        if host:
            with self._convert_errors():
                self._streams[Stream.COMPUTE].synchronize()
            self._check_transfers()

    def await_mark(self, mark: Any) -> None:
        with self._convert_errors():
            mark.synchronize()

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise DeviceError(f"the device {self.device} failed: {error}") from error

    def synchronize(self) -> None:
        with self._convert_errors():
            torch.cuda.synchronize(self.device)
        self._check_transfers()

    def _check_transfers(self) -> None:
        transfers, self._transfers = self._transfers, []
        check_transfers(transfers)

    def to_pinned(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in pinned memory; return ``source`` if that is unnecessary or fails."""
        if not source.numel() or source.is_pinned():
            return source
        try:
            return source.pin_memory()
        except RuntimeError:
            self._forget_error()
            return source

    def generators(self) -> Sequence[torch.Generator]:
        return (torch.cuda.default_generators[self.device.index], torch.default_generator)

    def pin(self, address: int, count: int) -> bool:
        """Pin host memory, so that copies do not block; return False if the system refuses."""
        with torch.cuda.device(self.device):
            is_pinned = int(_runtime().cudaHostRegister(address, count, _PORTABLE)) == 0
        if not is_pinned:
            self._forget_error()
        return is_pinned

    def unpin(self, address: int) -> None:
        _runtime().cudaHostUnregister(address)

    def _forget_error(self) -> None:
        """Clear the error of a refused call, which the next kernel's check would report."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)

    def prepare(self) -> None:
        """Let libraries allocate their memory per stream (cuBLAS: a workspace) before any op is measured."""
        with torch.cuda.device(self.device):
            self._make_workspaces()
            self.synchronize()

    def _make_workspaces(self) -> None:
        """Make libraries such as cuBLAS allocate their workspaces for the current stream."""
        with torch.no_grad():
            for dtype in (torch.float32, torch.bfloat16):
                square = torch.ones(64, 64, dtype=dtype, device=self.device)
                torch.mm(square, square)
                torch.addmm(square[0], square, square)
        self._workspace_stream = torch.cuda.current_stream(self.device).cuda_stream

    def allocated_bytes(self) -> int:
        """Return the device memory that PyTorch uses, in bytes rounded up to whole segments."""
        return round_up(torch.cuda.memory_allocated(self.device), ALLOCATOR.segment)

    def reserved_bytes(self) -> int:
        """Release PyTorch's unused device memory, and return the bytes that it still reserves."""
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)

    def time(self, call: Callable[[], object]) -> float:
        """Return the median device time of ``call`` in seconds, without the overhead of the timing."""
        with torch.cuda.device(self.device):
            if self._event_seconds is None:
                self._event_seconds = 0.0
                self._event_seconds = self.time(_do_nothing)
            call()
            starts = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS)]
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS)]
            self.synchronize()
            internals.let_device_idle(_IDLE_CYCLES)
            for start, end in zip(starts, ends, strict=True):
                start.record()
                call()
                end.record()
            self.synchronize()
            seconds = statistics.median(s.elapsed_time(e) / 1000 for s, e in zip(starts, ends, strict=True))
            return max(seconds - self._event_seconds, 0.0)

    def facts(self) -> Mapping[str, object]:
        """Return the properties of device and libraries that measured costs depend on, for cache keys."""
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "device": properties.name,
            "device_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "cudnn_flags": [
                torch.backends.cudnn.enabled,
                torch.backends.cudnn.deterministic,
                torch.backends.cudnn.benchmark,
            ],
            "precision": [
                internals.precision_of(torch.backends.cuda, "matmul"),
                internals.precision_of(torch.backends.cudnn, "conv"),
            ],
            "requests": "of a second run",
        }


class CudaArena:
    """An arena in one allocation on a CUDA device; PyTorch's memory statistics and limits include it."""

    is_synchronous = False

    def __init__(self, count: int, device: torch.device, reserve: int) -> None:
        library = self.library = load_native(Flavor.CUDA)
        self.bytes = round_up(max(count, 1), PAGE_BYTES)
        self._device = device
        install(library)
        try:
            self.address = int(torch.cuda.caching_allocator_alloc(self.bytes, device))
        except torch.OutOfMemoryError as error:
            library.outofcore_uninstall()
            raise ArenaError(
                f"{device} does not give {format_bytes(self.bytes)} for the arena; lower the budget, or free other "
                "memory on the device"
            ) from error
        handle = library.outofcore_arena_open(self.address, self.bytes, LARGE_BYTES, reserve)
        if handle is None:
            torch.cuda.caching_allocator_delete(self.address)
            library.outofcore_uninstall()
            raise ArenaError(
                "too many arenas are open or used by tensors; close other steps and drop their tensors first"
            )
        self.handle: int = handle
        # The library releases the memory itself, since tensors in it may outlive the arena.
        self._region: _DeviceRegion | None = _DeviceRegion(self.address, library.outofcore_arena_drop, handle)
        self._uninstall = weakref.finalize(self, library.outofcore_uninstall)
        self._uninstall.atexit = False

    @property
    def region(self) -> object:
        return self._open_region()

    def view(self, offset: int, count: int) -> torch.Tensor:
        """Return a range of the arena as a tensor; raise ``ArenaError`` if it is out of bounds."""
        region = self._open_region()
        if offset < 0 or count < 0 or offset + count > self.bytes:
            raise ArenaError(
                f"bytes [{offset}, {offset + count}) are outside of the arena of {self.bytes} bytes; "
                "this is a bug in the plan: please report it"
            )
        if not count:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return torch.as_tensor(_Bytes(region, offset, count), device=self._device)

    def save(self, offset: int, count: int, home: HomeStore, slot: int) -> None:
        home.tensor_of(slot, count).copy_(self.view(offset, count))

    def load(self, offset: int, count: int, home: HomeStore, slot: int) -> None:
        self.view(offset, count).copy_(home.tensor_of(slot, count))

    def move(self, start: int, to: int, count: int) -> bool:
        if abs(start - to) < count:
            return False
        self.view(to, count).copy_(self.view(start, count))
        return True

    def discard(self, offset: int, count: int) -> None:
        """Keep the memory, since a device's memory can only be released as a whole."""

    def counters(self) -> ArenaCounters:
        self._open_region()
        return read_counters(self.library, self.handle)

    def close(self) -> None:
        self._region = None
        self._uninstall()

    def _open_region(self) -> _DeviceRegion:
        if self._region is None:
            raise StateError("the arena is closed; compile the step again to go on")
        return self._region


class _DeviceRegion:
    """The memory of an arena on a device; ``release`` is called when neither arena nor tensor refers to it."""

    def __init__(self, address: int, release: Callable[[int], object], handle: int) -> None:
        self.address = address
        # Not at exit, when CUDA may have been shut down.
        weakref.finalize(self, functools.partial(release, handle)).atexit = False


class _Bytes:
    """A range of a region for ``torch.as_tensor``; the tensor keeps the region alive."""

    def __init__(self, region: _DeviceRegion, offset: int, count: int) -> None:
        self._region = region
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (region.address + offset, False),
            "strides": None,
            "version": 3,
        }


def _runtime() -> Any:
    return torch.cuda.cudart()


class _Kind(IntEnum):
    """Kind of an action, as ``Kind`` in ``issue.h``."""

    WAIT = 0  # a stream waits for an event
    RECORD = 1  # record an event in a stream
    COPY = 2  # copy bytes
    TRANSFER = 3  # copy between a file and host memory


def _stream_index(stream: Stream) -> int:
    """Return a stream's index among the handles, since native code has no negative indices."""
    return stream % len(Stream)


class _Action(ctypes.Structure):
    """An action, as ``Action`` in ``issue.h``."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("stream", ctypes.c_int32),
        ("to", ctypes.c_void_p),
        ("of", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
    )


class _Lanes:
    """Threads that read and write files, one for each of ``streams`` that can wait for a thread (``lanes.cpp``)."""

    def __init__(self, library: ctypes.PyDLL, device: torch.device, streams: Mapping[Stream, int]) -> None:
        # The lanes' counters, which the device reads, each on its own cache line.
        counts = torch.zeros(len(streams), _LINE_BYTES // 4, dtype=torch.int32, pin_memory=True)
        self.by_stream: dict[Stream, int] = {}
        for index, (stream, handle) in enumerate(streams.items()):
            lane = library.outofcore_lane_new(counts[index].data_ptr())
            if lane is not None and library.outofcore_lane_holds(lane, handle):
                self.by_stream[stream] = lane
            elif lane is not None:
                library.outofcore_lane_free(lane)
        # Not at exit: the threads end with the process.
        weakref.finalize(self, _end_lanes, library, device, tuple(self.by_stream.values()), counts).atexit = False


def _end_lanes(library: ctypes.PyDLL, device: torch.device, lanes: Sequence[int], counts: torch.Tensor) -> None:
    """End the transfer threads once the device is idle; ``counts`` must live until then."""
    if lanes:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(device)  # no transfer may be posted from now on
    for lane in lanes:
        library.outofcore_lane_free(lane)


def _do_nothing() -> None:
    """Use no device time."""
