"""The wrapper of HiGHS, and what is said where it is missing."""

import random
import sys

import pytest

import lightning_dpx as dpx
from lightning_dpx.memory.plan.solvers.highs import Solver, require_solver, solver_installed


@pytest.fixture
def without_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)


def test_a_program_grows_between_runs_and_becomes_integer() -> None:
    pytest.importorskip("highspy")
    solver = Solver()
    cheap, dear = solver.add_column(1.0, integer=True), solver.add_column(integer=True)
    solver.add_cost(dear, 2.0)
    row = solver.add_row({cheap: -2, dear: -2}, -3)
    answer = solver.run(integer=False)
    assert answer.least == pytest.approx(2.0)
    assert answer.values.tolist() == pytest.approx([1.0, 0.5])
    assert answer.activity[row] == pytest.approx(-3)
    answer = solver.run(integer=True)
    assert answer.values.tolist() == pytest.approx([1.0, 1.0])
    assert 2.99 <= answer.least <= 3.0
    third = solver.add_column(0.5)
    solver.add_row({dear: 1, third: -1}, 0)
    assert solver.run(integer=True).least == pytest.approx(3.5, rel=0.01)
    solver.add_row({cheap: 1, dear: 1}, 1)
    answer = solver.run(integer=True)
    assert answer.least == float("inf")
    assert not len(answer.values)


def test_a_run_in_integers_does_no_more_work_than_it_may() -> None:
    pytest.importorskip("highspy")
    found = []
    for most in (8e4, 3e4, 3e4):
        solver, generator = Solver(), random.Random(0)
        columns = [solver.add_column(1 + generator.random(), integer=True) for _ in range(100)]
        for _ in range(150):  # each wants one of its columns
            solver.add_row(dict.fromkeys(generator.sample(columns, 6), -1.0), -1.0)
        answer = solver.run(integer=True, work=most)
        found.append((solver.work, answer.least, answer.values.tolist()))
    assert found[0][0] > 5e4
    assert 3e4 <= found[1][0] <= 4e4, "a few checks until it stops"
    assert found[1] == found[2]


def test_nothing_is_printed_and_what_others_print_is(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("highspy")
    sys.stdout.write("before\n")
    solver = Solver()
    solver.add_column(1.0, integer=True)
    sys.stdout.write("after\n")
    assert capfd.readouterr().out == "before\nafter\n"


@pytest.mark.usefixtures("without_highs")
def test_without_highs_the_error_tells_what_to_install() -> None:
    assert not solver_installed()
    for attempt in (require_solver, Solver):
        with pytest.raises(dpx.UnsupportedError, match=r"needs HiGHS.*pip install 'lightning-dpx\[milp\]'.*'optimal'"):
            attempt()
