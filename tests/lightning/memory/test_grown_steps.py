"""Steps that hold more than the profiled one, though their batches have the same shapes."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from tests.conftest import SIMULATED, make_trainer
from tests.lightning.memory.test_profiling import Peaks

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
ROWS = 64
WIDTH = 64


class Chosen(LightningModule):
    """Sees the rows that are chosen by what is in a batch, as code does that leaves out paddings."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Sigmoid()) for _ in range(8)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, is_chosen = batch
        loss: torch.Tensor = self.net(rows[is_chosen]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(sim: Any, shares: list[float], budget: int | None = None) -> Peaks:
    """Steps in which so large a share of the rows is chosen."""
    torch.manual_seed(0)
    batches: Any = []
    for share in shares:
        batches.append((torch.randn(ROWS, 8, WIDTH), torch.arange(ROWS) < int(share * ROWS)))
    peaks = Peaks(sim)
    strategy = dpx.DPXStrategy(micro_batches=1, memory_budget=budget, plan_cache=False)
    trainer = make_trainer(max_epochs=1, strategy=strategy, accelerator="sim", devices=1, callbacks=[peaks])
    trainer.fit(Chosen(), DataLoader(batches, batch_size=None))
    return peaks


def test_once_seen_they_are_planned_for_with_room_for_more(sim: Any, caplog: Any) -> None:
    before = sim.memory_allocated(0)
    shares = [0.5, 0.5, 0.56, 0.56, 0.57, 0.5]
    unplanned = fitted(sim, shares)
    budget = before + int(0.6 * (unplanned.found[1] - before))
    with caplog.at_level("INFO"):
        planned = fitted(sim, shares, budget)
    assert max(planned.found[3:]) <= budget
    assert caplog.text.count("steps save more than the profiled one, and may save more still") == 1
    for name, value in unplanned.state.items():
        assert torch.equal(planned.state[name], value)


@pytest.mark.filterwarnings("default")  # that the step took more than it may is told as well
def test_where_no_plan_keeps_them_within_the_budget_that_is_told_once(sim: Any) -> None:
    before = sim.memory_allocated(0)
    shares = [0.25, 0.25, 1.0, 1.0, 1.0]
    budget = before + int(0.6 * (fitted(sim, shares).found[1] - before))
    with pytest.warns(UserWarning, match="no plan keeps them within memory_budget") as told:
        planned = fitted(sim, shares, budget)
    assert len(planned.found) == len(shares)
    assert sum("no plan keeps them within" in str(one.message) for one in told) == 1
