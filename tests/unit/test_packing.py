"""Tests of the placement of rectangles."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import naive_placement
import numpy as np
import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outofcore.cli.pack import read_table
from outofcore.errors import InputError, ValidationError
from outofcore.planning import placement
from outofcore.planning.placement import Packing, PlacementParams, Rectangle, canonical, peak
from outofcore.planning.placement.compiled import CanonicalResult, Deadline, best_fit, eject, first_fit
from outofcore.planning.placement.rectangles import Ints, Rectangles
from outofcore.validator import Placed, check_packing

INSTANCES = Path(__file__).parents[2] / "benchmarks" / "instances" / "pack"


def checked_height(rectangles: Sequence[Rectangle], offsets: Sequence[int]) -> int:
    return check_packing(
        Placed(r.id, r.lower, r.upper, r.size, offset, r.alignment, r.gap)
        for r, offset in zip(rectangles, offsets, strict=True)
    )


def pack(rectangles: Sequence[Rectangle], capacity: int | None = None, **options: Any) -> Packing:
    return placement.pack(rectangles, capacity=capacity, params=PlacementParams(**options))


def pack_and_check(rectangles: Sequence[Rectangle], capacity: int | None = None, **options: Any) -> Packing:
    drawn = pack(rectangles, capacity, **options)
    assert len(drawn.offsets) == len(rectangles)
    assert checked_height(rectangles, drawn.offsets) == drawn.height
    assert drawn.height >= drawn.lower_bound
    return drawn


def of(*rows: tuple[int, int, int]) -> list[Rectangle]:
    return [Rectangle(i, lower, upper, size) for i, (lower, upper, size) in enumerate(rows)]


def tiling(count: int, width: int, height: int, seed: int) -> list[Rectangle]:
    """Cut a box into rectangles: the optimal height is known, and hard to reach."""
    draw = random.Random(seed)
    boxes = [(0, width, 0, height)]
    while len(boxes) < count:
        a, b, low, high = box = max(draw.sample(boxes, min(3, len(boxes))), key=lambda x: (x[1] - x[0]) * (x[3] - x[2]))
        across = draw.random() < 0.5
        if (b - a if across else high - low) < 2:
            continue
        boxes.remove(box)
        if across:
            cut = draw.randrange(a + 1, b)
            boxes += [(a, cut, low, high), (cut, b, low, high)]
        else:
            cut = draw.randrange(low + 1, high)
            boxes += [(a, b, low, cut), (a, b, cut, high)]
    draw.shuffle(boxes)
    return of(*((a, b, high - low) for a, b, low, high in boxes))


# The speed of the machine does not matter to a packing.
SLOWLY = settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])

# The example of MiniMalloc's README.
MINIMALLOC = of((0, 3, 4), (3, 9, 4), (0, 9, 4), (9, 21, 4), (0, 21, 4))

ALGORITHMS: dict[str, Callable[[Rectangles], Ints]] = {
    "skyline": lambda r: best_fit(r, r.lifetimes.astype(np.float64)),
    "snug skyline": lambda r: best_fit(r, r.sizes / r.sizes.max(), 0.5),
    "first fit by size": lambda r: first_fit(r, np.argsort(-r.sizes, kind="stable")),
    "first fit in order": lambda r: first_fit(r, np.arange(len(r))),
    "ejection": lambda r: eject(r, first_fit(r, np.arange(len(r))), 0, 20_000, Deadline(None)),
}


@st.composite
def rectangles(draw: st.DrawFn) -> list[Rectangle]:
    """Draw rectangles of all kinds: empty, permanent, with a gap in the middle or around the end, aligned."""
    drawn: list[Rectangle] = []
    for index in range(draw(st.integers(0, 14))):
        lower, a, b, upper = sorted(draw(st.lists(st.integers(0, 12), min_size=4, max_size=4)))
        if draw(st.booleans()):
            lower, upper = 0, 12
        gap = draw(st.sampled_from([None, None, (a, b)]))
        size = draw(st.one_of(st.integers(0, 9), st.sampled_from([64, 4096, 5000])))
        drawn.append(Rectangle(index, lower, upper, size, draw(st.sampled_from([1, 1, 1, 3, 8, 64])), gap))
    return drawn


@SLOWLY
@given(rectangles())
def test_every_packing_is_valid(drawn: list[Rectangle]) -> None:
    packing = pack_and_check(drawn, effort=30_000)
    live = max(sum(r.size for r in drawn if any(a <= t < b for a, b in r.segments)) for t in range(13))
    assert live <= packing.lower_bound <= packing.height
    assert pack(drawn, effort=0).lower_bound == live == peak(drawn).bytes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@SLOWLY
@given(drawn=rectangles(), base=st.sampled_from([0, 7, 4096]))
def test_each_algorithm_is_valid_by_itself(algorithm: str, drawn: list[Rectangle], base: int) -> None:
    solid = [r for r in drawn if r.size and r.segments]
    if not solid:
        return
    offsets = ALGORITHMS[algorithm](Rectangles.of(solid, base)).tolist()
    checked_height(solid, offsets)
    assert min(offsets) >= base


@SLOWLY
@given(rectangles(), st.sampled_from([0, 7, 4096]), st.sampled_from([0.0, 0.1, 1.0]))
def test_compiled_algorithms_equal_naive_ones(drawn: list[Rectangle], base: int, snug: float) -> None:
    solid = [r for r in drawn if r.size and r.segments]
    if not solid:
        return
    layout = Rectangles.of(solid, base)
    worth = layout.lifetimes / layout.lifetimes.max()
    order = np.argsort(-layout.sizes, kind="stable")
    assert best_fit(layout, worth, snug).tolist() == naive_placement.best_fit(layout, worth.tolist(), snug)
    assert first_fit(layout, order).tolist() == naive_placement.first_fit(layout, order.tolist())


SWITCHES = ("dominance", "lifting", "precedence", "decomposition", "restarts")


@pytest.mark.parametrize("disabled", SWITCHES)
@SLOWLY
@given(drawn=rectangles(), base=st.sampled_from([0, 7]), reduction=st.integers(0, 3))
def test_search_techniques_do_not_lose_placements(
    disabled: str, drawn: list[Rectangle], base: int, reduction: int
) -> None:
    solid = [r for r in drawn if r.size and r.segments]
    if not solid:
        return
    layout = Rectangles.of(solid, base)
    capacity = layout.height(first_fit(layout, np.arange(len(solid)))) - reduction
    answers: list[CanonicalResult] = []
    plain = PlacementParams(effort=3_000_000, **dict.fromkeys(SWITCHES, False))
    for params in (PlacementParams(effort=3_000_000), PlacementParams(effort=3_000_000, **{disabled: False}), plain):
        answer, offsets = canonical.search(layout, capacity, params, Deadline(None))
        answers.append(answer)
        if answer is CanonicalResult.FOUND:
            assert checked_height(solid, offsets.tolist()) <= capacity
            assert offsets.min() >= base
    assert reduction or answers[0] is not CanonicalResult.NONE
    assert not {CanonicalResult.FOUND, CanonicalResult.NONE} <= set(answers)


@pytest.mark.parametrize("count", [24, 40, 60])
@pytest.mark.parametrize("seed", range(2))
def test_cut_box_is_reassembled(count: int, seed: int) -> None:
    drawn = tiling(count, 1000, 10_000, seed)
    assert pack_and_check(drawn, capacity=10_000, effort=4_000_000_000).height == 10_000


def test_infeasible_capacity_is_proven() -> None:
    arcs = [Rectangle(0, 0, 4, 5), Rectangle(1, 2, 6, 5), Rectangle(2, 0, 6, 5, gap=(2, 4))]
    fillers = [Rectangle(f"{i}", i % 6, i % 6 + 1, 1 + i % 2) for i in range(12)]
    assert pack_and_check(arcs + fillers, capacity=14).lower_bound == 15


def test_best_fit_places_longest_lifetime_lowest() -> None:
    drawn = of((0, 2, 8), (1, 4, 4), (2, 4, 8), (0, 5, 1), (4, 5, 3))
    packing = placement.best_fit(drawn)
    assert checked_height(drawn, packing.offsets) == packing.height
    # 3 is held throughout, then 1 lives longest; 0 must be above it, and 4 begins where 1 ends.
    assert packing.offsets == (5, 1, 5, 0, 1)
    assert placement.best_fit([]) == Packing((), 0, 0)


def test_ctrl_c_ends_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: Deadline) -> bool:
        raise KeyboardInterrupt

    drawn = tiling(300, 1000, 10_000, seed=1)
    monkeypatch.setattr(Deadline, "has_passed", property(interrupt))
    with pytest.raises(KeyboardInterrupt):
        canonical.search(Rectangles.of(drawn, 0), 10_000, PlacementParams(restarts=False), Deadline(None))


@pytest.mark.parametrize(
    ("drawn", "height"),
    [
        ([], 0),
        (of((0, 5, 0)), 0),
        (of((3, 3, 7)), 7),  # held at no time, but it has an address
        (of((0, 5, 7)), 7),
        (of((0, 5, 7), (5, 9, 7)), 7),  # half-open intervals: they do not overlap
        (of((0, 6, 7), (5, 9, 7)), 14),
        (MINIMALLOC, 12),
        # Both are held throughout, around the third.
        (of((0, 9, 5), (0, 9, 3), (2, 4, 1)), 9),
        # Ordering by size, length or area alone leaves a hole here.
        (of((0, 2, 4), (2, 4, 2), (0, 3, 2), (3, 6, 4), (4, 6, 2)), 6),
    ],
)
def test_small_cases_have_the_optimal_height(drawn: list[Rectangle], height: int) -> None:
    assert pack_and_check(drawn).height == height


def test_wrapping_rectangle_has_one_address() -> None:
    # Around the end of ten instructions: "a" is evicted over [3, 7), and "b" uses its place.
    drawn = [Rectangle("a", 0, 10, 8, gap=(3, 7)), Rectangle("b", 3, 7, 8), Rectangle("c", 0, 10, 1)]
    packing = pack_and_check(drawn)
    assert packing.height == packing.lower_bound == 9
    assert packing.offsets[0] == packing.offsets[1]
    # "b" stays one instruction too long.
    late = [drawn[0], Rectangle("b", 3, 8, 8), drawn[2]]
    assert pack_and_check(late).height == 17


def test_circular_arcs_may_need_more_than_the_live_bytes() -> None:
    # Three arcs that overlap in pairs, at different times: two are live, and three addresses are needed.
    drawn = [Rectangle(0, 0, 4, 1), Rectangle(1, 2, 6, 1), Rectangle(2, 0, 6, 1, gap=(2, 4))]
    packing = pack_and_check(drawn)
    assert packing.height == 3
    # The search was exhaustive at height two.
    assert packing.lower_bound == 3


def test_offsets_are_aligned() -> None:
    drawn = [Rectangle(0, 0, 4, 5), Rectangle(1, 0, 4, 5, alignment=8), Rectangle(2, 1, 3, 1, alignment=64)]
    packing = pack_and_check(drawn)
    assert packing.offsets[1] % 8 == packing.offsets[2] % 64 == 0
    # The two permanent rectangles take 13 bytes with the small one above, or 8 with the aligned one below.
    assert packing.height <= 65


def test_search_keeps_the_alignment() -> None:
    draw = random.Random(3)
    drawn = [Rectangle(r.id, r.lower, r.upper, r.size, draw.choice((1, 8, 64))) for r in tiling(40, 100, 3000, seed=5)]
    assert pack_and_check(drawn, effort=300_000).height <= pack_and_check(drawn, effort=0).height


@pytest.mark.parametrize("seed", range(3))
def test_search_beats_every_fixed_order(seed: int) -> None:
    drawn = tiling(16, 200, 1000, seed)
    layout = Rectangles.of(drawn, 0)
    plain = min(layout.height(ALGORITHMS[algorithm](layout)) for algorithm in ALGORITHMS if algorithm != "ejection")
    packing = pack_and_check(drawn)
    assert packing.lower_bound == 1000
    assert packing.height == 1000 or packing.height < plain


def test_hard_instances_are_lower_than_first_fit() -> None:
    for seed in range(3):
        drawn = tiling(120, 10_000, 100_000, seed)
        layout = Rectangles.of(drawn, 0)
        orders = [np.lexsort((-layout.sizes, layout.begin)), np.argsort(-layout.sizes), np.argsort(-layout.lifetimes)]
        plain = min(layout.height(first_fit(layout, order)) for order in orders)
        assert pack_and_check(drawn, effort=1_000_000).height < 0.95 * plain


@pytest.mark.parametrize("path", sorted(INSTANCES.glob("*.csv")), ids=lambda p: p.name)
def test_instances_are_packed_low(path: Path) -> None:
    """In-core, auto and priced plans are within 1 % of the live bytes."""
    drawn = read_table(path.read_text()).rectangles
    layout = Rectangles.of(drawn, 0)
    plain = layout.height(first_fit(layout, np.argsort(-layout.sizes, kind="stable")))
    packing = pack_and_check(drawn, effort=1_000_000)
    assert packing.height <= plain
    if any(label in path.name for label in ("in-core", "auto", "priced")):
        assert packing.height <= 1.01 * packing.lower_bound


def test_instances_exist() -> None:
    assert {path.name.partition("-")[0] for path in INSTANCES.glob("*.csv")} >= {"cut", "residual258", "resnet50"}


def test_same_rectangles_give_the_same_packing() -> None:
    drawn = tiling(300, 1000, 10_000, seed=1)
    first, second = pack(drawn, effort=500_000), pack(list(drawn), effort=500_000)
    assert first == second
    assert first.height > first.lower_bound  # else the search did not run


def test_search_stops_at_the_capacity() -> None:
    drawn = tiling(300, 1000, 10_000, seed=1)
    quick, lowest = pack(drawn, effort=0), pack(drawn, effort=500_000)
    assert lowest.height < quick.height
    relaxed = pack_and_check(drawn, capacity=quick.height + 10_000, effort=500_000)
    assert lowest.height < relaxed.height <= quick.height + 10_000
    assert pack_and_check(drawn, capacity=lowest.height, effort=1_000_000).height <= lowest.height


def test_infeasible_capacity_is_not_searched_for() -> None:
    drawn = tiling(300, 1000, 10_000, seed=1)
    # A search would take hours.
    packing = pack_and_check(drawn, capacity=9_999, effort=10**12)
    assert packing.height > 9_999


def test_search_stops_at_its_time_limit() -> None:
    drawn = tiling(300, 1000, 10_000, seed=1)
    packing = pack(drawn, effort=10**12, seconds=0.05)
    assert checked_height(drawn, packing.offsets) == packing.height


def test_peak_names_time_and_rectangles() -> None:
    result = peak([*MINIMALLOC, Rectangle("none", 4, 4, 100)])
    assert (result.bytes, result.time, result.ids) == (12, 0, (0, 2, 4))
    assert peak([]).bytes == 0


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (of((5, 4, 1)), "ends at 4, before it begins at 5"),
        (of((0, 4, -1)), "size -1"),
        ([Rectangle(0, 0, 4, 1, alignment=0)], "alignment 0"),
        ([Rectangle(0, 2, 4, 1, gap=(1, 3))], "is outside"),
        ([Rectangle("x", 0, 4, 1), Rectangle("x", 5, 6, 1)], "two rectangles have the id x"),
        (of((0, 4, 2**70)), "2\\*\\*60 or more"),
        (of((-(2**63), 4, 1)), "2\\*\\*60 or more"),
        (of((0, 4, 2**59), (2, 4, 2**59)), "more than there are addresses"),
    ],
)
def test_contradictory_rectangles_are_refused(drawn: list[Rectangle], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pack(drawn)


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        ([Placed(0, 0, 4, 8, 0), Placed(1, 3, 5, 8, 7)], "overlaps rectangle 0.*held at 3"),
        ([Placed(0, 0, 4, 8, 0), Placed(1, 0, 5, 2, 3)], "overlaps"),
        ([Placed(0, 0, 9, 8, 0, gap=(2, 6)), Placed(1, 4, 7, 8, 0)], "overlaps .*held at 6"),
        ([Placed(0, 0, 4, 8, 4, alignment=8)], "multiple of 8"),
        ([Placed(0, 0, 4, 8, -8)], "not negative"),
        ([Placed(0, 0, 4, 8, 93)], "above the capacity of 100"),
    ],
)
def test_checker_refuses_invalid_placements(placed: list[Placed], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        check_packing(placed, 100)


def test_checker_accepts_a_valid_placement() -> None:
    placed = [
        Placed(0, 0, 9, 8, 0, gap=(2, 6)),
        Placed(1, 2, 6, 8, 0),
        Placed(2, 0, 9, 92, 8, 4),
        Placed(3, 5, 5, 9, 0),
    ]
    assert check_packing(placed, 100) == 100
