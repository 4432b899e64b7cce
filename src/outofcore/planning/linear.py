"""Linear programs, put together column by column and row by row, solved by HiGHS."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import highspy
import numpy as np
from numpy.typing import NDArray

INFINITY = float("inf")
# Bytes are counted in these, so that the solver meets numbers near one: by the byte its answers are off by more than
# its tolerance says.
UNIT = float(1 << 30)


class Linear:
    """A linear program in the making."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []
        self._starts: list[int] = [0]
        self._columns: list[int] = []
        self._values: list[float] = []
        self._solver: highspy.Highs | None = None

    def column(self, low: float = 0.0, high: float = INFINITY, cost: float = 0.0) -> int:
        """A variable; returns its number."""
        self._lower.append(low)
        self._upper.append(high)
        self._costs.append(cost)
        return len(self._costs) - 1

    def row(self, terms: dict[int, float], low: float = -INFINITY, high: float = INFINITY) -> int:
        """The sum of the variables times their factors lies between ``low`` and ``high``; returns the row's number."""
        self._columns += terms.keys()
        self._values += terms.values()
        self._starts.append(len(self._columns))
        self._row_lower.append(low)
        self._row_upper.append(high)
        return len(self._row_upper) - 1

    def minimise(self) -> NDArray[np.float64] | None:
        """The values at which the cost is least; None if there are none.

        The same program gives the same values. Once solved, it can be solved again with changed bounds,
        starting from where the last solution was; columns and rows added since are not seen.
        """
        solver = self._solver = self._solver or self._loaded()
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return np.array(solver.getSolution().col_value)

    def least(self) -> float:
        """The cost of the solution that ``minimise`` found."""
        return 0.0 if self._solver is None else float(self._solver.getInfo().objective_function_value)

    def duals(self) -> tuple[list[float], list[float]]:
        """Of that solution, what the bounds of each column and of each row cost."""
        if self._solver is None:
            return [], []
        solution = self._solver.getSolution()
        return list(solution.col_dual), list(solution.row_dual)

    def bound(self, column: int, low: float, high: float) -> None:
        """Change the bounds of a column, before the first solution or after."""
        self._lower[column], self._upper[column] = low, high
        if self._solver is not None:
            self._solver.changeColBounds(column, low, high)

    def _loaded(self) -> highspy.Highs:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self._costs), len(self._row_lower)
        lp.col_cost_ = np.array(self._costs)
        lp.col_lower_, lp.col_upper_ = np.array(self._lower), np.array(self._upper)
        lp.row_lower_, lp.row_upper_ = np.array(self._row_lower), np.array(self._row_upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self._starts)
        lp.a_matrix_.index_ = np.array(self._columns, dtype=np.int32)
        lp.a_matrix_.value_ = np.array(self._values)
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("random_seed", 0)
        solver.setOptionValue("solver", "simplex")
        solver.passModel(lp)
        return solver


def levels(
    linear: Linear, moments: Sequence[int], stays: Iterable[tuple[int, float, Iterable[tuple[int, int]]]]
) -> list[int | None]:
    """Columns for how much is held at each of some moments.

    Each is the one before and what changes. So there are about as many terms as stays, where a row that names all that
    is held at a moment would make their number grow with the square of it.

    Args:
        linear: to which columns and rows are added.
        moments: in order.
        stays: columns, each with its factor and the ranges of moments, half-open, over which it is held.

    Returns:
        Moments between which nothing changes have the same column; None: nothing is held yet.
    """
    changes: list[dict[int, float]] = [{} for _ in range(len(moments) + 1)]
    for column, factor, ranges in stays:
        for begin, end in ranges:
            first, last = bisect_left(moments, begin), bisect_left(moments, end)
            if first < last:
                changes[first][column] = changes[first].get(column, 0.0) - factor
                changes[last][column] = changes[last].get(column, 0.0) + factor
    found: list[int | None] = []
    level: int | None = None
    for change in changes[:-1]:
        terms = {column: factor for column, factor in change.items() if factor}
        if terms:
            if level is not None:
                terms[level] = -1.0
            level = linear.column(-INFINITY)
            linear.row({level: 1.0} | terms, 0.0, 0.0)
        found.append(level)
    return found
