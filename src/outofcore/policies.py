"""The values of ``policy`` in ``compile`` and ``estimate``, and the parts of custom policies.

>>> from outofcore.graph import Op, StepGraph, Storage, StorageKind
>>> from outofcore.costs import Costs, Home, OpCost
>>> mib = 1 << 20
>>> storages = [Storage(i, mib, StorageKind.ACTIVATION, f"x{i}") for i in range(6)]
>>> ops = [Op(0, "layer", (), (), (0,)), *(Op(i, "layer", (i - 1,), (), (i,)) for i in range(1, 6))]
>>> ops += [Op(6 + i, "back", (5 - i,), (), ()) for i in range(6)]
>>> step = StepGraph(tuple(storages), tuple(ops))
>>> costs = Costs(tuple(OpCost(1e-3) for _ in ops), (Home("disk", None, 1e9, 1e9),))

A policy is a name, a name with values of its fields, or an object. These three are equivalent:

>>> from outofcore.planning import plan_step
>>> for policy in ("window", "window:reach=1.5", Window()):
...     print(len(plan_step(step, costs, 4 * mib, policy).plan.decisions))
2
2
2

A function of the graph, the costs, and the room in bytes for blocks of 64 KiB and more is a policy, too:

>>> def first_map_leaves(graph, costs, room):
...     [gap] = [gap for gap in gaps_of(graph, 0) if gap.end > gap.start + 1]
...     return Plan("mine", room, (Decision(gap, Residency.OFFLOAD, gap.start + 1, gap.end),))
>>> plan_step(step, costs, 5 * mib, first_map_leaves).plan.policy
'first_map_leaves'

Policies with parameters or several variants are subclasses of ``Policy``.
"""

from outofcore.analysis import gaps_of, is_fetched
from outofcore.errors import BudgetError
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning.baselines import DTR, TFLMS, PoocH, ProfileGuided, SqrtCheckpoint, SuperNeurons, Window
from outofcore.planning.baselines.held import Held
from outofcore.planning.parameters import SearchParams
from outofcore.planning.policy import Asked, Auto, KeepAll, OffloadAll, Policy, PolicyLike, movable_gaps
from outofcore.planning.registry import POLICIES, policy_of

__all__ = [
    "DTR",
    "POLICIES",
    "TFLMS",
    "Asked",
    "Auto",
    "BudgetError",
    "Decision",
    "Gap",
    "Held",
    "KeepAll",
    "OffloadAll",
    "Plan",
    "Policy",
    "PolicyLike",
    "PoocH",
    "ProfileGuided",
    "Residency",
    "SearchParams",
    "SqrtCheckpoint",
    "SuperNeurons",
    "Window",
    "gaps_of",
    "is_fetched",
    "movable_gaps",
    "policy_of",
]
