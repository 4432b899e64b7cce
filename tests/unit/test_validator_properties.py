"""Tests that the validator agrees with brute force on valid and broken programs."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from random import Random

import oracle
import pytest
from effort import examples
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from mutations import MUTATIONS, with_instruction
from strategies import naive_programs

from outofcore.costs import Costs
from outofcore.errors import ValidationError
from outofcore.graph import StepGraph
from outofcore.program import Block, Program
from outofcore.validator import validate

Case = tuple[StepGraph, Costs, Program]
LIMITS = settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@LIMITS
@given(naive_programs())
def test_valid_programs_are_accepted(case: Case) -> None:
    graph, costs, program = case
    assert not oracle.is_broken(graph, program)
    validate(graph, program, program.arena_bytes, costs)


@LIMITS
@given(naive_programs(), st.randoms(use_true_random=False))
def test_accepted_programs_are_correct_on_every_schedule(case: Case, random: Random) -> None:
    graph, costs, program = case
    validate(graph, program, program.arena_bytes, costs)
    assert oracle.faults_on_schedule(graph, program, random) == []


@pytest.mark.parametrize("name", MUTATIONS)
@settings(LIMITS, max_examples=examples(15))
@given(case=naive_programs(), random=st.randoms(use_true_random=False))
def test_broken_programs_are_refused(name: str, case: Case, random: Random) -> None:
    graph, costs, program = case
    for description, broken in islice(MUTATIONS[name](graph, program, random), 3):
        event(name)
        with pytest.raises(ValidationError):
            validate(graph, broken, program.arena_bytes, costs)
            pytest.fail(f"{description}: accepted")


@LIMITS
@given(naive_programs(), st.randoms(use_true_random=False))
def test_wait_is_redundant_exactly_if_brute_force_agrees(case: Case, random: Random) -> None:
    graph, costs, program = case
    waits = [(i, w) for i, instruction in enumerate(program.instructions) for w in instruction.waits]
    pairs = oracle.conflicts(graph, program)
    for index, wait in random.sample(waits, min(len(waits), 6)):
        instruction = program.instructions[index]
        without_wait = replace(instruction, waits=tuple(w for w in instruction.waits if w is not wait))
        changed = with_instruction(program, index, without_wait)
        if oracle.is_racy(graph, changed, pairs):
            with pytest.raises(ValidationError, match="must wait"):
                validate(graph, changed, program.arena_bytes, costs)
        else:
            validate(graph, changed, program.arena_bytes, costs)


@LIMITS
@given(naive_programs())
def test_unplaced_programs_are_checked_by_their_sum(case: Case) -> None:
    graph, costs, program = case
    loose = replace(program, arena_bytes=0, blocks=tuple(replace(b, offset=-1) for b in program.blocks))
    peak = max(
        sum(b.bytes for b in program.blocks if _alive(b, index)) for index in range(-1, len(program.instructions))
    )
    validate(graph, loose, peak, costs)
    if peak > 0:
        with pytest.raises(ValidationError, match=f"{peak} bytes are held"):
            validate(graph, loose, peak - 1, costs)


def _alive(block: Block, index: int) -> bool:
    if not block.wraps:
        return block.born <= index < block.dies
    if block.born == block.dies == 0:
        return True
    return block.born <= index or index < block.dies
