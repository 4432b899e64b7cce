"""Lower a plan to instructions on blocks that have no addresses yet."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from outofcore.analysis.gaps import final_gap, full_overwrites_of, gaps_of, is_fetched, placed_bytes
from outofcore.analysis.recipes import Content, History, ops_to_recompute
from outofcore.costs import Costs
from outofcore.errors import GraphError
from outofcore.graph import Op, StepGraph, StorageKind
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.program import Block, CopyIn, CopyOut, Instruction, Lodging, Program, Run
from outofcore.units import PAGE_BYTES


@dataclass(slots=True)
class _Stay:
    """The instructions over which one block belongs to a storage, or to a workspace if ``storage`` is None."""

    storage: int | None
    bytes: int
    born: int
    dies: int = -1
    wraps: bool = False


@dataclass
class _Lowering:
    """Lowers a plan to a program, op by op; records in which block and at which homes each storage is."""

    graph: StepGraph
    costs: Costs
    plan: Plan
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    stays: list[_Stay] = field(default_factory=list[_Stay])
    block_of: dict[int, int] = field(default_factory=dict[int, int])  # storage -> its current block
    wrapping: dict[int, int] = field(default_factory=dict[int, int])  # storage -> its wrapping block
    dying: dict[int, int] = field(
        default_factory=dict[int, int]
    )  # storage -> its evicted block, until its copy out counts as done

    def __post_init__(self) -> None:
        self.version = [0] * len(self.graph.storages)
        self.placed = [placed_bytes(storage.bytes) for storage in self.graph.storages]
        # For each storage the version at each home.
        self.homes: list[dict[int, int]] = [{} for _ in self.graph.storages]
        self.lodgings: dict[int, int] = {}
        self.clean: set[int] = set()
        recomputes = any(d.residency is Residency.RECOMPUTE for d in self.plan.decisions)
        self.history = History.of(self.graph) if recomputes else None

    def run(self) -> Program:
        """Return a program of op runs and copies that carries out the plan."""
        graph, n = self.graph, len(self.graph.ops)
        version, homes, staying = self.version, self.homes, set(self.plan.staying)
        releases: dict[int, list[Decision]] = defaultdict(list)
        fetches: dict[int, list[Decision]] = defaultdict(list)
        leaving: dict[int, list[Decision]] = defaultdict(list)
        replays: dict[int, list[Decision]] = defaultdict(list)
        last_stay_starts: dict[int, int] = {}  # the use at which the last stay of a storage starts, if it has several
        first_leave: dict[int, Decision] = {}  # the first eviction of each storage within the step
        cyclic: set[int] = set()  # at home when the step ends
        held_until_release: set[int] = set()  # storages that go home after their last use and whose release is planned
        renewed: dict[int, list[int]] = defaultdict(list)  # by op, storages that it overwrites as a whole in a new stay
        ended: dict[int, list[int]] = defaultdict(list)  # by op, storages whose next use does so
        for storage in graph.storages:
            uses = graph.uses[storage.id]
            for op in full_overwrites_of(graph, storage.id):
                if op != uses[0]:
                    renewed[op].append(storage.id)
                    ended[uses[uses.index(op) - 1]].append(storage.id)
                    last_stay_starts[storage.id] = op
                elif storage.arrives:
                    renewed[op].append(storage.id)
        for decision in self._decisions():
            gap = decision.gap
            if decision.residency is Residency.RECOMPUTE:
                leaving[gap.start].append(decision)
                replays[decision.fetch_at].append(decision)
                continue
            if gap.start >= 0:
                releases[decision.release_by].append(decision)
            if gap == final_gap(graph, gap.storage):
                held_until_release.add(gap.storage)
                continue
            if gap.start >= 0:
                leaving[gap.start].append(decision)
            if is_fetched(graph, gap):
                fetches[decision.fetch_at - n if gap.end >= n else decision.fetch_at].append(decision)
            else:
                renewed[gap.end % n].append(gap.storage)
            if gap.end >= n:
                cyclic.add(gap.storage)
                self.lodgings[gap.storage] = decision.home
            else:
                first_leave[gap.storage] = min(
                    first_leave.get(gap.storage, decision), decision, key=lambda d: d.gap.start
                )
                last_stay_starts[gap.storage] = max(gap.end, last_stay_starts.get(gap.storage, -1))
        for storage in graph.storages:
            if not graph.uses[storage.id] and storage.kind is not StorageKind.CONSTANT:
                continue
            if storage.arrives or storage.id in cyclic:
                homes[storage.id][self.lodgings.get(storage.id, 0)] = 0
            elif storage.kind is StorageKind.CONSTANT or storage.id in graph.persistent:
                self.wrapping[storage.id] = self.block_of[storage.id] = self._new_stay(storage.id, wraps=True)
                # Others count as changed when a step starts, since the user may write to them between steps.
                if storage.id in first_leave and storage.id in graph.frozen:
                    home = first_leave[storage.id].home
                    self.clean.add(storage.id)
                    self.lodgings[storage.id] = home
                    homes[storage.id][home] = 0

        self._check_staying()
        outputs = set(graph.outputs)
        last_use = {storage.id: uses[-1] for storage, uses in zip(graph.storages, graph.uses, strict=True) if uses}
        for op in graph.ops:
            for decision in releases.pop(op.id, ()):
                if decision.gap.storage in self.dying:
                    self._end_stay(self.dying.pop(decision.gap.storage))
            # Fetch in the order of use, whichever step evicted the storages.
            coming = sorted(fetches.pop(op.id, ()), key=lambda d: (d.gap.end % n, d.gap.storage))
            if op.id in replays:
                recomputed = [decision.gap.storage for decision in replays.pop(op.id)]
                chain = self._recomputation_sequence(recomputed, {decision.gap.storage for decision in coming})
                # Copies in for the recomputation come first, since it waits for them; prefetches for later ops follow.
                ahead = [d for d in coming if d.gap.end % n != op.id and not self._is_read(d.gap.storage, chain)]
                for decision in coming:
                    if decision not in ahead:
                        self._fetch(decision, last_stay_starts)
                self._recompute(recomputed, chain)
                coming = ahead
            for decision in coming:
                self._fetch(decision, last_stay_starts)
            for storage in renewed.pop(op.id, ()):
                self._begin_stay(storage, is_last=op.id == last_stay_starts.get(storage))
            self._run_op(op)
            for storage in op.mutates + op.creates:
                version[storage] += 1
            for storage in op.touched:
                if last_use[storage] != op.id or storage in graph.persistent or storage in staying:
                    continue
                if graph.storages[storage].kind is StorageKind.CONSTANT:
                    continue
                changed_input = graph.storages[storage].arrives and version[storage] > 0
                if (storage in outputs or changed_input) and homes[storage].get(0) != version[storage]:
                    self.instructions.append(CopyOut(self.block_of[storage], version[storage]))
                    homes[storage][0] = version[storage]
                    if storage in held_until_release or graph.storages[storage].bytes <= PAGE_BYTES:
                        # The plan defines the release. Small blocks are held to the end: an op that reused their bytes
                        # would wait for all earlier copies out.
                        self.dying[storage] = self.block_of.pop(storage)
                        continue
                self._end_stay(self.block_of.pop(storage))
            for storage in ended.pop(op.id, ()):
                self._end_stay(self.block_of.pop(storage))
            for decision in leaving.pop(op.id, ()):
                storage = decision.gap.storage
                block = self.block_of.pop(storage)
                if decision.residency is Residency.RECOMPUTE or homes[storage].get(decision.home) == version[storage]:
                    self._end_stay(block)
                    continue
                self.instructions.append(CopyOut(block, version[storage], home=decision.home))
                homes[storage][decision.home] = version[storage]
                self.dying[storage] = block
        for storage in sorted(outputs - staying):
            lodging = self.lodgings.get(storage, 0)
            if homes[storage].get(lodging) != version[storage] and storage in self.block_of:
                self.instructions.append(CopyOut(self.block_of[storage], version[storage], home=lodging))
        for block in (*self.dying.values(), *(self.block_of[storage] for storage in self.plan.staying)):
            self._end_stay(block)
        return self._program()

    def _decisions(self) -> list[Decision]:
        """Return the decisions to carry out, fetches of inputs included; raise ``GraphError`` if one is invalid."""
        n = len(self.graph.ops)
        decisions: list[Decision] = []
        arriving: set[int] = set()
        for decision in self.plan.decisions:
            gap = decision.gap
            if decision.residency is Residency.KEEP:
                continue
            if gap not in gaps_of(self.graph, gap.storage) and gap != final_gap(self.graph, gap.storage):
                raise GraphError(
                    f"the plan decides about a gap that the graph does not have: {gap}; use a gap of ``movable_gaps``"
                )
            latest_release = min(decision.fetch_at, n) if gap.end >= n else decision.fetch_at
            if not gap.start < decision.release_by <= latest_release <= decision.fetch_at <= gap.end or (
                gap.end >= n > decision.fetch_at
            ):
                raise GraphError(
                    f"the times of a decision are out of order: {decision}; release_by must come after the gap "
                    "starts, and fetch_at not before release_by or after the gap ends"
                )
            is_recompute = decision.residency is Residency.RECOMPUTE
            if (is_recompute or decision.home) and gap == final_gap(self.graph, gap.storage):
                raise GraphError(
                    f"outputs and changed inputs must go to the first home after their last use, by OFFLOAD to home 0: "
                    f"{decision}"
                )
            if is_recompute:
                self._check_recompute(decision)
            if not 0 <= decision.home < max(len(self.costs.homes), 1):
                raise GraphError(
                    f"there is no home {decision.home}: the costs have {len(self.costs.homes)} homes, numbered from 0; "
                    f"correct the home of {decision}"
                )
            if gap.start < 0:
                if decision.home:
                    raise GraphError(f"an input must come from the first home, so home must be 0: {decision}")
                arriving.add(gap.storage)
            decisions.append(decision)
        for storage in self.graph.storages:
            uses = self.graph.uses[storage.id]
            # Inputs without a decision are fetched before the first op.
            if storage.arrives and storage.id not in arriving and uses:
                if uses[0] in full_overwrites_of(self.graph, storage.id):
                    continue
                decisions.append(Decision(Gap(storage.id, -1, uses[0]), Residency.OFFLOAD, 0, 0))
        return decisions

    def _check_staying(self) -> None:
        """Raise ``GraphError`` if a storage planned to stay on the device is evicted or is not a gradient."""
        decided = {decision.gap.storage for decision in self.plan.decisions}
        for storage in self.plan.staying:
            if storage not in self.graph.gradients_left:
                raise GraphError(
                    f"storage {storage} cannot stay on the device after the step: it is not a gradient that "
                    "the step creates and outputs; remove it from ``staying``"
                )
            if storage in decided:
                raise GraphError(
                    f"storage {storage} cannot stay on the device: a decision evicts it; remove the decision, or "
                    "remove the storage from ``staying``"
                )

    def _new_stay(self, storage: int | None, byte_count: int = 0, *, wraps: bool = False) -> int:
        """Add a block that is held from the next instruction on; return its index."""
        if storage is not None:
            byte_count = self.placed[storage]
        self.stays.append(_Stay(storage, byte_count, 0 if wraps else len(self.instructions), wraps=wraps))
        return len(self.stays) - 1

    def _begin_stay(self, storage: int, *, is_last: bool) -> None:
        """Give a storage a new block, or in its last stay of a step the block that wraps into the next step."""
        if is_last and storage in self.wrapping:
            self.block_of[storage] = block = self.wrapping[storage]
            self.stays[block].born = len(self.instructions)
        else:
            self.block_of[storage] = self._new_stay(storage)

    def _end_stay(self, block: int) -> None:
        self.stays[block].dies = len(self.instructions)

    def _check_recompute(self, decision: Decision) -> None:
        """Raise ``GraphError`` if a decision to recompute a storage is invalid."""
        gap = decision.gap
        data = self.graph.storages[gap.storage]
        name = f"storage {gap.storage} ({data.name or data.kind.value})"
        if gap.start < 0 or gap.storage in self.graph.persistent:
            raise GraphError(f"{name} cannot be recomputed: it exists before the step; keep or offload it")
        if decision.release_by != gap.start + 1:
            raise GraphError(
                f"a recomputed storage must be released right after the use before its gap, so release_by must be "
                f"{gap.start + 1}: {decision}"
            )

    def _fetch(self, decision: Decision, last_stay_starts: dict[int, int]) -> None:
        """Append a copy of a storage from its home into a new block; raise ``GraphError`` if the home lacks it."""
        storage = decision.gap.storage
        self._begin_stay(storage, is_last=decision.gap.end == last_stay_starts.get(storage))
        version = self.homes[storage].get(decision.home)
        if version is None:
            raise GraphError(
                f"the plan fetches storage {storage} from home {decision.home} before anything was copied "
                f"out to it: {decision}; evict the storage to this home first, or fetch it from another"
            )
        self.instructions.append(CopyIn(self.block_of[storage], version, home=decision.home))

    def _recomputation_sequence(self, storages: list[int], fetched: Set[int]) -> Sequence[int]:
        """Return the ops to run again, in order, to recompute storages."""
        if self.history is None:
            return ()
        version, homes = self.version, self.homes
        present = ChainMap(self.block_of, self.dying)  # not merged into one dict: there are many chains

        def is_there(content: Content) -> bool:
            storage, needed_version = content
            on_device = version[storage] == needed_version and (storage in present or storage in fetched)
            return on_device or needed_version in homes[storage].values()

        return ops_to_recompute(self.history, {(storage, version[storage]) for storage in storages}, is_there)

    def _is_read(self, storage: int, chain: Sequence[int]) -> bool:
        """Return whether an op of the chain reads a storage at its current version."""
        content = (storage, self.version[storage])
        return self.history is not None and any(content in self.history.needs(self.graph.ops[index]) for index in chain)

    def _recompute(self, storages: list[int], op_ids: Sequence[int]) -> None:
        """Append instructions that run the given ops again, to recompute storages in new blocks."""
        graph, history, version = self.graph, self.history, self.version
        if history is None:
            return
        targets = {(storage, version[storage]) for storage in storages}

        present = ChainMap(self.block_of, self.dying)  # not merged into one dict: there are many chains

        def on_device(content: Content) -> bool:
            return content[0] in present and version[content[0]] == content[1]

        freed = _contents_freed_by_run(history, op_ids, targets)
        blocks: dict[Content, int] = {}
        for index, freed_contents in zip(op_ids, freed, strict=True):
            op = graph.ops[index]
            needs = dict(history.needs(op))
            for storage, needed in needs.items():
                if (storage, needed) not in blocks and not on_device((storage, needed)):
                    blocks[storage, needed] = self._fetch_intermediate(storage, needed)
            makes = dict(history.makes(op))
            used: dict[int, int] = {}
            for storage in op.touched:
                content = (storage, needs.get(storage, -1))
                if storage in needs and storage in makes:
                    used[storage] = blocks.pop(content)  # written in place, which overwrites the former contents
                elif storage in needs:
                    # Resident inputs are read in place, since recomputed ops do not write them.
                    used[storage] = blocks[content] if content in blocks else present[storage]
                else:
                    used[storage] = self._new_stay(storage)
            self._append_run(op, used, recompute=True)
            blocks.update({content: used[content[0]] for content in makes.items()})
            for storage in op.discards:
                self._end_stay(used[storage])
            for content in freed_contents:
                if content in blocks:
                    self._end_stay(blocks.pop(content))
            for content in makes.items():
                if content in blocks and content not in targets and on_device(content):
                    self._end_stay(blocks.pop(content))
        for storage in storages:
            self.block_of[storage] = blocks[storage, version[storage]]

    def _fetch_intermediate(self, storage: int, version: int) -> int:
        """Append a copy of this version of a storage from the first home that holds it; return the new block."""
        home = min(home for home, held_version in self.homes[storage].items() if held_version == version)
        block = self._new_stay(storage)
        self.instructions.append(CopyIn(block, version, home=home))
        return block

    def _run_op(self, op: Op) -> None:
        for storage in op.creates:
            self.block_of[storage] = self._new_stay(storage)
        self._append_run(op, self.block_of)

    def _append_run(self, op: Op, blocks: dict[int, int], *, recompute: bool = False) -> None:
        """Append an instruction that runs an op on the given blocks (by storage)."""
        scratch = placed_bytes(self.costs.ops[op.id].workspace_bytes)
        workspace = self._new_stay(None, scratch) if scratch else None
        used = tuple(blocks[s] for s in op.touched)
        self.instructions.append(Run(op.id, used, workspace, again=recompute, communicates=op.communicates))
        if workspace is not None:
            self._end_stay(workspace)

    def _program(self) -> Program:
        """Build the program from the instructions and blocks so far; the blocks have no addresses yet."""
        graph, version = self.graph, self.version
        blocks: list[Block] = []
        for index, stay in enumerate(self.stays):
            dies = stay.dies
            if stay.wraps and dies < 0:  # never evicted: held over the whole step
                blocks.append(Block(index, stay.storage, stay.bytes, 0, 0, True))
            else:
                blocks.append(Block(index, stay.storage, stay.bytes, stay.born, dies, stay.wraps))
        changed = {s.id for s in graph.storages if s.arrives and version[s.id] > 0}
        staying = self.plan.staying
        results = sorted((set(graph.outputs) - set(staying)) | (graph.persistent - set(self.wrapping)) | changed)
        lodgings = tuple(Lodging(storage, home) for storage, home in sorted(self.lodgings.items()) if home)
        return Program(
            tuple(self.instructions),
            tuple(blocks),
            0,
            tuple(results),
            lodgings,
            tuple(sorted(staying)),
            tuple(sorted(self.clean)),
        )


def _contents_freed_by_run(history: History, op_ids: Sequence[int], targets: Set[Content]) -> list[list[Content]]:
    """Return for each recomputed op the storage versions (contents) to free after it."""
    ops = history.graph.ops
    read_next = set(targets)  # contents whose next event is a run that reads them, or the end
    released: list[list[Content]] = []
    for index in reversed(op_ids):
        needs, makes = history.needs(ops[index]), history.makes(ops[index])
        released.append([content for content in (*needs, *makes) if content not in read_next])
        read_next.difference_update(makes)
        read_next.update(needs)
    return released[::-1]


def lower(graph: StepGraph, costs: Costs, plan: Plan) -> Program:
    """Lower a plan to instructions on blocks without addresses; raise ``GraphError`` if it contradicts the step."""
    return _Lowering(graph, costs, plan).run()
