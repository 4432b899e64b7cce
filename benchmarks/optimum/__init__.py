"""The best plan of a small step, by exact search: what plans are measured against in ``small.py`` and in tests.

- ``prices``: a lower bound, and what each choice adds to it at least.
- ``moment``, ``fluid``: states of the search, and what may follow on each.
- ``reach``: the states to start from, and the plan that a path stands for.
- ``exact``: the search.
"""

from optimum.exact import Optimum, optimum

__all__ = ["Optimum", "optimum"]
