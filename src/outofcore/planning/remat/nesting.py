"""Chains in which ops run several times, so that they hold less at once: nested rematerialization.

A chain that runs each op once holds what it makes from the run that makes it to the last that reads it: in a U-Net all
skip connections at once. Here, what lies idle over the run at which the most is held is dropped there, and made again
right before it is read next; of all that lies idle, whatever costs the fewest seconds for its bytes. Then the same for
the run at which the most is held now, until all is within a bound. The runs that make something again may themselves be
the ones at which the most is held, and what they make may be dropped and made again in its turn.

    each once     a  b  c  .  .  .  [x: reads c]  [y: reads a]      a is held over the making of c and x
    nested        a  b  c  .  .  .  [x: reads c]  a  [y: reads a]   a is dropped once b is there

A run of which nothing is read before it is made anew is left out. So what a chain is for is made late, where it can be.
Kumar, Purohit, Svitkina, Vee & Wang, "Efficient Rematerialization for Deep Networks" (NeurIPS 2019) bound what such
schedules can reach; the choice by seconds for bytes is that of Kirisame et al. (arXiv 2006.09616), without the age,
since it is known when each content is read next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from outofcore.planning.remat.contents import Contents

# Contents to drop that are tried in full at each turn, those first that look cheapest.
_TRIED = 4
# Runs that a chain may have for each op in it.
_RUNS_EACH = 12
# Runs that are looked at, at most, to make one chain hold less: for each op in it, and some more.
_WORK_EACH, _WORK = 40, 2000


@dataclass(frozen=True, slots=True)
class Nested:
    """A chain as found.

    Attributes:
        ops: in the order in which they run, some several times.
        bytes: the most that it holds.
        seconds: of all runs.
        work: runs that were looked at to find it.
    """

    ops: tuple[int, ...]
    bytes: int
    seconds: float
    work: int


@dataclass(frozen=True)
class Surroundings:
    """What a chain finds, and is for.

    Attributes:
        targets: contents that must be there in the end.
        home: contents that are copied in from home.
        there: contents that are on the device.
    """

    targets: Set[int]
    home: Set[int]
    there: Set[int]


def nested(contents: Contents, ops: Sequence[int], around: Surroundings, bound: int) -> Nested:
    """The chain, holding no more than a bound if that can be had; else about as little as it can.

    Args:
        contents: of the step.
        ops: of the chain, each once and in the step's order.
        around: what it finds, and is for.
        bound: bytes of large blocks that it had best hold at most.
    """
    return _Nesting(contents, around, bound).run(list(ops))


@dataclass(slots=True)
class _Walk:
    """What a sequence of runs holds.

    Attributes:
        levels: by run, the bytes held while it runs.
        most: the largest of them.
        held: by content, the positions of the run from which on it is there and after which it is gone, for each time;
            those are -1 and the number of runs where it is copied in before or is there in the end.
        reads: by content, the positions of the runs that read it.
    """

    levels: list[int]
    most: int
    held: dict[int, list[tuple[int, int]]]
    reads: dict[int, list[int]]


@dataclass
class _Nesting:
    contents: Contents
    around: Surroundings
    bound: int
    work: int = field(default=0, init=False)
    enough: int = field(default=0, init=False)

    def run(self, ops: list[int]) -> Nested:
        seconds = self.contents.seconds
        walk = self._walk(ops)
        if walk is None:  # it reads what it has not: not for this to judge
            return Nested(tuple(ops), 1 << 62, sum(seconds[op] for op in ops), self.work)
        longest, self.enough = _RUNS_EACH * len(ops), _WORK_EACH * len(ops) + _WORK
        while walk.most > self.bound and self.work < self.enough and len(ops) <= longest:
            found = self._lower(ops, walk)
            if found is None:
                break
            ops, walk = found
        if walk.most <= self.bound:
            ops, walk = self._settled(ops, walk)
        return Nested(tuple(ops), walk.most, sum(seconds[op] for op in ops), self.work)

    def _lower(self, ops: list[int], walk: _Walk) -> tuple[list[int], _Walk] | None:
        """The sequence with something dropped over the run at which the most is held; None if nothing helps."""
        c, levels = self.contents, walk.levels
        peak = max(range(len(levels)), key=levels.__getitem__)
        needed = set(c.needs[ops[peak]])
        rated: list[tuple[float, int, int, list[int]]] = []
        for content, spans in walk.held.items():
            if not c.size[content] or content in needed or content in self.around.home:
                continue
            if not any(begin < peak < end for begin, end in spans):
                continue
            reads = walk.reads.get(content, [])
            later = bisect_right(reads, peak)
            to = reads[later] if later < len(reads) else len(ops)
            again = self._making(content, to, ops, walk)
            if again is not None:
                rated.append((sum(c.seconds[op] for op in again) / c.size[content], content, to, again))
        rated.sort(key=lambda one: one[:3])
        now = sum(c.seconds[op] for op in ops)
        count = levels.count(walk.most)
        best: tuple[float, list[int], _Walk] | None = None
        tried = 0
        for _, content, to, again in rated:
            if tried >= _TRIED and best is not None:
                break
            tried += 1
            changed = self._living([*ops[:to], *again, *ops[to:]])
            after = self._walk(changed)
            if after is None or (after.most, after.levels.count(after.most)) >= (walk.most, count):
                continue
            more = (sum(c.seconds[op] for op in changed) - now) / c.size[content]
            if best is None or more < best[0]:
                best = (more, changed, after)
        return None if best is None else best[1:]

    def _making(self, content: int, to: int, ops: list[int], walk: _Walk) -> list[int] | None:
        """The runs that make a content again right before a position, from what is held there without it."""
        c, around = self.contents, self.around
        runs: set[int] = set()
        pending, seen = [content], {content}
        while pending:
            op = c.maker[pending.pop()]
            if op < 0:
                return None
            if op in runs:
                continue
            runs.add(op)
            written = {c.storage[made] for made in c.makes[op]}
            for need in c.needs[op]:
                if need in seen:
                    continue
                seen.add(need)
                if need in around.there or need in around.home:
                    continue
                spans = walk.held.get(need, ())
                if any(begin < to <= end for begin, end in spans):
                    if c.storage[need] in written:
                        return None  # written over in place, and who reads it later would find it gone
                    continue
                # A small one may as well have been held since it was there last, unless it was written over.
                if not c.size[need] and any(end < to for _, end in spans) and not self._is_overwritten(need):
                    continue
                pending.append(need)
        self.work += len(runs)
        return sorted(runs)

    def _is_overwritten(self, content: int) -> bool:
        """Whether an op of the step writes to it in place, which could be one of a chain."""
        c = self.contents
        following = content + 1
        return following < len(c.storage) and c.storage[following] == c.storage[content]

    def _living(self, ops: list[int]) -> list[int]:
        """The sequence without runs of which nothing is read before it is made anew."""
        c = self.contents
        read_next = set(self.around.targets)
        kept: list[int] = []
        for op in reversed(ops):
            makes = c.makes[op]
            if read_next.isdisjoint(makes):
                continue
            kept.append(op)
            read_next.difference_update(makes)
            read_next.update(c.needs[op])
        return kept[::-1]

    def _walk(self, ops: list[int]) -> _Walk | None:
        """What a sequence holds; None if a run does not find what it needs. The lowering lets go by the same rule."""
        c, around = self.contents, self.around
        needs_of, makes_of, storage, size = c.needs, c.makes, c.storage, c.size
        there, home = around.there, around.home
        self.work += len(ops)
        read_next = set(around.targets)
        going: list[list[int]] = []
        for op in reversed(ops):
            needs, makes = needs_of[op], makes_of[op]
            going.append([x for x in (*needs, *makes) if x not in read_next])
            read_next.difference_update(makes)
            read_next.update(needs)
        going.reverse()
        since: dict[int, int] = {}
        held: dict[int, list[tuple[int, int]]] = {}
        reads: dict[int, list[int]] = {}
        levels: list[int] = []
        used = 0
        for position, op in enumerate(ops):
            written = {storage[m] for m in makes_of[op]}
            for need in needs_of[op]:
                if need not in since:
                    if need in home:
                        since[need] = position - 1
                        used += size[need]
                    elif need in there:
                        continue
                    else:
                        return None
                reads.setdefault(need, []).append(position)
            used += c.fresh[op]
            levels.append(used + c.workspace[op])
            used -= c.scratch[op]
            for need in needs_of[op]:
                if storage[need] in written and need in since:
                    held.setdefault(need, []).append((since.pop(need), position))
            for m in makes_of[op]:
                if m in there:
                    used -= size[m]
                else:
                    since[m] = position
            for x in going[position]:
                if x in since:
                    used -= size[x]
                    held.setdefault(x, []).append((since.pop(x), position))
        for x, begin in since.items():
            held.setdefault(x, []).append((begin, len(ops)))
        return _Walk(levels, max(levels, default=0), held, reads)

    def _settled(self, ops: list[int], walk: _Walk) -> tuple[list[int], _Walk]:
        """The sequence without runs that turned out not to be needed: what they make can be held after all."""
        position = len(ops) - 1
        while position > 0 and self.work < 2 * self.enough:
            if ops[position] in ops[:position]:
                changed = self._living([*ops[:position], *ops[position + 1 :]])
                after = self._walk(changed)
                if after is not None and after.most <= self.bound:
                    ops, walk = changed, after
                    position = min(position, len(ops))
            position -= 1
        return ops, walk
