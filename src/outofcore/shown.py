"""What a compiled step shows of itself: numbers, a report and a trace."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from outofcore.capture import Captured
from outofcore.costs import Costs
from outofcore.planning import Planned, Policy
from outofcore.program import Timeline
from outofcore.reporting import report_step, trace_step


def versions() -> str:
    """What a measurement was taken with."""
    try:
        own = metadata.version("outofcore")
    except metadata.PackageNotFoundError:  # run from its source, without being installed
        own = "(not installed)"
    return f"outofcore {own}, PyTorch {torch.__version__} with {torch.get_num_threads()} threads"


class Shown(ABC):
    """The part of a step that shows what it did."""

    budget: int
    policy: Policy
    _step: Callable[..., Any]
    _began_ns: int  # when the last run began, in nanoseconds since 1970

    @property
    @abstractmethod
    def planned(self) -> Planned:
        """The plan of the last call."""

    @property
    @abstractmethod
    def captured(self) -> Captured:
        """The capture that the last call ran."""

    @property
    @abstractmethod
    def costs(self) -> Costs:
        """The costs that the last call was planned with."""

    @property
    @abstractmethod
    def timeline(self) -> Timeline:
        """When each instruction of the last call ran."""

    def report(self, path: str | os.PathLike[str], *, title: str = "", budgets: int | None = None) -> None:
        """Write what the last call did as one HTML page that needs nothing else.

        It shows memory over time and the queues, measured and predicted, why ops waited, what was decided about each
        storage, step time against budget, and what would help most.

        Args:
            path: the file; its folder is created.
            title: the heading; by default the name of the step.
            budgets: how many budgets to plan for besides this one, for the curve; each takes as long as planning
                took. 0: none.

        Raises:
            StateError: the step was not called yet.
            InputError: the file cannot be written.
        """
        report_step(
            Path(path),
            self.captured.graph,
            self.costs,
            self.planned,
            self.timeline,
            budget=self.budget,
            title=title or getattr(self._step, "__name__", "training step"),
            count=budgets,
            policy=self.policy,
            notes=[("versions", versions())],
        )

    def trace(self, path: str | os.PathLike[str], *, beside: str | os.PathLike[str] | None = None) -> None:
        """Write the last call, measured and predicted, as a trace that Perfetto and chrome://tracing open.

        Args:
            path: the file, compressed if its name ends in ``.gz``; its folder is created.
            beside: a trace that ``torch.profiler`` exported of the last call: both are then in the file, on one axis
                of time (to about a millisecond).

        Raises:
            StateError: the step was not called yet.
            InputError: a file cannot be read or written.
        """
        other = None if beside is None else Path(beside)
        trace_step(Path(path), self.captured.graph, self.planned, self.timeline, began_ns=self._began_ns, beside=other)
