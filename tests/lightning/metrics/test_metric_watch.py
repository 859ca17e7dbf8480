"""Metrics that a run makes, or puts in the place of others, have the values of one device."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError, Metric

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


class MadeByALaterStep(Model):
    """By a step that nothing looks at: another one from the fourth batch of each epoch on."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.number = batch_idx // 3
        return super().training_step(batch, batch_idx)

    def metric(self) -> MeanSquaredError:
        if self.number not in self.kept:
            self.kept[self.number] = MeanSquaredError(squared=False).to(self.device)
        return self.kept[self.number]


class ClonedEachEpoch(Model):
    """The prototype is a part of the module; of a clone no constructor is called."""

    def __init__(self) -> None:
        super().__init__()
        self.prototype = MeanSquaredError(squared=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 0:
            self.kept["all"] = self.prototype.clone()
        return super().training_step(batch, batch_idx)

    def metric(self) -> MeanSquaredError:
        return self.kept["all"]


class MadeAsAPart(Model):
    def metric(self) -> MeanSquaredError:
        if not hasattr(self, "error"):
            self.error = MeanSquaredError(squared=False).to(self.device)
        return self.error


class Holder:
    """Has one or none."""

    error: MeanSquaredError | None = None


class MadeInAnObject(Model):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()

    def metric(self) -> MeanSquaredError:
        if self.holder.error is None:
            self.holder.error = MeanSquaredError(squared=False).to(self.device)
        return self.holder.error


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


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and targets, which grow from batch to batch."""
    return torch.randn(48, 4), torch.randn(48) * torch.linspace(0.1, 5, 48)


def fitted(kind: type[Model], **options: Any) -> tuple[list[float], float, list[str]]:
    torch.manual_seed(0)
    model = kind()
    values = Values()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(max_epochs=2, callbacks=[values], **options).fit(
            model, DataLoader(TensorDataset(*data()), batch_size=8)
        )
    whole = [str(one.message) for one in caught if "whole, on the first replica" in str(one.message)]
    return values.of_steps, float(model.metric().compute()), whole


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("execution", ["inline", "threads"])
@pytest.mark.parametrize(
    "kind",
    [
        NewGlobalEachEpoch,
        MadeByAStep,
        MadeByALaterStep,
        ClonedEachEpoch,
        MadeAsAPart,
        MadeInAnObject,
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
    if kind is InAListEachBatch:
        assert "other metrics in every batch (kept[1])" in whole[0]
    elif kind in (NewGlobalEachEpoch, InAListEachEpoch):
        assert not whole
    else:
        assert all("gets a batch whole" in text and "The step makes metrics in it" in text for text in whole)
        assert whole


def test_the_class_of_metrics_is_as_it_was_after_a_run() -> None:
    before = dict(vars(Metric))
    fitted(MadeByALaterStep, strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    assert dict(vars(Metric)) == before


class MadeByAnEvaluation(Model):
    def metric(self) -> MeanSquaredError:
        if "all" not in self.kept:
            self.kept["all"] = MeanSquaredError(squared=False).to(self.device)
        return self.kept["all"]

    def test_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx > 2:
            self.metric().update(self.net(batch[0])[:, 0], batch[1])


@pytest.mark.usefixtures("hardware")
def test_metrics_that_come_in_an_evaluation_are_those_of_one_device() -> None:
    loader = DataLoader(TensorDataset(*data()), batch_size=8)
    found: list[float] = []
    device = places(1)[0].partition(":")[0]
    several = {"strategy": dpx.DPXStrategy(execution="inline"), "accelerator": device, "devices": 2}
    for options in ({}, several):
        torch.manual_seed(0)
        model = MadeByAnEvaluation()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "dpx: test_step gets a batch whole")
            make_trainer(**options).test(model, loader, verbose=False)
        found.append(float(model.metric().compute()))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


class ByHand(MadeByALaterStep):
    """Steps its optimizer itself, so that no step can run again."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.kept[0] = MeanSquaredError(squared=False)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.filterwarnings("ignore:The training_step writes Python state that its replicas share")
def test_metrics_that_a_later_step_by_hand_makes_are_told() -> None:
    torch.manual_seed(0)
    with pytest.warns(match=r"training_step has made metrics in a batch \(kept\[1\]\)"):
        make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(execution="inline"), devices=2).fit(
            ByHand(), DataLoader(TensorDataset(*data()), batch_size=8)
        )
