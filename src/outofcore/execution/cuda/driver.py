"""CUDA itself: every call of ``torch.cuda`` that runs a step is in this file.

Written against torch 2.11: ``torch.cuda.Stream``, ``Event``, ``caching_allocator_alloc`` and ``cudart`` as
documented at https://docs.pytorch.org/docs/2.11/cuda.html, stream order and host memory as in the CUDA runtime's
reference (cudaStreamWaitEvent takes an event as it was recorded last, so that marks can be recorded anew in each
step; cudaMemcpyAsync does not block the host where its host memory is pinned; memory that cudaHostRegister has pinned
is as good as memory from cudaHostAlloc). Transfers to and from a disk are host functions in a stream (cuLaunchHostFunc
of the driver's API, by the stream's ``cuda_stream``, which is a CUstream as well as a cudaStream_t): such a function
runs after what was issued to its stream before and holds up what comes after, must not call CUDA nor wait for anything
that does, and functions of several streams may run one after the other. It has not run on a GPU yet.

The arena is one allocation of the caching allocator's. So it counts in ``torch.cuda.max_memory_reserved`` and is held
to ``set_per_process_memory_fraction``, and all that ops ask for within it (``arena.cpp``) changes neither. A step
therefore cannot fragment the device's memory; expandable segments, which would map pages to make room, are not needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import statistics
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from outofcore import _torch_internals as internals
from outofcore.analysis import LARGE_BYTES
from outofcore.errors import ArenaError, InputError, StateError, TransferError
from outofcore.execution.arena import ArenaCounters, Recorder, install, read_counters
from outofcore.execution.binding import Bound, BoundRun
from outofcore.execution.cuda.interface import FileHome, Mark, Stream
from outofcore.execution.cuda.staging import Transfer, check_transfers, transfer_of
from outofcore.execution.homes import HomeStore, PinnedHome
from outofcore.execution.native import Flavor, load_native
from outofcore.units import MIB, PAGE_BYTES, format_bytes, round_up

# What the caching allocator hands out begins at multiples of this, and kernels are chosen by it.
ALIGNMENT = 512
# It takes memory from the device in pieces of this, for small requests and for large ones.
SEGMENT = 2 * MIB
_PORTABLE = 1  # cudaHostRegisterPortable
_REPEATS = 5
# Cycles that the device idles while the host issues what is to be timed: some milliseconds.
_AHEAD = 8_000_000


class CudaDriver:
    """One CUDA device, as ``interface.Driver`` has it.

    Args:
        device: such as ``torch.device("cuda", 0)``; without an index, the current one.

    Raises:
        InputError: there is no such device.
    """

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise InputError(
                f"device {str(device)!r} was asked for, and PyTorch sees no CUDA device here; "
                "see `outofcore doctor`, or leave 'device' out to run on the CPU"
            )
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise InputError(f"there is no device cuda:{index}; PyTorch sees {torch.cuda.device_count()}")
        self.device = torch.device("cuda", index)
        # By number; all but the first, which is the user's own.
        self._streams: list[Any] = [
            torch.cuda.current_stream(self.device),
            *(torch.cuda.Stream(self.device) for _ in list(Stream)[1:]),
        ]
        self._transfers: list[Transfer] = []  # of this step

    def open_arena(self, count: int, reserve: int) -> CudaArena:
        """See ``Driver.open_arena``."""
        return CudaArena(count, self.device, reserve)

    @contextlib.contextmanager
    def step(self, bound: Bound | None) -> Iterator[None]:
        """See ``Driver.step``; the compute stream is the one that is current now."""
        with torch.cuda.device(self.device):
            self._streams[Stream.COMPUTE] = torch.cuda.current_stream(self.device)
            yield

    def launch(self, run: BoundRun | None, call: Callable[[], object]) -> None:
        """See ``Driver.launch``."""
        call()

    def copy(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """See ``Driver.copy``: cudaMemcpyAsync on the stream, as both sides are contiguous bytes."""
        with torch.cuda.stream(self._streams[stream]):
            target.copy_(source, non_blocking=True)

    def staging(self, count: int) -> torch.Tensor:
        """See ``Driver.staging``."""
        home = PinnedHome(self.pin, self.unpin, round_up(count, PAGE_BYTES))
        home.ensure(count)
        return home.face(0, count)  # it keeps the memory

    def transfer(self, stream: Stream, index: int, home: FileHome, offset: int, memory: torch.Tensor) -> None:
        """See ``Driver.transfer``."""
        library = load_native(Flavor.CUDA).library
        if library is None:
            raise TransferError(
                f"the device {self.device} reaches a disk by native code alone, and {load_native(Flavor.CUDA).reason}; "
                "install a C++ compiler, or leave 'home' out"
            )
        work = transfer_of(home, offset, memory.data_ptr(), memory.numel(), writes=stream is Stream.WRITE)
        self._transfers.append(work)  # it has to live until it has run
        function = ctypes.cast(library.outofcore_transfer, ctypes.c_void_p)
        handle = ctypes.c_void_p(self._streams[stream].cuda_stream)
        status = _cuda().cuLaunchHostFunc(handle, function, ctypes.byref(work))
        if status:
            raise TransferError(
                f"the device {self.device} does not take a transfer to or from the spill file (CUresult {status}); "
                "leave 'home' out, so that host memory alone is used"
            )

    def mark(self, *, timed: bool = False) -> Any:
        """See ``Driver.mark``."""
        return torch.cuda.Event(enable_timing=timed)

    def record(self, stream: Stream, mark: Any) -> None:
        """See ``Driver.record``."""
        mark.record(self._streams[stream])

    def wait(self, stream: Stream, mark: Any) -> None:
        """See ``Driver.wait``."""
        self._streams[stream].wait_event(mark)

    def seconds(self, start: Any, end: Any) -> float:
        """See ``Driver.seconds``."""
        return float(start.elapsed_time(end)) / 1000

    def finish(self, *, host: bool) -> None:
        """See ``Driver.finish``: the compute stream has waited for the others already."""
        if host:
            self._streams[Stream.COMPUTE].synchronize()
            self._check_transfers()

    def await_mark(self, mark: Any) -> None:
        """See ``Driver.await_mark``."""
        mark.synchronize()

    def synchronize(self) -> None:
        """See ``Driver.synchronize``."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise TransferError(f"the device {self.device} failed: {error}") from error
        self._check_transfers()

    def _check_transfers(self) -> None:
        transfers, self._transfers = self._transfers, []
        check_transfers(transfers)

    def pinned(self, source: torch.Tensor) -> torch.Tensor:
        """See ``Driver.pinned``. PyTorch does not reuse pinned memory of its own before copies from it are done."""
        if not source.numel() or source.is_pinned():
            return source
        try:
            return source.pin_memory()
        except RuntimeError:
            self._forget_error()
            return source

    def generators(self) -> Sequence[torch.Generator]:
        """See ``Driver.generators``."""
        return (torch.cuda.default_generators[self.device.index], torch.default_generator)

    def pin(self, address: int, count: int) -> bool:
        """Pin whole pages of host memory in place, to the byte; False where the system refuses."""
        with torch.cuda.device(self.device):
            done = int(_runtime().cudaHostRegister(address, count, _PORTABLE)) == 0
        if not done:
            self._forget_error()
        return done

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""
        _runtime().cudaHostUnregister(address)

    def _forget_error(self) -> None:
        """Clear the error that a refused call leaves behind: the next kernel's check takes it for its own."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)

    def prepare(self) -> None:
        """Let libraries make what they keep for a stream (cuBLAS: a workspace), so that no op is charged with it."""
        with torch.cuda.device(self.device), torch.no_grad():
            for dtype in (torch.float32, torch.bfloat16):
                square = torch.ones(64, 64, dtype=dtype, device=self.device)
                torch.mm(square, square)
                torch.addmm(square[0], square, square)
            self.synchronize()

    def allocated_bytes(self) -> int:
        """Bytes in use of those that PyTorch has from the device, in whole segments at the least."""
        return round_up(torch.cuda.memory_allocated(self.device), SEGMENT)

    def reserved_bytes(self) -> int:
        """Bytes that PyTorch has from the device, once it has given back what it can."""
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)

    def recorder(self) -> Recorder:
        """Logs what a thread asks of CUDA's allocator."""
        return Recorder(load_native(Flavor.CUDA))

    def time(self, call: Callable[[], object]) -> float:
        """Median seconds that the device takes for what ``call`` issues, the host being ahead of it."""
        with torch.cuda.device(self.device):
            call()
            starts = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS)]
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS)]
            self.synchronize()
            internals.let_device_idle(_AHEAD)
            for start, end in zip(starts, ends, strict=True):
                start.record()
                call()
                end.record()
            self.synchronize()
            return statistics.median(s.elapsed_time(e) / 1000 for s, e in zip(starts, ends, strict=True))

    def facts(self) -> Mapping[str, object]:
        """What the speed of ops and of copies on this device depends on."""
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
            "arena": load_native(Flavor.CUDA).library is not None,
        }


class CudaArena:
    """One allocation on a CUDA device in which addresses are planned; as ``arenas.Memory`` has it.

    The memory lives until ``close``, and then as long as any view of it or tensor placed in it.

    Args:
        count: bytes, rounded up to whole pages.
        device: with an index.
        reserve: bytes beyond it for off-plan requests of 64 KiB and more.

    Raises:
        ArenaError: the device does not give the memory, or the allocator cannot be put under PyTorch.
    """

    def __init__(self, count: int, device: torch.device, reserve: int) -> None:
        self.native = load_native(Flavor.CUDA)
        self.bytes = round_up(max(count, 1), PAGE_BYTES)
        self._device = device
        library = self.native.library
        if library is not None:
            install(library)
        try:
            self.address = int(torch.cuda.caching_allocator_alloc(self.bytes, device))
        except torch.OutOfMemoryError as error:
            if library is not None:
                library.outofcore_uninstall()
            raise ArenaError(
                f"{device} does not give {format_bytes(self.bytes)} for the arena; lower the budget, or free what else "
                "lies there"
            ) from error
        self._handle: int | None = None
        self._uninstall: Callable[[], object] = _nothing
        if library is None:
            self._region: _Region | None = _Region(self.address, torch.cuda.caching_allocator_delete, self.address)
            return
        self._handle = library.outofcore_arena_open(self.address, self.bytes, LARGE_BYTES, reserve)
        if self._handle is None:
            torch.cuda.caching_allocator_delete(self.address)
            library.outofcore_uninstall()
            raise ArenaError("too many arenas are open or still referred to by tensors; close compiled steps first")
        # The library gives the memory back itself, since tensors that it placed there may live longer.
        self._region = _Region(self.address, library.outofcore_arena_drop, self._handle)
        self._uninstall = weakref.finalize(self, library.outofcore_uninstall)
        self._uninstall.atexit = False

    @property
    def region(self) -> object:
        """See ``Memory.region``."""
        return self._opened()

    @property
    def handle(self) -> int | None:
        """See ``Memory.handle``."""
        return self._handle

    def view(self, offset: int, count: int) -> torch.Tensor:
        """See ``Memory.view``.

        Raises:
            ArenaError: the bytes do not lie in the arena.
            StateError: the arena is closed.
        """
        region = self._opened()
        if offset < 0 or count < 0 or offset + count > self.bytes:
            raise ArenaError(
                f"bytes [{offset}, {offset + count}) do not lie in the arena of {self.bytes} bytes; "
                "this is a fault of the plan: please report it"
            )
        if not count:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return torch.as_tensor(_Bytes(region, offset, count), device=self._device)

    def save(self, offset: int, count: int, home: HomeStore, slot: int) -> None:
        """See ``Memory.save``: in the order of the current stream; the host waits."""
        home.face(slot, count).copy_(self.view(offset, count))

    def load(self, offset: int, count: int, home: HomeStore, slot: int) -> None:
        """See ``Memory.load``: in the order of the current stream; the host waits."""
        self.view(offset, count).copy_(home.face(slot, count))

    def move(self, start: int, to: int, count: int) -> bool:
        """See ``Memory.move``: in the order of the current stream."""
        if abs(start - to) < count:
            return False
        self.view(to, count).copy_(self.view(start, count))
        return True

    def discard(self, offset: int, count: int) -> None:
        """See ``Memory.discard``: a device's memory is given back as a whole."""

    def counters(self) -> ArenaCounters:
        """See ``Memory.counters``."""
        self._opened()
        if self.native.library is None:
            return ArenaCounters()
        return read_counters(self.native.library, self._handle)

    def close(self) -> None:
        """See ``Memory.close``."""
        self._region = None
        self._uninstall()

    def _opened(self) -> _Region:
        if self._region is None:
            raise StateError("the arena is closed; compile the step again to go on")
        return self._region


class _Region:
    """Device memory, given back when nothing refers to it any more."""

    def __init__(self, address: int, release: Callable[[int], object], what: int) -> None:
        self.address = address
        # Not at exit: by then CUDA may be gone.
        weakref.finalize(self, functools.partial(release, what)).atexit = False


class _Bytes:
    """Some bytes of a region for ``torch.as_tensor``, whose result keeps the region alive."""

    def __init__(self, region: _Region, offset: int, count: int) -> None:
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


@functools.cache
def _cuda() -> ctypes.CDLL:
    """The driver's API, which is loaded wherever there is a device. Calls release the GIL."""
    return ctypes.CDLL("libcuda.so.1")


def _nothing() -> None:
    """Stands in for the native allocator's call."""


__all__ = ["ALIGNMENT", "SEGMENT", "CudaArena", "CudaDriver", "Mark"]
