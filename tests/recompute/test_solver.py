"""The wrapper of HiGHS, and what is said where it is missing."""

import sys

import pytest

import lightning_dpx as dpx
from lightning_dpx.recompute.solver import Solver, require_solver, solver_installed


@pytest.fixture
def without_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)


def test_a_programme_grows_between_runs_and_becomes_integer() -> None:
    pytest.importorskip("highspy")
    solver = Solver()
    cheap, dear = solver.column(1.0, integer=True), solver.column(integer=True)
    solver.add_cost(dear, 2.0)
    row = solver.row({cheap: -2, dear: -2}, -3)
    answer = solver.run(integer=False)
    assert answer.least == pytest.approx(2.0)
    assert answer.values.tolist() == pytest.approx([1.0, 0.5])
    assert answer.activity[row] == pytest.approx(-3)
    answer = solver.run(integer=True)
    assert answer.values.tolist() == pytest.approx([1.0, 1.0])
    assert 2.99 <= answer.least <= 3.0
    third = solver.column(0.5)
    solver.row({dear: 1, third: -1}, 0)
    assert solver.run(integer=True).least == pytest.approx(3.5, rel=0.01)
    solver.row({cheap: 1, dear: 1}, 1)
    answer = solver.run(integer=True)
    assert answer.least == float("inf")
    assert not len(answer.values)
    assert solver.seconds > 0


@pytest.mark.usefixtures("without_highs")
def test_without_highs_the_error_tells_what_to_install() -> None:
    assert not solver_installed()
    for attempt in (require_solver, Solver):
        with pytest.raises(dpx.UnsupportedError, match=r"needs HiGHS.*pip install 'lightning-dpx\[milp\]'.*'optimal'"):
            attempt()
