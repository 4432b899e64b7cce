"""Linear programs, built variable by variable and row by row, and solved by HiGHS.

A memory row for each op would name every gap held there. ``binding_ops`` drops rows that follow from a neighbour's, and
``levels`` writes held bytes as a running sum. So the program grows with the number of gaps and not with its square.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import highspy
import numpy as np
from numpy.typing import NDArray

INFINITY = float("inf")
# Unit of bytes. Numbers near one keep the solver within its tolerance; single bytes do not.
UNIT = float(1 << 30)
# In ``binding_ops`` an op implies only rows at most this many ops away, which bounds the work for each op.
_MAX_DISTANCE = 64

Terms = Mapping[int, float]
# Bytes that may be held, and the half-open ranges of ops over which they are.
HeldRanges = tuple[int, Iterable[tuple[int, int]]]


class _SilentHighs(highspy.Highs):
    """HiGHS without output: since 1.16 its constructor prints a banner when it enables callbacks."""

    def enableCallbacks(self) -> None:  # noqa: N802 - the name of HiGHS
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


class LinearProgram:
    """A linear program to minimise; ``interior`` selects an interior-point method."""

    def __init__(self, *, interior: bool = False) -> None:
        self._method = "ipm" if interior else "simplex"  # interior points are faster with many optimal vertices
        self._costs: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []
        self._starts: list[int] = [0]
        self._columns: list[int] = []
        self._values: list[float] = []
        self._solver: highspy.Highs | None = None

    def add_variable(self, low: float = 0.0, high: float = INFINITY, cost: float = 0.0) -> int:
        self._lower.append(low)
        self._upper.append(high)
        self._costs.append(cost)
        return len(self._costs) - 1

    def add_cost(self, column: int, cost: float) -> None:
        self._costs[column] += cost

    def add_row(self, terms: Terms, low: float = -INFINITY, high: float = INFINITY) -> int:
        """Require that the sum of ``terms`` is in [``low``, ``high``]; return the number of this row."""
        self._columns += terms.keys()
        self._values += terms.values()
        self._starts.append(len(self._columns))
        self._row_lower.append(low)
        self._row_upper.append(high)
        return len(self._row_upper) - 1

    def minimise(self) -> NDArray[np.float64] | None:
        """Solve the program; return each variable's value, or None if there is no optimum."""
        # Variables and rows that are added after the first call are ignored.
        solver = self._solver = self._solver or self._build_solver()
        solver.run()
        if self._method != "simplex" and solver.getModelStatus() == highspy.HighsModelStatus.kUnknown:
            solver.setOptionValue("solver", "simplex")
            solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return np.array(solver.getSolution().col_value)

    def objective(self) -> float:
        return 0.0 if self._solver is None else float(self._solver.getInfo().objective_function_value)

    def dual_values(self) -> tuple[list[float], list[float]]:
        """Return the dual values of variables and of rows after ``minimise``; before it, empty lists."""
        if self._solver is None:
            return [], []
        solution = self._solver.getSolution()
        return list(solution.col_dual), list(solution.row_dual)

    def _build_solver(self) -> highspy.Highs:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self._costs), len(self._row_lower)
        lp.col_cost_ = np.array(self._costs)
        lp.col_lower_, lp.col_upper_ = np.array(self._lower), np.array(self._upper)
        lp.row_lower_, lp.row_upper_ = np.array(self._row_lower), np.array(self._row_upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self._starts)
        lp.a_matrix_.index_ = np.array(self._columns, dtype=np.int32)
        lp.a_matrix_.value_ = np.array(self._values)
        solver = _SilentHighs()
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("random_seed", 0)
        solver.setOptionValue("solver", self._method)
        solver.passModel(lp)
        return solver


def add_levels(
    program: LinearProgram, moments: Sequence[int], stays: Iterable[tuple[int, float, Iterable[tuple[int, int]]]]
) -> list[int | None]:
    """Add variables for the bytes held at each moment; return their numbers (None before any are held).

    ``stays``: the number of a variable, its factor, and the half-open ranges of moments over which its bytes are held.
    """
    changes: list[dict[int, float]] = [{} for _ in range(len(moments) + 1)]
    for column, factor, ranges in stays:
        for begin, end in ranges:
            first, last = bisect_left(moments, begin), bisect_left(moments, end)
            if first < last:
                changes[first][column] = changes[first].get(column, 0.0) - factor
                changes[last][column] = changes[last].get(column, 0.0) + factor
    variables: list[int | None] = []
    level: int | None = None
    for change in changes[:-1]:
        terms = {column: factor for column, factor in change.items() if factor}
        if terms:
            if level is not None:
                terms[level] = -1.0
            level = program.add_variable(-INFINITY)
            program.add_row({level: 1.0} | terms, 0.0, 0.0)
        variables.append(level)
    return variables


def binding_ops(free: Sequence[int], stays: Iterable[HeldRanges], spans: Sequence[int] | None = None) -> list[int]:
    """Return ops that suffice as memory constraints: their limits imply the limits of all other ops."""
    # Each byte held over op p is held over op i as well, or is in a range around p and not around i. If p has at least
    # the bytes of such ranges more room than i, the row of i implies that of p.
    count = len(free)
    begins: list[list[tuple[int, int]]] = [[] for _ in range(count + 1)]  # by begin: end and bytes of a range
    ends: list[list[tuple[int, int]]] = [[] for _ in range(count + 1)]  # by end: begin and bytes of a range
    for size, ranges in stays:
        for first, last in ranges:
            if first < last:
                begins[first].append((last, size))
                ends[last].append((first, size))
    binding: list[int] = []
    for i in range(count):
        while binding and i - binding[-1] <= _MAX_DISTANCE and (spans is None or spans[binding[-1]] == spans[i]):
            p = binding[-1]
            more = free[p] - free[i]
            if more >= 0:
                implied = sum(size for at in range(p + 1, i + 1) for first, size in ends[at] if first <= p) <= more
            else:
                implied = False
                if sum(size for at in range(p + 1, i + 1) for last, size in begins[at] if last > i) <= -more:
                    break
            if not implied:
                binding.append(i)
                break
            binding.pop()
        else:
            binding.append(i)
    return binding
