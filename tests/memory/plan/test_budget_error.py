"""A budget that cannot be met: what could be, and what stands in the way."""

from dataclasses import replace

from lightning_dpx.errors import BudgetError
from lightning_dpx.memory.plan.budget_error import budget_error, surely_needed
from lightning_dpx.memory.plan.problem import Choice, Problem
from lightning_dpx.memory.plan.replay_search import ReplayChoice
from tests.memory.made_up import SIZE, chain


def error_for(problem: Problem, budget: int, reached: int = 0) -> BudgetError:
    smallest = ReplayChoice(frozenset(), problem, Choice(frozenset(problem.droppable)))
    return budget_error(problem.profile, budget, smallest, surely_needed([problem]), "search", reached)


def test_the_smallest_budget_and_the_largest_value_are_named() -> None:
    problem = Problem(chain(6, refused="it draws random numbers"))
    error = error_for(problem, SIZE // 2)
    assert error.smallest == problem.forecast(Choice(frozenset(problem.droppable))).peak
    assert "A budget of 512.00 KiB for activations cannot be met; the smallest that can is" in str(error)
    assert "without a plan it is 6.00 MiB" in str(error)
    assert "The largest single activation, 1.00 MiB, is saved by '0'" in str(error)


def test_a_planner_that_does_not_come_down_so_far_is_named() -> None:
    problem = Problem(chain(6))
    assert "by planner='search', which reaches 5.50 MiB" in str(error_for(problem, 5 * SIZE, int(5.5 * SIZE)))


def test_what_every_plan_needs_is_what_is_left_when_all_goes() -> None:
    problem = Problem(chain(6, refused="it draws"))
    surely = surely_needed([problem])
    assert SIZE <= surely <= problem.forecast(Choice(frozenset(problem.droppable))).peak


def test_where_nothing_is_known_of_the_costliest_moment_no_gap_is_left() -> None:
    profile = replace(chain(6), requests=())  # backward asks for nothing, so nothing tells where it is
    error = error_for(Problem(replace(profile, forward_events=0)), SIZE // 2)
    assert "What sets that" not in str(error)
    assert "  " not in str(error)
