"""What to keep by linear programming, when to copy just in time: the policy behind ``auto``.

The relaxation (``relaxation``) prices every byte at every op at once, over all kinds of storages, and
says which gaps to keep; its few fractions are rounded so that everything still fits. The timing
(``timing``) then lays the copies. What time copies take is not known before they are laid: the
relaxation is asked with several guesses of it, and the simulator picks.
"""

from __future__ import annotations

from collections.abc import Sequence

from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.plan import Plan
from outofcore.planning.model import Model
from outofcore.planning.relaxation import relax
from outofcore.planning.timing import schedule


def priced(
    graph: StepGraph,
    costs: Costs,
    budget: int,
    *,
    transit: float = 1.0,
    slack: float = 0.0,
    times: Sequence[float] | None = None,
) -> Plan:
    """Plan by the relaxation and just-in-time copies.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of large blocks that may be resident.
        transit: for how many times the seconds of its copies a gap's bytes are charged all the same;
            lowered by itself where that asks too much.
        slack: see ``timing.schedule``.
        times: see ``Model.of``.

    Raises:
        BudgetError: no choice of gaps fits.
    """
    model = Model.of(graph, costs, budget, times)
    for charge in (transit, transit / 2, transit / 4, 0.0):
        relaxed = relax(model, transit=charge)
        if relaxed is not None:
            return Plan("priced", budget, schedule(model, relaxed.rounded(model), slack))
    raise BudgetError(f"no choice of what to keep fits {budget} bytes")
