"""Compare the runs of ``peers.py``: who is faster at which peak, with the tables in Markdown. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outofcore.units import format_bytes, format_seconds

Row = Mapping[str, Any]
OURS = "outofcore"
COMPILED = "outofcore-inductor"  # with Inductor's kernels; losses differ from eager PyTorch's
_BOTH = frozenset({OURS, COMPILED})

# A budget at most this factor above another is represented by that other budget.
_SAME = 1.08
_NEAR = 1.15


def choose_budgets(smallest: int, in_core: int, at_peaks: Iterable[int], parts: Iterable[float]) -> list[int]:
    """Return the budgets to run in bytes, largest first.

    They are ``smallest``, ``in_core``, ``at_peaks`` (which match peers' peaks), and ``in_core`` divided by ``parts``.
    Of peaks within 8 %, only the lowest is used. A fraction within 15 % of another budget is dropped.
    """
    chosen = [in_core, smallest]
    for budget in sorted(at_peaks):
        if smallest <= budget < in_core and not any(selected <= budget <= _SAME * selected for selected in chosen):
            chosen.append(budget)
    for budget in (int(in_core / part) for part in parts):
        near = any(budget <= _NEAR * selected and selected <= _NEAR * budget for selected in chosen)
        if smallest <= budget < in_core and not near:
            chosen.append(budget)
    return sorted(chosen, reverse=True)


def ratio_of(ours: Row, peer: Row) -> float:
    """Return the median of two rows' step-time ratios by round; slow rounds cancel out."""
    pairs = zip(_timed_seconds(ours), _timed_seconds(peer), strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def _timed_seconds(row: Row) -> Sequence[float]:
    return row["steps"]["seconds"][row["warm_up"] :]


def verdicts(rows: Sequence[Row], tool: str = OURS) -> list[dict[str, Any]]:
    """Compare each peer with our run (of ``tool``) whose peak is the next at or below the peer's.

    The fastest run below the peer's peak would favour us, as the best of noisy medians. ``ours`` and ``ratio`` (our
    seconds over the peer's) are None if no run stayed below the peer's peak.
    """
    ours = [row for row in rows if row["tool"] == tool]
    results: list[dict[str, Any]] = []
    for peer in rows:
        if peer["tool"] in _BOTH:
            continue
        below = [row for row in ours if row["peak"] <= peer["peak"]]
        best = max(below, key=lambda row: row["peak"], default=None)
        ratio = None if best is None else ratio_of(best, peer)
        half = max((row for row in ours if row["peak"] <= peer["peak"] / 2), key=lambda row: row["peak"], default=None)
        results.append(
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
    return results


def below_all_peers(rows: Sequence[Row]) -> list[str]:
    peers = [row["peak"] for row in rows if row["tool"] not in _BOTH]
    return [row["name"] for row in rows if row["tool"] == OURS and row["peak"] < min(peers, default=0)]


def markdown(workloads: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        "# Step time and peak memory, compared with PyTorch's own tools",
        "",
        "By `make bench-peers`. Each row is a separate process; the processes of a workload take turns, step by step.",
        "*Step*: the median. *Peak*: the peak memory (RSS) of the process, above that of plain PyTorch after a step of",
        "a tiny model. *Ours over it*: the step time of the outofcore run with the next lower peak, over this one's:",
        "both measured, the median of the ratios round by round; so is *over eager*. *Eager's",
        "losses*: whether losses equal plain PyTorch's, bit for bit.",
    ]
    for name, result in workloads.items():
        machine = result["machine"]
        lines += [
            "",
            f"## {name}",
            "",
            f"{result['workload']}. {result['date']}, {machine['cores']} cores of {machine['cpu']}, "
            f"{result['threads']} threads, PyTorch {result['versions']['torch']}, Python {machine['python']}; "
            f"{result['rounds']} timed steps each; `{result['command']}`.",
            "",
            "| tool | step | over eager | peak | first step | eager's losses | ours over it | Inductor's kernels |",
            "|---|---:|---:|---:|---:|---|---:|---:|",
        ]
        ratios_by_peer = [
            {verdict["peer"]: verdict["ratio"] for verdict in result.get(key, ())}
            for key in ("verdicts", "verdicts_compiled")
        ]
        for row in sorted(result["rows"], key=lambda row: -row["peak"]):
            lines.append(f"| {' | '.join(_cells(row, [ratios.get(row['name']) for ratios in ratios_by_peer]))} |")
        lines += ["", *_sentences(result)]
    return "\n".join(lines) + "\n"


def _cells(row: Row, ratios: Iterable[float | None]) -> list[str]:
    name = f"**{row['name']}**" if row["tool"] in _BOTH else row["name"]
    over_eager = "-" if row["to_eager"] is None else f"{row['to_eager']:.2f}"
    times = [format_seconds(row["seconds"]), over_eager, format_bytes(row["peak"]), format_seconds(row["first_step_s"])]
    same = {None: "-", True: "yes", False: "no"}[row["same_losses"]]
    return [name, *times, same, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)]


def _sentences(result: Mapping[str, Any]) -> list[str]:
    """Return the conclusions about a workload, favourable or not."""
    results, tools = result["verdicts"], {row["tool"] for row in result["rows"]}
    lines: list[str] = []
    if OURS in tools:
        faster = sum(verdict["faster"] for verdict in results)
        lines += [f"At {faster} of the {len(results)} peaks that peers reached, outofcore is faster at that peak."]
        lines += _lines_of_slower(result, results)
    if COMPILED in tools:
        compiled = result.get("verdicts_compiled", ())
        faster = sum(verdict["faster"] for verdict in compiled)
        lines += [
            f"With Inductor's kernels it is faster at {faster} of {len(compiled)}.",
            *_lines_of_slower(result, compiled),
        ]
        lines += [
            f"- within half of the peak of {verdict['peer']} ({verdict['at_half']}): {verdict['ratio_at_half']:.2f} "
            "times its step"
            for verdict in compiled
            if verdict["peer"].startswith("compile") and verdict.get("ratio_at_half") is not None
        ]
        same = "the same, to the last bit," if result.get("compiled_losses_identical", True) else "not the same"
        lines += ["", f"Its losses with Inductor's kernels are {same} at all of its budgets."]
    lowest = [row for row in result["rows"] if row["name"] in result["below_all_peers"]]
    if lowest:
        low = min(row["peak"] for row in lowest)
        peers = min(row["peak"] for row in result["rows"] if row["tool"] not in _BOTH)
        lines += ["", f"The lowest peak of a peer is {format_bytes(peers)}, of outofcore {format_bytes(low)}."]
    elif OURS in tools:
        lines += ["", "No run of outofcore has a peak below that of every peer."]
    if not result["losses_identical"]:
        lines += ["", "The losses of outofcore differ from those of eager PyTorch."]
    if result["missing"]:
        lines += [
            "",
            "Without a result:",
            "",
            *(f"- {name}: {_line(reason)}" for name, reason in result["missing"].items()),
        ]
    return lines


def _lines_of_slower(result: Mapping[str, Any], results: Iterable[Mapping[str, Any]]) -> list[str]:
    differing = {row["name"] for row in result["rows"] if row["same_losses"] is False}
    return [
        f"- not at that of {verdict['peer']}: "
        + ("no run stayed below it" if verdict["ratio"] is None else f"{verdict['ratio']:.2f} times its step")
        + (", with other losses than eager PyTorch's" if verdict["peer"] in differing else "")
        for verdict in results
        if not verdict["faster"]
    ]


def _line(text: str) -> str:
    first = text.strip().splitlines()[0]
    return first if len(first) <= 300 else f"{first[:299]}…"
