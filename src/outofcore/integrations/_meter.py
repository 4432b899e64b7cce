"""What a loop or a compiled step did in each of some steps: the numbers that loggers are given."""

from __future__ import annotations

import time

from outofcore.api import LoopStats, StepStats


class Meter:
    """Adds up what happens between two readings, and gives it by step.

    Values are, by name: ``step_seconds``, the time of a step; ``wait_seconds``, of that, what it waited for copies;
    ``bytes_out`` and ``bytes_in``, moved from the arena to the homes and back; each the mean over the steps since the
    last reading. ``peak_bytes`` is what was in use of the arena at the most, so far.
    """

    def __init__(self) -> None:
        self._before = LoopStats()
        self._began = time.perf_counter()
        self._calls: list[StepStats] = []

    def begin(self, stats: LoopStats) -> None:
        """What came before this is not counted."""
        self._before, self._began = stats, time.perf_counter()

    def of_loop(self, stats: LoopStats, steps: int) -> dict[str, float]:
        """Values of the steps of a loop since the last reading; the time is that of the clock, data included."""
        count, before, began = max(steps, 1), self._before, self._began
        self.begin(stats)
        return {
            "step_seconds": (self._began - began) / count,
            "wait_seconds": (stats.transfer_microseconds - before.transfer_microseconds) / 1e6 / count,
            "bytes_out": (stats.written_bytes - before.written_bytes) / count,
            "bytes_in": (stats.fetched_bytes - before.fetched_bytes) / count,
            "peak_bytes": float(stats.peak_bytes),
        }

    def add(self, stats: StepStats) -> None:
        """Count a call of a compiled step."""
        self._calls.append(stats)

    def of_calls(self) -> dict[str, float]:
        """Values of the calls since the last reading; the time is that within them."""
        calls, self._calls = self._calls, []
        count = max(len(calls), 1)
        return {
            "step_seconds": sum(call.seconds for call in calls) / count,
            "wait_seconds": sum(max(call.seconds - call.compute_seconds, 0.0) for call in calls) / count,
            "bytes_out": sum(call.bytes_out for call in calls) / count,
            "bytes_in": sum(call.bytes_in for call in calls) / count,
            "peak_bytes": float(max((call.peak_bytes for call in calls), default=0)),
        }


def prefixed(values: dict[str, float], prefix: str) -> dict[str, float]:
    """The values under longer names."""
    return {prefix + name: value for name, value in values.items()}
