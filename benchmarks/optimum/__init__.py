"""Find the optimal plan of a small step by exact search, as a reference for ``small.py`` and tests."""

from optimum.exact import Optimum, optimum

__all__ = ["Optimum", "optimum"]
