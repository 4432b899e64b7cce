"""The step graph: ops in order, on storages, as plain data without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from operator import attrgetter

from outofcore.errors import GraphError


class StorageKind(Enum):
    """The role of a storage for the user."""

    PARAMETER = "parameter"  # a learnt tensor of the model; persists across steps
    GRADIENT = "gradient"  # the gradient of a parameter; persists only where no op creates it
    OPTIMIZER_STATE = "optimizer_state"  # moments, master weights and the like; persists across steps
    STATE_RANGE = "state_range"  # contiguous bytes of a persistent tensor that is at home between steps
    BUFFER = "buffer"  # a registered tensor that is not learnt, such as running statistics; persists
    ACTIVATION = "activation"  # computed in the step and not visible outside of it
    INPUT = "input"  # passed in by the caller; its contents are new in each step
    OUTPUT = "output"  # returned to the caller
    CONSTANT = "constant"  # a value baked into the step; always resident


# Kinds whose bytes are at the first home when a step begins, and again when it ends if it has changed them.
ARRIVING_KINDS = frozenset({StorageKind.INPUT, StorageKind.STATE_RANGE})

# Kinds that persist to the next step unless an op of the step creates them.
PERSISTENT_KINDS = frozenset(
    {StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE, StorageKind.BUFFER}
)


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes behind one tensor, or behind several that alias each other."""

    id: int  # its index in ``StepGraph.storages``
    bytes: int
    kind: StorageKind
    name: str = ""  # for people: "layer3.2.conv1.weight", or the module path and op that created it
    # Whether the executor detects every write of the user between two steps. Then the copy at home of a persistent
    # storage stays valid from step to step as long as no op writes to it (see ``Program.clean``).
    watched: bool = False

    @property
    def arrives(self) -> bool:
        """Whether it is fetched from the first home in every step, and written back if an op changes it."""
        return self.kind in ARRIVING_KINDS


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: the storages that it reads, mutates and creates.

    A storage written in place is in ``mutates``, and also in ``reads`` if its former contents matter; otherwise the op
    overwrites it as a whole. ``discards`` are mutated storages whose former contents affect only their own new
    contents, such as the running statistics of batch norm: a recomputation gets scratch memory for them.

    An op that ``communicates`` is a collective. Collectives run on their own queue in graph order. If a plan recomputes
    a ``rerunnable`` one, the plans of all processes must do so.
    """

    id: int  # its index in ``StepGraph.ops``
    name: str
    reads: tuple[int, ...]
    mutates: tuple[int, ...]
    creates: tuple[int, ...]
    rerunnable: bool = True  # may run again to recompute its results
    random: bool = False  # draws from a generator
    family: str = ""  # ops of one family cost the same; empty: the op is its own family
    module: str = ""  # path of the module that called it, such as "encoder.3.attention"
    source: str = ""  # the user's "file:line"
    discards: tuple[int, ...] = ()  # those of ``mutates`` that are scratch memory when it is recomputed
    communicates: bool = False  # a collective, which other processes run, too
    module_class: str = ""  # class of that module, such as "MultiheadAttention"

    @property
    def short_name(self) -> str:
        """The name without namespace and overload: "convolution" for "aten.convolution.default"."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 and parts[0] == "aten" else self.name

    @property
    def text(self) -> str:
        """The op with its module and source line: "convolution in layers.1 (Conv2d) at model.py:10"."""
        kind = f" ({self.module_class})" if self.module_class else ""
        module = f" in {self.module}{kind}" if self.module else ""
        return f"{self.short_name}{module}{f' at {self.source}' if self.source else ''}"

    @property
    def touched(self) -> tuple[int, ...]:
        """All storages that must be on the device while the op runs, in order, without duplicates."""
        return tuple(dict.fromkeys(self.reads + self.mutates + self.creates))


@dataclass(frozen=True)
class StepGraph:
    """One training step: its ops in order, and their storages.

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
        """Storages whose contents carry over from one step to the next."""
        return frozenset(s.id for s in self.storages if s.kind in PERSISTENT_KINDS and s.id not in self.creator)

    @cached_property
    def frozen(self) -> frozenset[int]:
        """Watched persistent storages (see ``Storage.watched``) that no op writes."""
        written = {storage for op in self.ops for storage in op.mutates}
        return frozenset(s for s in self.persistent if self.storages[s].watched and s not in written)

    @cached_property
    def gradients_left(self) -> frozenset[int]:
        """Gradients that the step creates and returns to the user; the next step does not use them."""
        gradients = (s for s in self.outputs if self.storages[s].kind is StorageKind.GRADIENT)
        return frozenset(s for s in gradients if s in self.creator)

    @cached_property
    def changed_inputs(self) -> frozenset[int]:
        """Inputs and state ranges that the step writes; they are copied home at its end."""
        return frozenset(s for op in self.ops for s in op.mutates if self.storages[s].arrives)

    @cached_property
    def seen_after(self) -> frozenset[int]:
        """Storages that the user reads after the step: created outputs and changed inputs."""
        return self.changed_inputs.union(s for s in self.outputs if s in self.creator)

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """The ids of the ops that use each storage, in ascending order."""
        users: list[list[int]] = [[] for _ in self.storages]
        for op in self.ops:
            for storage in op.touched:
                users[storage].append(op.id)
        return tuple(tuple(ops) for ops in users)

    @cached_property
    def unused(self) -> frozenset[int]:
        """Storages that only their creator uses, and that are not outputs."""
        outputs = frozenset(self.outputs)
        return frozenset(s for s in self.creator if s not in outputs and len(self.uses[s]) == 1)

    @cached_property
    def overwrites(self) -> frozenset[tuple[int, int]]:
        """Pairs of an op and a storage that it overwrites as a whole, without using former contents."""
        return frozenset((op.id, s) for op in self.ops for s in op.mutates if s not in op.reads)

    @cached_property
    def overwritten(self) -> frozenset[int]:
        """Storages that an op overwrites as a whole, except constants."""
        return frozenset(s for _, s in self.overwrites if self.storages[s].kind is not StorageKind.CONSTANT)

    def content(self, *, families: bool = True) -> tuple[object, ...]:
        """Return values that identify the graph; source lines and module classes are left out."""
        left_out = {"source", "module_class"} if families else {"source", "module_class", "family"}
        values_of = attrgetter(*(item.name for item in fields(Op) if item.name not in left_out))
        storages = [(s.id, s.bytes, s.kind.value, s.name, s.watched) for s in self.storages]
        return storages, [values_of(item) for item in self.ops], self.outputs

    def unwatched(self) -> StepGraph:
        """Return the same step with no storage marked as watched (see ``Storage.watched``)."""
        return replace(self, storages=tuple(replace(storage, watched=False) for storage in self.storages))

    def check(self) -> None:
        """Raise ``GraphError`` if the graph is inconsistent, for example if an op reads a missing storage."""
        for index, storage in enumerate(self.storages):
            if storage.id != index:
                raise GraphError(f"storage at index {index} has id {storage.id}; ids must be the indices")
            if storage.bytes < 0:
                raise GraphError(f"storage {index} ({storage.name}) has {storage.bytes} bytes; it must have at least 0")
        exists = {s.id for s in self.storages} - set(self.creator)
        for index, op in enumerate(self.ops):
            if op.id != index:
                raise GraphError(f"op at index {index} has id {op.id}; ids must be the indices")
            for storage in op.reads + op.mutates:
                if storage not in exists:
                    raise GraphError(
                        f"op {index} ({op.name}) uses storage {storage} before any op creates it; "
                        "list ops in the order in which they run"
                    )
            for storage in op.discards:
                if storage not in op.mutates:
                    raise GraphError(
                        f"op {index} ({op.name}) discards storage {storage}, which it does not mutate; list the "
                        "storage in its mutates as well"
                    )
            for storage in op.creates:
                if storage in exists or not 0 <= storage < len(self.storages):
                    raise GraphError(
                        f"op {index} ({op.name}) creates storage {storage}, which "
                        f"{'exists already' if storage in exists else 'is not in the list of storages'}; "
                        "list each storage, and create it in one op only"
                    )
                exists.add(storage)
        for storage in self.outputs:
            if storage not in exists:
                raise GraphError(f"output {storage} is not a storage of the step")
