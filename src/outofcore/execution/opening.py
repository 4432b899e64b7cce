"""Devices and homes by the names that users give them."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from outofcore.errors import InputError, SpillError, UnitError
from outofcore.execution.backend import Backend, CpuBackend
from outofcore.execution.cuda.backend import CudaBackend
from outofcore.execution.homes import DiskHome, HomeStore, HostHome
from outofcore.execution.native import Flavor, load_native
from outofcore.units import PAGE_BYTES, parse_bytes


def _host_limit(host_budget: int | str | None) -> int | None:
    limit = None if host_budget is None else parse_bytes(host_budget)
    if limit is not None and limit < PAGE_BYTES:
        raise UnitError(
            f"a host budget of {limit} bytes holds not even one page of {PAGE_BYTES}; leave it out or raise it"
        )
    return limit


def open_homes(home: str | os.PathLike[str] | None, host_budget: int | str | None = None) -> list[HomeStore]:
    """The homes of a step, nearest first.

    Args:
        home: "host", "disk", or a folder on a disk; by default "disk".
        host_budget: bytes of host memory for what is not on the device. With a home on disk they are used before
            it; by default none, and with "host" as much as there is.

    Raises:
        UnitError: the budget cannot be read, or is less than a page.
        SpillError: a home cannot be used.
    """
    limit = _host_limit(host_budget)
    if home == "host":
        return [HostHome(limit)]
    disk = DiskHome() if home is None or home == "disk" else DiskHome(Path(home))
    return [disk] if limit is None else [HostHome(limit), disk]


def open_backend(device: str | torch.device | None) -> Backend:
    """Where steps run: on the CPU, or on a CUDA device.

    Raises:
        InputError: there is no such device, or steps do not run there.
    """
    try:
        wanted = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise InputError(f"{device!r} is no device; write 'cpu', 'cuda' or 'cuda:0'") from error
    if wanted.type == "cpu":
        return CpuBackend()
    if wanted.type == "cuda":
        return CudaBackend(wanted)
    raise InputError(f"steps run on the CPU and on CUDA devices, and device={str(wanted)!r} was asked for")


def open_device_homes(
    backend: CudaBackend, home: str | os.PathLike[str] | None, host_budget: int | str | None
) -> list[HomeStore]:
    """The homes of a step on a GPU, nearest first: pinned host memory, and behind it a disk if one is named.

    Args:
        backend: the GPU.
        home: None or "host", "disk", or a folder on a disk.
        host_budget: bytes of host memory; None: as much as there is.

    Raises:
        UnitError: the budget cannot be read, or is less than a page.
        SpillError: a home cannot be used; so it is with a disk where the native code cannot be built.
    """
    limit = _host_limit(host_budget)
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
    """The homes of a step, nearest first: see ``open_device_homes`` for a GPU, and ``open_homes`` for the CPU."""
    if isinstance(backend, CudaBackend):
        return open_device_homes(backend, home, host_budget)
    return open_homes(home, host_budget)
