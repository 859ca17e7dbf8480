"""A first step may return no loss: whether the next one does is looked at without a trace."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.lightning.memory.test_profiling import Gates, fitted, peak_of_fit


class SkipsTheFirst(Gates):
    """Has no loss for its first batch, and writes to a parameter in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.zeros(()), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        with torch.no_grad():
            self.steps += 1
        if batch_idx:
            return super().training_step(batch, batch_idx)
        return None


returns_none = pytest.mark.filterwarnings("ignore:.*returned `None`:UserWarning")


@returns_none
def test_a_look_for_a_loss_leaves_parameters_as_they_were(sim: Any) -> None:
    seen = fitted(sim, kind=SkipsTheFirst, memory_budget="1GiB", plan_cache=False, verify="off")
    assert seen.state["steps"] == 3


@returns_none
def test_a_look_for_a_loss_without_room_leads_to_a_profile_of_fewer_rows(sim: Any, caplog: Any) -> None:
    before = sim.memory_allocated(0)
    budget = before + int(0.6 * (peak_of_fit(sim) - before))
    seen = fitted(sim, 3, SkipsTheFirst, memory_budget=budget, plan_cache=False, verify="off")
    assert "profiled on 1/4 of the rows, because all did not fit" in caplog.text
    assert max(seen.found[1:]) <= budget
