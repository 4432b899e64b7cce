"""Which of several algorithms an op is run by: the fastest whose workspace fits.

The rule is SuperNeurons' (Wang et al., PPoPP 2018, section 3.5), with one difference: there the room is what happens to
be free when the op runs; here it is what the budget leaves beside the op's own tensors, since a plan makes that free.
"""

from __future__ import annotations

from collections.abc import Sequence

from outofcore.costs import OpCost

# Another algorithm is taken if it saves this share of the time at least: measurements differ by some percent.
_GAIN = 0.1


def choose(own: OpCost, others: Sequence[OpCost], room: int) -> int | None:
    """The place of the algorithm to take among ``others``; None: the op's own, which is taken where in doubt.

    Args:
        own: what the op costs by the algorithm that it takes by itself.
        others: what it costs by others.
        room: bytes that its workspace may take. Where none fits, the least is taken.
    """
    fitting = [i for i, other in enumerate(others) if other.workspace_bytes <= room]
    if own.workspace_bytes <= room:
        fitting = [i for i in fitting if others[i].seconds < own.seconds * (1 - _GAIN)]
        return min(fitting, key=lambda i: (others[i].seconds, i), default=None)
    if fitting:
        return min(fitting, key=lambda i: (others[i].seconds, i))
    least = min(range(len(others)), key=lambda i: (others[i].workspace_bytes, i), default=None)
    return least if least is not None and others[least].workspace_bytes < own.workspace_bytes else None
