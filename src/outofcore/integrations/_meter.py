"""Statistics of a loop or a compiled step between two readings, for loggers."""

from __future__ import annotations

import time

from outofcore.api import LoopStats, StepStats


class Meter:
    """Computes statistics of the steps since the last reading: means per step, and the peak."""

    def __init__(self) -> None:
        self._before = LoopStats()
        self._began = time.perf_counter()
        self._calls: list[StepStats] = []

    def reset(self, stats: LoopStats) -> None:
        self._before, self._began = stats, time.perf_counter()

    def read_loop(self, stats: LoopStats, steps: int) -> dict[str, float]:
        """Return a loop's mean times and copied bytes per step since the last reading, and its peak memory."""
        count, before, began = max(steps, 1), self._before, self._began
        self.reset(stats)
        return {
            "step_seconds": (self._began - began) / count,
            "wait_seconds": (stats.transfer_microseconds - before.transfer_microseconds) / 1e6 / count,
            "bytes_out": (stats.written_bytes - before.written_bytes) / count,
            "bytes_in": (stats.fetched_bytes - before.fetched_bytes) / count,
            "peak_bytes": float(stats.peak_bytes),
        }

    def add(self, stats: StepStats) -> None:
        self._calls.append(stats)

    def read_calls(self) -> dict[str, float]:
        """Return the mean times and copied bytes per call since the last reading, and the peak memory of the calls."""
        calls, self._calls = self._calls, []
        count = max(len(calls), 1)
        return {
            "step_seconds": sum(call.seconds for call in calls) / count,
            "wait_seconds": sum(max(call.seconds - call.compute_seconds, 0.0) for call in calls) / count,
            "bytes_out": sum(call.bytes_out for call in calls) / count,
            "bytes_in": sum(call.bytes_in for call in calls) / count,
            "peak_bytes": float(max((call.peak_bytes for call in calls), default=0)),
        }


def add_prefix(values: dict[str, float], prefix: str) -> dict[str, float]:
    return {prefix + name: value for name, value in values.items()}
