"""The turns of one step: the buffers that they write, and their times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outofcore.graph import StorageKind
from outofcore.logical_workers.processes import WorkerProcesses


class Turns:
    """The turns of one step: the buffers that they write, copies of the buffers, and times."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self.keys: list[str] = []  # of the buffers that a turn writes
        self.stored: list[int] = []  # the turns with gradients stored at home
        self._initial: list[torch.Tensor] = []  # before the first turn
        self._after_worker_0: list[torch.Tensor] = []  # after the turn of worker 0; empty in other processes
        self.seconds: list[float] = []
        self.switch_seconds = 0.0  # between turns

    def find_buffers(self, captured: Any) -> None:
        """Find the buffers that a turn writes; ``captured`` is the result of ``Step.prepare``."""
        written = {storage for op in captured.graph.ops for storage in op.mutates}
        listed = {id(buffer) for buffer in self._buffers}
        for binding in captured.states:
            storage = captured.values[binding.value].storage
            tensor = binding.tensor if binding.kind is StorageKind.BUFFER and storage in written else None
            if tensor is not None and id(tensor) not in listed:
                self._buffers.append(tensor)
                self.keys.append(binding.key)

    def save_initial(self) -> None:
        self._initial = self._copies()

    def save_after_worker_0(self) -> None:
        self._after_worker_0 = self._copies()

    def restore_buffers(self) -> None:
        if self._initial:
            self._write(self._initial)

    def broadcast(self, processes: WorkerProcesses) -> None:
        """Set the buffers, in all processes, to their values after the turn of worker 0."""
        if not self._buffers:
            return
        if processes.count > 1:
            values = self._after_worker_0 or self._initial
            row = torch.cat([buffer.cpu().contiguous().view(-1).view(torch.uint8) for buffer in values])
            processes.broadcast(row)
            parts = row.split([buffer.numel() * buffer.element_size() for buffer in values])
            self._after_worker_0 = [
                part.clone().view(b.dtype).view(b.shape) for part, b in zip(parts, values, strict=True)
            ]
        self._write(self._after_worker_0)

    def _copies(self) -> list[torch.Tensor]:
        return [buffer.detach().clone() for buffer in self._buffers]

    def _write(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._buffers, values, strict=True):
                buffer.copy_(value)
