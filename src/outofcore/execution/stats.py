"""What one call of a step did, in a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

from outofcore.capture.captured import Captured
from outofcore.planning import Planned
from outofcore.program import CopyIn, CopyOut, Timeline
from outofcore.report import facts_html
from outofcore.units import format_bytes, format_seconds


@dataclass(frozen=True)
class StepStats:
    """What the last call of a step did.

    Attributes:
        seconds: of the step, its own waits for copies included.
        compute_seconds: of which ops ran.
        bytes_out: moved from the arena to the home.
        bytes_in: moved from the home to the arena.
        off_plan: unplanned requests of 64 KiB and more, since compilation.
        predicted_seconds: as simulated; 0 for a call that was followed, which has no plan.
        followed_calls: so far (see ``dynamic`` of ``outofcore.compile``).
        why_followed: why calls are followed, such as an argument of another shape; empty: they are not.
        peak_bytes: the peak of the arena; where calls are followed, in all of them.

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
    followed_calls: int = 0
    why_followed: str = ""
    peak_bytes: int = 0

    def _repr_html_(self) -> str:
        return facts_html("last step", step_facts(self))

    def __repr__(self) -> str:
        if self.followed_calls:
            return (
                f"<step of {format_seconds(self.seconds)}, the {self.followed_calls}. followed: ops "
                f"{format_seconds(self.compute_seconds)}, {format_bytes(self.bytes_out)} out, "
                f"{format_bytes(self.bytes_in)} in>"
            )
        return (
            f"<step of {format_seconds(self.seconds)}, {format_seconds(self.predicted_seconds)} predicted: ops "
            f"{format_seconds(self.compute_seconds)}, {format_bytes(self.bytes_out)} out, "
            f"{format_bytes(self.bytes_in)} in, {self.off_plan} requests off the plan>"
        )


def step_facts(stats: StepStats) -> list[tuple[str, str]]:
    """Return the facts that people look for first, by name."""
    foreseen = f", {format_seconds(stats.predicted_seconds)} predicted" if stats.predicted_seconds else ""
    facts = [
        ("step", f"{format_seconds(stats.seconds)}{foreseen}"),
        ("ops", format_seconds(stats.compute_seconds)),
        ("moved", f"{format_bytes(stats.bytes_out)} out, {format_bytes(stats.bytes_in)} in"),
    ]
    if stats.followed_calls:
        facts.append(("calls followed", f"{stats.followed_calls}, as {stats.why_followed}"))
    if stats.off_plan:
        facts.append(("requests off the plan", str(stats.off_plan)))
    return facts


def measure_step(captured: Captured, planned: Planned, timeline: Timeline, off_plan: int) -> StepStats:
    """Derive a call's statistics from its plan and its timeline."""
    program = planned.program
    ported = (set(captured.graph.outputs) - captured.graph.gradients_left) | {
        captured.values[b.value].storage for b in captured.inputs
    }
    compute = 0.0
    moved = {CopyOut: 0, CopyIn: 0}
    for instruction, start, end in zip(program.instructions, timeline.starts, timeline.ends, strict=True):
        if isinstance(instruction, CopyOut | CopyIn):
            block = program.blocks[instruction.block]
            if block.storage not in ported:
                moved[type(instruction)] += block.bytes
        else:
            compute += end - start
    return StepStats(
        timeline.step_seconds,
        compute,
        moved[CopyOut],
        moved[CopyIn],
        off_plan,
        planned.timeline.step_seconds,
        peak_bytes=program.arena_bytes,
    )
