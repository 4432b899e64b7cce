"""``outofcore doctor``: check the machine and the installed versions, and train a small model through both doors."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import outofcore
from outofcore._torch_internals import TESTED_TEXT, Feature, is_tested, missing
from outofcore.compiling import COMPILERS
from outofcore.errors import OutOfCoreError, StateError
from outofcore.execution.cuda.backend import CudaBackend
from outofcore.execution.opening import open_homes
from outofcore.profiling.cache import Cache, default_cache_folder
from outofcore.profiling.links import measure_link, measure_memory_bandwidth
from outofcore.report.machine import available_memory_bytes, this_machine, transparent_huge_pages
from outofcore.runtime import file_io
from outofcore.runtime.folders import file_system_of
from outofcore.runtime.homes import DiskHome, HomeStore, HostHome
from outofcore.runtime.native import Flavor, load_native
from outofcore.units import MIB, PAGE_BYTES, format_bytes, format_seconds

# The tensors of the small training take 9 MiB.
_TRIAL_BUDGET = 4 * MIB
_TRIAL_STEPS = 3


def doctor(home: str, cache: Path | None) -> bool:
    """Print one line for each check as soon as it is done; return whether a small model trains exactly in both ways.

    An exclamation mark marks a problem. ``cache`` None is the user's default folder. Raises ``SpillError`` if the home
    cannot be used.
    """
    (store,) = open_homes(home)
    try:
        for is_good, name, text in _findings(store, cache):
            _print_line(is_good, name, text)
    finally:
        store.close()
    works = True
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for name, losses_of in (("compile", _compiled_losses), ("budget", _loop_losses)):
            is_good, text = _trial(losses_of, device, home if device == "cpu" else "host")
            _print_line(is_good, f"{name} on {device}", text)
            works = works and is_good
    return works


def _print_line(is_good: bool, name: str, text: str) -> None:
    print(f"{' ' if is_good else '!'} {name:<18} {text}", flush=True)


def _trial(losses_of: Callable[[_Training, str], list[float]], device: str, home: str) -> tuple[bool, str]:
    """Train a small model in one of the ways, and compare its losses with those of plain PyTorch."""
    began = time.perf_counter()
    plain, trained = _Training(device), _Training(device)
    try:
        expected = [plain.step(plain.x).item() for _ in range(_TRIAL_STEPS)]
        losses = losses_of(trained, home)
    except Exception as error:  # whatever it is, it is the answer
        return False, f"{type(error).__name__}: {error}".partition("\n")[0]
    if losses != expected:
        return False, f"the losses are {losses}, and in plain PyTorch {expected}"
    seconds = format_seconds(time.perf_counter() - began)
    return True, f"{_TRIAL_STEPS} steps within {format_bytes(_TRIAL_BUDGET)}, losses as in plain PyTorch; {seconds}"


class _Training:
    """A small model, the same each time, with its optimizer and its input."""

    def __init__(self, device: str) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)]
            self.model = nn.Sequential(*layers).to(device)
            self.x = torch.rand(256, 256).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.model(x) - x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def _compiled_losses(training: _Training, home: str) -> list[float]:
    model, device = training.model, str(training.x.device)
    with outofcore.compile(
        training.step, model, training.optimizer, budget=_TRIAL_BUDGET, device=device, home=home, cache=False
    ) as step:
        return [step(training.x).item() for _ in range(_TRIAL_STEPS)]


def _loop_losses(training: _Training, home: str) -> list[float]:
    with outofcore.budget(_TRIAL_BUDGET, training.model, home=home, cache=False):
        return [training.step(training.x).item() for _ in range(_TRIAL_STEPS)]


def _findings(store: HomeStore, cache: Path | None) -> Iterator[tuple[bool, str, str]]:
    machine = this_machine()
    yield True, "outofcore", f"{outofcore.__version__}, Python {machine.python}, {machine.kernel}"
    threads = f"{torch.get_num_threads()} threads"
    yield is_tested(), "PyTorch", f"{torch.__version__}, {threads}; outofcore is tested with {TESTED_TEXT}"
    for feature in Feature:
        if names := missing(feature):
            yield False, "PyTorch", f"{feature.value} does not work: {', '.join(names)} is missing"
    yield True, "CPU", f"{machine.cpu}, {machine.cores} cores"
    available = available_memory_bytes()
    free = "" if available is None else f", {format_bytes(available)} available"
    yield True, "memory", f"{format_bytes(machine.memory_bytes)}{free}"
    yield True, "memory speed", f"{_rate(measure_memory_bandwidth())} read and written by a copy"
    pages = transparent_huge_pages()
    yield pages != "never", "huge pages", f"transparent, {pages}" if pages else "not told by this system"
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    yield compiler is not None, "C++ compiler", compiler or f"none on PATH (looked for {', '.join(COMPILERS)})"
    yield _native_finding("native code", Flavor.CPU)
    kept = Cache(default_cache_folder() if cache is None else cache)
    files = sum(path.suffix == ".json" for path in kept.files())
    yield True, "measurements", f"{kept.folder}, {files} files, {format_bytes(kept.bytes())}"
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
    yield _native_finding("native code for CUDA", Flavor.CUDA)
    yield from _device_link_findings()


def _native_finding(name: str, flavor: Flavor) -> tuple[bool, str, str]:
    try:
        load_native(flavor)
    except StateError as error:
        return False, name, str(error)
    return True, name, "works"


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
        store.ensure(PAGE_BYTES)
        direct = store.locate(0, PAGE_BYTES).cache is file_io.Cache.PAST
        text = "yes" if direct else "no: copies go through the page cache, which costs processor time"
        yield direct, "direct I/O", text


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s"
