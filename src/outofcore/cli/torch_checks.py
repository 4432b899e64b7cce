"""The checks of ``outofcore doctor`` that need PyTorch; the last ones train a small model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import outofcore
from outofcore._torch_internals import TESTED_TEXT, Feature, is_tested, missing
from outofcore.cli.doctor import CPU_BUILD, CheckStatus, Finding
from outofcore.compiling import is_built
from outofcore.errors import OutOfCoreError, StateError
from outofcore.execution.cuda.backend import CudaBackend
from outofcore.execution.opening import open_homes
from outofcore.profiling.links import Rates, measure_link, measure_memory_bandwidth
from outofcore.runtime import file_io
from outofcore.runtime.folders import file_system_of
from outofcore.runtime.homes import DiskHome, HomeStore, HostHome
from outofcore.runtime.native import Flavor, library_file, load_native
from outofcore.units import MIB, PAGE_BYTES, format_bytes, format_seconds

# The tensors of the small training take 9 MiB.
_TRIAL_BUDGET = 4 * MIB
_TRIAL_STEPS = 3


def findings(home: str) -> Iterator[Finding]:
    """Run all checks that need PyTorch, and yield each finding when its check ends."""
    has_gpu = torch.cuda.is_available()
    (store,) = open_homes(home)
    try:
        yield from _torch_findings()
        yield from _gpu_findings()
        yield from _native_findings("native code", Flavor.CPU)
        text = f"{_rate_text(measure_memory_bandwidth())} read and written by a copy"
        yield Finding(CheckStatus.OK, "memory speed", text)
        yield from _home_findings(store)
        if isinstance(store, DiskHome):
            host = HostHome()
            try:
                yield from _home_findings(host)
            finally:
                host.close()
    finally:
        store.close()
    if has_gpu:
        yield from _native_findings("CUDA native code", Flavor.CUDA)
        yield _device_link_finding()
    for device in ("cpu", "cuda") if has_gpu else ("cpu",):
        for name, losses_of in (("compile", _compiled_losses), ("budget", _loop_losses)):
            yield _training_finding(f"{name} on {device}", losses_of, device, home if device == "cpu" else "host")


def _torch_findings() -> Iterator[Finding]:
    version, threads = torch.__version__, f"{torch.get_num_threads()} threads"
    if is_tested():
        yield Finding(CheckStatus.OK, "PyTorch", f"{version}, {threads}; outofcore is tested with {TESTED_TEXT}")
    else:
        text = f"{version}, {threads}; outofcore is tested with {TESTED_TEXT} and may not work with this version"
        yield Finding(CheckStatus.NOTE, "PyTorch", text)
    for feature in Feature:
        if names := missing(feature):
            text = f"{feature.value} does not work with this version: it lacks {', '.join(names)}"
            yield Finding(CheckStatus.PROBLEM, "PyTorch", text)


def _gpu_findings() -> Iterator[Finding]:
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        text = f"{device.name}, {format_bytes(device.total_memory)}, compute capability {device.major}.{device.minor}"
        yield Finding(CheckStatus.OK, f"GPU {index}", text)
    if torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        yield Finding(CheckStatus.OK, "GPU", "not used: this PyTorch is built for the CPU")
    elif Path("/proc/driver/nvidia").exists():
        yield Finding(CheckStatus.NOTE, "GPU", "PyTorch cannot use the NVIDIA GPU of this machine; update its driver")
    else:
        text = f"none; to save the 5 GB of CUDA libraries: pip uninstall torch, then {CPU_BUILD}"
        yield Finding(CheckStatus.NOTE, "GPU", text)


def _native_findings(name: str, flavor: Flavor) -> Iterator[Finding]:
    if not is_built(library_file(flavor)) and not sys.stderr.isatty():  # on a terminal the compilation reports itself
        yield Finding(CheckStatus.BEGINS, name, "compiling now, once, for about half a minute ...")
    try:
        load_native(flavor)
    except StateError as error:
        yield Finding(CheckStatus.PROBLEM, name, str(error))
    else:
        yield Finding(CheckStatus.OK, name, "works")


def _device_link_finding() -> Finding:
    backend = CudaBackend(torch.device("cuda"))
    home = backend.home(256 * MIB)
    try:
        link = measure_link(home, driver=backend.driver)
    except OutOfCoreError as error:
        return Finding(CheckStatus.PROBLEM, "pinned memory", f"cannot be measured: {error}")
    finally:
        home.close()
    text = (
        f"{_speeds_text(link.alone)}, latency {format_seconds(link.latency_s)}; both at once while ops run: "
        f"{_speeds_text(link.together)}"
    )
    if home.pinned:
        return Finding(CheckStatus.OK, "pinned memory", text)
    return Finding(CheckStatus.NOTE, "pinned memory", f"refused by the system, so copies are slower; {text}")


def _home_findings(store: HomeStore) -> Iterator[Finding]:
    name = f"{store.name} home"
    room = f"{format_bytes(store.capacity)} free"
    if isinstance(store, DiskHome):
        system = file_system_of(store.directory) or "unknown file system"
        room = f"{store.directory} ({system}), {room}"
    yield Finding(CheckStatus.OK, name, room)
    try:
        link = measure_link(store)
    except OutOfCoreError as error:
        yield Finding(CheckStatus.PROBLEM, name, f"cannot be measured: {error}")
        return
    text = f"{_speeds_text(link.alone)}, latency {format_seconds(link.latency_s)}"
    yield Finding(CheckStatus.OK, f"{store.name} speed", text)
    text = f"{_speeds_text(link.computing)} while ops run, which slows them by {link.compute_slowdown:.0%}; "
    text += f"both at once: {_speeds_text(link.together)}"
    yield Finding(CheckStatus.OK, f"{store.name} under load", text)
    if isinstance(store, DiskHome):
        store.ensure(PAGE_BYTES)
        if store.locate(0, PAGE_BYTES).cache is file_io.Cache.PAST:
            yield Finding(CheckStatus.OK, "direct I/O", "yes")
        else:
            text = "no: copies go through the page cache, which takes CPU time"
            yield Finding(CheckStatus.NOTE, "direct I/O", text)


def _speeds_text(rates: Rates) -> str:
    return f"write {_rate_text(rates.out)}, read {_rate_text(rates.into)}"


def _rate_text(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s"


def _training_finding(
    name: str, losses_of: Callable[[_SmallTraining, str], list[float]], device: str, home: str
) -> Finding:
    """Check that a small model trains to the same losses as in plain PyTorch, and return the finding."""
    began = time.perf_counter()
    plain, trained = _SmallTraining(device), _SmallTraining(device)
    try:
        expected = [plain.step(plain.x).item() for _ in range(_TRIAL_STEPS)]
        losses = losses_of(trained, home)
    except Exception as error:  # any error is a finding
        return Finding(CheckStatus.PROBLEM, name, f"{type(error).__name__}: {error}".partition("\n")[0])
    if losses != expected:
        return Finding(CheckStatus.PROBLEM, name, f"losses {losses} differ from plain PyTorch's, {expected}")
    seconds = format_seconds(time.perf_counter() - began)
    text = f"{_TRIAL_STEPS} steps within {format_bytes(_TRIAL_BUDGET)}, losses as in plain PyTorch; {seconds}"
    return Finding(CheckStatus.OK, name, text)


class _SmallTraining:
    """A small model with an optimizer and an input; all instances start with the same values."""

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


def _compiled_losses(training: _SmallTraining, home: str) -> list[float]:
    model, device = training.model, str(training.x.device)
    with outofcore.compile(
        training.step, model, training.optimizer, budget=_TRIAL_BUDGET, device=device, home=home, cache=False
    ) as step:
        return [step(training.x).item() for _ in range(_TRIAL_STEPS)]


def _loop_losses(training: _SmallTraining, home: str) -> list[float]:
    with outofcore.budget(_TRIAL_BUDGET, training.model, home=home, cache=False):
        return [training.step(training.x).item() for _ in range(_TRIAL_STEPS)]
