"""Planning."""

from outofcore.planning.parameters import QUICK, SearchParams
from outofcore.planning.placing import Outcome, Planned, fit, fit_once, keep_all, place
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
from outofcore.planning.relaxation import lower_bound_seconds

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
    "smallest_budget",
]
