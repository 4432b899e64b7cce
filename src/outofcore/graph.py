"""The captured step as plain data: operations in order, on storages.

Nothing here knows PyTorch. A graph comes from a capture, from a file, or from a test.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from operator import attrgetter

from outofcore.errors import GraphError


class StorageKind(Enum):
    """What the bytes of a storage are to the user."""

    PARAMETER = "parameter"  # a learnt tensor of the model; persists across steps
    GRADIENT = "gradient"  # the gradient of a parameter; persists only where no op creates it
    OPTIMIZER_STATE = "optimizer_state"  # moments, master weights and the like; persists across steps
    STATE_RANGE = "state_range"  # bytes in a row of a persistent tensor that is at home between steps
    BUFFER = "buffer"  # a registered tensor that is not learnt, such as running statistics; persists
    ACTIVATION = "activation"  # anything computed in the step and not seen outside of it
    INPUT = "input"  # handed to the step by its caller; its contents are new in each step
    OUTPUT = "output"  # returned to the caller
    CONSTANT = "constant"  # a value baked into the step; always resident


# Kinds of which a step begins with the bytes at the first home, and brings them back there if it has changed them.
ARRIVING_KINDS = frozenset({StorageKind.INPUT, StorageKind.STATE_RANGE})

# Kinds whose bytes, where no op of the step creates them, are the same storage in the next step.
PERSISTENT_KINDS = frozenset(
    {StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE, StorageKind.BUFFER}
)


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes shared by aliasing tensors."""

    id: int  # its index in ``StepGraph.storages``
    bytes: int
    kind: StorageKind
    name: str = ""  # for people: "layer3.2.conv1.weight", or the module path and op that created it
    # Persistent: whether the executor finds out what was written to it between two steps, by whatever way. Then a copy
    # at home can be relied on from step to step, as long as no op writes to it (see ``Program.clean``).
    watched: bool = False

    @property
    def arrives(self) -> bool:
        """Whether it comes from the first home in every step, and goes back there if an op changes it."""
        return self.kind in ARRIVING_KINDS


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: which storages it reads, writes in place and brings into being.

    A storage written in place stands in ``mutates``, and in ``reads`` as well only if its former
    contents matter; a storage first written here stands in ``creates`` alone. So an op that mutates a storage
    without reading it overwrites it as a whole, and needs no bytes that were there before.

    ``discards`` names those of ``mutates`` whose former contents influence nothing but their own new
    ones, as with the running statistics of batch norm in training: where the op runs again, it may be
    given any bytes for them, and what it leaves there is thrown away.

    An op that ``communicates`` is a collective: processes run it together, each in its own copy of the step. It runs on
    a queue of its own, in the order in which the graph has such ops. One that is ``rerunnable``, such as a gathering of
    what lasts, runs again where a plan says so, which all processes then have to follow alike.
    """

    id: int  # its index in ``StepGraph.ops``
    name: str
    reads: tuple[int, ...]
    mutates: tuple[int, ...]
    creates: tuple[int, ...]
    rerunnable: bool = True  # may run again to recompute what it created
    random: bool = False  # draws from a generator
    family: str = ""  # ops of one family cost the same; empty: a family of its own
    module: str = ""  # path of the module that asked for it, such as "encoder.3.attention"
    source: str = ""  # the user's "file:line"
    discards: tuple[int, ...] = ()  # of ``mutates``, what a second run may have scratch memory for
    communicates: bool = False  # a collective, which other processes run as well
    module_class: str = ""  # class of that module, such as "MultiheadAttention"

    @property
    def short_name(self) -> str:
        """The name without namespace and overload: "convolution" for "aten.convolution.default"."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 and parts[0] == "aten" else self.name

    @property
    def text(self) -> str:
        """The op with its module and the user's line: "convolution in layers.1 (Conv2d) at model.py:10"."""
        kind = f" ({self.module_class})" if self.module_class else ""
        module = f" in {self.module}{kind}" if self.module else ""
        return f"{self.short_name}{module}{f' at {self.source}' if self.source else ''}"

    @property
    def touched(self) -> tuple[int, ...]:
        """All storages that must be on the device while the op runs, each once, in order."""
        return tuple(dict.fromkeys(self.reads + self.mutates + self.creates))


@dataclass(frozen=True)
class StepGraph:
    """One training step.

    Attributes:
        storages: each at the index that is its id.
        ops: in the order in which plain PyTorch runs them; each at the index that is its id.
        outputs: ids of storages that must exist when the step ends, beyond those that persist.
    """

    storages: tuple[Storage, ...]
    ops: tuple[Op, ...]
    outputs: tuple[int, ...] = ()

    @cached_property
    def creator(self) -> dict[int, int]:
        """The op that creates each storage; storages that exist before the step are absent."""
        return {storage: op.id for op in self.ops for storage in op.creates}

    @cached_property
    def persistent(self) -> frozenset[int]:
        """Storages whose contents at the end of a step are those at the start of the next."""
        return frozenset(s.id for s in self.storages if s.kind in PERSISTENT_KINDS and s.id not in self.creator)

    @cached_property
    def frozen(self) -> frozenset[int]:
        """Persistent storages that no op writes, and of which the executor finds out what the user writes."""
        written = {storage for op in self.ops for storage in op.mutates}
        return frozenset(s for s in self.persistent if self.storages[s].watched and s not in written)

    @cached_property
    def gradients_left(self) -> frozenset[int]:
        """Gradients that the step creates and leaves to the user: the next step knows nothing of them."""
        left = (s for s in self.outputs if self.storages[s].kind is StorageKind.GRADIENT)
        return frozenset(s for s in left if s in self.creator)

    @cached_property
    def changed_inputs(self) -> frozenset[int]:
        """Inputs that the step writes: they go home at its end."""
        return frozenset(s for op in self.ops for s in op.mutates if self.storages[s].arrives)

    @cached_property
    def seen_after(self) -> frozenset[int]:
        """What the user sees after the step: outputs that an op creates, and inputs that one changes."""
        return self.changed_inputs.union(s for s in self.outputs if s in self.creator)

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """For each storage the ops that touch it, in order."""
        found: list[list[int]] = [[] for _ in self.storages]
        for op in self.ops:
            for storage in op.touched:
                found[storage].append(op.id)
        return tuple(tuple(ops) for ops in found)

    @cached_property
    def unseen(self) -> frozenset[int]:
        """Storages that an op creates and that neither another op nor the user reads."""
        seen = frozenset(self.outputs)
        return frozenset(s for s in self.creator if s not in seen and len(self.uses[s]) == 1)

    @cached_property
    def overwrites(self) -> frozenset[tuple[int, int]]:
        """Pairs of an op and a storage that it overwrites as a whole: nothing of the former contents is used."""
        return frozenset((op.id, s) for op in self.ops for s in op.mutates if s not in op.reads)

    @cached_property
    def overwritten(self) -> frozenset[int]:
        """Storages, but for constants, that an op overwrites as a whole."""
        return frozenset(s for _, s in self.overwrites if self.storages[s].kind is not StorageKind.CONSTANT)

    def content(self, *, families: bool = True) -> tuple[object, ...]:
        """Return all that tells it from another step, as plain values; lines and classes of the user's code do not."""
        left_out = {"source", "module_class"} if families else {"source", "module_class", "family"}
        op = attrgetter(*(one.name for one in fields(Op) if one.name not in left_out))
        storages = [(s.id, s.bytes, s.kind.value, s.name, s.watched) for s in self.storages]
        return storages, [op(one) for one in self.ops], self.outputs

    def unwatched(self) -> StepGraph:
        """Return the same step where nobody detects the user's writes between two steps (see ``Storage.watched``)."""
        return replace(self, storages=tuple(replace(storage, watched=False) for storage in self.storages))

    def check(self) -> None:
        """Refuse a graph that contradicts itself.

        Raises:
            GraphError: an id is not its index, a storage is created twice, is used before it is
                created, or has no bytes; an op discards what it does not mutate; or an op or output names a storage
                that is not there.
        """
        for index, storage in enumerate(self.storages):
            if storage.id != index:
                raise GraphError(f"storage at index {index} has id {storage.id}; ids must be the indices")
            if storage.bytes < 0:
                raise GraphError(f"storage {index} ({storage.name}) has {storage.bytes} bytes")
        exists = {s.id for s in self.storages} - set(self.creator)
        for index, op in enumerate(self.ops):
            if op.id != index:
                raise GraphError(f"op at index {index} has id {op.id}; ids must be the indices")
            for storage in op.reads + op.mutates:
                if storage not in exists:
                    raise GraphError(f"op {index} ({op.name}) uses storage {storage} before any op creates it")
            for storage in op.discards:
                if storage not in op.mutates:
                    raise GraphError(f"op {index} ({op.name}) discards storage {storage}, which it does not mutate")
            for storage in op.creates:
                if storage in exists or not 0 <= storage < len(self.storages):
                    raise GraphError(f"op {index} ({op.name}) creates storage {storage}, which exists already")
                exists.add(storage)
        for storage in self.outputs:
            if storage not in exists:
                raise GraphError(f"output {storage} is not a storage of the step")
