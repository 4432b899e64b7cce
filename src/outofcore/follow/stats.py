"""The counters of an eager loop."""

from __future__ import annotations

from dataclasses import dataclass

from outofcore.report import facts_html
from outofcore.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class LoopStats:
    """The counters of a loop since it was started.

    They count storages of 64 KiB and more, unless another size is named.

    Attributes:
        ops: ops that used such a storage.
        expected_ops: of these, ops that came in the same order as before.
        fetches: storages that were fetched into the arena.
        fetched_bytes: their bytes.
        fetches_ahead: fetches that began before an op needed them.
        evictions: storages that were evicted from the arena.
        writes: of these, storages that were changed or had no copy at home yet.
        written_bytes: their bytes.
        unseen_writes: evicted storages that were changed without a visible op.
        adoptions: storages from outside that were taken over, such as parameters and batches.
        adopted_bytes: their bytes.
        bytes_in_use: bytes of the arena in use now.
        peak_bytes: the peak of these; above the budget only if there were ``exceedances``.
        bytes_evicted: bytes of storages that are evicted now.
        fixed: storages that stay in place because code outside PyTorch has their address, such as by ``numpy()``.
        outside_bytes: bytes that other threads have allocated now, in requests of 64 KiB and more.
        peak_outside_bytes: the peak of these.
        untracked_uses: times an op used memory in place, outside of the budget: memory that is not PyTorch's own or
            whose address other code has, and data from before the loop that the op uses in part, such as by index, or
            that is too large to move (see ``is_worth_adopting`` in storages.h).
        at_home_bytes: bytes of operands that ops used at home, because no hole in the arena was large enough or
            another thread used them too. A GPU reads and writes them over its link.
        transfer_microseconds: time spent waiting for fetches and evictions.
        peak_home_bytes: the peak of the homes' bytes.
        planned_ops: ops that ran by plan.
        unplanned_evictions: evictions that were not in the plan.
        departures: times the loop left its plan.
        recipes: storages that autograd does not keep, because they can be recomputed.
        reruns: times such a storage was recomputed.
        dropped_bytes: bytes of storages that were freed because of that.
        rerun_microseconds: time spent on recomputing them.
        file_bytes: bytes of storages that have the file as home from which they were mapped, such as a checkpoint.
        small_bytes: bytes of storages below 64 KiB now, on a CPU: of the models, and requested by the loop's ops.
            They cannot be moved; the arena has the rest of the budget.
        peak_small_bytes: the peak of these.
        peak_total_bytes: the peak of all storages, resident and evicted: about the peak of plain PyTorch.
        exceedances: times an op was allowed more than the budget, with ``grow`` or ``measure``.
        arena_bytes: memory of the arena now: ``bytes_in_use``, and free memory not yet returned to the system.
        steps: optimizer steps; in loops without an optimizer, backward passes, or calls without gradients.
        plans: number of plans that were made.
        budget_bytes: the budget.
        resident_bytes: physical memory of the process (RSS) now; 0 if the system does not report it.
        file_pages_bytes: of these, pages of files: the code of libraries, and mapped checkpoints.
        other_bytes: the rest, without shared memory and, on a CPU, without the tensors counted above: Python's
            objects, autograd's graphs, scratch memory of ops, and memory from before the loop.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Linear(256, 256)
    >>> with outofcore.budget("1MiB", model) as run:
    ...     for _ in range(3):
    ...         loss = model(torch.ones(64, 256)).square().mean()
    ...         loss.backward()
    >>> run.stats.peak_bytes <= 1 << 20
    True
    """

    ops: int = 0
    expected_ops: int = 0
    fetches: int = 0
    fetched_bytes: int = 0
    fetches_ahead: int = 0
    evictions: int = 0
    writes: int = 0
    written_bytes: int = 0
    unseen_writes: int = 0
    adoptions: int = 0
    adopted_bytes: int = 0
    bytes_in_use: int = 0
    peak_bytes: int = 0
    bytes_evicted: int = 0
    fixed: int = 0
    outside_bytes: int = 0
    peak_outside_bytes: int = 0
    untracked_uses: int = 0
    at_home_bytes: int = 0
    transfer_microseconds: int = 0
    peak_home_bytes: int = 0
    planned_ops: int = 0
    unplanned_evictions: int = 0
    departures: int = 0
    recipes: int = 0
    reruns: int = 0
    dropped_bytes: int = 0
    rerun_microseconds: int = 0
    file_bytes: int = 0
    small_bytes: int = 0
    peak_small_bytes: int = 0
    peak_total_bytes: int = 0
    exceedances: int = 0
    arena_bytes: int = 0
    steps: int = 0
    plans: int = 0
    budget_bytes: int = 0
    resident_bytes: int = 0
    file_pages_bytes: int = 0
    other_bytes: int = 0

    def _repr_html_(self) -> str:
        return facts_html("loop", loop_facts(self))

    def __repr__(self) -> str:
        return f"<{self.summary}>"

    @property
    def summary(self) -> str:
        """One line of text with the main counters.

        >>> LoopStats(ops=200, expected_ops=176, planned_ops=26, steps=13, peak_bytes=6 << 20, budget_bytes=8 << 20)
        <13 steps, peak 6.00 MiB of 8.00 MiB, evicted 0 B, fetched 0 B; 88 % of ops predicted, 13 % planned>
        """
        over = f", exceeded by {self.exceedances} ops" if self.exceedances else ""
        return (
            f"{self.steps} {'step' if self.steps == 1 else 'steps'}, peak {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.budget_bytes)}{over}, evicted {format_bytes(self.written_bytes)}, fetched "
            f"{format_bytes(self.fetched_bytes)}; {_percent(self.expected_ops, self.ops)} of ops predicted, "
            f"{_percent(self.planned_ops, self.ops)} planned"
        )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.0f} %"


def loop_facts(stats: LoopStats) -> list[tuple[str, str]]:
    """Return the most important counters for a report, as pairs of label and text."""
    waited, rerun = (micros / 1e6 for micros in (stats.transfer_microseconds, stats.rerun_microseconds))
    moved = f"{format_bytes(stats.written_bytes)} evicted, {format_bytes(stats.fetched_bytes)} fetched"
    facts = [
        ("steps", str(stats.steps)),
        ("resident", f"{format_bytes(stats.bytes_in_use)}, peak {format_bytes(stats.peak_bytes)}"),
        ("evicted now", format_bytes(stats.bytes_evicted)),
        ("moved", moved),
        ("waited for copies", format_seconds(waited)),
        (
            "ops",
            f"{stats.ops}: {_percent(stats.expected_ops, stats.ops)} predicted, "
            f"{_percent(stats.planned_ops, stats.ops)} planned ({stats.plans} plans)",
        ),
    ]
    if stats.peak_small_bytes:
        now, peak = format_bytes(stats.small_bytes), format_bytes(stats.peak_small_bytes)
        facts.append(("tensors below 64 KiB", f"{now}, peak {peak}"))
    if stats.resident_bytes:
        parts = {"arena": stats.arena_bytes, "pages of files": stats.file_pages_bytes, "others": stats.other_bytes}
        text = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items() if count)
        facts.append(("memory of the process", f"{format_bytes(stats.resident_bytes)}: {text}"))
    if stats.exceedances:
        facts.append(("exceeded the budget", f"{stats.exceedances} times"))
    if stats.file_bytes:
        facts.append(("mapped from files", format_bytes(stats.file_bytes)))
    if stats.reruns:
        facts.append(("recomputed", f"{stats.reruns} times, {format_seconds(rerun)}"))
    if stats.departures:
        facts.append(("left a plan", f"{stats.departures} times"))
    if stats.at_home_bytes:
        facts.append(("used at home", format_bytes(stats.at_home_bytes)))
    if stats.fixed:
        facts.append(("keep their address", f"{stats.fixed} storages"))
    return facts
