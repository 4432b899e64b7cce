"""Start-up code of every Python process on the stub: gives the ops of PyTorch their results."""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

REPLAY = os.environ.get("STUB_REPLAY", "")
HOG_BYTES = int(os.environ.get("STUB_HOG_MIB", "0")) << 20


class _AfterImport:
    """A module finder that calls a function after the import of a module.

    A process that does not import PyTorch or its compiler starts at the usual speed.
    """

    def __init__(self, then: dict[str, Callable[[types.ModuleType], None]]) -> None:
        self._then = then

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        then = self._then.pop(name, None)
        if then is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                run(module)
                then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install(torch: types.ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # replaced kernels are intended here
        ctypes.CDLL(REPLAY).replay_install()
    if HOG_BYTES:
        _plant_hog(torch)


def _plant_hog(torch: types.ModuleType) -> None:
    begin, hogs = torch.cuda.reset_peak_memory_stats, []

    def reset_peak_memory_stats(*options: object) -> None:
        begin(*options)
        if not hogs:
            hogs.append(torch.empty(HOG_BYTES, dtype=torch.uint8, device="cuda"))

    torch.cuda.reset_peak_memory_stats = reset_peak_memory_stats


def _compute_graphs(compile_fx: types.ModuleType) -> None:
    """Compute Inductor's graphs op by op on the CPU; the compiled kernels do nothing."""
    import torch  # noqa: PLC0415 - it is loaded already

    compile_inner, replay = compile_fx.compile_fx_inner, ctypes.CDLL(REPLAY)

    def compile_fx_inner(graph: Any, example_inputs: Any, **options: Any) -> Callable[[list[Any]], Sequence[Any]]:
        host = copy.deepcopy(graph)
        for node in host.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
        host.recompile()
        compiled = compile_inner(graph, example_inputs, **options)

        def call(args: list[Any]) -> Sequence[Any]:
            tensors, copies = list(args), [arg.cpu() for arg in args]
            before = [argument.clone() for argument in copies]
            # Idle kernels leave indices that would be out of range for ops among them.
            replay.replay_pause(1)
            try:
                results = compiled(args)
            finally:
                replay.replay_pause(0)
            with torch.no_grad():
                computed = host(*copies)
            for target, result in zip(results, computed, strict=True):
                target.copy_(result)
            for tensor, now, old in zip(tensors, copies, before, strict=True):
                if not torch.equal(now, old):
                    tensor.copy_(now)
            return results

        return call

    compile_fx.compile_fx_inner = compile_fx_inner


if REPLAY:
    sys.meta_path.insert(0, _AfterImport({"torch": _install, "torch._inductor.compile_fx": _compute_graphs}))
