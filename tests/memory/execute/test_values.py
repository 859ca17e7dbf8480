"""Values that are made again stay as long as something waits for them, and no longer."""

import pytest
import torch
from torch import Tensor, nn

import lightning_dpx as dpx
from lightning_dpx.bench.allocations import peak_of_passing
from tests.conftest import SIMULATED

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)  # the host's allocator is asked


class Solver(nn.Module):
    """An integrator of fourth order that looks at a result of each of its terms, such as its dtype or its size."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

    def _slope_at(self, y: Tensor) -> Tensor:
        assert y.abs().dtype == torch.float32  # saves ``y`` once more, and goes at once
        slope: Tensor = self.slope(y)
        return slope

    def forward(self, y: Tensor) -> Tensor:
        for _ in range(5):
            one = self._slope_at(y)
            two = self._slope_at(y + one / 15)
            three = self._slope_at(y + (two - one / 3) / 5)
            four = self._slope_at(y + (one - two + three) / 5)
            y = y + (one + 3 * (two + three) + four) / 40
        return y


@pytest.mark.parametrize("share", [0.4, 0.36, 0.33, 0.3])
def test_what_was_saved_in_a_part_of_the_graph_that_is_gone_keeps_nothing(share: float) -> None:
    """It is asked for by nobody any more, so nothing that it would be made from waits for it."""
    torch.manual_seed(0)
    module, x = Solver(), torch.randn(128, 32)
    plan = dpx.search_plan(module, x, budget=share, planner="optimal", progress=False)
    assert plan.budget is not None
    dpx.apply_plan(module, plan)
    for _ in range(3):
        module.zero_grad(set_to_none=True)
        assert peak_of_passing(lambda: module(x).sum().backward()) <= 1.002 * plan.budget
