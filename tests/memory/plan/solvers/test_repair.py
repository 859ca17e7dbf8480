"""Steps from a choice that is above or below the budget to one that uses it up, and as low as can be."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_dpx.memory import PLANNERS, profile_module
from lightning_dpx.memory.plan.forecast import timeline
from lightning_dpx.memory.plan.problem import Choice, Problem
from lightning_dpx.memory.plan.solvers.bounds import Relaxation, knapsack
from lightning_dpx.memory.plan.solvers.highs import solver_installed
from lightning_dpx.memory.plan.solvers.milp_model import milp_choices
from lightning_dpx.memory.plan.solvers.repair import HASTENING, REACHING, Descent, fill, hasten
from tests.memory.chains import chain_profile
from tests.memory.models import ORDINARY
from tests.memory.random_steps import MOST_UNITS, blocks, every_choice, random_profile


def test_a_knapsack_that_forgets_what_comes_back_reaches_the_budget() -> None:
    reached = 0
    for length in (20, 40, 60):
        problem = Problem(chain_profile("equal", length))
        relaxation, budget = Relaxation(problem), round(0.5 * problem.profile.peak)
        choice = Choice(knapsack(relaxation, budget)[1])
        after = Descent(relaxation, REACHING).reach(choice, budget)
        reached += problem.forecast(choice).peak > budget >= problem.forecast(after).peak
    assert reached


def test_what_is_far_above_the_budget_or_within_it_stays_as_it_is() -> None:
    problem = Problem(chain_profile("equal", 20))
    descent = Descent(Relaxation(problem), REACHING)
    assert descent.reach(Choice(), problem.profile.peak) == Choice()
    assert descent.reach(Choice(), problem.profile.peak // 2) == Choice()


def test_what_does_not_fit_is_not_filled() -> None:
    problem = Problem(chain_profile("equal", 20))
    everything = Choice(frozenset(problem.droppable))
    assert fill(problem, everything, 4096) == everything
    assert fill(problem, everything, problem.profile.peak) == Choice()


def test_a_choice_that_computes_all_from_the_beginning_each_time_is_hastened_within_its_peak() -> None:
    problem = Problem(chain_profile("equal", 20))
    every = frozenset(problem.droppable)
    slow = Choice(every, every)
    before = problem.forecast(slow)
    budget = round(1.1 * before.peak)
    after = problem.forecast(hasten(problem, slow, budget, problem.work + HASTENING))
    filled = problem.forecast(fill(problem, slow, budget))
    assert after.peak <= budget
    assert after.seconds < 0.9 * filled.seconds, "which goes by what a unit takes alone"
    nothing_left = problem.work
    assert hasten(problem, slow, budget, nothing_left - 1) == slow


def test_a_choice_in_which_nothing_is_computed_many_times_is_not_hastened() -> None:
    problem = Problem(chain_profile("equal", 20))
    everything = Choice(frozenset(problem.droppable))
    assert hasten(problem, everything, problem.profile.peak, problem.work + HASTENING) == everything


@pytest.mark.parametrize("block", blocks(2, usual=1))
def test_the_lowest_peak_of_random_steps_is_nearly_always_that_of_all_choices(block: int) -> None:
    lowest = total = 0
    for seed in range(50 * block, 50 * block + 50):
        problem = Problem(random_profile(seed, 5))
        if len(problem.droppable) > MOST_UNITS:
            continue
        least = min(problem.forecast(choice).peak for choice in every_choice(problem))
        reached = problem.forecast(PLANNERS["optimal"]().choose(problem, None)).peak
        assert least <= reached <= 1.2 * least, f"seed {seed}"
        lowest, total = lowest + (reached == least), total + 1
    assert lowest >= 0.95 * total > 0


def test_a_descent_ends_where_its_work_does() -> None:
    problem = Problem(chain_profile("unequal", 40))
    relaxation, size = Relaxation(problem), len(problem.profile.curve) + len(problem.profile.values)
    peaks = [
        problem.forecast(Descent(relaxation, count * size).lower(Choice())).peak / problem.profile.peak
        for count in (25, 100, 400)
    ]
    assert 1 > peaks[0] > peaks[1] > peaks[2]


def test_what_is_offloaded_is_not_forgotten_after_every_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one way back, so a choice with another would predict something else. A mask may be expanded each time."""
    monkeypatch.setattr("lightning_dpx.memory.plan.solvers.repair._FEW", 1000)
    torch.manual_seed(0)
    profile = profile_module(*ORDINARY["gpt"]())
    values = [
        replace(v, offloaded=True, inputs=()) if v.name and at % 5 == 0 else v for at, v in enumerate(profile.values)
    ]
    problem = Problem(replace(profile, values=tuple(values)))
    fixed = {unit for unit in problem.droppable if any(values[v].offloaded for v in problem.units[unit].values)}
    masks = {unit for unit in problem.droppable if any(values[v].compact for v in problem.units[unit].values)}
    assert fixed
    assert masks - fixed <= problem.forgettable == set(problem.droppable) - fixed
    every = Choice(frozenset(problem.droppable))
    curve = timeline(problem.profile, problem.values_of(every.dropped))
    choices = Descent(Relaxation(problem), REACHING).steps(every, np.array(curve), 0)
    if solver_installed():
        budgets = [round(share * problem.profile.peak) for share in (0.5, 0.3, 0.2)]
        choices += [choice for budget in budgets for choice in milp_choices(problem, budget)]
    assert any(choice.uncached for choice in choices)
    assert not any(choice.uncached & fixed for choice in choices)
