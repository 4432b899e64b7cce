"""What the measurements of ``peers.py`` say: who is faster at which peak. Pure functions; the table in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outofcore.units import format_bytes, format_seconds

Row = Mapping[str, Any]
OURS = "outofcore"
COMPILED = "outofcore-inductor"  # with Inductor's kernels, and so not with the losses of eager PyTorch
_BOTH = frozenset({OURS, COMPILED})

# Budgets that are so near to another, above it, are served by that other.
_SAME = 1.08
_NEAR = 1.15


def choose_budgets(smallest: int, in_core: int, at_peaks: Iterable[int], parts: Iterable[float]) -> list[int]:
    """Budgets to run, in bytes, the largest first.

    The smallest, that which holds everything, those at which a peer's peak is kept, and parts of the second. Of several
    peers' peaks within 8 % the lowest counts: what stays below it stays below all of them. A part is left out where
    another budget is within 15 %.

    Args:
        smallest: with which a step can run at all.
        in_core: that holds everything.
        at_peaks: budgets with which our process stays below the peak of a peer.
        parts: of ``in_core``, as divisors.
    """
    chosen = [in_core, smallest]
    for budget in sorted(at_peaks):
        if smallest <= budget < in_core and not any(kept <= budget <= _SAME * kept for kept in chosen):
            chosen.append(budget)
    for budget in (int(in_core / part) for part in parts):
        near = any(budget <= _NEAR * kept and kept <= _NEAR * budget for kept in chosen)
        if smallest <= budget < in_core and not near:
            chosen.append(budget)
    return sorted(chosen, reverse=True)


def ratio_of(ours: Row, other: Row) -> float:
    """One row's step time over another's: the median of the ratios of the rounds in which both took a turn.

    A round in which the machine was slow was slow for both, which a ratio of two medians does not know.
    """
    pairs = zip(_timed(ours), _timed(other), strict=True)
    return statistics.median(mine / its for mine, its in pairs)


def _timed(row: Row) -> Sequence[float]:
    return row["steps"]["seconds"][row["warm_up"] :]


def verdicts(rows: Sequence[Row], tool: str = OURS) -> list[dict[str, Any]]:
    """For each peer: that of our runs whose peak was the next below it, or the same, and whether it was faster.

    Nothing is interpolated: both are measurements. Not the fastest of all below it: the best of several noisy medians
    would flatter us. ``ours`` and ``ratio`` (our seconds over the peer's) are None
    where none of our runs stayed below the peer's peak. ``tool`` says which of our runs count.
    """
    ours = [row for row in rows if row["tool"] == tool]
    found: list[dict[str, Any]] = []
    for peer in rows:
        if peer["tool"] in _BOTH:
            continue
        below = [row for row in ours if row["peak"] <= peer["peak"]]
        best = max(below, key=lambda row: row["peak"], default=None)
        ratio = None if best is None else ratio_of(best, peer)
        half = max((row for row in ours if row["peak"] <= peer["peak"] / 2), key=lambda row: row["peak"], default=None)
        found.append(
            {
                "peer": peer["name"],
                "peak": peer["peak"],
                "ours": None if best is None else best["name"],
                "ratio": ratio,
                "at_half": None if half is None else half["name"],
                "ratio_at_half": None if half is None else ratio_of(half, peer),
                "faster": ratio is not None and ratio < 1,
            }
        )
    return found


def below_all_peers(rows: Sequence[Row]) -> list[str]:
    """The names of our runs with a peak below that of every peer."""
    peers = [row["peak"] for row in rows if row["tool"] not in _BOTH]
    return [row["name"] for row in rows if row["tool"] == OURS and row["peak"] < min(peers, default=0)]


def markdown(workloads: Mapping[str, Mapping[str, Any]]) -> str:
    """The tables, one for each workload."""
    lines = [
        "# Step time against peak memory, beside what PyTorch itself offers",
        "",
        "By `make bench-peers`. Each row is a process of its own; the processes of a workload take turns step by step.",
        "*Step*: the median. *Peak*: the most memory (RSS) of the process, above that of plain PyTorch after a step of",
        "a tiny model. *Ours over it*: the step time of the outofcore run with the next lower peak, over this one's:",
        "both measured, nothing interpolated, the median of the ratios round by round; so is *over eager*. *Eager's",
        "losses*: whether they are those of plain PyTorch, bit for bit.",
    ]
    for name, found in workloads.items():
        machine = found["machine"]
        lines += [
            "",
            f"## {name}",
            "",
            f"{found['workload']}. {found['date']}, {machine['cores']} cores of {machine['cpu']}, {found['threads']} "
            f"threads, PyTorch {found['versions']['torch']}, Python {machine['python']}; {found['rounds']} timed steps "
            f"each; `{found['command']}`.",
            "",
            "| tool | step | over eager | peak | first step | eager's losses | ours over it | Inductor's kernels |",
            "|---|---:|---:|---:|---:|---|---:|---:|",
        ]
        judged = [
            {verdict["peer"]: verdict["ratio"] for verdict in found.get(which, ())}
            for which in ("verdicts", "verdicts_compiled")
        ]
        for row in sorted(found["rows"], key=lambda row: -row["peak"]):
            lines.append(f"| {' | '.join(_cells(row, [ratios.get(row['name']) for ratios in judged]))} |")
        lines += ["", *_sentences(found)]
    return "\n".join(lines) + "\n"


def _cells(row: Row, ratios: Iterable[float | None]) -> list[str]:
    name = f"**{row['name']}**" if row["tool"] in _BOTH else row["name"]
    over_eager = "-" if row["to_eager"] is None else f"{row['to_eager']:.2f}"
    times = [format_seconds(row["seconds"]), over_eager, format_bytes(row["peak"]), format_seconds(row["first_step_s"])]
    same = {None: "-", True: "yes", False: "no"}[row["same_losses"]]
    return [name, *times, same, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)]


def _sentences(found: Mapping[str, Any]) -> list[str]:
    """What one may say about a workload, and what may not be left out."""
    judged, tools = found["verdicts"], {row["tool"] for row in found["rows"]}
    lines: list[str] = []
    if OURS in tools:
        faster = sum(verdict["faster"] for verdict in judged)
        lines += [f"At {faster} of the {len(judged)} peaks that peers reached, outofcore is faster at that peak."]
        lines += _slower(found, judged)
    if COMPILED in tools:
        compiled = found.get("verdicts_compiled", ())
        faster = sum(verdict["faster"] for verdict in compiled)
        lines += [f"With Inductor's kernels it is faster at {faster} of {len(compiled)}.", *_slower(found, compiled)]
        lines += [
            f"- within half of the peak of {verdict['peer']} ({verdict['at_half']}): {verdict['ratio_at_half']:.2f} "
            "times its step"
            for verdict in compiled
            if verdict["peer"].startswith("compile") and verdict.get("ratio_at_half") is not None
        ]
        same = "the same, to the last bit," if found.get("compiled_losses_identical", True) else "not the same"
        lines += ["", f"Its losses with Inductor's kernels are {same} at all of its budgets."]
    lowest = [row for row in found["rows"] if row["name"] in found["below_all_peers"]]
    if lowest:
        low = min(row["peak"] for row in lowest)
        peers = min(row["peak"] for row in found["rows"] if row["tool"] not in _BOTH)
        lines += ["", f"The lowest peak of a peer is {format_bytes(peers)}, of outofcore {format_bytes(low)}."]
    elif OURS in tools:
        lines += ["", "No run of outofcore has a peak below that of every peer."]
    if not found["losses_identical"]:
        lines += ["", "The losses of outofcore are not those of eager PyTorch to the last bit."]
    if found["missing"]:
        lines += ["", "Without a result:", "", *(f"- {name}: {_line(why)}" for name, why in found["missing"].items())]
    return lines


def _slower(found: Mapping[str, Any], judged: Iterable[Mapping[str, Any]]) -> list[str]:
    """The peaks at which outofcore is not faster."""
    others = {row["name"] for row in found["rows"] if row["same_losses"] is False}
    return [
        f"- not at that of {verdict['peer']}: "
        + ("no run stayed below it" if verdict["ratio"] is None else f"{verdict['ratio']:.2f} times its step")
        + (", with other losses than eager PyTorch's" if verdict["peer"] in others else "")
        for verdict in judged
        if not verdict["faster"]
    ]


def _line(text: str) -> str:
    """The first line of an error, no longer than one reads."""
    first = text.strip().splitlines()[0]
    return first if len(first) <= 300 else f"{first[:299]}…"
