"""Every kind of metric has, on replicas, the values that it has on one device."""

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.aggregation import RunningMean, RunningSum
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassCohenKappa,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecisionRecallCurve,
    MulticlassRecall,
)
from torchmetrics.image import PeakSignalNoiseRatio
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef, R2Score, SpearmanCorrCoef
from torchmetrics.retrieval import RetrievalMAP
from torchmetrics.text import BLEUScore, Perplexity, WordErrorRate
from torchmetrics.wrappers import (
    BootStrapper,
    ClasswiseWrapper,
    FeatureShare,
    MinMaxMetric,
    MultioutputWrapper,
    MultitaskWrapper,
    Running,
)

import lightning_dpx as dpx
from tests.conftest import Classifier, make_loader, make_trainer


class Feature(nn.Module):
    """Stands for the network that several metrics share."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.tanh()


class Featured(Metric):
    """Of the kind that FeatureShare wraps; its state has no reduction."""

    feature_network = "network"

    def __init__(self, power: float) -> None:
        super().__init__()
        self.network, self.power = Feature(), power
        self.add_state("updates", torch.zeros(1), dist_reduce_fx=None)

    def update(self, rows: torch.Tensor) -> None:
        self.updates = self.updates * 0.5 + self.network(rows).abs().pow(self.power).mean()

    def compute(self) -> torch.Tensor:
        return self.updates.sum()


class Boxes(Metric):
    """Takes one dict an image, as metrics of detection do, and keeps lists without a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("found", [], dist_reduce_fx=None)
        self.add_state("wanted", [], dist_reduce_fx=None)

    def update(self, found: list[dict[str, torch.Tensor]], wanted: list[dict[str, Any]]) -> None:
        assert len(found) == len(wanted)
        self.found.extend(one["boxes"] for one in found)
        self.wanted.extend(one["boxes"] for one in wanted)

    def compute(self) -> torch.Tensor:
        pairs = enumerate(zip(self.found, self.wanted, strict=True), start=1)
        return torch.stack([place * (one - other).abs().mean() for place, (one, other) in pairs]).sum()


class Resets(MeanMetric):
    """Its reset has a side effect, which must happen as often as on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.num_resets = 0

    def reset(self) -> None:
        super().reset()
        self.num_resets += 1


def _boxes(rows: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": row[: 4 * (1 + int(row[0] > 0))].reshape(-1, 4)} for row in rows]


def _near(rows: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": one["boxes"] * 0.5} for one in _boxes(rows)]


Feed = Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]]


def classes(rows: torch.Tensor, labels: torch.Tensor) -> tuple[Any, ...]:
    return rows[:, :3].softmax(-1), labels


def values(rows: torch.Tensor, labels: torch.Tensor) -> tuple[Any, ...]:
    return rows[:, 0], rows[:, 0] + 0.3 * rows[:, 1]


def one_value(rows: torch.Tensor, labels: torch.Tensor) -> tuple[Any, ...]:
    return (rows[:, 0],)


def pairs(rows: torch.Tensor, labels: torch.Tensor) -> tuple[Any, ...]:
    return rows[:, :2], rows[:, 2:4]


def tasks(rows: torch.Tensor, labels: torch.Tensor) -> tuple[Any, ...]:
    predictions = {"class": rows[:, :3].softmax(-1), "value": rows[:, 0]}
    return predictions, {"class": labels, "value": rows[:, 1]}


def texts(rows: torch.Tensor, labels: torch.Tensor) -> tuple[Any, ...]:
    said = [f"the cat {int(label)} sat" for label in labels]
    return said, [f"a cat {int(label) % 2} sat" for label in labels]


def sentences(rows: torch.Tensor, labels: torch.Tensor) -> tuple[Any, ...]:
    said, wanted = texts(rows, labels)
    return said, [[sentence] for sentence in wanted]


METRICS: dict[str, tuple[Callable[[], Any], Feed]] = {
    "running mean": (lambda: RunningMean(window=2), one_value),
    "running sum": (lambda: RunningSum(window=3), one_value),
    "running error": (lambda: Running(MeanSquaredError(), window=2), values),
    "min and max": (lambda: MinMaxMetric(MulticlassAccuracy(3)), classes),
    "nested wrappers": (lambda: MinMaxMetric(MeanSquaredError(squared=False)), values),
    "bootstrap": (lambda: BootStrapper(MeanSquaredError(), num_bootstraps=3), values),
    "by class": (lambda: ClasswiseWrapper(MulticlassRecall(3, average=None)), classes),
    "outputs": (lambda: MultioutputWrapper(R2Score(), 2), pairs),
    "tasks": (lambda: MultitaskWrapper({"class": MulticlassAccuracy(3), "value": MeanSquaredError()}), tasks),
    "shared features": (lambda: FeatureShare({"one": Featured(1.0), "two": Featured(2.0)}), one_value),
    "composition": (lambda: MulticlassF1Score(3) + 2 * MulticlassRecall(3), classes),
    "groups": (lambda: MetricCollection([MulticlassF1Score(3), MulticlassRecall(3), MulticlassCohenKappa(3)]), classes),
    "states without a reduction": (PearsonCorrCoef, values),
    "ranks": (SpearmanCorrCoef, values),
    "signal to noise": (lambda: PeakSignalNoiseRatio(data_range=3.0), values),
    "root": (lambda: MeanSquaredError(squared=False), values),
    "determination": (R2Score, values),
    "confusion": (lambda: MulticlassConfusionMatrix(3), classes),
    "calibration": (lambda: MulticlassCalibrationError(3), classes),
    "area": (lambda: MulticlassAUROC(3, thresholds=None), classes),
    "binned curve": (lambda: MulticlassPrecisionRecallCurve(3, thresholds=5), classes),
    "detection": (Boxes, lambda rows, labels: (_boxes(rows), _near(rows))),
    "words": (WordErrorRate, texts),
    "sentences": (lambda: BLEUScore(n_gram=2), sentences),
    "tokens": (Perplexity, lambda rows, labels: (rows[:, :6].reshape(-1, 2, 3), torch.stack([labels, labels], 1))),
    "retrieval": (RetrievalMAP, lambda rows, labels: (rows[:, 0].sigmoid(), rows[:, 1] > 0, labels)),
    "mean of a loss": (MeanMetric, lambda rows, labels: (rows[:, 0].mean(),)),
    "weighted by rows": (MeanMetric, lambda rows, labels: (rows[:, 0].mean(), len(rows))),
    "masked rows": (MeanSquaredError, lambda rows, labels: tuple(one[rows[:, 0] > 0] for one in values(rows, labels))),
    "one's own reset": (Resets, one_value),
}  # fmt: skip


class EveryMetric(Classifier):
    """Calls every metric as a function in training and updates it in validation; remembers all values."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict({name: make() for name, (make, _) in METRICS.items()})
        self.seen: dict[str, list[Any]] = {name: [] for name in METRICS}

    def _each(self, batch: Any) -> Any:
        for name, metric in self.metrics.items():
            yield name, metric, METRICS[name][1](*batch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for name, metric, arguments in self._each(batch):
            value = metric(*arguments)
            if self.trainer.is_global_zero:
                self.seen[name].append(on_host(value))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for _, metric, arguments in self._each(batch):
            metric.update(*arguments)

    def on_validation_epoch_end(self) -> None:
        for name, metric in self.metrics.items():
            self.seen[name].append(on_host(metric.compute()))
            metric.reset()


def on_host(value: Any) -> Any:
    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), value)


def fit_every_metric(**options: Any) -> EveryMetric:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of metrics that dislike what they are fed
        torch.manual_seed(0)
        model = EveryMetric()
        loader = make_loader(40)  # the last batch holds 8 of 16 rows
        make_trainer(max_epochs=1, num_sanity_val_steps=0, **options).fit(model, loader, loader)
    return model


@pytest.fixture(scope="module")
def on_one_device() -> EveryMetric:
    return fit_every_metric(accelerator="cpu")


@pytest.fixture(scope="module", params=[("inline", 2), ("threads", 3)], ids=str)
def on_replicas(request: pytest.FixtureRequest) -> EveryMetric:
    execution, num_replicas = request.param
    strategy = dpx.DPXStrategy(execution=execution)
    return fit_every_metric(accelerator="cpu", strategy=strategy, devices=num_replicas)


@pytest.mark.parametrize("name", list(METRICS))
def test_a_metric_of_any_kind_has_the_values_of_one_device(
    name: str, on_one_device: EveryMetric, on_replicas: EveryMetric
) -> None:
    ours, theirs = on_replicas.seen[name], on_one_device.seen[name]
    assert len(ours) == len(theirs) == 4
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_only_the_user_resets_a_metric(on_one_device: EveryMetric, on_replicas: EveryMetric) -> None:
    expected = on_one_device.metrics["one's own reset"].num_resets
    assert on_replicas.metrics["one's own reset"].num_resets == expected


def test_metrics_are_plain_objects_after_a_run(on_replicas: EveryMetric) -> None:
    for metric in on_replicas.metrics.values():
        assert "forward" not in vars(metric)
        assert "reset" not in vars(metric)
        if not isinstance(metric, FeatureShare):  # which cannot be pickled anywhere
            pickle.loads(pickle.dumps(metric))
