"""Several thresholds, of which the best is taken."""

from lightning_dpx.memory.plan.planners.search import SearchPlanner
from lightning_dpx.memory.plan.planners.threshold import ThresholdPlanner
from lightning_dpx.memory.plan.problem import Choice, Problem
from tests.memory.made_up import SIZE, chain


def test_within_the_budget_it_is_the_cheapest_that_was_tried() -> None:
    problem = Problem(chain(32))
    assert SearchPlanner().choose(problem, 32 * SIZE) == Choice(), "nothing is cheapest where all fits"
    found = problem.forecast(SearchPlanner().choose(problem, 20 * SIZE))
    assert found.peak <= 20 * SIZE
    assert found.seconds <= problem.forecast(ThresholdPlanner().choose(problem, None)).seconds


def test_without_a_budget_it_goes_as_low_as_any_of_its_thresholds() -> None:
    problem = Problem(chain(32))
    lowest = problem.forecast(SearchPlanner().choose(problem, None)).peak
    assert lowest <= problem.forecast(ThresholdPlanner().choose(problem, None)).peak
    assert lowest <= problem.forecast(SearchPlanner(num_trials=1).choose(problem, None)).peak
