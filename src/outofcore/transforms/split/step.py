"""Split the ops of a step that need more memory than the op budget: ``split_step``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from outofcore.analysis import LARGE_BYTES
from outofcore.capture.captured import Captured, Value
from outofcore.transforms.passes import drop_shape_only_arguments, split_convolutions
from outofcore.transforms.split.exactness import ExactnessCheck, checks_of_gathered, make_check
from outofcore.transforms.split.needs import SplitNeeds
from outofcore.transforms.split.prepare import shrink_losses, split_norms
from outofcore.transforms.split.rewrite import StepBuilder
from outofcore.transforms.split.search import SplitSearch
from outofcore.transforms.split.state_ranges import find_ranged_storages
from outofcore.transforms.split.writer import LimitError, UnfitError


@dataclass(frozen=True)
class SplitStep:
    captured: Captured
    checks: tuple[ExactnessCheck, ...]
    values: tuple[Value, ...]  # that the calls of the checks refer to
    is_split: bool = False  # whether any op is split, which may need no checks


def split_step(
    traced: Captured,
    max_bytes: int,
    *,
    refused: Iterable[str] = (),
    parts: int | None = None,
    min_bytes: int = LARGE_BYTES,
    limit: int | None = None,
    workspaces: Mapping[str, int] | None = None,
    home: int | None = None,
) -> SplitStep:
    """Split ops that need more than ``max_bytes`` bytes, where possible.

    ``refused`` are keys of failed exactness checks. With ``parts``, every op that can be split is split into this many
    parts, even a small one. Storages below ``min_bytes`` stay whole; so does a step that would exceed ``limit`` ops.
    ``workspaces`` are known scratch bytes of whole ops, by family. ``home`` is the capacity in bytes of the first home
    (None: unlimited), where cut parameters and optimizer state are between steps; with 0, updates stay whole.
    """
    captured = shrink_losses(split_convolutions(drop_shape_only_arguments(traced)), max_bytes if parts is None else 0)
    unfit = set(refused)
    captured, norm_checks = split_norms(captured, max_bytes if parts is None else 0, unfit)
    while True:
        refused = frozenset(unfit)
        ranged = find_ranged_storages(captured, max_bytes, parts, home)
        needs = SplitNeeds(captured, ranged, min_bytes, refused, workspaces or {}, home)
        search = SplitSearch(needs, max_bytes, refused, parts)
        chosen = search.choose()
        try:
            rewritten = StepBuilder(captured, search.cell_map(), chosen, limit).build() if chosen else None
        except LimitError:
            rewritten = None
        except UnfitError as error:
            if error.op not in chosen or chosen[error.op].split.is_update:
                return SplitStep(captured, (), captured.values)
            unfit.add(make_check(captured, search.cell_map(), error.op, chosen[error.op]).key)
            continue
        break
    if rewritten is None:
        return SplitStep(captured, (), captured.values)
    cell_map = search.cell_map()
    part_checks = [
        make_check(captured, cell_map, op, chosen[op]) for op in sorted(chosen) if not chosen[op].split.is_exact
    ]
    gathered_checks = [check for _, check in checks_of_gathered(captured, cell_map, chosen)]
    checks = {check.key: check for check in (*norm_checks, *part_checks, *gathered_checks)}
    return SplitStep(rewritten, tuple(checks.values()), captured.values, is_split=True)
