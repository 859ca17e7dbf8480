"""The threshold rule, on chains of made-up layers of one MiB each."""

from itertools import pairwise

import pytest

from lightning_dpx.memory.plan.problem import Problem
from lightning_dpx.memory.plan.solvers.mirror import make_mirror_plan
from tests.memory.made_up import SIZE, chain


@pytest.mark.parametrize("num_layers", [2, 3, 5])
def test_a_stage_is_kept_as_soon_as_more_than_the_threshold_has_gathered(num_layers: int) -> None:
    problem = Problem(chain(24))
    plan = make_mirror_plan(problem, num_layers * SIZE)
    kept = sorted(set(problem.droppable) - plan.choice.dropped)
    gaps = {later - earlier for earlier, later in pairwise(kept)}
    assert gaps == {num_layers + 1}
    assert plan.save_size == len(kept) * SIZE
    assert plan.max_size == (num_layers + 1) * SIZE


def test_a_threshold_that_nothing_reaches_keeps_nothing() -> None:
    problem = Problem(chain(24))
    plan = make_mirror_plan(problem, 100 * SIZE)
    assert plan.choice.dropped == set(problem.droppable)
    assert plan.save_size == 0
    assert plan.max_size == 24 * SIZE


def test_what_cannot_be_computed_again_is_never_dropped() -> None:
    problem = Problem(chain(24, refused="it is the user's own"))
    assert 12 not in make_mirror_plan(problem, 100 * SIZE).choice.dropped
