"""Open devices and homes by the names that users give them, and track which steps use a home."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import torch

from outofcore._torch_internals import memory_of
from outofcore.analysis import is_large
from outofcore.errors import InputError, StateError, UnitError
from outofcore.execution.aliases import HomeTensors
from outofcore.execution.backend import Backend, CpuBackend
from outofcore.execution.cuda.backend import CudaBackend
from outofcore.execution.engines import ReplayMode
from outofcore.runtime.file_io import new_copy_buffer
from outofcore.runtime.homes import DiskHome, HomeStore, HostHome
from outofcore.runtime.slots import Slots
from outofcore.units import PAGE_BYTES, parse_bytes


class OpenHome:
    """A backing store for bytes that are not on the device; a context manager made by ``open_home``.

    Models are created in it (``outofcore.build``, ``outofcore.materialize``), and steps are compiled over it
    (``outofcore.compile(…, home=…)``). Of several steps that share a home, only one has tensors in its arena. Calling
    another step moves them home and releases that arena. So a step for training and one for evaluation of the same
    model take the larger of their budgets, not the sum.

    >>> import torch
    >>> import outofcore
    >>> with outofcore.open_home("host") as home:
    ...     model = outofcore.build(lambda: torch.nn.Linear(256, 256), home=home)
    ...     home.bytes >= 256 * 256 * 4
    True
    """

    def __init__(self, stores: Sequence[HomeStore], *, stays_open: bool) -> None:
        self.stores = tuple(stores)
        self.home_tensors = HomeTensors([Slots(store) for store in stores])
        self.stays_open = stays_open  # whether tensors stay in the home when a step is closed
        self._holders = 1 if stays_open else 0
        self._closed = False
        self._occupant: tuple[object, Callable[[], None]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def bytes(self) -> int:
        """Bytes in use."""
        return sum(store.bytes for store in self.stores)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized 1-D tensor, which is stored in the home if it takes 64 KiB or more.

        Raises:
            SpillError: the home has no room.

        >>> import torch
        >>> import outofcore
        >>> with outofcore.open_home("disk") as home:
        ...     row = home.empty(1 << 20, torch.float32)
        ...     home.copy(torch.arange(1024.0), row[1024:2048])
        ...     found = torch.empty(1024)
        ...     home.copy(row[1024:2048], found)
        >>> found[-1]
        tensor(1023.)
        """
        size = count * dtype.itemsize
        base = self.home_tensors.allocate(size) if is_large(size) else torch.empty(size, dtype=torch.uint8)
        return base.view(dtype)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy elements as ``target.copy_`` does, but bypass the page cache for tensors on a disk.

        So copying a large tensor in slices takes no memory apart from the slices. A slice bypasses the cache if it is
        whole pages, or ends with the tensor. Source and target have the same shape and dtype, and do not overlap.

        Raises:
            TransferError: the disk cannot be read or written.
            SpillError: the target is in a file that the home does not own, and there is no room for a writable copy.
        """
        source_place, target_place = self._on_disk(source), self._on_disk(target, to_write=True)
        if source_place is not None:
            source_place[0].start()  # the tensor may have been changed since it was last written there
        if source_place is not None and target_place is not None:
            buffer, count = new_copy_buffer(), source.numel() * source.element_size()
            for offset in range(0, count, len(buffer)):
                piece = buffer[: min(len(buffer), count - offset)]
                source_place[0].read(source_place[1] + offset, piece)
                target_place[0].write(target_place[1] + offset, piece)
        elif source_place is not None and _is_memory(target):
            source_place[0].read(source_place[1], memory_of(_bytes_of(target)))
        elif target_place is not None and _is_memory(source):
            target_place[0].write(target_place[1], memory_of(_bytes_of(source)))
        else:
            with torch.no_grad():
                target.copy_(source)

    def _on_disk(self, tensor: torch.Tensor, *, to_write: bool = False) -> tuple[HomeStore, int] | None:
        """Return the disk and offset of a tensor that can bypass the page cache; None for other tensors."""
        slot = self.home_tensors.find_accessible_slot(tensor, to_write=to_write) if tensor.is_contiguous() else None
        if slot is None or slot[0].in_memory:
            return None
        begin = int(tensor.storage_offset()) * tensor.element_size()
        end = begin + tensor.numel() * tensor.element_size()
        if begin % PAGE_BYTES or (end % PAGE_BYTES and end != tensor.untyped_storage().nbytes()):
            return None
        return slot[0], slot[1] + begin

    def close(self) -> None:
        """Close the home; steps that use it can go on, and its tensors stay valid. May be called again."""
        if self.stays_open and not self._closed:
            self._closed = True
            self.release()

    def check_open(self) -> None:
        if self._closed:
            raise StateError("this home is closed; open another one with outofcore.open_home()")

    def hold(self) -> None:
        """Count one more step that uses the home."""
        self.check_open()
        self._holders += 1

    def release(self) -> None:
        """Remove one user of the home; close the stores after the last one."""
        self._holders -= 1
        if self._holders == 0:
            for store in self.stores:
                store.close()

    @property
    def shared(self) -> bool:
        """Whether the user or several steps may use the home's tensors."""
        return self.stays_open or self._holders > 1

    def start(self) -> None:
        """Record that any tensor at home may have changed since it was last written."""
        for store in self.stores:
            store.start()

    def occupy(self, step: object, move_out: Callable[[], None]) -> bool:
        """Move out the previous step and give the home to ``step``; return False if ``step`` already has the home."""
        # ``move_out`` moves this step's tensors home when another step needs them.
        if self._occupant is not None and self._occupant[0] is step:
            return False
        if self._occupant is not None:
            self._occupant[1]()
        self._occupant = (step, move_out)
        return True

    def leave(self, step: object) -> None:
        """Record that a step has no tensors in its arena any more."""
        if self._occupant is not None and self._occupant[0] is step:
            self._occupant = None


def _is_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def parse_host_limit(host_budget: int | str | None) -> int | None:
    """Parse a limit of host memory to bytes; raise ``UnitError`` if it is invalid or below a page."""
    limit = None if host_budget is None else parse_bytes(host_budget)
    if limit is not None and limit < PAGE_BYTES:
        raise UnitError(
            f"a host budget of {limit} bytes holds not even one page of {PAGE_BYTES} bytes; leave it out or raise it"
        )
    return limit


def open_homes(home: str | os.PathLike[str] | None, host_budget: int | str | None = None) -> list[HomeStore]:
    """Open the homes of a step on the CPU, nearest first; ``home`` is "host", "disk" (default) or a folder.

    By default "host" has no limit, and a disk is used alone. Raises ``UnitError`` for an invalid
    budget, ``SpillError`` if a home cannot be used.
    """
    limit = parse_host_limit(host_budget)
    if home == "host":
        return [HostHome(limit)]
    disk = DiskHome() if home is None or home == "disk" else DiskHome(Path(home))
    return [disk] if limit is None else [HostHome(limit), disk]


def open_backend(device: str | torch.device | None, *, replay: ReplayMode = True) -> Backend:
    """Open the backend of a device, by default the CPU; raise ``InputError`` if steps cannot run there."""
    _initialize_vector_math()
    try:
        parsed = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise InputError(f"{device!r} is no device; write 'cpu', 'cuda' or 'cuda:0'") from error
    if parsed.type == "cpu":
        return CpuBackend(replay=bool(replay))
    if parsed.type == "cuda":
        return CudaBackend(parsed, replay=replay)
    raise InputError(f"device={str(parsed)!r} is not supported; use 'cpu' or a CUDA device")


def _initialize_vector_math() -> None:
    """Let MKL's vector functions initialize themselves in one thread."""
    # If several threads make a process's first call of such a function (``sqrt``, ``exp``, ``erf`` …), some of them
    # compute it less exactly, in about one process of ten (PyTorch 2.13, MKL 2024.2).
    torch.ones(16, dtype=torch.float32, device="cpu").sqrt_()


def open_device_homes(
    backend: CudaBackend, home: str | os.PathLike[str] | None, host_budget: int | str | None
) -> list[HomeStore]:
    """Open the homes of a step on a GPU: pinned host memory and, if ``home`` names one, a disk."""
    limit = parse_host_limit(host_budget)
    if home is None or home == "host":
        return [backend.home(limit)]
    return [backend.home(limit), DiskHome() if home == "disk" else DiskHome(Path(home))]


def open_homes_of_backend(
    backend: Backend, home: str | os.PathLike[str] | None, host_budget: int | str | None = None
) -> list[HomeStore]:
    """Open the homes of a step on the device of ``backend``, nearest first."""
    if isinstance(backend, CudaBackend):
        return open_device_homes(backend, home, host_budget)
    return open_homes(home, host_budget)
