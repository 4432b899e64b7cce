"""Split the ops of a step that need more memory than there is: ``tiled``, the front door of the package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from outofcore.analysis import LARGE_BYTES
from outofcore.capture.captured import Captured, Value
from outofcore.transforms.passes import by_shape, split
from outofcore.transforms.split.exactness import Claim, claim_of, claims_of_gathered
from outofcore.transforms.split.needs import Needs
from outofcore.transforms.split.prepare import halved, small_losses
from outofcore.transforms.split.rewrite import Builder
from outofcore.transforms.split.search import Search
from outofcore.transforms.split.state_ranges import rangeable
from outofcore.transforms.split.writer import LimitError, UnfitError


@dataclass(frozen=True)
class Tiled:
    """A step with split ops.

    ``claims`` are what its bits rely on, ``values`` what the refs of the claims' calls name. ``is_cut`` tells whether
    an op is split, which may need no claims.
    """

    captured: Captured
    claims: tuple[Claim, ...]
    values: tuple[Value, ...]
    is_cut: bool = False


def tiled(
    traced: Captured,
    most: int,
    *,
    refused: Iterable[str] = (),
    parts: int | None = None,
    least: int = LARGE_BYTES,
    limit: int | None = None,
    workspaces: Mapping[str, int] | None = None,
    home: int | None = None,
) -> Tiled:
    """Split ops that need more than ``most`` bytes, as far as that is possible.

    Args:
        refused: keys of claims that do not hold.
        parts: split all ops that can be into this many parts, whatever they need.
        least: storages of fewer bytes stay whole.
        limit: with more ops than this the step stays unchanged.
        workspaces: known bytes of scratch memory of whole ops, by family.
        home: capacity in bytes of the first home, None without limit. Cut parameters and optimizer state are there
            between steps; with 0 they are not, and updates stay whole.
    """
    captured = small_losses(split(by_shape(traced)), most if parts is None else 0)
    unfit = set(refused)
    captured, halves = halved(captured, most if parts is None else 0, unfit)
    while True:
        refused = frozenset(unfit)
        ranged = rangeable(captured, most, parts, home)
        needs = Needs(captured, ranged, least, refused, workspaces or {}, home)
        search = Search(needs, most, refused, parts)
        chosen = search.chosen()
        try:
            found = Builder(captured, search.cell_map(), chosen, limit).built() if chosen else None
        except LimitError:
            found = None
        except UnfitError as error:
            if error.op not in chosen or chosen[error.op].way.updates:
                return Tiled(captured, (), captured.values)
            unfit.add(claim_of(captured, search.cell_map(), error.op, chosen[error.op]).key)
            continue
        break
    if found is None:
        return Tiled(captured, (), captured.values)
    cell_map = search.cell_map()
    parts_of = [claim_of(captured, cell_map, op, chosen[op]) for op in sorted(chosen) if not chosen[op].way.is_exact]
    whole = [claim for _, claim in claims_of_gathered(captured, cell_map, chosen)]
    claims = {claim.key: claim for claim in (*halves, *parts_of, *whole)}
    return Tiled(found, tuple(claims.values()), captured.values, is_cut=True)
