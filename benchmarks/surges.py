"""Optimizers and models whose memory comes and goes, for many steps within little: bits, bytes and what became of them.

    python benchmarks/surges.py                        # 100 steps of each at 1.1 and 2 times the smallest budget
    python benchmarks/surges.py --steps 20 --only galore,surges

Each case runs in plain PyTorch first. The table says for each budget whether all losses and states have the same bits,
the most physical memory that the arena took with what was served beyond it, how many requests no plan foresaw, how many
bytes left the arena for them, how many bytes ops had from a home since the budget could not hold them, and how the
calls went on. The command fails where bits differ, or where the budget is exceeded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "shared"))

import surging

from outofcore.units import format_bytes

_ROW = "{:<12}{:>6}{:>11}{:>11}{:>7}{:>9}{:>11}{:>11}  {:<10}{:>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run steps whose memory needs surge within small budgets.")
    parser.add_argument("--steps", type=int, default=100, help="number of steps of each run (default: 100)")
    parser.add_argument("--factors", default="1.1,2", help="budgets, in smallest budgets (default: 1.1,2)")
    parser.add_argument("--only", default="", help="names of cases (default: all)")
    given = parser.parse_args()
    print(
        _ROW.format("case", "times", "budget", "peak", "bits", "requests", "evicted", "at home", "ends as", "seconds")
    )
    failed = False
    for name in given.only.split(",") if given.only else surging.names():
        smallest = surging.smallest_budget(name)
        for factor in map(float, given.factors.split(",")):
            budget = int(smallest * factor)
            found = surging.compare(name, budget, given.steps)
            is_within = found.peak <= budget and not found.beyond[0]
            failed |= not (found.exact and is_within)
            print(
                _ROW.format(
                    name,
                    factor,
                    format_bytes(budget),
                    format_bytes(found.peak) + ("" if is_within else "!"),
                    "same" if found.exact else "OTHER",
                    found.off_plan,
                    format_bytes(found.evicted),
                    format_bytes(found.overflow) if found.overflow else "-",
                    "eager loop" if found.followed else "plan",
                    f"{found.seconds:.1f}",
                ),
                flush=True,
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()
