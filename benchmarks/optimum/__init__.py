"""Find the optimal plan of a small step by exact search, as a reference for ``small.py`` and tests.

- ``prices``: a lower bound, and the minimum cost that each choice adds.
- ``moment``, ``fluid``: search states and their successors.
- ``reach``: initial states, and the plan of a finished path.
- ``exact``: the search.
"""

from optimum.exact import Optimum, optimum

__all__ = ["Optimum", "optimum"]
