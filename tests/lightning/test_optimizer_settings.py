"""What a step changes of optimizers and schedulers, it changes once, however many slices run it."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, ReduceLROnPlateau, SequentialLR, StepLR

import lightning_dpx as dpx
from lightning_dpx.lightning.optimizer_settings import SettingsSnapshot, plain_settings
from tests.conftest import assert_equal, make_loader, make_trainer


class Model(LightningModule):
    """Rows (B, 8) to a loss; changes its learning rate in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.change()
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def change(self) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.9
            group["momentum"] += 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class OfTheTrainer(Model):
    def change(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = group["lr"] * 0.9


class AtAMilestone(Model):
    """Nothing that a rehearsal of the first batch would see."""

    def change(self) -> None:
        if self.global_step == 2:
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.1


class BySlice(Model):
    """By what is in the batch, which is not the same for all slices."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Scheduled(Model):
    def change(self) -> None:
        self.lr_schedulers().step()

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return StepLR(optimizer, 2, 0.5)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": self.scheduler(optimizer), "frequency": 1000}]


class InSequence(Scheduled):
    def scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        parts = [ExponentialLR(optimizer, 0.9), StepLR(optimizer, 2, 0.5)]
        return SequentialLR(optimizer, parts, milestones=[3])


class InPlace(Scheduled):
    """A learning rate that is a tensor, which a scheduler writes in place."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=torch.tensor(0.1), momentum=0.5)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "frequency": 1000}]


KINDS = [Model, OfTheTrainer, AtAMilestone, BySlice, Scheduled, InSequence, InPlace]
RUNS = [
    {"devices": 2, "execution": "inline"},
    {"devices": 3, "execution": "inline"},
    {"devices": 2, "execution": "threads"},
    {"devices": 1, "micro_batches": 2},
    {"devices": 2, "execution": "inline", "verify": "off"},
]


def ended(model: Model, **where: Any) -> dict[str, Any]:
    trainer = make_trainer(max_epochs=2, **where)
    trainer.fit(model, make_loader(48, 16))
    seen: dict[str, Any] = {name: value.cpu() for name, value in model.state_dict().items()}
    settings = plain_settings(trainer.optimizers, [config.scheduler for config in trainer.lr_scheduler_configs])
    return seen | {name: torch.tensor(value) for name, value in settings if isinstance(value, float | int)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_settings_end_where_those_of_one_device_do(hardware, kind, run) -> None:
    options = dict(run)
    devices = options.pop("devices")
    if kind is AtAMilestone and options.get("execution") == "threads":
        with pytest.warns(UserWarning, match="has changed settings of an optimizer .* while its slices ran at once"):
            ended(kind(), devices=devices, strategy=dpx.DPXStrategy(**options))
        return
    ours = ended(kind(), devices=devices, strategy=dpx.DPXStrategy(**options))
    assert_equal(ours, ended(kind()))


def optimizer_and_scheduler() -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=0.1)
    return optimizer, SequentialLR(optimizer, [ExponentialLR(optimizer, 0.9), StepLR(optimizer, 2)], milestones=[3])


def test_a_snapshot_notices_and_puts_back() -> None:
    optimizer, scheduler = optimizer_and_scheduler()
    before = SettingsSnapshot([optimizer], [scheduler])
    assert before.is_current
    optimizer.step()
    scheduler.step()
    optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    optimizer.param_groups[0]["mine"] = 1
    assert not before.is_current
    before.restore()
    assert before.is_current
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], "mine" in group) == (0.1, (0.9, 0.999), False)
    assert scheduler.last_epoch == 0
    assert len(group["params"]) == 2


def test_equal_values_are_no_change() -> None:
    optimizer, _ = optimizer_and_scheduler()
    before = SettingsSnapshot([optimizer], [])
    optimizer.param_groups[0]["betas"] = (0.9, 0.9990)
    optimizer.param_groups[0]["lr"] = float("0.1")
    assert before.is_current


def test_a_scheduler_by_a_metric_is_put_back_as_well() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    before = SettingsSnapshot([optimizer], [scheduler])
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] < 0.1
    before.restore()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert scheduler.num_bad_epochs == 0


def test_a_tensor_that_is_written_in_place_is_put_back() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=torch.tensor(0.1))
    before = SettingsSnapshot([optimizer], [])
    optimizer.param_groups[0]["lr"].mul_(0.5)
    after = before.again()
    assert not before.is_current
    before.restore()
    assert before.is_current
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    after.restore()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)
