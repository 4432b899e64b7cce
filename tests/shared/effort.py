"""How many cases tests run in `make test`, and how many with ``--exhaustive`` (`make test-all`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest

from outofcore.planning.parameters import SearchParams

try:
    from hypothesis import settings
except ModuleNotFoundError:  # a machine with a GPU runs tests/cuda, which do without it
    settings = None


def register_profiles(*, exhaustive: bool) -> None:
    """Set Hypothesis' `max_examples`, which tests here read as a percentage of their own count."""
    if settings is not None:
        settings.register_profile("outofcore", max_examples=100 if exhaustive else 20)
        settings.load_profile("outofcore")


def is_exhaustive() -> bool:
    return settings is not None and settings().max_examples == 100


def examples(count: int) -> int:
    """Return the number of examples that Hypothesis tries: ``count`` with ``--exhaustive``, else a fifth."""
    return max(count * settings().max_examples // 100, 5)


@contextmanager
def search_like(params: SearchParams) -> Iterator[None]:
    """Make ``params`` the default search parameters of ``auto``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SearchParams.__init__, "__defaults__", tuple(getattr(params, f.name) for f in fields(params)))
        yield


def some_of(values: Iterable[Any], keep: Iterable[Any] | Callable[[Any], bool]) -> list[Any]:
    """Mark values as exhaustive unless ``keep`` contains or accepts them."""
    is_kept = keep if callable(keep) else list(keep).__contains__
    return [value if is_kept(value) else _exhaustive(value) for value in values]


def pairs_of(*factors: Iterable[Any]) -> list[Any]:
    """Mark as exhaustive all but a pairwise cover of the factors' product (Cohen et al., IEEE TSE 23(7), 1997)."""
    product = list(itertools.product(*factors))
    pairs = [set(itertools.combinations(enumerate(map(repr, values)), 2)) for values in product]
    open_pairs, chosen = set[Any]().union(*pairs), set[int]()
    while open_pairs:
        best = max(range(len(product)), key=lambda index: len(pairs[index] & open_pairs))
        chosen.add(best)
        open_pairs -= pairs[best]
    return [values if index in chosen else _exhaustive(values) for index, values in enumerate(product)]


def _exhaustive(value: Any) -> Any:
    return pytest.param(*value if isinstance(value, tuple) else (value,), marks=pytest.mark.exhaustive)
