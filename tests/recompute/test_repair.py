"""Steps from a choice that is above or below the budget to one that uses it up."""

from lightning_dpx.recompute.bounds import Relaxation, knapsack
from lightning_dpx.recompute.planner import Choice, Problem
from lightning_dpx.recompute.repair import fill, reach
from tests.recompute.chains import chain_profile


def test_a_knapsack_that_forgets_what_comes_back_reaches_the_budget() -> None:
    reached = 0
    for length in (20, 40, 60):
        problem = Problem(chain_profile("equal", length))
        relaxation, budget = Relaxation(problem), round(0.5 * problem.profile.peak)
        choice = Choice(knapsack(relaxation, budget)[1])
        after = reach(relaxation, choice, budget)
        reached += problem.forecast(choice).peak > budget >= problem.forecast(after).peak
    assert reached


def test_what_is_far_above_the_budget_or_within_it_stays_as_it_is() -> None:
    problem = Problem(chain_profile("equal", 20))
    relaxation = Relaxation(problem)
    assert reach(relaxation, Choice(), problem.profile.peak) == Choice()
    assert reach(relaxation, Choice(), problem.profile.peak // 2) == Choice()


def test_what_does_not_fit_is_not_filled() -> None:
    problem = Problem(chain_profile("equal", 20))
    everything = Choice(frozenset(problem.droppable))
    assert fill(problem, everything, 4096) == everything
    assert fill(problem, everything, problem.profile.peak) == Choice()
