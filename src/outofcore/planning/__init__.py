"""Planning: from a graph, its costs and a byte budget to a placed, simulated program. Without PyTorch.

The terms, with those of the field in brackets:

- *gap* [use interval]: the time between two uses of a storage in a row, with ops inside. A plan decides about gaps.
- *kept, offloaded, computed again* [resident, evicted and prefetched, rematerialized]: what can become of one.
- *home*: where bytes live that are not on the device: host memory, a disk.
- *release, fetch* [eviction, prefetch]: the op before which a gap's room is free, and the one before which it is taken.
- *chain*: the runs that compute something again right before one op.
- *block* [live range]: bytes over instructions, to be given an address (``placement``).
- *state*: what becomes of each gap; *schedule*: when its copies run; *candidate*: both, with how it was found.
- *room*: the bytes of the budget that are left for large blocks; *limit*: so many of them a problem may use.

The modules, from the outside in:

- ``planner``: the front door: in core where that fits, else what the policy says; the errors for what is too small.
- ``policy``, ``registry``, ``baselines``: what a policy is; how it is written; the published ones.
- ``search``: ``auto``: which candidates are made, and which of them are placed. ``parameters``: its switches.
- ``front``: ``auto`` where nothing can be offloaded: the least recomputation for each budget.
- ``candidates``: one candidate: rounded, tuned, and made to leave bytes free. ``tuner``: the local search over states,
  and when copies run.
- ``remat``: what to recompute: contents, chains, annealing, a greedy search.
- ``guide``: the linear program that says what to keep and what goes where. ``bound``: the one that says what no plan
  beats. ``relaxation``: what the two share; ``linear_program`` has the solver. ``problem``: a step in arrays.
- ``placing``: lowered, placed, wired and simulated, and what plans are compared by. ``placement``: addresses.
- ``repair``: which bytes to leave free where blocks stick out. ``polish``: a local search over placed plans.
- ``resident_gradients``: which gradients stay when a step ends.

To see why a plan was chosen, log ``outofcore.planning`` at debug level: each candidate with the seconds that its
schedule promises, then each attempt to place one, with the seconds that are simulated or how high its blocks reach. The
same is in ``Planned.candidates``, with the reason why each lost.
"""

from outofcore.planning.bound import lower_bound_seconds
from outofcore.planning.parameters import QUICK, SearchParams
from outofcore.planning.placing import Outcome, Planned, fit, fit_once, keep_all, place, resimulated
from outofcore.planning.planner import (
    explain_too_small,
    in_core_budget,
    plan_in_core,
    plan_step,
    plans_of_step,
    smallest_budget,
)
from outofcore.planning.policy import Policy, PolicyLike
from outofcore.planning.registry import POLICIES, policy_of

__all__ = [
    "POLICIES",
    "QUICK",
    "Outcome",
    "Planned",
    "Policy",
    "PolicyLike",
    "SearchParams",
    "explain_too_small",
    "fit",
    "fit_once",
    "in_core_budget",
    "keep_all",
    "lower_bound_seconds",
    "place",
    "plan_in_core",
    "plan_step",
    "plans_of_step",
    "policy_of",
    "resimulated",
    "smallest_budget",
]
