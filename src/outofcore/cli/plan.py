"""``outofcore plan MODEL``: whether a model fits, without training it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outofcore import planning
from outofcore.capture.whole import capture_whole
from outofcore.cli.answer import Subject
from outofcore.cli.common import find_workload, open_home
from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.graphfile import GraphFile
from outofcore.presets import Device, device
from outofcore.profiling.cache import open_cache
from outofcore.profiling.estimate import blank_batch, estimated_costs
from outofcore.profiling.links import known_link
from outofcore.profiling.ops import profile_ops
from outofcore.zoo import Workload


@dataclass(frozen=True)
class Survey:
    """A step captured and measured on this machine, without a budget yet."""

    graph: StepGraph
    costs: Costs

    @property
    def smallest_budget(self) -> int:
        """The least bytes that can hold the step."""
        return planning.smallest_budget(self.graph, self.costs)

    @property
    def in_core_budget(self) -> int:
        """The bytes from which on nothing needs to move."""
        return planning.in_core_budget(self.graph, self.costs)


def survey(work: Workload, home: str, tell: Callable[[str, int, int], None], cache: bool | Path = True) -> Survey:
    """Capture a workload's step and measure its ops and the home. The model is let go of again.

    Args:
        work: the workload.
        home: as on the command line.
        tell: called with the stage, and how much of it is done.
        cache: as for ``outofcore.compile``.

    Raises:
        SpillError: the home cannot be used.
        CaptureError: the step cannot become one graph.
    """
    kept = open_cache(cache)
    store = open_home(home)
    try:
        model = work.build()
        optimizer = work.optimizer(model)
        tell("capture", 0, 1)
        captured = capture_whole(work.make_step(model, optimizer), [model], [optimizer], next(work.batches()), {})
        profiles = profile_ops(captured, advance=lambda done, total: tell("profile", done, total), cache=kept)
        tell("measure the home", 0, 1)
        link = known_link(store, kept).home
    finally:
        store.close()
    return Survey(captured.graph, Costs(tuple(profile.cost for profile in profiles), (link,)))


def imagine(work: Workload, target: Device, tell: Callable[[str, int, int], None]) -> Survey:
    """Capture a workload's step and work out what it would cost on a device that is not here. Nothing is run.

    Raises:
        CaptureError: the step cannot become one graph.
    """
    model = work.build()
    optimizer = work.optimizer(model)
    tell("capture", 0, 1)
    batch = blank_batch(next(work.batches(1)), work.options.batch)
    captured = capture_whole(work.make_step(model, optimizer), [model], [optimizer], batch, {})
    tell("capture", 1, 1)
    return Survey(captured.graph, estimated_costs(captured, target))


def subject_of(
    model: str, options: Mapping[str, Any], *, home: str, gpu: str | None, quiet: bool, cache: bool | Path = True
) -> Subject:
    """A model of the zoo as a step to plan for: measured here, or imagined on another device.

    Args:
        model: as on the command line.
        options: of the workload.
        home: as on the command line; of no matter where a device is named.
        gpu: a device's name among the presets; None: this machine.
        quiet: do not tell what goes on.
        cache: as for ``outofcore.compile``; of no matter where a device is named.

    Raises:
        OutOfCoreError: an argument cannot be used, or the step cannot be captured.
    """
    target = None if gpu is None else device(gpu)
    work = find_workload(model, options)
    tell = _silent if quiet else _to_stderr
    found = survey(work, home, tell, cache) if target is None else imagine(work, target, tell)
    note = "" if target is None else target.describe()
    return Subject(work.describe(), GraphFile.of(found.graph, found.costs), note)


def _silent(stage: str, done: int, total: int) -> None:
    pass


def _to_stderr(stage: str, done: int, total: int) -> None:
    """What goes on, on one line that is overwritten; nothing where nobody looks on."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{stage} {done}/{total}" if done < total else "\r\033[K")
        sys.stderr.flush()
