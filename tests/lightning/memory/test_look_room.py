"""A checked step is looked at again only where a budget has room for the copies that this takes."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.conftest import SIMULATED, make_trainer
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


class FillsTheHost(Layers):
    """Runs out of memory whenever it is rehearsed, after a value that autograd has saved."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = torch.tanh(self.net(batch[0]))
        if len(batch[0]) == 5:
            raise torch.OutOfMemoryError("not enough memory")
        return hidden.square().mean()


def test_a_rehearsal_without_room_on_the_host_leaves_nothing_there(caplog: Any) -> None:
    """To save on the host what is there would only tie it to its own graph."""
    strategy = dpx.DPXStrategy(micro_batches=2)
    trainer = make_trainer(max_epochs=1, strategy=strategy, accelerator="cpu", devices=1)
    trainer.fit(FillsTheHost(), DataLoader(TensorDataset(torch.randn(16, 4, 64)), 8))
    gc.collect()
    assert "the rehearsal failed with OutOfMemoryError" in caplog.text, "the premise"
    shapes = [one.shape for one in gc.get_objects() if type(one) is torch.Tensor]
    assert (5, 4, 64) not in shapes
