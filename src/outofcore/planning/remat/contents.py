"""The contents of a step (storages at a version, see ``analysis.recipes``), numbered for searches."""

from __future__ import annotations

from dataclasses import dataclass

from outofcore.analysis.gaps import is_large, placed_bytes
from outofcore.analysis.recipes import History
from outofcore.costs import Costs
from outofcore.graph import StepGraph, StorageKind

# Values of ``StepContents.lasting``, for contents after their last use. FLEETING: freed. AT_HOME: at home, as an input
# that is not written. ALWAYS: on the device, as a constant.
FLEETING, AT_HOME, ALWAYS = 0, 1, 2


@dataclass(frozen=True)
class StepContents:
    """The contents (versions of storages) and ops of a step, numbered for the native searches."""

    first: list[int]  # by storage, the number of its version 0
    storage: list[int]  # by content
    size: list[int]  # by content, its bytes among large blocks; 0 if it is small
    maker: list[int]  # by content, the op that writes it; -1 if no op may do so again
    born: list[int]  # by content, the op after which the storage has that version; -1: at the start of the step
    gone: list[int]  # by content, the last op that finds it on the device
    lasting: list[int]  # by content, where it is after its last use: one of the constants above
    needs: list[tuple[int, ...]]  # by op, the contents that it reads when it runs again
    makes: list[tuple[int, ...]]  # by op, the contents that it leaves when it runs again
    fresh: list[int]  # by op, bytes of large blocks that running it again allocates
    scratch: list[int]  # by op, the part of ``fresh`` that is freed after the run
    workspace: list[int]  # by op, bytes of its workspace, if that is large
    before: list[int]  # by op, bytes of large blocks of its inputs on the device
    seconds: list[float]  # by op
    home_seconds: list[float]  # by content, of a copy in from the last home

    @staticmethod
    def of(graph: StepGraph, costs: Costs) -> StepContents:
        """List the storage versions (contents) of a step, and the contents that each op reads and writes."""
        history = History.of(graph)
        n = len(graph.ops)
        size = [placed_bytes(s.bytes) if is_large(s.bytes) else 0 for s in graph.storages]
        result = StepContents(
            [], [], [], [], [], [], [], [], [], [], [], [], [], [cost.seconds for cost in costs.ops], []
        )
        for storage in graph.storages:
            result.first.append(len(result.storage))
            writes = history.writes[storage.id]
            uses = graph.uses[storage.id]
            end = n if storage.id in graph.persistent else (uses[-1] if uses else -1)
            constant = storage.kind is StorageKind.CONSTANT
            for version in range(len(writes) + 1):
                op = graph.ops[writes[version - 1]] if version else None
                result.storage.append(storage.id)
                result.size.append(0 if constant else size[storage.id])
                result.home_seconds.append(costs.homes[-1].in_seconds(result.size[-1]) if costs.homes else 0.0)
                may_rerun = op is not None and op.rerunnable and storage.id not in op.discards
                result.maker.append(op.id if op is not None and may_rerun else -1)
                result.born.append(op.id if op is not None else -1)
                result.gone.append(min(end, history.last_op_with((storage.id, version), end)))
                is_input = storage.arrives and not writes
                result.lasting.append(ALWAYS if constant else AT_HOME if is_input else FLEETING)
        for op in graph.ops:
            needs, makes = dict(history.needs(op)), dict(history.makes(op))
            result.needs.append(tuple(result.first[s] + v for s, v in needs.items()))
            result.makes.append(tuple(result.first[s] + v for s, v in makes.items()))
            result.fresh.append(sum(size[s] for s in op.touched if s not in needs))
            result.scratch.append(sum(size[s] for s in op.touched if s not in needs and s not in makes))
            extra = placed_bytes(costs.ops[op.id].workspace_bytes)
            result.workspace.append(extra if is_large(extra) else 0)
            inputs = (s for s in op.touched if s not in op.creates)
            result.before.append(sum(size[s] for s in inputs if graph.storages[s].kind is not StorageKind.CONSTANT))
        return result
