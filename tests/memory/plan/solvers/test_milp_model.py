"""The integer program: its bound is below every choice, and its solution near it."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.memory import PLANNERS, plan_profile
from lightning_dpx.memory.plan.problem import Choice, Problem
from lightning_dpx.memory.plan.solvers.bounds import Relaxation, least_seconds
from lightning_dpx.memory.plan.solvers.milp_model import MilpModel, milp_choices
from tests.memory.chains import KINDS, chain_profile
from tests.memory.models import GPT
from tests.memory.plan.solvers.test_highs import without_highs
from tests.memory.random_steps import MOST_UNITS, blocks, budgets_and_least, random_profile

__all__ = ["without_highs"]


@pytest.mark.parametrize("block", blocks(8, usual=2))
def test_the_bound_is_below_all_choices_for_random_steps(block: int) -> None:
    pytest.importorskip("highspy")
    tight = found = possible = 0
    for seed in range(25 * block, 25 * block + 25):
        problem = Problem(random_profile(seed, 5))
        if len(problem.droppable) > MOST_UNITS:
            continue
        for budget, least in budgets_and_least(problem, seed):
            program = MilpModel(problem, budget)
            results = [problem.forecast(choice) for choice in program.solve()]
            assert program.least <= least * (1 + 1e-5), f"seed {seed}, budget {budget}"
            assert program.least >= least_seconds(Relaxation(problem), budget)
            if least < float("inf"):
                possible += 1
                tight += program.least >= 0.99 * least
                found += any(r.peak <= budget and r.seconds <= least * 1.01 + 1e-9 for r in results)
    assert tight >= 0.6 * possible > 0
    assert found >= 0.6 * possible


@pytest.mark.parametrize("block", blocks(3, usual=1))
def test_with_what_passes_while_values_are_made_the_solution_is_that_of_all_choices(block: int) -> None:
    """Also where nothing but what operators take inside of a repetition decides, and where nothing fits."""
    pytest.importorskip("highspy")
    possible = impossible = 0
    for seed in range(12 * block, 12 * block + 12):
        profile, generator = random_profile(seed, 5), random.Random(seed)
        values = (replace(value, beside=generator.choice((0, 0, 4096, 12_000))) for value in profile.values)
        problem = Problem(replace(profile, values=tuple(values)))
        if len(problem.droppable) > MOST_UNITS:
            continue
        for budget, least in budgets_and_least(problem, seed):
            program = MilpModel(problem, budget)
            within = [r.seconds for r in map(problem.forecast, program.solve()) if r.peak <= budget]
            assert program.least <= least * (1 + 1e-5), f"seed {seed}, budget {budget}"
            if least == float("inf"):
                impossible += 1
                assert program.least == least, "it is proved that nothing fits"
            else:
                possible += 1
                assert min(within) <= 1.003 * least + 1e-9, f"seed {seed}, budget {budget}"
                chosen = problem.forecast(PLANNERS["milp"]().choose(problem, budget))
                assert chosen.peak <= budget
                assert chosen.seconds <= 1.003 * least + 1e-9
    assert possible > 0
    assert impossible > 0


@pytest.mark.parametrize(("length", "share"), [(10, 0.7), (10, 0.5), (20, 0.5), (40, 0.5), (60, 0.3)])
@pytest.mark.parametrize("kind", KINDS)
def test_on_chains_the_extra_time_is_within_five_percent_of_the_bound(kind: str, length: int, share: float) -> None:
    pytest.importorskip("highspy")
    problem = Problem(chain_profile(kind, length))
    budget = round(share * problem.profile.peak)
    result = problem.forecast(PLANNERS["auto"]().choose(problem, budget))
    assert result.peak <= budget
    least = max(least_seconds(Relaxation(problem), budget), problem.proved.get(budget, 0.0))
    assert least <= result.seconds <= 1.05 * least


def test_a_stretch_that_comes_back_at_once_is_counted() -> None:
    """The knapsack alone would drop nearly all of a chain and need all of it at the end of forward."""
    pytest.importorskip("highspy")
    problem = Problem(chain_profile("equal", 40))
    budget = round(0.3 * problem.profile.peak)
    first, *_, last = milp_choices(problem, budget)
    assert problem.forecast(first).peak > budget
    assert problem.forecast(last).peak <= budget
    assert problem.forecast(last).seconds == pytest.approx(problem.proved[budget], rel=0.01)
    assert problem.proved[budget] > least_seconds(Relaxation(problem), budget)


def test_the_planner_by_name() -> None:
    pytest.importorskip("highspy")
    problem = Problem(chain_profile("residual", 12))
    planner, budget = PLANNERS["milp"](), round(0.6 * problem.profile.peak)
    choice = planner.choose(problem, budget)
    assert problem.forecast(choice).peak <= budget
    assert problem.proved[budget] > 0
    assert problem.forecast(choice).seconds <= 1.01 * problem.proved[budget]
    assert problem.forecast(planner.choose(problem, None)).peak < budget
    assert planner.choose(problem, 1) != Choice()  # nothing fits: the smallest


@pytest.mark.usefixtures("without_highs")
def test_without_highs_everything_else_plans_and_the_planner_says_what_is_missing() -> None:
    profile = chain_profile("residual", 24)  # whose times are not measured, which would move the bound
    plan = plan_profile(nn.Module(), profile, profile.peak // 2)
    assert plan.least_share is not None
    assert plan.recompute_share is not None
    assert 0 < plan.least_share <= plan.recompute_share <= 1.25 * plan.least_share
    module, x = GPT(), torch.randint(50, (4, 32))
    for budget in (0.5, None):
        with pytest.raises(dpx.UnsupportedError, match="needs HiGHS, which is not installed"):
            dpx.search_plan(module, x, budget=budget, planner="milp")
