"""Run single calls of a training function under a budget: the fallback of a compiled step for many shapes."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore._torch_internals import storage_address, storage_key, tree_flatten, tree_unflatten, view_storage_bytes
from outofcore.follow.devices import CPU
from outofcore.follow.failures import explain_error
from outofcore.follow.loop import Loop
from outofcore.follow.native import call
from outofcore.follow.stats import LoopStats
from outofcore.follow.user_tensors import state_of, tensors_of
from outofcore.runtime.mapped_files import MappedFiles
from outofcore.tensor_data import rebase_tensor

_log = logging.getLogger("outofcore")


@dataclass(frozen=True)
class CallStats:
    """The seconds and bytes of one call; ``waited_seconds`` is the time spent waiting for copies."""

    seconds: float
    waited_seconds: float
    bytes_out: int
    bytes_in: int


class BudgetedCalls:
    """Calls training functions in eager PyTorch within a loop's budget; pauses the loop between calls."""

    def __init__(self, loop: Loop, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._loop, self._models, self._optimizers = loop, list(models), list(optimizers)
        self.last: CallStats | None = None
        self.count = 0  # calls so far
        loop.start()
        loop.pause()
        # A step that is not closed frees its arena when it is garbage-collected.
        self._stop = weakref.finalize(self, loop.stop)
        self._stop.atexit = False

    @property
    def stats(self) -> LoopStats:
        return self._loop.stats

    def adopt_from(self, move: Callable[[], object]) -> None:
        """Run ``move``, which gives tensors new memory, in the loop, so that the loop owns that memory."""
        self._run_in_loop(move)

    def __call__(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step in the loop; return its result detached and, except model state, outside the loop's memory."""
        begin, stats_before = time.perf_counter(), self.stats

        def run() -> Any:
            self._adopt_untracked()
            result = step(*args, **kwargs)
            self._loop.end_step()
            return result

        result = self._run_in_loop(run)
        stats_after = self.stats
        self.count += 1
        self.last = CallStats(
            time.perf_counter() - begin,
            (stats_after.transfer_microseconds - stats_before.transfer_microseconds) / 1e6,
            stats_after.written_bytes - stats_before.written_bytes,
            stats_after.fetched_bytes - stats_before.fetched_bytes,
        )
        return self._detach_result(result)

    def drop_cache(self, tensor: torch.Tensor) -> None:
        """Release the memory of an evicted tensor that is resident only because the user has read the tensor."""
        CPU.library.follow_forget(storage_address(tensor.untyped_storage()))

    def evict_all(self) -> None:
        self._loop.evict_all()

    def close(self, *, keep_memory: bool) -> None:
        """Evict all tensors and end the loop. Unless ``keep_memory``, first move them out of the loop's memory."""
        self._loop.evict_all()
        if not keep_memory:
            self._loop.release()
        self._stop()

    def _run_in_loop(self, run: Callable[[], Any]) -> Any:
        """Call ``run`` while the loop is running, and return its result."""
        try:
            self._loop.resume()
            return run()
        except RuntimeError as error:
            explained_error = explain_error(error)
            if explained_error is None:
                raise
            try:
                raise explained_error from error
            finally:
                del explained_error  # breaks a reference cycle with this frame
        finally:
            self._loop.pause()

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        for model in self._models:
            yield from tensors_of(model)
        for optimizer in self._optimizers:
            yield from state_of(optimizer)

    def _adopt_untracked(self) -> None:
        """Move new model and optimizer tensors into the loop's memory, unless shared with files or processes."""
        untracked = self._loop.find_untracked([tensor for tensor in self._state_tensors() if CPU.can_move(tensor)])
        if not untracked:
            return
        library, mapped = CPU.library, MappedFiles()
        by_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in untracked:
            storage = tensor.untyped_storage()
            if mapped.is_shared(tensor):
                continue
            if library.follow_plain(storage_address(storage)):
                self._loop.adopt([tensor])
            else:
                by_storage.setdefault(storage_key(tensor), []).append(tensor)
        # Another step may own that memory, so the model moves to a copy.
        for tensors in by_storage.values():
            copy = view_storage_bytes(tensors[0]).clone()
            for tensor in tensors:
                rebase_tensor(tensor, copy)
        _log.info("adopted %d tensors from other memory", len(untracked))

    def _detach_result(self, result: Any) -> Any:
        """Detach a result's tensors from autograd; move all except model and optimizer state out of the loop."""
        library, persistent = CPU.library, {storage_key(tensor) for tensor in self._state_tensors()}

        def detach_and_release(value: Any) -> Any:
            """Detach a tensor and, unless it is state, move it out of the loop; return other values unchanged."""
            if not isinstance(value, torch.Tensor):
                return value
            if value.grad_fn is not None:
                value = value.detach()
            if CPU.can_move(value) and storage_key(value) not in persistent:
                call(library, "follow_release", storage_address(value.untyped_storage()))
            return value

        leaves, spec = tree_flatten(result)
        return tree_unflatten([detach_and_release(leaf) for leaf in leaves], spec)
