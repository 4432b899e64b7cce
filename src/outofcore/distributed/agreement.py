"""The messages that a step's processes exchange, so that no process waits for another in vain.

Each process captures the step by itself. If one has no plan for a call yet, all compare their facts and collectives. If
one cannot go on, all raise. Otherwise one measures and plans, and the others take its plan. A process with another
graph plans by itself; its collectives have the same order. At later calls, a number shows whether all run the same
collectives. A process that never calls the step is noticed only after the timeout of the process group.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outofcore._torch_internals import gather_into
from outofcore.capture.collectives import Collective
from outofcore.capture.replicas import group_of, parallel_models
from outofcore.errors import CommunicationError, InputError, StateError
from outofcore.finalization import wait_for_threads_at_exit
from outofcore.peers import StepFacts
from outofcore.profiling.cache import Cache
from outofcore.profiling.groups import GroupCost, group_cost

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# The maximum length of a message for another process.
_MAX_TEXT = 2000


class Agreement:
    """Exchanges facts, plans and errors among the processes that run a step together."""

    def __init__(self, models: Sequence[nn.Module], cache: Cache | None, group: ProcessGroup | None = None) -> None:
        self._cache = cache
        self._group: ProcessGroup | None = None
        self._costs: dict[int, GroupCost] = {}
        self._follows_one_plan = group is not None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            wait_for_threads_at_exit()
        groups = [group_of(model) for model in parallel_models(models)]
        if group is not None:
            groups.append(group)
        if groups:
            self._set_group(groups)

    @property
    def is_joined(self) -> bool:
        """Whether other processes run the step together with this one."""
        return self._group is not None

    def _set_group(self, groups: Sequence[ProcessGroup]) -> None:
        is_single = all(group is groups[0] for group in groups)
        group = groups[0] if is_single else torch.distributed.group.WORLD
        if group is not None and group.size() > 1:
            wait_for_threads_at_exit()
            self._group = group

    def join(self, collectives: Sequence[Collective]) -> None:
        """Adopt the process group of the step's collectives, unless a group is known already."""
        if self._group is None and collectives:
            self._set_group([collective.group for collective in collectives])

    def rendezvous(self, facts: StepFacts | None, device: torch.device) -> bool:
        """Return whether every process has a plan (``facts`` is not None); raise an error if their steps differ."""
        group = self._group
        if group is None:
            return facts is not None
        number = 0
        if facts is not None:
            number = _collectives_number(
                (*facts.collectives, facts.graph) if self._follows_one_plan else facts.collectives
            )
        own_number = torch.tensor([number], dtype=torch.int64, device=device)
        everyone = torch.empty(group.size(), dtype=torch.int64, device=device)
        with _translated_errors():
            gather_into(everyone, own_number, group)
        numbers = everyone.tolist()
        if 0 in numbers:
            return False
        if len(set(numbers)) > 1 and facts is not None:
            _check_facts_match(self._gather_facts(facts), follow_one_plan=self._follows_one_plan)
        return True

    def compare_facts(self, facts: StepFacts) -> tuple[StepFacts, ...]:
        """Gather the facts of all processes, by rank; raise an error if they cannot run the step together."""
        everyone = self._gather_facts(facts)
        self._raise_error_of_other_process(facts, everyone)
        _check_facts_match(everyone, follow_one_plan=self._follows_one_plan)
        return everyone

    def _gather_facts(self, facts: StepFacts) -> tuple[StepFacts, ...]:
        if self._group is None:
            return (facts,)
        everyone: list[Any] = [None] * self._group.size()
        with _translated_errors():
            torch.distributed.all_gather_object(everyone, facts, group=self._group)
        return tuple(everyone)

    def _raise_error_of_other_process(self, facts: StepFacts, everyone: Sequence[StepFacts]) -> None:
        for rank, other_facts in enumerate(everyone):
            if other_facts.error and not facts.error:
                raise StateError(f"rank {rank} cannot run this step, so no rank runs it: {other_facts.error}")

    @property
    def rank(self) -> int:
        return 0 if self._group is None else self._group.rank()

    def costs(self, collectives: Sequence[Collective], device: torch.device) -> dict[int, GroupCost]:
        """Return costs of collectives by the number of processes in a group; all processes must call this together."""
        for collective in collectives:
            if collective.group.size() not in self._costs:
                with _translated_errors():
                    self._costs[collective.group.size()] = group_cost(collective.group, device, self._cache)
        return self._costs

    def from_leader(self, leader: int, make: Callable[[], Any]) -> Any:
        """Run ``make`` in process ``leader`` only; return its result in all processes, or raise an error in all."""
        if self._group is None:
            return make()
        group = self._group

        def share(result: Any, failure: str) -> tuple[Any, str]:
            shared: list[Any] = [result, failure]
            with _translated_errors():
                torch.distributed.broadcast_object_list(shared, group=group, group_src=leader)
            return shared[0], shared[1]

        def report_failure(failure: str) -> None:
            with contextlib.suppress(CommunicationError):
                share(None, failure)

        result: Any = None
        if self.rank == leader:
            with _reported_errors(report_failure):
                result = make()
        result, failure = share(result, "")
        if failure:
            raise StateError(f"rank {leader}, which plans for all ranks, cannot plan this step: {failure}")
        return result

    @contextlib.contextmanager
    def synchronized(self) -> Iterator[None]:
        """Wait for all processes at the end of the block; raise ``StateError`` if another process failed in it."""
        with _reported_errors(self._gather_texts):
            yield
        for rank, other_error in enumerate(self._gather_texts("")):
            if other_error:
                raise StateError(f"rank {rank} cannot run this step, so no rank runs it: {other_error}")

    def _gather_texts(self, text: str) -> list[str]:
        texts = [text]
        if self._group is not None:
            texts = [""] * self._group.size()
            with _translated_errors():
                torch.distributed.all_gather_object(texts, text, group=self._group)
        return texts


@contextlib.contextmanager
def _translated_errors() -> Iterator[None]:
    """Turn a ``RuntimeError`` of ``torch.distributed`` in the block into a ``CommunicationError``."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"the processes of the step could not exchange messages: {error}. Another process has "
            "ended, or did not reach the step within the timeout of the process group; end this one too, and let "
            "torchrun restart all of them"
        ) from error


@contextlib.contextmanager
def _reported_errors(send: Callable[[str], object]) -> Iterator[None]:
    """Call ``send`` with the text of an error in the block, to report it to other processes, and raise the error."""
    try:
        yield
    except BaseException as error:  # after any error, since the other processes wait for this one
        send(error_text(error))
        raise


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_TEXT]


def _collectives_number(collectives: Sequence[str]) -> int:
    """Return a number that identifies the collectives of a step; never 0."""
    digest = hashlib.sha256(json.dumps(list(collectives)).encode()).digest()
    return int.from_bytes(digest[:7], "big") + 1


def _check_facts_match(everyone: Sequence[StepFacts], *, follow_one_plan: bool) -> None:
    """Raise an error that names the first difference if processes are about to run different steps."""
    first = everyone[0]
    for rank, facts in enumerate(everyone[1:], 1):
        ranks = f"rank {rank} and rank 0"
        for name, advice in _EQUAL_FACTS.items():
            mine, theirs = getattr(facts, name), getattr(first, name)
            if mine != theirs:
                raise InputError(f"{ranks} differ in {name}: {mine} on rank {rank}, and {theirs} on rank 0; {advice}")
        _check_states(ranks, dict(facts.states), dict(first.states))
        for number in range(max(len(first.collectives), len(facts.collectives))):
            mine = facts.collectives[number] if number < len(facts.collectives) else "none"
            theirs = first.collectives[number] if number < len(first.collectives) else "none"
            if mine != theirs:
                raise StateError(
                    f"{ranks} run different collectives: number {number} is {mine} on rank {rank}, and {theirs} on "
                    "rank 0; each would wait for the other forever. Call the same collectives in the same order on all "
                    "ranks"
                )
        if facts.orders != first.orders:
            raise StateError(
                f"{ranks} compute their gradients in different orders, so that DistributedDataParallel would group "
                "them differently: run the same forward pass on all ranks in the first step"
            )
    for rank, facts in enumerate(everyone):
        if follow_one_plan and (facts.graph, facts.is_new) != (first.graph, first.is_new):
            raise InputError(
                f"rank {rank} and rank 0 are about to run different steps, but processes that share a model follow one "
                "plan: give all ranks batches of the same shapes, and equal plain arguments"
            )


# Facts that must be equal, with advice if they are not.
_EQUAL_FACTS = {
    "versions": "install the same versions on all ranks",
    "budget": "give all ranks the same budget, since they would wait for the slowest",
    "policy": "give all ranks the same policy",
}


def _check_states(ranks: str, mine: dict[str, str], theirs: dict[str, str]) -> None:
    for key in dict.fromkeys((*theirs, *mine)):
        if mine.get(key) != theirs.get(key):
            raise InputError(
                f"{ranks} have different models: {key} is {mine.get(key, 'not there')}, and "
                f"{theirs.get(key, 'not there')} on rank 0; build the same model on all ranks"
            )
