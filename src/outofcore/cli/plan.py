"""``outofcore plan MODEL``: whether a model fits, without training it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outofcore import planning
from outofcore.cli.answer import Subject
from outofcore.cli.common import find_workload
from outofcore.cli.script import build, is_script
from outofcore.costs import Costs
from outofcore.estimation import costed
from outofcore.execution.backend import Backend, CpuBackend
from outofcore.execution.opening import homes_of, open_backend
from outofcore.graph import StepGraph
from outofcore.graphfile import GraphFile
from outofcore.presets import Device, device
from outofcore.profiling.cache import open_cache
from outofcore.profiling.estimate import blank_batch
from outofcore.progress import Tell, following, silent
from outofcore.units import format_bytes
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


def survey(
    work: Workload,
    home: str | None,
    tell: Tell,
    cache: bool | Path = True,
    host_budget: int | None = None,
    backend: Backend | None = None,
) -> Survey:
    """Capture a workload's step and measure its ops and the home. The model is let go of again.

    Args:
        work: the workload.
        home: as on the command line.
        tell: called with the stage, and how much of it is done.
        cache: as for ``outofcore.compile``.
        host_budget: as for ``outofcore.compile``.
        backend: where the step is to run; None: on the CPU.

    Raises:
        SpillError: the home cannot be used.
        CaptureError: the step cannot become one graph.
    """
    kept = open_cache(cache)
    stores = homes_of(backend or CpuBackend(), home, host_budget)
    try:
        model = work.skeleton()
        optimizer = work.optimizer(model)
        step, batch = work.make_step(model, optimizer), next(work.batches())
        found = costed(step, [model], [optimizer], batch, {}, where=stores, cache=kept, tell=tell, backend=backend)
        return Survey(*found)
    finally:
        for store in stores:
            store.close()


def imagine(work: Workload, target: Device, tell: Tell) -> Survey:
    """Capture a workload's step and work out what it would cost on a device that is not here. Nothing is run.

    Raises:
        CaptureError: the step cannot become one graph.
    """
    model = work.skeleton()
    optimizer = work.optimizer(model)
    batch = blank_batch(next(work.batches(1)), work.options.batch)
    step = work.make_step(model, optimizer)
    return Survey(*costed(step, [model], [optimizer], batch, {}, where=target, cache=None, tell=tell))


def own(
    target: str,
    where: str | Device | None,
    tell: Tell,
    cache: bool | Path = True,
    host_budget: int | None = None,
    backend: Backend | None = None,
) -> tuple[str, Survey]:
    """Capture the step that the user's own function builds, and find out what it costs; with its title.

    Args:
        target: "folder/file.py:function".
        where: the home, as on the command line, or a device that is not here.
        tell: told how far things are.
        cache: as for ``outofcore.compile``.
        host_budget: as for ``outofcore.compile``.
        backend: where the step is to run; None: on the CPU.

    Raises:
        OutOfCoreError: the file cannot be used, or the step cannot be captured.
    """
    script = build(target)
    models = list(script.model) if isinstance(script.model, list | tuple) else [script.model]
    optimizers = [] if script.optimizer is None else script.optimizer
    optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    place = where if isinstance(where, Device) else homes_of(backend or CpuBackend(), where, host_budget)
    try:
        found = costed(
            script.step,
            models,
            optimizers,
            script.inputs,
            {},
            where=place,
            cache=open_cache(cache),
            tell=tell,
            backend=backend,
        )
    finally:
        if not isinstance(place, Device):
            for store in place:
                store.close()
    return script.title, Survey(*found)


def subject_of(
    model: str,
    options: Mapping[str, Any],
    *,
    home: str | None,
    gpu: str | None,
    quiet: bool,
    cache: bool | Path = True,
    host_budget: int | None = None,
    where: str = "cpu",
) -> Subject:
    """A model of the zoo or of the user's as a step to plan for: measured here, or imagined on another device.

    Args:
        model: as on the command line.
        options: of the workload; of no matter for the user's own code.
        home: as on the command line; of no matter where a device is named.
        gpu: a device's name among the presets; None: this machine.
        quiet: do not tell what goes on.
        cache: as for ``outofcore.compile``; of no matter where a device is named.
        host_budget: likewise.
        where: a device that is here, on which the step is to run and is measured.

    Raises:
        OutOfCoreError: an argument cannot be used, or the step cannot be captured.
    """
    target = None if gpu is None else device(gpu)
    backend = open_backend(where)
    with following(silent if quiet else None) as tell:
        if is_script(model):
            title, found = own(model, home if target is None else target, tell, cache, host_budget, backend)
        else:
            work = find_workload(model, options)
            title = work.describe()
            if target is None:
                found = survey(work, home, tell, cache, host_budget, backend)
            else:
                found = imagine(work, target, tell)
    if backend.driver is not None:
        beside = backend.beside(found.smallest_budget, 0, 0)
        title += (
            f", on {backend.device} (bytes of the arena; of a budget, {format_bytes(beside)} or more lie beside it)"
        )
    note = "" if target is None else target.describe()
    return Subject(title, GraphFile.of(found.graph, found.costs), note)
