"""The program: a plan as one flat list of instructions on queues.

A queue runs its instructions one after the other; only waits order instructions of different queues. Collectives run in
graph order under every plan. The program is one steady-state step; all queues are empty when it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Queue(Enum):
    """The queue that runs an instruction."""

    COMPUTE = "compute"  # the ops
    COPY_OUT = "copy-out"  # device to home
    COPY_IN = "copy-in"  # home to device
    COMMUNICATE = "communicate"  # the collectives, which other processes run, too


@dataclass(frozen=True, slots=True)
class Wait:
    """A condition to start: ``count`` instructions of a queue have ended. Each home has its own queues of copies."""

    queue: Queue
    count: int
    home: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Run an op on a block for each storage of ``op.touched``, in that order, and a workspace.

    If ``again``, it recomputes results of its first run in this step, from the same versions and random numbers. Blocks
    of storages that it writes without reading, or ``discards``, may hold any bytes then.
    """

    op: int
    blocks: tuple[int, ...]
    workspace: int | None = None
    waits: tuple[Wait, ...] = ()
    again: bool = False
    communicates: bool = False


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Copy a block to the storage's slot at a home."""

    block: int
    version: int  # how often the storage has been written in this step at the copy
    waits: tuple[Wait, ...] = ()
    home: int = 0  # index into ``Costs.homes``


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Copy the storage's slot at a home into a block."""

    block: int
    version: int  # the version that the home holds
    waits: tuple[Wait, ...] = ()
    home: int = 0  # index into ``Costs.homes``


Instruction = Run | CopyOut | CopyIn


def queue_of(instruction: Instruction) -> Queue:
    if isinstance(instruction, Run):
        return Queue.COMMUNICATE if instruction.communicates else Queue.COMPUTE
    return Queue.COPY_OUT if isinstance(instruction, CopyOut) else Queue.COPY_IN


def lane_of(instruction: Instruction) -> tuple[Queue, int]:
    """Return the queue of an instruction, and the home of a copy (0 for an op)."""
    return queue_of(instruction), 0 if isinstance(instruction, Run) else instruction.home


@dataclass(frozen=True, slots=True)
class Block:
    """Device bytes held for one stay of a storage, or for the workspace of one op.

    They are held from instruction ``born`` up to, but not including, instruction ``dies`` (indices into
    ``Program.instructions``). A block that ``wraps`` is held across the end of the step: over [born, end) and over
    [0, dies), where ``dies <= born``, or over the whole step if ``born = dies = 0``.
    """

    id: int  # its index in ``Program.blocks``
    storage: int | None  # None: workspace
    bytes: int  # rounded up to the arena's granularity
    born: int
    dies: int
    wraps: bool = False
    offset: int = -1  # byte offset in the arena; -1: not yet placed


@dataclass(frozen=True, slots=True)
class Lodging:
    """The home that holds a persistent storage between steps while it is not on the device."""

    storage: int
    home: int  # index into ``Costs.homes``


@dataclass(frozen=True)
class Program:
    """One step, ready to be simulated, validated and executed.

    Attributes:
        instructions: in program order; each queue runs its own in this order.
        blocks: each at the index that is its id.
        arena_bytes: the end of the highest placed block.
        results: storages whose home is up to date when the step ends.
        lodgings: persistent storages whose home is not the first; all other storages use the first home.
        clean: persistent storages in wrapping blocks that no op writes. Their home is up to date when a step starts, so
            they are evicted without a copy; the executor updates it if the user changes them.
        staying: created gradients that stay in a block until the next step begins.
    """

    instructions: tuple[Instruction, ...]
    blocks: tuple[Block, ...]
    arena_bytes: int = 0
    results: tuple[int, ...] = ()
    lodgings: tuple[Lodging, ...] = ()
    staying: tuple[int, ...] = ()
    clean: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """The start and end of each instruction, simulated or measured, in seconds from the start of the step."""

    starts: tuple[float, ...]  # in program order
    ends: tuple[float, ...]
    step_seconds: float  # to the end of the last instruction
