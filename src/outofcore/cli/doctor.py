"""``outofcore doctor``: what the library sees of the machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

import outofcore
from outofcore.cli.measured import cache_at, describe
from outofcore.compiling import COMPILERS
from outofcore.errors import OutOfCoreError
from outofcore.execution.cuda.backend import CudaBackend
from outofcore.execution.folders import file_system_of
from outofcore.execution.homes import DiskHome, HomeStore, HostHome
from outofcore.execution.native import Flavor, load_native
from outofcore.execution.opening import open_homes
from outofcore.profiling.links import measure_link, measure_memory_bandwidth
from outofcore.report.machine import available_memory_bytes, this_machine, transparent_huge_pages
from outofcore.units import MIB, format_bytes, format_seconds


def doctor(home: str, cache: Path | None) -> None:
    """Print one line for each thing that matters, as it becomes known; an exclamation mark marks what is amiss.

    Args:
        home: as on the command line.
        cache: the folder in which measurements are kept; None: the user's own.

    Raises:
        SpillError: the home cannot be used.
    """
    (store,) = open_homes(home)
    try:
        for good, name, text in _findings(store, cache):
            print(f"{' ' if good else '!'} {name:<18} {text}", flush=True)
    finally:
        store.close()


def _findings(store: HomeStore, cache: Path | None) -> Iterator[tuple[bool, str, str]]:
    machine = this_machine()
    yield True, "outofcore", f"{outofcore.__version__}, Python {machine.python}, {machine.kernel}"
    yield True, "PyTorch", f"{torch.__version__}, {torch.get_num_threads()} threads"
    yield True, "CPU", f"{machine.cpu}, {machine.cores} cores"
    available = available_memory_bytes()
    free = "" if available is None else f", {format_bytes(available)} available"
    yield True, "memory", f"{format_bytes(machine.memory_bytes)}{free}"
    yield True, "memory speed", f"{_rate(measure_memory_bandwidth())} read and written by a copy"
    pages = transparent_huge_pages()
    yield pages != "never", "huge pages", f"transparent, {pages}" if pages else "not told by this system"
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    yield compiler is not None, "C++ compiler", compiler or f"none on PATH (looked for {', '.join(COMPILERS)})"
    native = load_native()
    good = native.library is not None
    yield good, "native arena", "works" if good else f"{native.reason}; steps run on malloc, which is slower"
    yield True, "measurements", describe(cache_at(cache))
    yield from _home_findings(store)
    if isinstance(store, DiskHome):
        host = HostHome()
        try:
            yield from _home_findings(host)
        finally:
            host.close()
    if not torch.cuda.is_available():
        yield True, "CUDA", "no device"
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        text = f"{device.name}, {format_bytes(device.total_memory)}, compute capability {device.major}.{device.minor}"
        yield True, f"CUDA device {index}", text
    native = load_native(Flavor.CUDA)
    good = native.library is not None
    why = "" if good else f"{native.reason}; results are copied to their places, and scratch memory is not planned"
    yield good, "native CUDA arena", why or "works"
    yield from _device_link_findings()


def _device_link_findings() -> Iterator[tuple[bool, str, str]]:
    backend = CudaBackend(torch.device("cuda"))
    home = backend.home(256 * MIB)
    try:
        link = measure_link(home, driver=backend.driver)
    except OutOfCoreError as error:
        yield False, "pinned memory", f"cannot be measured: {error}"
        return
    finally:
        home.close()
    alone = f"out {_rate(link.alone.out)}, in {_rate(link.alone.into)}; latency {format_seconds(link.latency_s)}"
    beside = f"both at once, beside ops: {_rate(link.together.out)} and {_rate(link.together.into)}"
    yield home.pinned, "pinned memory", f"{alone}; {beside}" if home.pinned else f"refused by the system; {alone}"


def _home_findings(store: HomeStore) -> Iterator[tuple[bool, str, str]]:
    name = f"{store.name} home"
    room = f"{format_bytes(store.capacity)} free"
    if isinstance(store, DiskHome):
        system = file_system_of(store.directory) or "unknown file system"
        room = f"{store.directory} ({system}), {room}"
    yield True, name, room
    try:
        link = measure_link(store)
    except OutOfCoreError as error:
        yield False, name, f"cannot be measured: {error}"
        return
    yield (
        True,
        f"{store.name} speed",
        f"out {_rate(link.alone.out)}, in {_rate(link.alone.into)}; latency {format_seconds(link.latency_s)}",
    )
    yield (
        True,
        f"{store.name} beside ops",
        f"out {_rate(link.computing.out)}, in {_rate(link.computing.into)}; both at once {_rate(link.together.out)} "
        f"and {_rate(link.together.into)}; ops take {link.compute_slowdown:.0%} longer for each",
    )
    if isinstance(store, DiskHome):
        text = "yes" if store.direct else "no: copies go through the page cache, which costs processor time"
        yield store.direct, "direct I/O", text


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s"
