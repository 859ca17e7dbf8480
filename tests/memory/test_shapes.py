"""One plan for steps of several shapes."""

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.memory import Profile, forecast_plan, plan_profile, plan_shapes, profile_module


class Pair(nn.Module):
    """Rows (L, 64) and (R, 64), each through a tower of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))) for _ in range(2)
        )

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.left(left).sum() + self.right(right).sum()


@pytest.fixture(scope="module")
def pair() -> Pair:
    torch.manual_seed(0)
    return Pair()


@pytest.fixture(scope="module")
def steps(pair: Pair) -> list[list[Profile]]:
    shapes = [(1024, 64), (64, 1024), (512, 512)]
    return [[profile_module(pair, torch.randn(left, 64), torch.randn(right, 64))] for left, right in shapes]


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_every_shape_is_within_its_budget(share: float, pair: Pair, steps: list[list[Profile]]) -> None:
    budgets = [[int(share * step[0].peak)] for step in steps]
    alone = plan_profile(pair, steps[0][0], budgets[0][0])
    assert forecast_plan(steps[1][0], alone).peak > budgets[1][0], "the plan of one shape does not do for the others"
    shared = plan_shapes(pair, steps, budgets, now=alone)
    found = [forecast_plan(step[0], shared.plans[0]) for step in steps]
    assert all(result.peak <= budget for result, (budget,) in zip(found, budgets, strict=True))
    (plan,), (worst,) = shared.plans, shared.worst
    assert (plan.peak, plan.budget) == (found[worst].peak, budgets[worst][0]), "the figures are those of the worst"
    assert plan.unplanned_peak == steps[worst][0].peak
    plan.check(pair)


def test_a_plan_that_does_for_all_is_kept(pair: Pair, steps: list[list[Profile]]) -> None:
    peak = max(step[0].peak for step in steps)
    small = [profile_module(pair, torch.randn(64, 64), torch.randn(64, 64))]
    budgets = [[peak // 2], [peak // 2]]
    first = plan_shapes(pair, steps[:1], budgets[:1])
    assert plan_shapes(pair, [steps[0], small], budgets, now=first.plans[0]).plans[0].dropped == first.plans[0].dropped


def test_a_larger_shape_alone_decides_where_the_others_fit_anyway(pair: Pair, steps: list[list[Profile]]) -> None:
    large = [profile_module(pair, torch.randn(2048, 64), torch.randn(64, 64))]
    budget = int(large[0].peak * 0.6)
    now = plan_profile(pair, steps[0][0], budget)
    assert not now.dropped
    shared = plan_shapes(pair, [steps[0], large], [[budget], [budget]], now=now)
    assert shared.worst == (1,)
    assert shared.plans[0].dropped == plan_profile(pair, large[0], budget).dropped


def test_no_plan_for_all_is_an_error_that_says_so(pair: Pair, steps: list[list[Profile]]) -> None:
    least = [plan_profile(pair, step[0], None).peak or 0 for step in steps]
    with pytest.raises(dpx.BudgetError, match="the smallest that can is"):
        plan_shapes(pair, steps, [[size // 2] for size in least])
    plans = [plan_profile(pair, step[0], size) for step, size in zip(steps, least, strict=True)]
    exact = [[size] for size in least]
    if all(forecast_plan(steps[0][0], plan).peak > least[0] for plan in plans[1:]):
        with pytest.raises(dpx.BudgetError, match="was not met for all shapes of batches together"):
            plan_shapes(pair, steps, exact)
