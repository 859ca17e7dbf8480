"""HiGHS (Huangfu and Hall, 2018), where it is installed: minimizes a cost over columns between 0 and 1.

Columns and rows are gathered and handed over together, because one call for each takes longer than solving.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from typing import Any

import numpy as np

from lightning_dpx.errors import UnsupportedError

_GAP = 2e-3
_NODES = 200
_OVERHEAD = 5  # of a run in integers: as many checks as take as long


def solver_installed() -> bool:
    """Whether HiGHS is there."""
    return find_spec("highspy") is not None


def require_solver() -> None:
    """Does nothing where HiGHS is there.

    Raises:
        UnsupportedError: it is not.
    """
    if not solver_installed():
        raise UnsupportedError(
            "planner='milp' needs HiGHS, which is not installed; pip install 'lightning-dpx[milp]', or use "
            "planner='optimal', which plans without it."
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solver found.

    Attributes:
        least: No solution costs less; infinite if there is none.
        values: Of the columns; empty if no solution was found.
        activity: What each row comes to.
    """

    least: float
    values: np.ndarray
    activity: np.ndarray


class _Checks:
    """Stops a run after a number of checks."""

    def __init__(self) -> None:
        self.count = 0
        self.most = float("inf")

    def __call__(self, event: Any) -> None:
        self.count += 1
        if self.count > self.most:
            event.interrupt()


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """HiGHS 1.16 prints its version before it can be told not to, past Python, into what may be read as JSON."""
    if sys.platform == "win32":
        yield  # no library holds what is not yet written for all others
        return
    library = ctypes.CDLL(None)
    sys.stdout.flush()
    library.fflush(None)
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
        library.fflush(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


class Solver:
    """A program that can grow between runs.

    Work is counted instead of time, because an answer must not depend on how busy the machine is. Now and then in a run
    in integers HiGHS checks whether it shall stop, and the more terms there are, the longer it takes from one check to
    the next.

    Attributes:
        terms: Of all rows.
        work: Of all runs in integers: checks times terms.

    Raises:
        UnsupportedError: HiGHS is not installed.
    """

    def __init__(self) -> None:
        require_solver()
        import highspy  # an extra, which everything else does without

        self._api = highspy
        with _nothing_printed():
            self._highs = highspy.Highs()  # type: ignore[no-untyped-call]
        self._highs.setOptionValue("output_flag", False)
        # One thread, and limits that count work: the same plan whatever else the machine does.
        self._highs.setOptionValue("parallel", "off")
        self._highs.setOptionValue("mip_rel_gap", _GAP)
        self._highs.setOptionValue("mip_max_nodes", _NODES)
        self._highs.setOptionValue("mip_allow_restart", False)  # takes long where there are few nodes
        self._checks = _Checks()
        self._highs.cbMipInterrupt.subscribe(self._checks)
        self.terms: int = 0
        self.work: int = 0
        self._costs: list[float] = []
        self._integers: list[int] = []
        self._rows: list[tuple[Mapping[int, float], float]] = []
        self._known = [0, 0]  # columns and rows that were handed over

    def add_column(self, cost: float = 0.0, *, integer: bool = False) -> int:
        """Adds a column, and returns its number."""
        self._costs.append(cost)
        if integer:
            self._integers.append(len(self._costs) - 1)
        return len(self._costs) - 1

    def add_cost(self, column: int, cost: float) -> None:
        """Makes a column dearer; before the first run that knows it."""
        self._costs[column] += cost

    def add_row(self, terms: Mapping[int, float], most: float) -> int:
        """Adds a row, and returns its number: the sum of columns times factors is at most ``most``."""
        self._rows.append((terms, most))
        self.terms += len(terms)
        return len(self._rows) - 1

    def run(self, *, integer: bool, work: float = float("inf")) -> Answer:
        """The cheapest solution, or nearly so; in integers, the best that is found with this much work."""
        self._hand_over(integer)
        self._checks.count = 0
        self._checks.most = work / max(1, self.terms) - _OVERHEAD
        self._highs.run()
        if integer:
            self.work += (self._checks.count + _OVERHEAD) * self.terms
        info = self._highs.getInfo()
        status = self._highs.getModelStatus()
        if status in (self._api.HighsModelStatus.kInfeasible, self._api.HighsModelStatus.kUnboundedOrInfeasible):
            return Answer(float("inf"), np.zeros(0), np.zeros(0))
        # Stopped before anything was found; what was proved until then is a bound all the same.
        if info.primal_solution_status != self._api.SolutionStatus.kSolutionStatusFeasible:
            least = info.mip_dual_bound if integer else 0.0
            return Answer(least, np.zeros(0), np.zeros(0))
        optimal = status == self._api.HighsModelStatus.kOptimal
        if integer:
            least = info.mip_dual_bound
        elif optimal:
            least = info.objective_function_value
        else:
            least = 0.0  # a relaxation that was cut short has an objective, and no bound
        solution = self._highs.getSolution()
        return Answer(least, np.array(solution.col_value), np.array(solution.row_value))

    def _hand_over(self, integer: bool) -> None:
        columns, rows = self._known
        costs = np.array(self._costs[columns:])
        nothing = np.zeros(0, dtype=np.int32)
        zeros = np.zeros(len(costs))
        ones = np.ones(len(costs))
        self._highs.addCols(len(costs), costs, zeros, ones, 0, nothing, nothing, np.zeros(0))
        terms = [pair[0] for pair in self._rows[rows:]]
        most = np.array([pair[1] for pair in self._rows[rows:]])
        starts = np.cumsum([0, *map(len, terms)], dtype=np.int32)
        # Compressed rows, as HiGHS takes them: hundreds of thousands of terms in one call instead of as many calls.
        indices = np.array(list(chain.from_iterable(terms)), dtype=np.int32)
        factors = np.array(list(chain.from_iterable(row.values() for row in terms)), dtype=np.float64)
        least = np.full(len(most), -self._api.kHighsInf)
        self._highs.addRows(len(most), least, most, len(indices), starts[:-1], indices, factors)
        self._known = [len(self._costs), len(self._rows)]
        if integer:
            # Only now: in the relaxations before, these columns are numbers between 0 and 1.
            kinds = np.array([self._api.HighsVarType.kInteger] * len(self._integers))
            self._highs.changeColsIntegrality(len(self._integers), np.array(self._integers, dtype=np.int32), kinds)
