"""Tests of recorded steps as graphs, and of plans in the form that native code follows."""

from __future__ import annotations

from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from outofcore.background import PlanJob, plan_job
from outofcore.follow.records import FREED, Schedule, StepRecord, read_record, schedule_of
from outofcore.graph import StorageKind
from outofcore.planning.planner import in_core_budget, smallest_budget
from outofcore.units import MIB

BYTES = 4 * MIB
NAMES = ("aten::linear", "aten::relu")


def numbers_of(
    storages: list[list[int]],
    ops: list[tuple[int, list[list[int]]]],
    late: list[list[int]] = [],  # noqa: B006
) -> list[int]:
    numbers = [3, len(ops), len(storages), len(late), 0, 1, 0, 1]
    for storage in storages:
        numbers += storage
    for index, (scratch, touches) in enumerate(ops):
        numbers += [index % 2, 1_000_000, scratch, len(touches), *(n for touch in touches for n in touch)]
    return numbers + [n for pair in late for n in pair]


def test_small_step_is_read() -> None:
    record = read_record(
        numbers_of(
            # bytes, freed, created, lasts
            [[BYTES, -1, 0, 1], [BYTES, 4, 1, 0], [BYTES, 2, 1, 0], [BYTES, 3, 0, 0]],
            # place, storage, writes, creates
            [
                (0, [[1, 3, 0, 0], [2, 0, 0, 0], [-1, 1, 1, 1]]),
                (64, [[1, 1, 0, 0], [-1, 2, 1, 1]]),
                (0, [[1, 3, 0, 0]]),
                (0, [[1, 0, 1, 0]]),
            ],
        ),
        NAMES,
    )
    assert record.bucket == 3
    assert [s.kind for s in record.graph.storages] == [
        StorageKind.PARAMETER,
        StorageKind.ACTIVATION,
        StorageKind.ACTIVATION,
        StorageKind.INPUT,
    ]
    # Storage 1 is used last by op 1, and freed after op 3: at the end of the step.
    assert [(op.name, op.reads, op.mutates, op.creates) for op in record.graph.ops] == [
        ("aten::linear", (3, 0), (), (1,)),
        ("aten::relu", (1,), (), (2,)),
        ("aten::linear", (3,), (), ()),
        ("aten::relu", (0,), (0,), ()),
        (FREED, (1,), (), ()),
    ]
    assert record.places == (0, 1, 2, 3, 4)
    assert [cost.workspace_bytes for cost in record.costs.ops] == [0, 64, 0, 0, 0]


def test_storage_freed_by_the_next_step_persists() -> None:
    # A gradient is made by op 1, read by op 2, and freed when op 1 of the next step begins.
    record = read_record(
        numbers_of(
            [[BYTES, -1, 0, 1], [BYTES, -1, 1, 0]],
            [(0, [[1, 0, 0, 0]]), (0, [[1, 0, 0, 0]]), (0, [[-1, 1, 1, 1]]), (0, [[1, 1, 0, 0], [2, 0, 1, 0]])],
            [[1, 1]],
        ),
        NAMES,
    )
    assert [(op.name, op.reads, op.mutates, op.creates) for op in record.graph.ops] == [
        ("aten::linear", (0,), (), ()),
        (FREED, (1,), (), ()),
        ("aten::relu", (0,), (), ()),
        ("aten::linear", (), (1,), ()),
        ("aten::relu", (1, 0), (0,), ()),
    ]
    assert record.places == (0, 1, 1, 2, 3)
    assert 1 in record.graph.persistent


def chain(length: int, extra_ops: int) -> StepRecord:
    storages, ops = [], []
    for layer in range(length):
        storages += [[BYTES, -1, 0, 1], [BYTES, 2 * length - layer + extra_ops, 1, 0]]
        before = [[1, 2 * layer - 1, 0, 0]] if layer else []
        ops.append((0, [*before, [2, 2 * layer, 0, 0], [-1, 2 * layer + 1, 1, 1]]))
    for layer in reversed(range(length)):
        ops.append((4096, [[1, 2 * layer + 1, 0, 0], [2, 2 * layer, 1, 0]]))
    storages = [[b, min(freed, len(ops)), c, lasts] for b, freed, c, lasts in storages]
    return read_record(numbers_of(storages, ops), NAMES)


@settings(deadline=None, max_examples=examples(15))
@given(st.integers(2, 8), st.integers(0, 3), st.integers(0, 100), st.sampled_from(("auto", "offload-all", "tflms")))
def test_evicted_storages_are_fetched_before_their_use(length: int, extra_ops: int, share: int, policy: str) -> None:
    record = chain(length, extra_ops)
    smallest = smallest_budget(record.graph, record.costs)
    budget = smallest + (in_core_budget(record.graph, record.costs) - smallest) * share // 100
    answer = plan_job(PlanJob(record.graph, record.costs, budget, policy))
    if answer.planned is None:  # baselines may fail to find a plan
        assert policy != "offload-all"
        assert "finds no plan" in answer.reason
        return
    schedule = schedule_of(record, answer.planned.plan, answer.planned.program)
    uses = {s: [i for i, op in enumerate(record.graph.ops) if s in op.touched] for s in range(2 * length)}
    for pairs in (schedule.release, schedule.fetch, schedule.write):
        assert list(pairs) == sorted(pairs)
        assert all(0 <= op < record.op_count and 0 <= s < 2 * length for op, s in pairs)
    evicted = {s for _, s in schedule.release}
    assert {s for _, s in schedule.fetch} <= evicted
    assert evicted <= {s for _, s in schedule.write}
    # Each op that uses a storage has an offset for it, within the budget.
    for storage, ops in uses.items():
        first = min(op for op, s, _ in schedule.offsets if s == storage)
        assert first == record.places[ops[0]]
    assert all(offset + BYTES <= budget for _, _, offset in schedule.offsets)


def test_budget_for_all_storages_has_no_evictions() -> None:
    record = chain(4, 0)
    answer = plan_job(PlanJob(record.graph, record.costs, 100 * BYTES, "auto"))
    assert answer.planned is not None
    schedule = schedule_of(record, answer.planned.plan, answer.planned.program)
    assert schedule.release == schedule.fetch == schedule.write == ()
    assert schedule.offsets


def test_schedule_follows_the_plan_exactly() -> None:
    record = chain(3, 0)  # weights 0, 2, 4, and the results of ops 0, 1, 2: 1, 3, 5
    answer = plan_job(PlanJob(record.graph, record.costs, smallest_budget(record.graph, record.costs), "offload-all"))
    assert answer.planned is not None
    schedule = schedule_of(record, answer.planned.plan, answer.planned.program)
    assert Schedule(schedule.release, schedule.fetch, schedule.write) == Schedule(
        release=((1, 0), (2, 1), (2, 2), (3, 3), (4, 4), (5, 2)),
        fetch=((1, 2), (2, 4), (4, 2), (4, 3), (5, 0), (5, 1)),
        write=((0, 0), (1, 1), (1, 2), (2, 3), (3, 4), (4, 2)),
    )


def test_answer_gives_the_reason_when_the_budget_is_too_small() -> None:
    record = chain(3, 0)
    answer = plan_job(PlanJob(record.graph, record.costs, BYTES, "auto"))
    assert answer.planned is None
    assert "cannot hold this step" in answer.reason
