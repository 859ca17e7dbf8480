"""Hooks and steps get a batch as on one device: the loader's own object where one replica takes all of it."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

import lightning_dpx as dpx
from tests.conftest import make_loader, make_trainer


class Model(LightningModule):
    """Notes which batch a hook before the step, the step, and a hook after it get."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.before: list[Any] = []
        self.within: list[Any] = []
        self.after: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before.append(batch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.within.append(batch)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after.append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*is not what it is on one device")
@pytest.mark.parametrize(("options", "rows"), [({}, [8, 8]), ({"execution": "inline"}, [4, 4, 4, 4])])
def test_hooks_get_the_whole_batch_and_steps_their_part(options: Any, rows: list[int]) -> None:
    model = Model()
    trainer = make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(**options, verify="off"), devices=2)
    trainer.fit(model, make_loader(16, 8))
    assert [len(batch[0]) for batch in model.within] == rows
    for hook_batches in (model.before, model.after):
        assert [len(batch[0]) for batch in hook_batches] == [8, 8]
    is_in_place = [mine is given for mine, given in zip(model.within, model.before, strict=False)]
    assert is_in_place == [not options] * 2


class LooksBefore(LightningModule):
    """Gives the batch to its net before the step, and keeps its center for the step, which writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.scores: list[float] = []
        self.rows: list[float] = []
        self.center: Any = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.center = batch[0].mean(0)
        self.scores.append(self.net(batch[0]).sum().item())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batch[0].mul_(2)
        return nn.functional.cross_entropy(self.net(batch[0] - self.center), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append(float(batch[0].sum()))

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scores.append(self.net(batch[0]).sum().item())

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_hooks_before_a_step_find_the_batch_on_the_device_of_the_module(sim: Any, num_replicas: int) -> None:
    def fit(**options: Any) -> LooksBefore:
        torch.manual_seed(0)
        model = LooksBefore()
        trainer = make_trainer(max_epochs=1, accelerator="sim", **options)
        trainer.fit(model, make_loader(24, 8), make_loader(8, 8))
        return model

    expected = fit(strategy=dpx.DPXStrategy(), devices=1)
    found = fit(strategy=dpx.DPXStrategy(), devices=num_replicas)
    assert found.center.device.type == "sim"
    assert found.scores == pytest.approx(expected.scores, rel=1e-4)
    assert found.rows == pytest.approx(expected.rows, rel=1e-4)
