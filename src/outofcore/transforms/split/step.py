"""Split the ops of a step that need more memory than the op budget: ``split_step``."""

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
    """A step with split ops."""

    captured: Captured
    claims: tuple[Claim, ...]
    values: tuple[Value, ...]  # that the calls of the checks refer to
    is_cut: bool = False  # whether any op is split, which may need no checks


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
    """Split ops that need more than ``max_bytes`` bytes, where possible.

    Args:
        refused: keys of checks with a mismatch.
        parts: split every op that can be split into this many parts, even small ones.
        min_bytes: storages with fewer bytes stay whole.
        limit: largest number of ops; with more the step stays unchanged.
        workspaces: known scratch bytes of whole ops, by family.
        home: capacity of the first home in bytes, or None without a limit. Cut parameters and optimizer state are there
            between steps; with 0 updates stay whole.
    """
    captured = small_losses(split(by_shape(traced)), most if parts is None else 0)
    unfit = set(refused)
    captured, norm_checks = halved(captured, most if parts is None else 0, unfit)
    while True:
        refused = frozenset(unfit)
        ranged = rangeable(captured, most, parts, home)
        needs = Needs(captured, ranged, least, refused, workspaces or {}, home)
        search = Search(needs, most, refused, parts)
        chosen = search.chosen()
        try:
            rewritten = Builder(captured, search.cell_map(), chosen, limit).built() if chosen else None
        except LimitError:
            rewritten = None
        except UnfitError as error:
            if error.op not in chosen or chosen[error.op].way.updates:
                return Tiled(captured, (), captured.values)
            unfit.add(claim_of(captured, search.cell_map(), error.op, chosen[error.op]).key)
            continue
        break
    if rewritten is None:
        return Tiled(captured, (), captured.values)
    cell_map = search.cell_map()
    part_checks = [claim_of(captured, cell_map, op, chosen[op]) for op in sorted(chosen) if not chosen[op].way.is_exact]
    gathered_checks = [check for _, check in claims_of_gathered(captured, cell_map, chosen)]
    checks = {check.key: check for check in (*norm_checks, *part_checks, *gathered_checks)}
    return Tiled(rewritten, tuple(checks.values()), captured.values, is_cut=True)
