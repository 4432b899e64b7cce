"""Open devices and homes by the names that users give them; an open home, with its slots and users."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import torch

from outofcore.errors import InputError, SpillError, StateError, UnitError
from outofcore.execution.aliases import Faces
from outofcore.execution.backend import Backend, CpuBackend
from outofcore.execution.cuda.backend import CudaBackend
from outofcore.execution.engines import Replaying
from outofcore.execution.homes import DiskHome, HomeStore, HostHome
from outofcore.execution.native import Flavor, load_native
from outofcore.execution.slots import Slots
from outofcore.units import PAGE_BYTES, parse_bytes


class OpenHome:
    """Where bytes are that are not on the device: made by ``outofcore.open_home``; a context manager.

    Models are created in it (``outofcore.build``, ``outofcore.materialize``), and steps are compiled over it
    (``outofcore.compile(…, home=…)``). Of several steps that share a home only one has tensors in its arena: calling
    another one brings them home and releases that arena, so that a step for training and one for evaluation of the same
    model take the larger of their budgets and not the sum.

    Args:
        stores: where the bytes are, nearest first.
        kept: whether the home outlives its steps: what is there stays there when a step is closed; else it moves to
            ordinary memory with the last step that shares the home.

    >>> import torch
    >>> import outofcore
    >>> with outofcore.open_home("host") as home:
    ...     model = outofcore.build(lambda: torch.nn.Linear(256, 256), home=home)
    ...     home.bytes >= 256 * 256 * 4
    True
    """

    def __init__(self, stores: Sequence[HomeStore], *, kept: bool) -> None:
        self.stores = tuple(stores)
        self.faces = Faces([Slots(store) for store in stores])
        self.kept = kept
        self._holders = 1 if kept else 0
        self._closed = False
        self._tenant: tuple[object, Callable[[], None]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def bytes(self) -> int:
        """Bytes that are in use."""
        return sum(store.bytes for store in self.stores)

    def close(self) -> None:
        """Close the home; it is given back to the system once no step uses it. May be called again.

        Tensors in it stay valid.
        """
        if self.kept and not self._closed:
            self._closed = True
            self.release()

    def check_open(self) -> None:
        """Raise ``StateError`` if the home was closed."""
        if self._closed:
            raise StateError("this home is closed; open another one with outofcore.open_home()")

    def hold(self) -> None:
        """Count one more step that needs the home."""
        self.check_open()
        self._holders += 1

    def release(self) -> None:
        """Count one step less that needs the home; the last one closes it."""
        self._holders -= 1
        if self._holders == 0:
            for store in self.stores:
                store.close()

    @property
    def shared(self) -> bool:
        """Whether somebody other than the step that asks needs what is there, or may do so."""
        return self.kept or self._holders > 1

    def start(self) -> None:
        """Record that anything at home may have changed since it was last written."""
        for store in self.stores:
            store.start()

    def occupy(self, step: object, vacate: Callable[[], None]) -> bool:
        """Let a step bring tensors into its arena, after the last occupant has removed its own.

        ``vacate`` is called when another step is to have the tensors; they are at home when it returns. Returns whether
        another step had them last. Raises ``StateError`` if that cannot give them up.
        """
        if self._tenant is not None and self._tenant[0] is step:
            return False
        if self._tenant is not None:
            self._tenant[1]()
        self._tenant = (step, vacate)
        return True

    def leave(self, step: object) -> None:
        """Record that a step has nothing in its arena any more."""
        if self._tenant is not None and self._tenant[0] is step:
            self._tenant = None


def host_limit(host_budget: int | str | None) -> int | None:
    """Parse the host memory limit of a home to bytes; raises ``UnitError`` if it is invalid or less than a page."""
    limit = None if host_budget is None else parse_bytes(host_budget)
    if limit is not None and limit < PAGE_BYTES:
        raise UnitError(
            f"a host budget of {limit} bytes holds not even one page of {PAGE_BYTES}; leave it out or raise it"
        )
    return limit


def open_homes(home: str | os.PathLike[str] | None, host_budget: int | str | None = None) -> list[HomeStore]:
    """Open the homes of a step on the CPU, nearest first; ``home`` is "host", "disk" (default) or a folder on a disk.

    With a home on disk ``host_budget`` is used before it, by default none; with "host" the default is unlimited. Raises
    ``UnitError`` for a bad budget, ``SpillError`` if a home cannot be used.
    """
    limit = host_limit(host_budget)
    if home == "host":
        return [HostHome(limit)]
    disk = DiskHome() if home is None or home == "disk" else DiskHome(Path(home))
    return [disk] if limit is None else [HostHome(limit), disk]


def open_backend(device: str | torch.device | None, *, replay: Replaying = True) -> Backend:
    """Open the backend of a device, by default the CPU; raises ``InputError`` if steps cannot run there.

    With ``replay`` native code may call ops; "graphs": and makes CUDA graphs of them.
    """
    try:
        wanted = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise InputError(f"{device!r} is no device; write 'cpu', 'cuda' or 'cuda:0'") from error
    if wanted.type == "cpu":
        return CpuBackend(replay=bool(replay))
    if wanted.type == "cuda":
        return CudaBackend(wanted, replay=replay)
    raise InputError(f"steps run on the CPU and on CUDA devices, and device={str(wanted)!r} was asked for")


def open_device_homes(
    backend: CudaBackend, home: str | os.PathLike[str] | None, host_budget: int | str | None
) -> list[HomeStore]:
    """Open the homes of a step on a GPU, nearest first: pinned host memory, and behind it a disk if one is named.

    Raises ``UnitError`` for a bad budget, ``SpillError`` if a home cannot be used, as a disk without the native code.
    """
    limit = host_limit(host_budget)
    if home is None or home == "host":
        return [backend.home(limit)]
    native = load_native(Flavor.CUDA)
    if native.library is None:
        raise SpillError(
            f"the device {backend.device} reaches a disk by native code alone, and {native.reason}; install a C++ "
            "compiler, or leave 'home' out"
        )
    return [backend.home(limit), DiskHome() if home == "disk" else DiskHome(Path(home))]


def homes_of(
    backend: Backend, home: str | os.PathLike[str] | None, host_budget: int | str | None = None
) -> list[HomeStore]:
    if isinstance(backend, CudaBackend):
        return open_device_homes(backend, home, host_budget)
    return open_homes(home, host_budget)
