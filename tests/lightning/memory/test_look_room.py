"""A checked step is looked at again only where a budget has room for the copies that this takes."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import SIMULATED
from tests.lightning.memory.test_static import Layers, peaks_of_later_steps

pytestmark = [pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED), pytest.mark.usefixtures("sim")]
MIB = 2**20
_SAID = "is not looked at again in later ones: copies of the module's buffers"


class WithBuffer(Layers):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", torch.ones(rows, 64))
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0] * self.table[0]).square().mean()
        return loss


@pytest.mark.parametrize("rows", [8192, 64])
def test_no_look_exceeds_a_budget(rows: int, sim: Any, caplog: Any) -> None:
    whole = torch.randn(8 * 6, 512, 64)
    held = sim.memory_allocated(0)
    budget = held + 3 * rows * 64 * 4 + 7 * MIB
    peaks = peaks_of_later_steps(WithBuffer(rows), whole, sim, micro_batches=2, memory_budget=budget)
    assert max(peaks) <= budget
    assert (_SAID in caplog.text) == (rows > 64)


class DoesMore(Layers):
    """Logs a second value from its third batch on, so that it is checked anew in the fourth."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx >= 2:
            self.log("twice", 2 * loss.detach())
        return loss


def test_a_step_that_does_more_is_checked_anew_on_no_more_rows_than_a_micro_batch_has(sim: Any, caplog: Any) -> None:
    """At first its slices have two rows each and one three, which together are more than the budget has room for."""
    whole = torch.randn(8 * 6, 1024, 64)
    budget = sim.memory_allocated(0) + 7 * MIB
    peaks = peaks_of_later_steps(DoesMore(), whole, sim, micro_batches=4, memory_budget=budget)
    assert "has done more in the last batch" in caplog.text, "the premise"
    assert max(peaks) <= budget
