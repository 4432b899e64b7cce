"""The program: a plan as one flat list of instructions on queues.

The simulator, the validator and the executor all interpret this list. A queue runs its instructions one after the
other; only waits order instructions of different queues. There is one queue of ops, one of collectives, and for each
home one of copies out and one of copies in. Collectives run in graph order under every plan, so processes whose plans
differ run the same collectives in the same order.

The program is one steady-state step: wrapping blocks hold their bytes from the end of one step to the start of the
next. All queues are empty when a step ends.
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
    """Start only after ``count`` instructions of ``queue`` have ended in this step.

    For copy queues, ``home`` selects the link.
    """

    queue: Queue
    count: int
    home: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Run an op on blocks: one for each storage of ``op.touched``, in that order, and one for scratch memory.

    If ``again``, the op has run before in this step and recomputes its results. Its blocks hold the versions that they
    held at its first run. Blocks of storages that it writes without reading, or ``discards``, may hold any bytes. A
    random op draws the same numbers as at its first run and leaves its generator unchanged.

    If it ``communicates``, the op is a collective and runs on their queue.
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
    """Return the queue that an instruction runs on."""
    if isinstance(instruction, Run):
        return Queue.COMMUNICATE if instruction.communicates else Queue.COMPUTE
    return Queue.COPY_OUT if isinstance(instruction, CopyOut) else Queue.COPY_IN


def lane_of(instruction: Instruction) -> tuple[Queue, int]:
    """Return the queue of an instruction, and the home of a copy; an op has 0 instead."""
    return queue_of(instruction), 0 if isinstance(instruction, Run) else instruction.home


@dataclass(frozen=True, slots=True)
class Block:
    """Device bytes held for one stay of a storage, or for the workspace of one op.

    Several blocks may hold versions of one storage at once: recomputation works on copies.

    The bytes are held from instruction ``born`` up to, but not including, instruction ``dies`` (indices into
    ``Program.instructions``). If ``wraps``, the block is held across the end of the step: over [born, end) and
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
        results: storages whose home is up to date when the step ends: outputs that do not stay, and persistent
            storages that no wrapping block holds.
        lodgings: persistent storages whose home is not the first. All other storages, inputs and outputs included, are
            at the first home between steps.
        clean: persistent storages in wrapping blocks that no op writes, and whose home (that of their lodging, else
            the first) holds the same bytes when a step starts. They are evicted without a copy. The executor updates
            their home if the user changes them between steps.
        staying: gradients that the step leaves in a block held to its end. The user sees them there until the next
            step begins, which may reuse the bytes.
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
    """When each instruction of a program ran, simulated or measured.

    Attributes:
        starts: seconds from the start of the step, one per instruction, in program order.
        ends: seconds from the start of the step, one per instruction, in program order.
        step_seconds: from the start of the step to the end of its last instruction.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    step_seconds: float
