"""What runs of a rehearsal hold, and what is left of them."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from tests.conftest import SIMULATED, StepsByHand, make_trainer

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
TABLE = 250_000  # elements
PARAMETERS = 62_500


class WithTable(LightningModule):
    """A large buffer, and large parameters; hardly any activations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(TABLE))
        self.net = nn.Linear(250, PARAMETERS // 250, bias=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class ByHand(StepsByHand, WithTable):
    """The same, optimized by hand."""


class Most(Callback):
    """The most bytes at a time on the first simulated device, between two steps each."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self.bytes = 0

    def _look(self, *_: Any) -> None:
        self.bytes = max(self.bytes, self._sim.max_memory_allocated(0))

    on_train_batch_end = on_validation_batch_end = on_validation_end = on_fit_end = _look


@pytest.mark.parametrize(("kind", "micro_batches"), [(WithTable, 2), (ByHand, 1)])
def test_runs_of_a_check_leave_no_copies_where_memory_is_planned(
    kind: type[WithTable], micro_batches: int, sim: Any
) -> None:
    torch.manual_seed(0)
    before = sim.memory_allocated(0)
    seen = Most(sim)
    module = kind()
    strategy = dpx.DPXStrategy(memory_budget="64MiB", micro_batches=micro_batches, plan_cache=False)
    trainer = make_trainer(max_epochs=2, accelerator="sim", devices=2, strategy=strategy, callbacks=[seen])
    rows = torch.randn(32, 250)
    trainer.fit(module, DataLoader(rows, 8), DataLoader(rows, 8))
    # Of the run the module's, another replica's, and one from before the step; of a check as many; two more are
    # there while it is found out how tables come together, and one is to spare.
    tables = 4 * TABLE * 9
    # With gradients and what the optimizer keeps, of the run and of the check.
    others = 4 * PARAMETERS * 12
    assert seen.bytes - before <= tables + others
