"""Metric objects are exact, whatever was cut."""

from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score, MulticlassRecall
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef

import lightning_dpx as dpx
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer, run

pytestmark = pytest.mark.usefixtures("hardware")


class Measured(Classifier):
    """Forwarded, updated, logged as object and as collection, on steps and epochs, in every loop."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.area = MulticlassAUROC(3, thresholds=None)  # keeps every row in lists
        self.error = MeanSquaredError()
        self.sums = nn.ModuleDict({"sum": SumMetric(), "mean": MeanMetric(), "max": MaxMetric(), "min": MinMetric()})
        self.several = MetricCollection({"f1": MulticlassF1Score(3), "recall": MulticlassRecall(3)}, prefix="train/")
        self.forwarded: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.area.update(logits.softmax(-1), batch[1])
        self.log("area", self.area, on_step=False, on_epoch=True)
        for name, metric in self.sums.items():
            metric.update(batch[0][:, 0])
            self.log(f"sums/{name}", metric, on_step=False, on_epoch=True)
        self.several.update(logits, batch[1])
        self.log_dict(self.several, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.error(self.net(batch[0])[:, 0], batch[1].float())
        self.log("error", self.error)
        self.log("first", batch[0].mean(), sync_dist=True)


def measured(kind: type[Measured], loader: Any, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = kind()
    trainer = make_trainer(**options)
    trainer.fit(model, loader, [loader, make_loader(40)])
    logged = {f"logged/{name}": value.cpu() for name, value in trainer.callback_metrics.items()}
    return {**model.state_dict(), **logged}


@pytest.mark.parametrize("num_rows", [53, 64])
def test_metrics_of_every_kind_equal_one_device(num_rows, execution) -> None:
    loader = make_loader(num_rows)
    ours = measured(Measured, loader, strategy=dpx.DPXStrategy(execution=execution), devices=3)
    one = measured(Measured, loader)
    assert "logged/accuracy_step" in one
    assert "logged/error/dataloader_idx_1" in one
    assert_equal(ours, one)


class Rows(Metric):
    """A metric of one's own, with a reduction of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.tensor(0.0), dist_reduce_fx=lambda stacked: stacked.amax(0))

    def update(self, rows: torch.Tensor) -> None:
        self.largest = torch.maximum(self.largest, rows.abs().max())

    def compute(self) -> torch.Tensor:
        return self.largest


class Own(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows.update(batch[0])
        return super().predict_step(batch, batch_idx)

    def on_predict_end(self) -> None:
        self.found = self.rows.compute().cpu()


def test_a_metric_of_ones_own_in_predict(execution) -> None:
    model, loader = Own(), make_loader()
    run(model, loader, strategy=dpx.DPXStrategy(execution=execution), devices=3)
    assert model.found == loader.dataset.tensors[0].abs().max()
