"""Placing rectangles: valid, low, the same each time; and what each way of placing promises."""

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


def proven(rectangles: Sequence[Rectangle], offsets: Sequence[int]) -> int:
    """The height, from the checker that shares no code with what it checks."""
    return check_packing(
        Placed(r.id, r.lower, r.upper, r.size, offset, r.alignment, r.gap)
        for r, offset in zip(rectangles, offsets, strict=True)
    )


def pack(rectangles: Sequence[Rectangle], capacity: int | None = None, **how: Any) -> Packing:
    return placement.pack(rectangles, capacity=capacity, params=PlacementParams(**how))


def packed(rectangles: Sequence[Rectangle], capacity: int | None = None, **how: Any) -> Packing:
    found = pack(rectangles, capacity, **how)
    assert len(found.offsets) == len(rectangles)
    assert proven(rectangles, found.offsets) == found.height
    assert found.height >= found.lower_bound
    return found


def of(*rows: tuple[int, int, int]) -> list[Rectangle]:
    return [Rectangle(i, lower, upper, size) for i, (lower, upper, size) in enumerate(rows)]


def tiling(count: int, width: int, height: int, seed: int) -> list[Rectangle]:
    """A box cut up: the best height is known, and hard to find again."""
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


# How fast a busy machine is says nothing about a packing.
SLOWLY = settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])

# The example of MiniMalloc's description.
MINIMALLOC = of((0, 3, 4), (3, 9, 4), (0, 9, 4), (9, 21, 4), (0, 21, 4))

WAYS: dict[str, Callable[[Rectangles], Ints]] = {
    "skyline": lambda r: best_fit(r, r.lifetimes.astype(np.float64)),
    "snug skyline": lambda r: best_fit(r, r.sizes / r.sizes.max(), 0.5),
    "first fit by size": lambda r: first_fit(r, np.argsort(-r.sizes, kind="stable")),
    "first fit in order": lambda r: first_fit(r, np.arange(len(r))),
    "ejection": lambda r: eject(r, first_fit(r, np.arange(len(r))), 0, 20_000, Deadline(None)),
}


@st.composite
def rectangles(draw: st.DrawFn) -> list[Rectangle]:
    """Of all kinds: empty, held all the time, with a gap in the middle or around the end, aligned."""
    found: list[Rectangle] = []
    for index in range(draw(st.integers(0, 14))):
        lower, a, b, upper = sorted(draw(st.lists(st.integers(0, 12), min_size=4, max_size=4)))
        if draw(st.booleans()):
            lower, upper = 0, 12
        gap = draw(st.sampled_from([None, None, (a, b)]))
        size = draw(st.one_of(st.integers(0, 9), st.sampled_from([64, 4096, 5000])))
        found.append(Rectangle(index, lower, upper, size, draw(st.sampled_from([1, 1, 1, 3, 8, 64])), gap))
    return found


@SLOWLY
@given(rectangles())
def test_any_packing_holds(found: list[Rectangle]) -> None:
    packing = packed(found, effort=30_000)
    live = max(sum(r.size for r in found if any(a <= t < b for a, b in r.segments)) for t in range(13))
    assert live <= packing.lower_bound <= packing.height
    assert pack(found, effort=0).lower_bound == live == peak(found).bytes


@pytest.mark.parametrize("way", WAYS)
@SLOWLY
@given(found=rectangles(), base=st.sampled_from([0, 7, 4096]))
def test_each_way_holds_by_itself(way: str, found: list[Rectangle], base: int) -> None:
    solid = [r for r in found if r.size and r.segments]
    if not solid:
        return
    offsets = WAYS[way](Rectangles.of(solid, base)).tolist()
    proven(solid, offsets)
    assert min(offsets) >= base


@SLOWLY
@given(rectangles(), st.sampled_from([0, 7, 4096]), st.sampled_from([0.0, 0.1, 1.0]))
def test_compiled_rules_equal_naive_ones(found: list[Rectangle], base: int, snug: float) -> None:
    solid = [r for r in found if r.size and r.segments]
    if not solid:
        return
    layout = Rectangles.of(solid, base)
    worth = layout.lifetimes / layout.lifetimes.max()
    order = np.argsort(-layout.sizes, kind="stable")
    assert best_fit(layout, worth, snug).tolist() == naive_placement.best_fit(layout, worth.tolist(), snug)
    assert first_fit(layout, order).tolist() == naive_placement.first_fit(layout, order.tolist())


SWITCHES = ("dominance", "lifting", "precedence", "decomposition", "restarts")


@pytest.mark.parametrize("off", SWITCHES)
@SLOWLY
@given(found=rectangles(), base=st.sampled_from([0, 7]), less=st.integers(0, 3))
def test_no_technique_of_the_search_loses_a_placement(off: str, found: list[Rectangle], base: int, less: int) -> None:
    solid = [r for r in found if r.size and r.segments]
    if not solid:
        return
    layout = Rectangles.of(solid, base)
    capacity = layout.height(first_fit(layout, np.arange(len(solid)))) - less
    answers: list[CanonicalResult] = []
    plain = PlacementParams(effort=3_000_000, **dict.fromkeys(SWITCHES, False))
    for params in (PlacementParams(effort=3_000_000), PlacementParams(effort=3_000_000, **{off: False}), plain):
        answer, offsets = canonical.search(layout, capacity, params, Deadline(None))
        answers.append(answer)
        if answer is CanonicalResult.FOUND:
            assert proven(solid, offsets.tolist()) <= capacity
            assert offsets.min() >= base
    assert less or answers[0] is not CanonicalResult.NONE
    assert not {CanonicalResult.FOUND, CanonicalResult.NONE} <= set(answers)


@pytest.mark.parametrize("count", [24, 40, 60])
@pytest.mark.parametrize("seed", range(2))
def test_a_box_cut_up_is_put_together_again(count: int, seed: int) -> None:
    found = tiling(count, 1000, 10_000, seed)
    assert packed(found, capacity=10_000, effort=4_000_000_000).height == 10_000


def test_that_there_is_no_placement_is_proven() -> None:
    arcs = [Rectangle(0, 0, 4, 5), Rectangle(1, 2, 6, 5), Rectangle(2, 0, 6, 5, gap=(2, 4))]
    others = [Rectangle(f"{i}", i % 6, i % 6 + 1, 1 + i % 2) for i in range(12)]
    assert packed(arcs + others, capacity=14).lower_bound == 15


def test_best_fit_alone_takes_the_longest_lifetime_at_the_lowest_place() -> None:
    found = of((0, 2, 8), (1, 4, 4), (2, 4, 8), (0, 5, 1), (4, 5, 3))
    packing = placement.best_fit(found)
    assert proven(found, packing.offsets) == packing.height
    # 3 is held all the time, then 1 is the longest; 0 must rise above it, 4 begins where it ends.
    assert packing.offsets == (5, 1, 5, 0, 1)
    assert placement.best_fit([]) == Packing((), 0, 0)


def test_ctrl_c_ends_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Deadline) -> bool:
        raise KeyboardInterrupt

    found = tiling(300, 1000, 10_000, seed=1)
    monkeypatch.setattr(Deadline, "has_passed", property(interrupted))
    with pytest.raises(KeyboardInterrupt):
        canonical.search(Rectangles.of(found, 0), 10_000, PlacementParams(restarts=False), Deadline(None))


@pytest.mark.parametrize(
    ("found", "height"),
    [
        ([], 0),
        (of((0, 5, 0)), 0),
        (of((3, 3, 7)), 7),  # held at no time, but it has an address
        (of((0, 5, 7)), 7),
        (of((0, 5, 7), (5, 9, 7)), 7),  # half-open: they do not meet
        (of((0, 6, 7), (5, 9, 7)), 14),
        (MINIMALLOC, 12),
        # Held all the time, both, whatever is in between.
        (of((0, 9, 5), (0, 9, 3), (2, 4, 1)), 9),
        # Each order by size, length or area alone leaves a hole here.
        (of((0, 2, 4), (2, 4, 2), (0, 3, 2), (3, 6, 4), (4, 6, 2)), 6),
    ],
)
def test_small_ones_are_placed_as_low_as_can_be(found: list[Rectangle], height: int) -> None:
    assert packed(found).height == height


def test_what_wraps_has_one_address_on_both_sides() -> None:
    # Around the end of ten instructions: "a" is away over [3, 7), where "b" takes its room.
    found = [Rectangle("a", 0, 10, 8, gap=(3, 7)), Rectangle("b", 3, 7, 8), Rectangle("c", 0, 10, 1)]
    packing = packed(found)
    assert packing.height == packing.lower_bound == 9
    assert packing.offsets[0] == packing.offsets[1]
    # "b" stays a moment too long.
    late = [found[0], Rectangle("b", 3, 8, 8), found[2]]
    assert packed(late).height == 17


def test_a_circle_may_need_more_than_is_ever_live() -> None:
    # Three arcs that meet in pairs, each at another time: two are live, three addresses are needed.
    found = [Rectangle(0, 0, 4, 1), Rectangle(1, 2, 6, 1), Rectangle(2, 0, 6, 1, gap=(2, 4))]
    packing = packed(found)
    assert packing.height == 3
    # The search has tried all there is with two.
    assert packing.lower_bound == 3


def test_offsets_are_aligned() -> None:
    found = [Rectangle(0, 0, 4, 5), Rectangle(1, 0, 4, 5, alignment=8), Rectangle(2, 1, 3, 1, alignment=64)]
    packing = packed(found)
    assert packing.offsets[1] % 8 == packing.offsets[2] % 64 == 0
    # The two that are live throughout take 13 bytes with the small one above, or 8 with what is aligned below.
    assert packing.height <= 65


def test_alignment_is_kept_by_the_search() -> None:
    draw = random.Random(3)
    found = [Rectangle(r.id, r.lower, r.upper, r.size, draw.choice((1, 8, 64))) for r in tiling(40, 100, 3000, seed=5)]
    assert packed(found, effort=300_000).height <= packed(found, effort=0).height


@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_what_no_order_finds(seed: int) -> None:
    found = tiling(16, 200, 1000, seed)
    layout = Rectangles.of(found, 0)
    plain = min(layout.height(WAYS[way](layout)) for way in WAYS if way != "ejection")
    packing = packed(found)
    assert packing.lower_bound == 1000
    assert packing.height == 1000 or packing.height < plain


def test_hard_instances_are_lower_than_first_fit() -> None:
    for seed in range(3):
        found = tiling(120, 10_000, 100_000, seed)
        layout = Rectangles.of(found, 0)
        orders = [np.lexsort((-layout.sizes, layout.begin)), np.argsort(-layout.sizes), np.argsort(-layout.lifetimes)]
        plain = min(layout.height(first_fit(layout, order)) for order in orders)
        assert packed(found, effort=1_000_000).height < 0.95 * plain


@pytest.mark.parametrize("path", sorted(INSTANCES.glob("*.csv")), ids=lambda p: p.name)
def test_instances_come_out_low(path: Path) -> None:
    """Steps in core, and as auto or priced plan them, within 1 % of what is live; all no higher than first fit."""
    found = read_table(path.read_text()).rectangles
    layout = Rectangles.of(found, 0)
    plain = layout.height(first_fit(layout, np.argsort(-layout.sizes, kind="stable")))
    packing = packed(found, effort=1_000_000)
    assert packing.height <= plain
    if any(how in path.name for how in ("in-core", "auto", "priced")):
        assert packing.height <= 1.01 * packing.lower_bound


def test_there_are_instances() -> None:
    assert {path.name.partition("-")[0] for path in INSTANCES.glob("*.csv")} >= {"cut", "residual258", "resnet50"}


def test_the_same_rectangles_come_out_the_same() -> None:
    found = tiling(300, 1000, 10_000, seed=1)
    first, second = pack(found, effort=500_000), pack(list(found), effort=500_000)
    assert first == second
    assert first.height > first.lower_bound  # else nothing was searched


def test_enough_is_enough() -> None:
    found = tiling(300, 1000, 10_000, seed=1)
    quick, lowest = pack(found, effort=0), pack(found, effort=500_000)
    assert lowest.height < quick.height
    relaxed = packed(found, capacity=quick.height + 10_000, effort=500_000)
    assert lowest.height < relaxed.height <= quick.height + 10_000
    assert packed(found, capacity=lowest.height, effort=1_000_000).height <= lowest.height


def test_a_capacity_that_cannot_do_is_not_searched_for() -> None:
    found = tiling(300, 1000, 10_000, seed=1)
    # Were it searched for, this would take hours.
    packing = packed(found, capacity=9_999, effort=10**12)
    assert packing.height > 9_999


def test_time_runs_out() -> None:
    found = tiling(300, 1000, 10_000, seed=1)
    packing = pack(found, effort=10**12, seconds=0.05)
    assert proven(found, packing.offsets) == packing.height


def test_the_peak_says_when_and_who() -> None:
    most = peak([*MINIMALLOC, Rectangle("none", 4, 4, 100)])
    assert (most.bytes, most.time, most.ids) == (12, 0, (0, 2, 4))
    assert peak([]).bytes == 0


@pytest.mark.parametrize(
    ("found", "message"),
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
def test_what_contradicts_itself_is_refused(found: list[Rectangle], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pack(found)


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
def test_the_checker_refuses(placed: list[Placed], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        check_packing(placed, 100)


def test_the_checker_lets_pass() -> None:
    placed = [
        Placed(0, 0, 9, 8, 0, gap=(2, 6)),
        Placed(1, 2, 6, 8, 0),
        Placed(2, 0, 9, 92, 8, 4),
        Placed(3, 5, 5, 9, 0),
    ]
    assert check_packing(placed, 100) == 100
