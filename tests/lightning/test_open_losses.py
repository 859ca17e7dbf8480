"""A loss that one slice alone had in the rows that were checked is not taken for a sum unseen."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.lightning.open_losses import sum_of_several_losses
from tests.conftest import assert_equal, make_trainer

MARKED = [(0,), (1,), (0, 5), (6,), (0, 1, 2, 6)]  # by batch of 8 rows


class Marked(LightningModule):
    """A sum, or a mean, over rows that are marked."""

    def __init__(self, *, averages: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self._averages = averages

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, marks = batch
        total: torch.Tensor = (self.net(rows).square().squeeze(1) * marks).sum()
        return total / marks.sum().clamp(min=1) if self._averages else total

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(*, averages: bool, **options: Any) -> dict[str, torch.Tensor]:
    marks = torch.zeros(8 * len(MARKED))
    for number, places in enumerate(MARKED):
        marks[[8 * number + place for place in places]] = 1.0
    rows = torch.randn(len(marks), 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(rows, marks), batch_size=8)
    model = Marked(averages=averages)
    make_trainer(max_epochs=1, **options).fit(model, loader)
    return model.state_dict()


def test_a_mean_over_marked_rows_is_that_of_one_device() -> None:
    strategy = dpx.DPXStrategy(execution="inline")
    with pytest.warns(UserWarning, match=r"is not the sum of the slices'|Several of its slices have a loss") as told:
        found = trained(averages=True, strategy=strategy, devices=2)
    assert any("all of its batches whole" in str(one.message) for one in told)
    # The batches before had their rows in one slice.
    assert_equal(found, trained(averages=True))


def test_a_sum_over_marked_rows_runs_again_once() -> None:
    strategy = dpx.DPXStrategy(execution="inline")
    with pytest.warns(UserWarning, match="Several of its slices have a loss") as told:
        found = trained(averages=False, strategy=strategy, devices=2)
    assert_equal(found, trained(averages=False))
    assert not any("all of its batches whole" in str(one.message) for one in told)


def test_a_loss_that_is_lost_beside_another_one_decides_nothing() -> None:
    assert sum_of_several_losses({0: {"loss": torch.tensor(2.0)}, 1: {"loss": torch.tensor(1.0)}}) == 3.0
    assert sum_of_several_losses({0: {"the result": 2.0}, 1: {"the result": 1e-3}}) is None
    assert sum_of_several_losses({0: {"the result": 2.0}, 1: {}}) is None
