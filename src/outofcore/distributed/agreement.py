"""What the processes of a step tell each other before and between steps, so that none waits for another in vain.

Each process captures the step by itself. If one has no plan for a call yet, all compare versions, budgets, models, and
the step's collectives in order; whoever cannot go on reports it, and all raise. Then one of them measures and plans,
and the others take its plan, so that their measurements do not disturb each other. A process with another graph (a
batch of another length) plans by itself; its collectives still come in the same order. At each later call a number
tells whether all are about to run the same collectives.

Limits: a process that never calls the step, or runs other collectives meanwhile, is noticed when the timeout of the
process group ends.
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
from outofcore.finalization import end_when_threads_rest
from outofcore.peers import StepFacts
from outofcore.profiling.cache import Cache
from outofcore.profiling.groups import GroupCost, group_cost

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# How long a message of another process may be.
_MOST_TEXT = 2000


class Agreement:
    """The processes that run one step together.

    They are those of a ``DistributedDataParallel`` wrapper's group among ``models``, or of ``group`` if they share the
    models. ``cache`` holds the costs of groups.
    """

    def __init__(self, models: Sequence[nn.Module], cache: Cache | None, group: ProcessGroup | None = None) -> None:
        self._cache = cache
        self._group: ProcessGroup | None = None
        self._costs: dict[int, GroupCost] = {}
        self._follows_one_plan = group is not None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            end_when_threads_rest()
        groups = [group_of(model) for model in parallel_models(models)]
        if group is not None:
            groups.append(group)
        if groups:
            self._join(groups)

    @property
    def joined(self) -> bool:
        """Whether processes synchronise: at once if a model is wrapped or sharded, else after the first collective."""
        return self._group is not None

    def _join(self, groups: Sequence[ProcessGroup]) -> None:
        one = all(group is groups[0] for group in groups)
        group = groups[0] if one else torch.distributed.group.WORLD
        if group is not None and group.size() > 1:
            end_when_threads_rest()
            self._group = group

    def join(self, collectives: Sequence[Collective]) -> None:
        """Record the collectives of a step."""
        if self._group is None and collectives:
            self._join([collective.group for collective in collectives])

    def meet(self, facts: StepFacts | None, device: torch.device) -> bool:
        """Return whether all processes have a plan for the call that begins now; ``facts`` is None without one.

        Raises ``StateError`` if they are about to run different collectives, ``InputError`` if they share a model and
        are about to run different steps.
        """
        group = self._group
        if group is None:
            return facts is not None
        mine = 0
        if facts is not None:
            mine = _number((*facts.collectives, facts.graph) if self._follows_one_plan else facts.collectives)
        told = torch.tensor([mine], dtype=torch.int64, device=device)
        everyone = torch.empty(group.size(), dtype=torch.int64, device=device)
        with _talking():
            gather_into(everyone, told, group)
        numbers = everyone.tolist()
        if 0 in numbers:
            return False
        if len(set(numbers)) > 1 and facts is not None:
            _check_alike(self._gathered(facts), follow_one_plan=self._follows_one_plan)
        return True

    def compare(self, facts: StepFacts) -> tuple[StepFacts, ...]:
        """Return the facts of all processes by rank.

        Raises ``InputError`` if they differ in what must be the same, or share a model and are about to run different
        steps; ``StateError`` if one cannot go on, or they run different collectives.
        """
        everyone = self._gathered(facts)
        self._raise_for_others(facts, everyone)
        _check_alike(everyone, follow_one_plan=self._follows_one_plan)
        return everyone

    def _gathered(self, facts: StepFacts) -> tuple[StepFacts, ...]:
        if self._group is None:
            return (facts,)
        found: list[Any] = [None] * self._group.size()
        with _talking():
            torch.distributed.all_gather_object(found, facts, group=self._group)
        return tuple(found)

    def _raise_for_others(self, facts: StepFacts, everyone: Sequence[StepFacts]) -> None:
        for rank, other in enumerate(everyone):
            if other.error and not facts.error:
                raise StateError(f"rank {rank} cannot run this step, and the others do not without it: {other.error}")

    @property
    def rank(self) -> int:
        """The rank of this process among those of the step."""
        return 0 if self._group is None else self._group.rank()

    def costs(self, collectives: Sequence[Collective], device: torch.device) -> dict[int, GroupCost]:
        """Return the cost of each group by its number of processes; all processes must call this at once."""
        for collective in collectives:
            if collective.group.size() not in self._costs:
                with _talking():
                    self._costs[collective.group.size()] = group_cost(collective.group, device, self._cache)
        return self._costs

    def from_leader(self, leader: int, make: Callable[[], Any]) -> Any:
        """Run ``make`` in one process and return its result in all; the others raise ``StateError`` if it raised."""
        if self._group is None:
            return make()
        group = self._group

        def share(made: Any, failure: str) -> tuple[Any, str]:
            shared: list[Any] = [made, failure]
            with _talking():
                torch.distributed.broadcast_object_list(shared, group=group, group_src=leader)
            return shared[0], shared[1]

        def tell(failure: str) -> None:
            with contextlib.suppress(CommunicationError):
                share(None, failure)

        made: Any = None
        if self.rank == leader:
            with _telling(tell):
                made = make()
        made, failure = share(made, "")
        if failure:
            raise StateError(f"rank {leader}, which plans for all, cannot plan this step: {failure}")
        return made

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """Leave the block when all processes have; raise this one's error, or ``StateError`` for another one's."""
        with _telling(self._tell):
            yield
        for rank, other in enumerate(self._tell("")):
            if other:
                raise StateError(f"rank {rank} cannot run this step, and the others do not without it: {other}")

    def _tell(self, text: str) -> list[str]:
        """Return the texts of all processes."""
        texts = [text]
        if self._group is not None:
            texts = [""] * self._group.size()
            with _talking():
                torch.distributed.all_gather_object(texts, text, group=self._group)
        return texts


@contextlib.contextmanager
def _talking() -> Iterator[None]:
    """Translate errors of the process group."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"the processes of the step could not tell each other what they are about to run: {error}. Another process "
            "has ended, or did not come to the step within the timeout of the process group; end this one as well, and "
            "let torchrun start all of them again"
        ) from error


@contextlib.contextmanager
def _telling(tell: Callable[[str], object]) -> Iterator[None]:
    """Tell the other processes of an error inside, and raise it."""
    try:
        yield
    except BaseException as error:  # they wait for this process, whatever has happened to it
        tell(told(error))
        raise


def told(error: BaseException) -> str:
    """Format an error for another process."""
    return f"{type(error).__name__}: {error}"[:_MOST_TEXT]


def _number(collectives: Sequence[str]) -> int:
    """Return a number for the collectives of a step, never 0."""
    digest = hashlib.sha256(json.dumps(list(collectives)).encode()).digest()
    return int.from_bytes(digest[:7], "big") + 1


def _check_alike(everyone: Sequence[StepFacts], *, follow_one_plan: bool) -> None:
    """Refuse processes that differ, each compared with the first."""
    first = everyone[0]
    for rank, other in enumerate(everyone[1:], 1):
        who = f"rank {rank} and rank 0"
        for name, advice in _ALIKE.items():
            mine, theirs = getattr(other, name), getattr(first, name)
            if mine != theirs:
                raise InputError(f"{who} differ in {name}: {mine} there, and {theirs} on rank 0; {advice}")
        _check_states(who, dict(other.states), dict(first.states))
        for number in range(max(len(first.collectives), len(other.collectives))):
            mine = other.collectives[number] if number < len(other.collectives) else "none"
            theirs = first.collectives[number] if number < len(first.collectives) else "none"
            if mine != theirs:
                raise StateError(
                    f"{who} come to other collectives: number {number} is {mine} on rank {rank}, and {theirs} on rank "
                    "0; each would wait for the other without end. Let all ranks call the same collectives in the same "
                    "order"
                )
        if other.orders != first.orders:
            raise StateError(
                f"{who} get their gradients in different orders, so that DistributedDataParallel would put them "
                "together differently: let all ranks run the same forward pass in the first step"
            )
    for rank, other in enumerate(everyone):
        if follow_one_plan and (other.graph, other.is_new) != (first.graph, first.is_new):
            raise InputError(
                f"rank {rank} and rank 0 are about to run different steps, and processes that share a model follow one "
                "plan: give all of them batches of the same shapes, and the same plain arguments"
            )


# What must be the same, and what to do about it if it is not.
_ALIKE = {
    "versions": "install the same on all of them",
    "budget": "give all of them the same, or they would wait for the slowest anyway",
    "policy": "give all of them the same",
}


def _check_states(who: str, mine: dict[str, str], theirs: dict[str, str]) -> None:
    for key in dict.fromkeys((*theirs, *mine)):
        if mine.get(key) != theirs.get(key):
            raise InputError(
                f"{who} have other models: {key} is {mine.get(key, 'not there')}, and {theirs.get(key, 'not there')} "
                "on rank 0; build the same model on all of them"
            )
