"""Planning: turn a graph, its costs and a byte budget into a placed program. Needs no PyTorch.

Terms, with the field's words in brackets:

- *gap* [use interval]: the time between two consecutive uses of a storage, with ops inside.
- *residency*: each gap is resident, offloaded [evicted and prefetched] or recomputed [rematerialized].
- *release, fetch*: the op before which a gap's bytes are free, and the op before which they are needed again.
- *chain* [recomputation sequence]: the ops that run again right before one op to recompute contents.
- *block* [live range]: bytes over a range of instructions, which ``placement`` gives an address.
- *state*: the residency of every gap. *schedule*: when its copies run. *candidate*: a state with its schedule.
- *room*: the bytes of the budget that are left for large blocks. *limit*: the bytes of room a problem may use.

Start reading at ``planner``. ``search`` is ``policy="auto"``; ``front`` is the same without homes; ``baselines`` are
the published policies. To see why a plan was chosen, log ``outofcore.planning`` at debug level.
"""

from outofcore.planning.bound import lower_bound_seconds
from outofcore.planning.parameters import QUICK, SearchParams
from outofcore.planning.placing import CandidateOutcome, Planned, fit_plan, fit_policy, keep_all, place, resimulate
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
    "CandidateOutcome",
    "Planned",
    "Policy",
    "PolicyLike",
    "SearchParams",
    "explain_too_small",
    "fit_plan",
    "fit_policy",
    "in_core_budget",
    "keep_all",
    "lower_bound_seconds",
    "place",
    "plan_in_core",
    "plan_step",
    "plans_of_step",
    "policy_of",
    "resimulate",
    "smallest_budget",
]
