"""Profiles of op families as entries of a cache.

Kept are families whose name says all there is to say: those of PyTorch's own operators and optimizers. An operator
or an optimizer of the user's may change while its name does not.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from outofcore._torch_internals import precision_of
from outofcore.analysis import LARGE_BYTES
from outofcore.analysis.requests import Elsewhere, Placement, Request, Requests, Result, Scratch
from outofcore.capture.pieces import PIECE_ELEMENTS
from outofcore.costs import OpCost
from outofcore.errors import GraphError
from outofcore.execution.native import load_native
from outofcore.graph import Op, StepGraph
from outofcore.jsonfile import Node
from outofcore.profiling.cache import Cache, Shelf
from outofcore.report.machine import this_machine

_log = logging.getLogger("outofcore.profiling")


@dataclass(frozen=True)
class OpProfile:
    """What running an op takes, and what it asks of the allocator."""

    cost: OpCost
    requests: Requests
    first_requests: Requests | None = None  # of its first run, where they differ


def machine_facts() -> dict[str, object]:
    """What the speed of anything here depends on."""
    machine = this_machine()
    return {
        "torch": torch.__version__,
        "cpu": machine.cpu,
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "threads": torch.get_num_threads(),
    }


def op_shelf(cache: Cache, device: Mapping[str, object] | None = None) -> Shelf:
    """The profiles taken under the settings of now.

    Args:
        cache: where.
        device: facts about a device other than the CPU.
    """
    settings = {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": [precision_of(torch.backends.mkldnn, op) for op in ("matmul", "conv")],
        "onednn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        # Without it nothing is known of the memory that ops ask for.
        "arena": load_native().library is not None,
        "large_bytes": LARGE_BYTES,
        "update_elements": PIECE_ELEMENTS,
        "results": "by leaf",  # how the requests of results are numbered
    }
    return cache.shelf("ops", {**machine_facts(), **settings, **(device or {})})


def is_keepable(op: Op) -> bool:
    """Whether the family of an op means the same in every process."""
    own = op.name.startswith("aten.") or (op.name.startswith("optimizer.") and not op.random)
    return own and bool(op.family) and " at 0x" not in op.family


class KeptProfiles:
    """The profiles of a shelf, and those to be added to it.

    Args:
        cache: None keeps and knows nothing.
        device: as for ``op_shelf``.
    """

    def __init__(self, cache: Cache | None, device: Mapping[str, object] | None = None) -> None:
        self._shelf = None if cache is None else op_shelf(cache, device)
        self._known = {} if self._shelf is None else self._shelf.read()
        self._new: dict[str, object] = {}

    def find(self, op: Op, *, timed: bool, first: bool) -> OpProfile | None:
        """The profile of an op's family.

        Args:
            op: an op of the family.
            timed: whether its seconds are wanted.
            first: whether its first run asks for other memory than later ones.
        """
        node = self._known.get(_key(op)) if is_keepable(op) else None
        if node is None:
            return None
        try:
            profile, has_time = _profile(node)
        except GraphError as error:
            _log.warning("%s is measured anew: %s", op.name, error)
            return None
        if (timed and not has_time) or first != (profile.first_requests is not None):
            return None
        return profile

    def add(self, op: Op, profile: OpProfile, *, timed: bool) -> None:
        """Take up a profile that was measured just now."""
        if self._shelf is not None and is_keepable(op):
            self._new[_key(op)] = _content(profile, timed=timed)

    def save(self) -> None:
        """Write what was added."""
        if self._shelf is not None:
            self._shelf.write(self._new)
            self._new = {}


def keep_profiles(
    cache: Cache,
    graph: StepGraph,
    profiles: Sequence[OpProfile],
    only: Collection[int] | None = None,
    device: Mapping[str, object] | None = None,
) -> None:
    """Put what steps have shown in place of what was measured of ops alone.

    Args:
        cache: where to.
        graph: of the step.
        profiles: of its ops. A family gets the median of its ops' seconds, and the requests of the one that needs
            the most scratch memory.
        only: the ops whose families are kept; None: all.
        device: as for ``op_shelf``.
    """
    wanted = None if only is None else {graph.ops[index].family for index in only}
    families: dict[str, list[int]] = {}
    for op in graph.ops:
        if op.touched and is_keepable(op) and (wanted is None or op.family in wanted):
            families.setdefault(op.family, []).append(op.id)
    kept = KeptProfiles(cache, device)
    for members in families.values():
        largest = max(members, key=lambda index: profiles[index].cost.workspace_bytes)
        seconds = statistics.median(profiles[index].cost.seconds for index in members)
        profile = profiles[largest]
        cost = replace(profile.cost, seconds=seconds)
        kept.add(graph.ops[members[0]], replace(profile, cost=cost), timed=True)
    kept.save()


def _key(op: Op) -> str:
    # An update of many small parameters has a name of thousands of characters.
    return f"{op.name}-{hashlib.sha256(op.family.encode()).hexdigest()[:24]}"


def _content(profile: OpProfile, *, timed: bool) -> Mapping[str, object]:
    content: dict[str, object] = {
        "seconds": profile.cost.seconds if timed else None,
        "workspace_bytes": profile.cost.workspace_bytes,
        "requests": _requests_content(profile.requests),
    }
    if profile.first_requests is not None:
        content["first_requests"] = _requests_content(profile.first_requests)
    return content


def _requests_content(requests: Requests) -> Mapping[str, object]:
    return {
        "bytes": requests.workspace_bytes,
        "list": [[request.bytes, *_placement_content(request.placement)] for request in requests.requests],
    }


def _placement_content(placement: Placement) -> tuple[object, ...]:
    match placement:
        case Result(key):
            return ("result", key)
        case Scratch(offset):
            return ("scratch", offset)
        case Elsewhere():
            return ("elsewhere",)


def _profile(node: Node) -> tuple[OpProfile, bool]:
    seconds, first = node.at("seconds"), node.find("first_requests")
    timed = seconds.value is not None
    cost = OpCost(seconds.number() if timed else 0.0, node.at("workspace_bytes").count())
    if cost.seconds < 0:
        seconds.refuse("is negative")
    profile = OpProfile(cost, _requests(node.at("requests")), None if first is None else _requests(first))
    return profile, timed


def _requests(node: Node) -> Requests:
    found: list[Request] = []
    for item in node.at("list").items():
        parts = list(item.items())
        if len(parts) < 2:
            item.refuse("is not a request: it needs bytes and a place")
        count, kind = parts[0].count(), parts[1].text()
        if kind == "elsewhere":
            found.append(Request(count, Elsewhere()))
        elif kind in ("result", "scratch") and len(parts) == 3:
            where = parts[2].count()
            found.append(Request(count, Result(where) if kind == "result" else Scratch(where)))
        else:
            item.refuse(f"has the place {kind!r}, which is none")
    return Requests(tuple(found), node.at("bytes").count())
