"""Recomputation sequences in Python, to compare with the results of ``remat.cpp`` to the last bit."""

from __future__ import annotations

from collections.abc import Sequence

from outofcore.planning.remat.chains import OFFLOADED, RECOMPUTED, Chain, ChainContents, Choices
from outofcore.planning.remat.contents import AT_HOME


def chain(choices: Choices, at: int, gaps: Sequence[int], limit: float = float("inf")) -> Chain | None:
    """Compute ``Choices.chain``, in the same order."""
    c = choices.contents
    maker, needs, born, gone, lasting, size = c.maker, c.needs, c.born, c.gone, c.lasting, c.size
    kind, start, fetch, gaps_of = choices.kind, choices.start, choices.fetch, choices.gaps_of
    target_list = sorted({choices.content[g] for g in gaps})
    targets, pending, visited = set(target_list), list(target_list), set(target_list)
    runs: set[int] = set()
    home: set[int] = set()
    seconds = 0.0
    while pending:
        op = maker[pending.pop()]
        if op < 0:
            return None
        if op in runs:
            continue
        runs.add(op)
        seconds += c.seconds[op]
        if seconds > limit:
            return None
        for need in needs[op]:
            if need in visited:
                continue
            visited.add(need)
            if lasting[need]:
                opened = [g for g in gaps_of[need] if start[g] < at < fetch[g]]
                is_resident = born[need] < at <= gone[need] and not any(
                    kind[g] in (OFFLOADED, RECOMPUTED) for g in opened
                )
                if lasting[need] == AT_HOME and not is_resident:
                    home.add(need)
                continue
            if born[need] < at <= gone[need]:
                is_resident = True
                for g in gaps_of[need]:
                    if kind[g] == RECOMPUTED:
                        if start[g] < at < fetch[g]:
                            is_resident = False
                    elif kind[g] == OFFLOADED and start[g] < at < fetch[g]:
                        home.add(need)
                if is_resident:
                    continue
            pending.append(need)
    choices.work += len(runs)
    order = sorted(runs)
    last: dict[int, int] = {}
    for op in order:
        for need in needs[op]:
            last[need] = op
    blocks: dict[int, int] = {}
    used = max_used = 0
    produced: set[int] = set()
    for op in order:
        for need in needs[op]:
            if need in home and need not in blocks:
                blocks[need] = size[need]
                used += size[need]
        used += c.fresh[op]
        max_used = max(max_used, used + c.workspace[op])
        used -= c.scratch[op]
        makes = c.makes[op]
        overwritten = {c.storage[m]: m for m in makes}
        for need in needs[op]:
            if need in blocks:
                if c.storage[need] in overwritten:
                    del blocks[need]  # written in place: the block holds the new content
                elif last[need] == op and need not in targets:
                    used -= blocks.pop(need)
        for m in makes:
            produced.add(m)
            if last.get(m, -1) > op or m in targets:
                blocks[m] = size[m]
            else:
                used -= size[m]
    target_bytes = sum(size[t] for t in targets)
    copied = tuple(size[x] for x in sorted(home))
    links = ChainContents(tuple(order), frozenset(produced), frozenset(visited | produced), copied, frozenset(home))
    return Chain(seconds, max_used, target_bytes, links)
