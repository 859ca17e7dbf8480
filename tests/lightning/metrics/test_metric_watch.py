"""Metrics that a run makes, or puts in the place of others, have the values of one device."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

import lightning_dpx as dpx
from tests.conftest import make_trainer, places

ROOT = MeanSquaredError(squared=False)  # of a mean: no mean of those of slices


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.kept: Any = {}

    def metric(self) -> MeanSquaredError:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        found = self.net(batch[0])[:, 0]
        self.log("error", self.metric()(found.detach(), batch[1]))
        return ((found - batch[1]) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class NewGlobalEachEpoch(Model):
    def on_train_epoch_start(self) -> None:
        global ROOT
        ROOT = MeanSquaredError(squared=False).to(self.device)

    def metric(self) -> MeanSquaredError:
        return ROOT


class MadeByAStep(Model):
    def metric(self) -> MeanSquaredError:
        if "all" not in self.kept:
            self.kept["all"] = MeanSquaredError(squared=False).to(self.device)
        return self.kept["all"]


class InAListEachEpoch(Model):
    def on_train_epoch_start(self) -> None:
        self.kept = [*self.kept, MeanSquaredError(squared=False).to(self.device)]

    def metric(self) -> MeanSquaredError:
        return self.kept[-1]


class InAListEachBatch(Model):
    def on_train_start(self) -> None:
        self.kept = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kept.append(MeanSquaredError(squared=False).to(self.device))

    def metric(self) -> MeanSquaredError:
        return self.kept[-1]


class Values(Callback):
    def __init__(self) -> None:
        self.of_steps: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.of_steps.append(float(trainer.callback_metrics["error"]))


def fitted(kind: type[Model], **options: Any) -> tuple[list[float], float, list[str]]:
    torch.manual_seed(0)
    model = kind()
    values = Values()
    rows = torch.randn(48, 4)
    targets = torch.randn(48) * torch.linspace(0.1, 5, 48)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(max_epochs=2, callbacks=[values], **options).fit(
            model, DataLoader(TensorDataset(rows, targets), batch_size=8)
        )
    whole = [str(one.message) for one in caught if "whole, on the first replica" in str(one.message)]
    return values.of_steps, float(model.metric().compute()), whole


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("execution", ["inline", "threads"])
@pytest.mark.parametrize(
    "kind",
    [
        NewGlobalEachEpoch,
        # On other devices each replica makes its own in the first batch.
        pytest.param(MadeByAStep, marks=pytest.mark.host),
        InAListEachEpoch,
        InAListEachBatch,
    ],
)
def test_metrics_that_come_in_a_run_are_those_of_one_device(kind: type[Model], execution: Any) -> None:
    expected, in_the_end, _ = fitted(kind)
    device = places(1)[0].partition(":")[0]
    found, state, whole = fitted(kind, strategy=dpx.DPXStrategy(execution=execution), accelerator=device, devices=2)
    assert found == pytest.approx(expected, rel=1e-5)
    assert state == pytest.approx(in_the_end, rel=1e-5)
    assert len(whole) == (kind is InAListEachBatch)
    if whole:
        assert "other metrics in every batch (kept[1])" in whole[0]
