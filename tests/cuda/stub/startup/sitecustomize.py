"""Read by every Python that starts on the stub, whoever starts it: gives the ops of PyTorch their results."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import warnings

REPLAY = os.environ.get("STUB_REPLAY", "")
HOG_BYTES = int(os.environ.get("STUB_HOG_MIB", "0")) << 20


class _AfterTorch:
    """Finds ``torch`` as others do, and does what is to be done once it is loaded.

    So a process that does not use PyTorch starts as fast as ever.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """As importers do it."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: object) -> None:
                run(module)
                _install()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels are replaced, which is the purpose
        ctypes.CDLL(REPLAY).replay_install()
    if HOG_BYTES:
        _plant_hog()


def _plant_hog() -> None:
    """Take memory of the device that nobody planned for, when a measurement of memory begins."""
    import torch  # noqa: PLC0415 - it is loaded already

    begin, hogs = torch.cuda.reset_peak_memory_stats, []

    def reset_peak_memory_stats(*given: object) -> None:
        begin(*given)
        if not hogs:
            hogs.append(torch.empty(HOG_BYTES, dtype=torch.uint8, device="cuda"))

    torch.cuda.reset_peak_memory_stats = reset_peak_memory_stats


if REPLAY:
    sys.meta_path.insert(0, _AfterTorch())
