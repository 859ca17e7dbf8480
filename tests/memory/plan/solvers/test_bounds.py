"""No choice costs less than the lower bound."""

import numpy as np
import pytest

from lightning_dpx.memory import PLANNERS
from lightning_dpx.memory.plan.problem import Choice, Problem
from lightning_dpx.memory.plan.solvers.bounds import Relaxation, knapsack, least_bytes, least_seconds, local_maxima
from tests.memory.chains import chain_profile
from tests.memory.random_steps import MOST_UNITS, blocks, budgets_and_least, every_choice, random_profile


@pytest.mark.parametrize("block", blocks(8, usual=2))
def test_the_bound_is_below_all_choices_for_random_steps(block: int) -> None:
    tight = total = 0
    for seed in range(25 * block, 25 * block + 25):
        problem = Problem(random_profile(seed, 5))
        if len(problem.droppable) > MOST_UNITS:
            continue
        relaxation = Relaxation(problem)
        for budget, least in budgets_and_least(problem, seed):
            bound = least_seconds(relaxation, budget)
            assert bound <= least * (1 + 1e-9), f"seed {seed}, budget {budget}"
            tight, total = tight + (bound >= 0.99 * least), total + 1
    assert tight >= 0.4 * total > 0, "a bound of nothing would be none"


def test_bytes_that_are_surely_there_are_there_in_every_choice() -> None:
    for seed in range(40):
        problem = Problem(random_profile(seed, 4))
        if len(problem.droppable) > MOST_UNITS:
            continue
        relaxation = Relaxation(problem)
        for choice in every_choice(problem):
            dropped = np.array([unit in choice.dropped for unit in relaxation.units], float)
            surely = relaxation.curve_of(dropped)
            assert problem.forecast(choice).peak >= surely.max(), f"seed {seed}, {choice}"
            event = int(surely.argmax())
            assert surely[event] == pytest.approx(relaxation.curve[event] - relaxation.freed(event) @ dropped)


def test_no_choice_takes_less_than_the_least_bytes() -> None:
    tight = total = 0
    for seed in range(40):
        problem = Problem(random_profile(seed, 4))
        if len(problem.droppable) > MOST_UNITS:
            continue
        smallest = min(problem.forecast(choice).peak for choice in every_choice(problem))
        bound = least_bytes(Relaxation(problem))
        assert bound <= smallest, f"seed {seed}"
        tight, total = tight + (bound >= 0.95 * smallest), total + 1
    assert tight >= 0.5 * total > 0, "a bound of nothing would be none"


def test_the_knapsack_of_a_chain_by_hand() -> None:
    """20 equal stages: 11 s bring 4 KiB back, and what is computed from nothing else is not dearer than the rest."""
    problem = Problem(chain_profile("equal", 20))
    peak = problem.profile.peak
    seconds, units = knapsack(Relaxation(problem), peak - 3 * 4096)
    assert seconds == pytest.approx(3 * 11)
    assert len(units) == 3
    assert problem.forecast(Choice(units)).peak <= peak - 3 * 4096 + 4096  # a neighbor may come back too early
    assert knapsack(Relaxation(problem), peak - 3 * 4096 + 1)[0] == pytest.approx(3 * 11 - 11 / 4096)
    assert knapsack(Relaxation(problem), peak) == (0.0, frozenset())
    assert least_seconds(Relaxation(problem), 4096) == float("inf")


def test_equal_units_are_dropped_here_and_there() -> None:
    relaxation = Relaxation(Problem(chain_profile("equal", 40)))
    order = relaxation.cheapest(np.full(len(relaxation.units), 4096.0))
    first = sorted(order[: len(order) // 4].tolist())
    assert min(np.diff(first)) > 1


def test_crests_are_the_highest_and_some_in_between() -> None:
    curve = np.array([0, 5, 3, 9, 9, 1, 7, 0, 6, 0], dtype=np.float64)
    assert local_maxima(curve, 4, 10) == [1, 3, 6, 8]
    assert local_maxima(curve, 6, 10) == [3, 6]
    assert local_maxima(curve, 4, 2) == [1, 3]


@pytest.mark.parametrize("planner", ["optimal", "search"])
def test_no_planner_beats_the_bound(planner: str) -> None:
    for kind in ("equal", "unequal", "residual"):
        problem = Problem(chain_profile(kind, 20))
        budget = round(0.6 * problem.profile.peak)
        result = problem.forecast(PLANNERS[planner]().choose(problem, budget))
        assert result.peak > budget or result.seconds >= least_seconds(Relaxation(problem), budget) > 0
