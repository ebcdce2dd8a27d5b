"""Linear programs as arrays, solved repeatedly by HiGHS with changed bounds or costs."""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import ArrayLike

from swapkit.planning.beside import go_on
from swapkit.simulation.problems import Floats, Indexes

_BASIC = highspy.HighsBasisStatus.kBasic
_AT_BOUND = highspy.HighsBasisStatus.kLower
_DUAL, _PRIMAL = 1, 4  # HiGHS's numbers of its simplex methods


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Linear:
    """Minimise costs @ x with lowers <= x <= uppers and row_lowers <= A @ x <= row_uppers.

    A has `values[i]` in row `rows[i]` and column `columns[i]`, sorted by column, each place once.
    """

    costs: Floats
    lowers: Floats
    uppers: Floats
    row_lowers: Floats
    row_uppers: Floats
    rows: Indexes
    columns: Indexes
    values: Floats

    def bound(self, duals: Floats, lowers: Floats, uppers: Floats) -> float:
        """Return a lower bound for all x between `lowers` and `uppers`, valid for any duals.

        Uses weak duality, with each product bounded over the range of its factor, so the tolerances
        of the solver do not matter. Better duals give a better bound. The ranges must be finite.
        """
        duals = np.where(np.isneginf(self.row_lowers), np.minimum(duals, 0.0), duals)
        duals = np.where(np.isposinf(self.row_uppers), np.maximum(duals, 0.0), duals)
        ends = np.where(duals > 0, self.row_lowers, np.where(duals < 0, self.row_uppers, 0.0))
        products = np.bincount(self.columns, self.values * duals[self.rows], len(self.costs))
        reduced = self.costs - products
        return float(duals @ ends + reduced @ np.where(reduced > 0, lowers, uppers))

    def to_highs(self) -> highspy.HighsLp:
        """Return the program as a HiGHS model."""
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.costs), len(self.row_lowers)
        model.col_cost_, model.col_lower_, model.col_upper_ = self.costs, self.lowers, self.uppers
        model.row_lower_, model.row_upper_ = self.row_lowers, self.row_uppers
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_ = np.searchsorted(self.columns, np.arange(len(self.costs) + 1))
        model.a_matrix_.index_ = self.rows
        model.a_matrix_.value_ = self.values
        return model


class Assembly:
    """Builds a linear program from blocks of columns, rows and values."""

    def __init__(self) -> None:
        self._columns: list[tuple[Floats, Floats, Floats]] = []
        self._rows: list[tuple[Floats, Floats]] = []
        self._entries: list[tuple[Indexes, Indexes, Floats]] = []
        self._counts = [0, 0]

    def columns(
        self,
        count: int,
        *,
        lower: ArrayLike = 0.0,
        upper: ArrayLike = np.inf,
        cost: ArrayLike = 0.0,
    ) -> Indexes:
        """Add variables; return their numbers."""
        self._columns.append((_spread(lower, count), _spread(upper, count), _spread(cost, count)))
        return self._number(0, count)

    def rows(self, count: int, lower: ArrayLike, upper: ArrayLike) -> Indexes:
        """Add constraints; return their numbers."""
        self._rows.append((_spread(lower, count), _spread(upper, count)))
        return self._number(1, count)

    def add(self, rows: ArrayLike, columns: ArrayLike, values: ArrayLike) -> None:
        """Add values to the matrix; values at the same place are summed."""
        entries = np.broadcast_arrays(rows, columns, values)
        self._entries.append(
            (
                entries[0].astype(np.int32),
                entries[1].astype(np.int32),
                entries[2].astype(np.float64),
            )
        )

    def costs(self) -> Floats:
        """Return the costs of all variables added so far."""
        return np.concatenate([columns[2] for columns in self._columns])

    def finish(self) -> Linear:
        """Return the program."""
        rows, columns, values = (
            np.concatenate([entry[i] for entry in self._entries]) for i in range(3)
        )
        places = columns.astype(np.int64) * self._counts[1] + rows
        order = np.argsort(places, kind="stable")
        places, values = places[order], values[order]
        firsts = np.flatnonzero(np.diff(places, prepend=-1))
        places, values = places[firsts], np.add.reduceat(values, firsts)
        places, values = places[values != 0], values[values != 0]
        lowers, uppers, costs = (np.concatenate([c[i] for c in self._columns]) for i in range(3))
        return Linear(
            costs=costs,
            lowers=lowers,
            uppers=uppers,
            row_lowers=np.concatenate([row[0] for row in self._rows]),
            row_uppers=np.concatenate([row[1] for row in self._rows]),
            rows=(places % self._counts[1]).astype(np.int32),
            columns=(places // self._counts[1]).astype(np.int32),
            values=values,
        )

    def _number(self, kind: int, count: int) -> Indexes:
        first = self._counts[kind]
        self._counts[kind] += count
        return np.arange(first, first + count, dtype=np.int32)


class SilentHighs(highspy.Highs):
    """HiGHS without output: since 1.16 its constructor prints a banner by a callback."""

    def enableCallbacks(self) -> None:  # noqa: D102, N802 - HiGHS names it so
        self.setOptionValue("output_flag", False)  # noqa: FBT003 - HiGHS takes it so
        super().enableCallbacks()  # type: ignore[no-untyped-call]


class Solver:
    """One linear program in HiGHS. Each solve starts from the basis of the last one."""

    def __init__(self, linear: Linear, basis: tuple[Indexes, Indexes]) -> None:
        """Start with a basis of the columns basis[0] and all rows except basis[1]."""
        self._highs = SilentHighs()  # type: ignore[no-untyped-call]
        self._highs.setOptionValue("presolve", "off")  # presolve would discard the basis
        self._highs.setOptionValue("threads", 1)
        # From the given basis the primal method takes a third of the dual one's time, which is the
        # better one from the basis of another budget.
        self._highs.setOptionValue("simplex_strategy", _PRIMAL)
        self._highs.passModel(linear.to_highs())
        start = highspy.HighsBasis()
        columns = [_AT_BOUND] * len(linear.costs)
        rows = [_BASIC] * len(linear.row_lowers)
        for column in basis[0].tolist():
            columns[column] = _BASIC
        for row in basis[1].tolist():
            rows[row] = _AT_BOUND
        start.col_status, start.row_status = columns, rows
        self._highs.setBasis(start)

    def set_bounds(self, columns: Indexes, lowers: Floats, uppers: Floats) -> None:
        """Change the bounds of some variables."""
        self._highs.changeColsBounds(len(columns), columns, lowers, uppers)

    def set_costs(self, columns: Indexes, costs: Floats) -> None:
        """Change the costs of some variables."""
        self._highs.changeColsCost(len(columns), columns, costs)

    def solve(self) -> tuple[Floats, Floats] | None:
        """Return the best x and the duals of the rows; None: the program is infeasible."""
        status = self._run()
        self._highs.setOptionValue("simplex_strategy", _DUAL)
        for presolve in ("off", "on"):
            if status == highspy.HighsModelStatus.kOptimal:
                break
            self._highs.clearSolver()  # drop numerical errors that have accumulated
            self._highs.setOptionValue("presolve", presolve)  # "on": other, better scaled numbers
            status = self._run()
            if status == highspy.HighsModelStatus.kInfeasible:
                break
        self._highs.setOptionValue("presolve", "off")
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        if status != highspy.HighsModelStatus.kOptimal:
            message = f"HiGHS found no optimum: {self._highs.modelStatusToString(status)}"
            raise RuntimeError(message)
        solution = self._highs.getSolution()
        return np.array(solution.col_value), np.array(solution.row_dual)

    def _run(self) -> highspy.HighsModelStatus:
        go_on()
        self._highs.run()
        return self._highs.getModelStatus()


def _spread(value: ArrayLike, count: int) -> Floats:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), (count,))
