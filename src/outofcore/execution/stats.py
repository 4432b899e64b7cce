"""Statistics of the last call of a step."""

from __future__ import annotations

from dataclasses import dataclass

from outofcore.capture.captured import Captured
from outofcore.planning import Planned
from outofcore.program import CopyIn, CopyOut, Timeline
from outofcore.report import facts_html
from outofcore.units import format_bytes, format_seconds


@dataclass(frozen=True)
class StepStats:
    """Statistics of the last call of a step.

    Attributes:
        seconds: duration of the step, including its waits for copies.
        compute_seconds: time in which ops ran.
        bytes_out: bytes copied from the arena to the home.
        bytes_in: bytes copied from the home to the arena.
        off_plan: unplanned requests of 64 KiB and more since compilation.
        predicted_seconds: simulated duration; 0 for an eager call, which has no plan.
        eager_calls: calls so far that ran without a plan (see ``dynamic`` of ``outofcore.compile``).
        eager_reason: why calls run without a plan, such as an argument of another shape; empty if they do not.
        peak_bytes: peak of the arena, over all eager calls if there are any.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Linear(256, 256)
    >>> def train_step(x):
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     return loss
    >>> with outofcore.compile(train_step, model, budget="4MiB") as step:
    ...     loss = step(torch.ones(64, 256))
    ...     step.stats.seconds > 0, step.stats.off_plan
    (True, 0)
    """

    seconds: float
    compute_seconds: float
    bytes_out: int
    bytes_in: int
    off_plan: int
    predicted_seconds: float
    eager_calls: int = 0
    eager_reason: str = ""
    peak_bytes: int = 0

    def _repr_html_(self) -> str:
        return facts_html("last step", step_facts(self))

    def __repr__(self) -> str:
        if self.eager_calls:
            return (
                f"<step of {format_seconds(self.seconds)}, eager call {self.eager_calls}: ops "
                f"{format_seconds(self.compute_seconds)}, {format_bytes(self.bytes_out)} out, "
                f"{format_bytes(self.bytes_in)} in>"
            )
        return (
            f"<step of {format_seconds(self.seconds)}, {format_seconds(self.predicted_seconds)} predicted: ops "
            f"{format_seconds(self.compute_seconds)}, {format_bytes(self.bytes_out)} out, "
            f"{format_bytes(self.bytes_in)} in, {self.off_plan} off-plan requests>"
        )


def step_facts(stats: StepStats) -> list[tuple[str, str]]:
    """Return the (label, text) rows of the HTML summary of a step."""
    prediction = f", {format_seconds(stats.predicted_seconds)} predicted" if stats.predicted_seconds else ""
    facts = [
        ("step", f"{format_seconds(stats.seconds)}{prediction}"),
        ("ops", format_seconds(stats.compute_seconds)),
        ("moved", f"{format_bytes(stats.bytes_out)} out, {format_bytes(stats.bytes_in)} in"),
    ]
    if stats.eager_calls:
        facts.append(("eager calls", f"{stats.eager_calls}, because {stats.eager_reason}"))
    if stats.off_plan:
        facts.append(("off-plan requests", str(stats.off_plan)))
    return facts


def measure_step(captured: Captured, planned: Planned, timeline: Timeline, off_plan: int) -> StepStats:
    """Compute a step's statistics from its timeline; ``off_plan`` is the number of unplanned requests."""
    program = planned.program
    callers_storages = (set(captured.graph.outputs) - captured.graph.gradients_left) | {
        captured.values[b.value].storage for b in captured.inputs
    }
    compute = 0.0
    copied_bytes = {CopyOut: 0, CopyIn: 0}
    for instruction, start, end in zip(program.instructions, timeline.starts, timeline.ends, strict=True):
        if isinstance(instruction, CopyOut | CopyIn):
            block = program.blocks[instruction.block]
            if block.storage not in callers_storages:
                copied_bytes[type(instruction)] += block.bytes
        else:
            compute += end - start
    return StepStats(
        timeline.step_seconds,
        compute,
        copied_bytes[CopyOut],
        copied_bytes[CopyIn],
        off_plan,
        planned.timeline.step_seconds,
        peak_bytes=program.arena_bytes,
    )
