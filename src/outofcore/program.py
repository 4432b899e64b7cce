"""The program: a plan as one flat list of instructions on queues.

The simulator, the validator and the executor all interpret this list. A queue runs its
instructions one after the other; between queues nothing is ordered but by the waits. There is one
queue of ops, one of collectives, and for each home one of copies out and one of copies in: links to different homes
work side by side. The order of collectives is that of the graph, whatever the plan; so processes that run one graph
by different plans run the same collectives in the same order.

The program is one step in its steady state: blocks that wrap hold their bytes from the end of one
step to the start of the next. All queues are empty when a step ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Queue(Enum):
    """Who runs an instruction."""

    COMPUTE = "compute"  # the ops
    COPY_OUT = "copy-out"  # device to home
    COPY_IN = "copy-in"  # home to device
    COMMUNICATE = "communicate"  # the collectives, which other processes run as well


@dataclass(frozen=True, slots=True)
class Wait:
    """Start no sooner than ``count`` instructions of ``queue`` are done in this step.

    Of the queues of copies, the one of the link to ``home``.
    """

    queue: Queue
    count: int
    home: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Run an op on blocks.

    ``blocks`` has one block for each storage of ``op.touched``, in that order; ``workspace`` is the
    block for scratch memory, or None.

    ``again``: the op has run before in this step, and runs once more to make what it made then. Its
    blocks hold what they held the first time, whatever versions of the storages there are by now; in a
    block of a storage that it writes but does not read, or that it ``discards``, lies anything. A random
    op draws the same numbers as the first time, and its generator goes on as if it had not run.

    ``communicates``: the op is a collective, and runs on the queue of those.
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
    version: int  # how often the storage has been written in this step when its bytes leave
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
    """Return the queue that an instruction runs on, and for copies the home to whose link that queue belongs."""
    return queue_of(instruction), 0 if isinstance(instruction, Run) else instruction.home


@dataclass(frozen=True, slots=True)
class Block:
    """Device bytes held for one stay of a storage, or for the workspace of one op.

    Several blocks may hold one storage at once, at different versions: what runs again works on copies.

    The bytes are held from instruction ``born`` up to, but not including, instruction ``dies``
    (indices into ``Program.instructions``). If ``wraps``, the block is held at the end of the step as
    well as at its start: over [born, end) and [0, dies), where ``dies <= born``, or over the whole
    step where ``born = dies = 0``.
    """

    id: int  # its index in ``Program.blocks``
    storage: int | None  # None: workspace
    bytes: int  # rounded up as the arena places it
    born: int
    dies: int
    wraps: bool = False
    offset: int = -1  # byte offset in the arena; -1: not yet placed


@dataclass(frozen=True, slots=True)
class Lodging:
    """Where a persistent storage lies from step to step when it is not on the device."""

    storage: int
    home: int  # index into ``Costs.homes``


@dataclass(frozen=True)
class Program:
    """One step, ready to be simulated, validated and executed.

    Attributes:
        instructions: in program order. The order on each queue is theirs.
        blocks: each at the index that is its id.
        arena_bytes: the end of the highest placed block.
        results: the storages whose home holds the up-to-date bytes when the step ends: every
            output that does not stay, and every persistent storage that no wrapping block holds.
        lodgings: the persistent storages whose home is not the first. Everything else that is seen between
            two steps, inputs and outputs among it, is found at the first home.
        clean: persistent storages that a wrapping block holds and no op writes, and whose home (that of their
            lodging, else the first) holds the same bytes when a step starts: so they leave without a copy. The executor
            sees to that, by writing there what the user has changed between two steps.
        staying: gradients that the step leaves in a block, which is held to the end of the step. They are seen
            there until the next step begins, and its bytes are free from then on.
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
        ends: likewise.
        step_seconds: from the start of the step to the end of its last instruction.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    step_seconds: float
