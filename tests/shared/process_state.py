"""Process settings that a test could leave changed: PyTorch's numerical settings, logging, the environment."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Set by pytest before each test, and once by PyTorch and OpenMP, which read them later.
_SET_BY_LIBRARIES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "PYTORCH_NVML_", "KMP_")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGHUP, signal.SIGXFSZ)


@dataclass(frozen=True)
class Setting:
    """One setting of a process; ``restore`` is None if it cannot be restored."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], Any] | None


def settings() -> list[Setting]:
    torch = sys.modules.get("torch")
    return [*_of_python(), *(_of_torch(torch) if torch is not None and hasattr(torch, "backends") else ())]


def read(these: list[Setting]) -> dict[str, Any]:
    return {setting.name: setting.read() for setting in these}


def restore(these: list[Setting], before: Mapping[str, Any]) -> list[str]:
    """Restore settings changed since ``before`` was read; return a line for each that cannot be restored."""
    unrestored = []
    for setting in these:
        value = setting.read()
        if setting.name in before and value != before[setting.name]:
            if setting.restore is None:
                unrestored.append(f"{setting.name} from {before[setting.name]!r} to {value!r}")
            else:
                setting.restore(before[setting.name])
    return unrestored


def _of_python() -> list[Setting]:
    def environment() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if not name.startswith(_SET_BY_LIBRARIES)}

    def set_environment(values: Mapping[str, str]) -> None:
        for name in environment().keys() - values.keys():
            del os.environ[name]
        os.environ.update(values)

    def levels() -> dict[str, tuple[int, bool, list[logging.Handler]]]:
        names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "outofcore"]
        loggers = {name: logging.getLogger(name) for name in names}
        return {n: (it.level, it.propagate, list(it.handlers)) for n, it in loggers.items() if it.level or it.handlers}

    def set_levels(values: Mapping[str, tuple[int, bool, list[logging.Handler]]]) -> None:
        for name in levels().keys() | values.keys():
            logger = logging.getLogger(name)
            level, logger.propagate, logger.handlers[:] = values.get(name, (0, True, []))
            logger.setLevel(level)

    def handlers() -> dict[str, Any]:
        return {str(number.name): signal.getsignal(number) for number in _SIGNALS}

    def set_handlers(values: Mapping[str, Any]) -> None:
        for name, handler in values.items():
            signal.signal(signal.Signals[name], handler)

    return [
        Setting("the environment", environment, set_environment),
        Setting("loggers", levels, set_levels),
        Setting("the root logger's level", lambda: logging.root.level, logging.root.setLevel),
        Setting("the working folder", os.getcwd, os.chdir),
        Setting("sys.argv", lambda: list(sys.argv), lambda value: sys.argv.__setitem__(slice(None), value)),
        Setting("sys.path", lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value)),
        Setting("signal handlers", handlers, set_handlers),
        Setting("garbage collection", lambda: (gc.isenabled(), gc.get_threshold()), _set_collection),
        Setting("sys.excepthook", lambda: sys.excepthook, lambda value: setattr(sys, "excepthook", value)),
    ]


def _set_collection(value: tuple[bool, tuple[int, int, int]]) -> None:
    enabled, threshold = value
    (gc.enable if enabled else gc.disable)()
    gc.set_threshold(*threshold)


def _of_torch(torch: Any) -> list[Setting]:
    backends, dist, module = torch.backends, torch.distributed, torch.nn.modules.module
    hooks = [name for name in vars(module) if name.startswith("_global") and name.endswith("hooks")]
    patchable = [
        (torch.nn.Module, "__call__"),
        (torch.nn.Module, "_call_impl"),
        (torch.Tensor, "backward"),
        (torch.autograd, "backward"),
        (torch.autograd, "_engine_run_backward"),
        (torch.autograd.graph, "_engine_run_backward"),
        (torch.optim.Optimizer, "zero_grad"),
    ]

    def set_deterministic(value: tuple[bool, bool, bool]) -> None:
        torch.use_deterministic_algorithms(value[0], warn_only=value[1])
        torch.utils.deterministic.fill_uninitialized_memory = value[2]

    def precisions() -> dict[str, str]:
        values = {"matrices": torch.get_float32_matmul_precision(), "oneDNN": backends.mkldnn.fp32_precision}
        return values | {op: getattr(backends.mkldnn, op).fp32_precision for op in ("matmul", "conv", "rnn")}

    def set_precisions(value: Mapping[str, str]) -> None:
        torch.set_float32_matmul_precision(value["matrices"])
        backends.mkldnn.fp32_precision = value["oneDNN"]
        for op in ("matmul", "conv", "rnn"):
            getattr(backends.mkldnn, op).fp32_precision = value[op]

    def autocast() -> tuple[bool, Any]:
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def set_autocast(value: tuple[bool, Any]) -> None:
        torch.set_autocast_enabled("cpu", value[0])
        torch.set_autocast_dtype("cpu", value[1])

    def modes() -> tuple[int, int]:
        return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()

    def group() -> bool:
        return dist.is_available() and dist.is_initialized()

    return [
        Setting("PyTorch's threads", torch.get_num_threads, torch.set_num_threads),
        Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
        Setting("the default device", torch.get_default_device, torch.set_default_device),
        Setting("gradients", torch.is_grad_enabled, torch.set_grad_enabled),
        Setting("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        Setting("autocast", autocast, set_autocast),
        Setting("modes of functions and dispatch", modes, None),
        Setting("oneDNN", lambda: backends.mkldnn.enabled, backends.mkldnn.set_flags),
        Setting("precisions", precisions, set_precisions),
        Setting("denormal numbers", lambda: _flushes(torch), torch.set_flush_denormal),
        Setting(
            "deterministic algorithms",
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                torch.utils.deterministic.fill_uninitialized_memory,
            ),
            set_deterministic,
        ),
        Setting("a process group", group, lambda value: dist.destroy_process_group()),
        Setting(
            "hooks of all modules",
            lambda: {name: len(getattr(module, name)) for name in hooks},
            lambda value: [getattr(module, name).clear() for name in hooks],
        ),
        Setting(
            "methods",
            lambda: {f"{owner.__name__}.{name}": getattr(owner, name) for owner, name in patchable},
            None,
        ),
    ]


def _flushes(torch: Any) -> bool:
    return (torch.tensor([1e-40]) * 2).item() == 0
