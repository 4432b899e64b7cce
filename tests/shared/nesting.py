"""Plans whose chains run ops several times, made from plans whose chains run each once."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.lowering import lower
from outofcore.plan import ChainOrder, Plan
from outofcore.program import Run


def with_nested_chains(graph: StepGraph, costs: Costs, plan: Plan, draw: Random) -> Plan:
    """The plan, with all that a chain has run so far run once more in places, so that nothing is held over them."""
    chains: dict[int, list[int]] = {}
    runs: list[int] = []
    for instruction in lower(graph, costs, plan).instructions:
        if isinstance(instruction, Run) and instruction.again:
            runs.append(instruction.op)
        elif isinstance(instruction, Run):
            if runs:
                chains[instruction.op] = runs
            runs = []
    orders: list[ChainOrder] = []
    for op, once in chains.items():
        order: list[int] = []
        for index, run in enumerate(once):
            if draw.random() < 0.5:
                order += once[:index]
            order.append(run)
        if order != once:
            orders.append(ChainOrder(op, tuple(order)))
    return replace(plan, chains=tuple(orders))
