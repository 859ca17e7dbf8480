"""Stages are kept where enough has gathered since the last one."""

from itertools import pairwise

import pytest

from lightning_dpx.memory.plan.planners.threshold import ThresholdPlanner, make_mirror_plan
from lightning_dpx.memory.plan.problem import Problem
from tests.memory.made_up import SIZE, chain


@pytest.mark.parametrize("stretch", [1, 2, 3])
def test_a_stage_is_kept_as_soon_as_more_than_the_threshold_has_gathered(stretch: int) -> None:
    problem = Problem(chain(12))
    plan = make_mirror_plan(problem, stretch * SIZE)
    kept = [unit for unit in problem.droppable if unit not in plan.choice.dropped]
    gaps = {after - before for before, after in pairwise(kept)}
    assert gaps == {stretch + 1}
    assert plan.save_size == len(kept) * SIZE
    assert (stretch + 1) * SIZE <= plan.max_size <= (stretch + 2) * SIZE, "the end is no mark"
    assert ThresholdPlanner(stretch * SIZE).choose(problem, None) == plan.choice


def test_without_a_threshold_stretches_are_about_the_root_of_the_length() -> None:
    problem = Problem(chain(64))
    choice = ThresholdPlanner().choose(problem, None)
    kept = len(problem.droppable) - len(choice.dropped)
    assert 4 <= kept <= 16
    assert problem.forecast(choice).peak < problem.profile.peak / 2
