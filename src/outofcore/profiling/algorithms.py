"""Measures the algorithms that ops could be run by, and takes for each family the fastest whose workspace fits."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from outofcore.analysis import placed_bytes
from outofcore.capture.captured import Captured
from outofcore.execution.algorithms import Algorithm, alternatives, is_convolution, run_by
from outofcore.execution.backend import Backend
from outofcore.planning.algorithms import choose
from outofcore.profiling.cache import Cache
from outofcore.profiling.kept import OpProfile
from outofcore.profiling.ops import profile_some
from outofcore.units import format_bytes, format_seconds

_log = logging.getLogger("outofcore.profiling")


def choose_algorithms(
    captured: Captured,
    profiles: Sequence[OpProfile],
    room: int,
    fixed: dict[str, Algorithm | None],
    cache: Cache | None,
    backend: Backend,
) -> tuple[Captured, tuple[OpProfile, ...]]:
    """A step whose convolutions run by the fastest algorithms with workspaces that fit, and its profiles.

    Args:
        captured: the step.
        profiles: of its ops as PyTorch runs them by itself.
        room: bytes for an op with all that it touches.
        fixed: by family what was chosen before, None being PyTorch's own choice; it stays, and what is chosen now is
            added, so that results do not change from one plan to the next.
        cache: where measurements are kept.
        backend: where the step runs.
    """
    storages = captured.graph.storages
    members: dict[str, list[int]] = {}
    for op in captured.graph.ops:
        if is_convolution(op) and op.family:
            members.setdefault(op.family, []).append(op.id)
    candidates = alternatives(backend.device)
    firsts = [ops[0] for ops in members.values()]
    tried = [
        profile_some(
            run_by(captured, dict.fromkeys(firsts, algorithm)), firsts, cache=cache, backend=backend, leave_out=True
        )
        for algorithm in candidates
    ]
    found, chosen = list(profiles), dict[int, Algorithm]()
    for family, ops in members.items():
        first = ops[0]
        if family not in fixed:
            own = profiles[first].cost
            # An op of whose memory nothing is known has no requests.
            able = [i for i, profile in enumerate(tried) if first in profile and profile[first].requests.requests]
            others = [tried[i][first].cost for i in able]
            beside = sum(placed_bytes(storages[s].bytes) for s in captured.graph.ops[first].touched)
            which = choose(own, others, room - beside)
            fixed[family] = None if which is None else candidates[able[which]]
            if which is not None:
                _log.info(
                    "%s (%s) runs %s: %s and %s of workspace, in place of %s and %s",
                    captured.graph.ops[first].name,
                    captured.graph.ops[first].source,
                    candidates[able[which]].name,
                    format_seconds(others[which].seconds),
                    format_bytes(others[which].workspace_bytes),
                    format_seconds(own.seconds),
                    format_bytes(own.workspace_bytes),
                )
        algorithm = fixed[family]
        place = next((i for i, candidate in enumerate(candidates) if candidate == algorithm), None)
        if algorithm is not None and place is not None and first in tried[place]:
            for op in ops:
                chosen[op], found[op] = algorithm, tried[place][first]
    return run_by(captured, chosen), tuple(found)
