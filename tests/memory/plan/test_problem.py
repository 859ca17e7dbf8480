"""A profile as planners see it, made of numbers alone."""

import pytest

import lightning_dpx as dpx
from lightning_dpx.memory.plan.problem import PLANNERS, Choice, Planner, Problem, best, register_planner
from tests.memory.made_up import SIZE, chain


def test_units_stand_in_the_order_of_forward_with_what_they_are_computed_from() -> None:
    problem = Problem(chain(4, refused="it draws"))
    assert [unit.inputs for unit in problem.units] == [(), (0,), (1,), (2,)]
    assert [unit.num_bytes for unit in problem.units] == [SIZE] * 4
    assert [unit.droppable for unit in problem.units][2] is False, "what is refused is kept"
    assert problem.values_of([0, 2]) == {0, 2}
    assert problem.last_use[0] == 1


def test_dropping_takes_fewer_bytes_and_more_time_and_a_forecast_is_made_once() -> None:
    problem = Problem(chain(8))
    nothing = problem.forecast(Choice())
    assert (nothing.peak, nothing.seconds) == (8 * SIZE, 0)
    choice = Choice(frozenset(problem.droppable[1::2]))
    found = problem.forecast(choice)
    assert found.peak < nothing.peak
    assert found.seconds > 0
    assert problem.forecast(choice) is found
    assert max(problem.timeline(choice)) == found.peak


def test_the_best_is_the_fastest_within_the_budget_and_else_the_smallest() -> None:
    problem = Problem(chain(8))
    choices = [Choice(), Choice(frozenset(problem.droppable[1:2])), Choice(frozenset(problem.droppable[1::2]))]
    assert best(problem, choices, 8 * SIZE) == choices[0]
    assert best(problem, choices, problem.forecast(choices[2]).peak) == choices[2]
    assert best(problem, choices, 1) == choices[2]


def test_what_is_forgotten_after_every_use_should_not_lead_to_another_such_one() -> None:
    problem = Problem(chain(4))
    first, second, third = problem.droppable[:3]
    assert problem.is_nested(Choice(frozenset({first, second}), frozenset({first, second})))
    assert not problem.is_nested(Choice(frozenset({first, third}), frozenset({first, third})))
    assert {first, third} <= problem.unnested
    assert second not in problem.unnested


def test_a_planner_is_known_by_its_name_and_a_name_has_one_planner() -> None:
    for name in PLANNERS:
        assert PLANNERS[name].name == name
    with pytest.raises(dpx.ConfigurationError, match="'search' is taken by SearchPlanner"):
        register_planner("search")(type("Other", (Planner,), {}))


def test_a_choice_is_within_a_budget_and_a_time_or_not_whatever_was_asked_before() -> None:
    problem = Problem(chain(12))
    choice = Choice(frozenset(problem.droppable))
    whole = Problem(problem.profile).forecast(choice)
    assert problem.forecast_within(choice, whole.peak - 1, whole.seconds) is None
    assert problem.forecast_within(choice, whole.peak, 0.5 * whole.seconds) is None
    work = problem.work
    assert problem.forecast_within(choice, whole.peak - 1, 0.5 * whole.seconds) is None
    assert problem.work == work, "what takes too much takes too much of less"
    assert problem.forecast_within(choice, whole.peak, whole.seconds) == whole
    assert problem.forecast_within(choice, whole.peak - 1, whole.seconds) is None
    assert problem.forecast(choice) == whole
