"""Policies that turn a graph, its costs and a budget into a plan."""

from outofcore.planning.addresses import place
from outofcore.planning.bounds import lower_bound_seconds
from outofcore.planning.fitting import (
    POLICIES,
    Planned,
    explain_too_small,
    fit,
    fit_once,
    in_core_budget,
    keep_all,
    plan_in_core,
    plan_step,
    smallest_budget,
)
from outofcore.planning.offload_all import offload_all
from outofcore.planning.pooch import pooch
from outofcore.planning.sqrt_checkpoint import sqrt_checkpoint
from outofcore.planning.superneurons import superneurons
from outofcore.planning.tflms import tflms
from outofcore.planning.thorough import effort_worth
from outofcore.planning.window import window

__all__ = [
    "POLICIES",
    "Planned",
    "effort_worth",
    "explain_too_small",
    "fit",
    "fit_once",
    "in_core_budget",
    "keep_all",
    "lower_bound_seconds",
    "offload_all",
    "place",
    "plan_in_core",
    "plan_step",
    "pooch",
    "smallest_budget",
    "sqrt_checkpoint",
    "superneurons",
    "tflms",
    "window",
]
