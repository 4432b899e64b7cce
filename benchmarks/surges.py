"""Run optimizers and models whose memory needs surge, for many steps within small budgets.

    python benchmarks/surges.py                        # 100 steps of each at 1.1 and 2 times the smallest budget
    python benchmarks/surges.py --steps 20 --only galore,surges

Each case runs in plain PyTorch first. Exits with status 1 if bits differ or the budget is exceeded.
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
    arguments = parser.parse_args()
    print(
        _ROW.format("case", "factor", "budget", "peak", "bits", "requests", "evicted", "at home", "ends as", "seconds")
    )
    failed = False
    for name in arguments.only.split(",") if arguments.only else surging.names():
        smallest = surging.smallest_budget(name)
        for factor in map(float, arguments.factors.split(",")):
            budget = int(smallest * factor)
            outcome = surging.compare(name, budget, arguments.steps)
            is_within = outcome.peak <= budget and not outcome.beyond[0]
            failed |= not (outcome.exact and is_within)
            print(
                _ROW.format(
                    name,
                    factor,
                    format_bytes(budget),
                    format_bytes(outcome.peak) + ("" if is_within else "!"),
                    "same" if outcome.exact else "DIFFER",
                    outcome.off_plan,
                    format_bytes(outcome.evicted),
                    format_bytes(outcome.overflow) if outcome.overflow else "-",
                    "eager loop" if outcome.followed else "plan",
                    f"{outcome.seconds:.1f}",
                ),
                flush=True,
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()
