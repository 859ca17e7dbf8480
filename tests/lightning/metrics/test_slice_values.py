"""Micro-batches do not wait for the value of a metric where their own, merged, are those of one device."""

import gc
import re
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

import lightning_dpx as dpx
from lightning_dpx.lightning.metrics.slice_values import SliceMetrics
from tests.conftest import assert_equal, make_trainer

WIDTH = 64
ROWS = 64


class Measures(LightningModule):
    """Rows (B, 64) to logits (B, 3), through layers whose activations are most of a step's memory."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(16)]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 3))
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.figures: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch[0])
        self.measure(logits, batch[1])
        return F.cross_entropy(logits, batch[1])

    def measure(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.log("accuracy", self.accuracy(logits, labels), on_step=True, on_epoch=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.figures += [float(value) for _, value in sorted(self.trainer.callback_metrics.items())]

    def on_train_epoch_end(self) -> None:
        self.figures.append(float(self.accuracy.compute()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LogsTheMetric(Measures):
    def measure(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)


class LogsACollection(Measures):
    def __init__(self) -> None:
        super().__init__()
        self.both = MetricCollection({"one": MulticlassAccuracy(3, average="micro"), "two": MulticlassAccuracy(3)})

    def measure(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.both(logits, labels)
        self.log_dict(self.both)

    def on_train_epoch_end(self) -> None: ...


class MetricAsLoss(Measures):
    """The value of a metric has gradients, and they are those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.error(self.net(batch[0]), F.one_hot(batch[1], 3).float())
        return loss

    def on_train_epoch_end(self) -> None:
        self.figures.append(float(self.error.compute()))


class RanksAll(Measures):
    """The area under a curve of all rows is no mean of those of slices."""

    def __init__(self) -> None:
        super().__init__()
        self.area = MulticlassAUROC(3)

    def measure(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.log("area", self.area(logits, labels))

    def on_train_batch_end(
        self, *_: Any
    ) -> None: ...  # two ranks that are exchanged by rounding are no small difference

    def on_train_epoch_end(self) -> None: ...


def fitted(kind: type[Measures], **options: Any) -> tuple[dict[str, torch.Tensor], LightningModule]:
    torch.manual_seed(0)
    model = kind()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(3 * ROWS - 7, WIDTH, generator=generator), torch.arange(3 * ROWS - 7) % 3)
    make_trainer(max_epochs=2, **options).fit(model, DataLoader(data, ROWS))
    seen = {name: value.cpu() for name, value in model.state_dict().items()}
    return {**seen, "figures": torch.tensor(model.figures)}, model


@pytest.mark.parametrize("kind", [Measures, LogsTheMetric, LogsACollection, MetricAsLoss])
@pytest.mark.parametrize(("own", "num_devices"), [({"micro_batches": 4}, 1), ({"micro_batches": 2}, 2)])
def test_values_and_states_are_those_of_one_device(
    hardware: str, kind: type[Measures], own: Any, num_devices: int
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dpx: micro-batches wait")
        strategy = dpx.DPXStrategy(execution="inline", **own)
        ours, _ = fitted(kind, strategy=strategy, devices=num_devices, accelerator=hardware)
    assert_equal(ours, fitted(kind)[0])


def peak_of(sim: Any, kind: type[Measures], number: int) -> int:
    class Counted(kind):  # type: ignore[misc, valid-type]
        def on_train_batch_start(self, *_: Any) -> None:
            sim.reset_peak_memory_stats(0)  # the rehearsal comes later, and takes no more than a step

    gc.collect()  # an earlier fit's trainer is in reference cycles
    before = sim.memory_allocated(0)
    fitted(Counted, strategy=dpx.DPXStrategy(micro_batches=number), accelerator="sim", devices=1)
    return int(sim.max_memory_allocated(0)) - before


def test_no_more_than_one_micro_batch_is_in_memory(sim: Any) -> None:
    whole = peak_of(sim, LogsTheMetric, 1)
    assert peak_of(sim, LogsTheMetric, 8) < 0.9 * whole
    with pytest.warns(UserWarning, match="micro-batches wait for each other"):
        assert peak_of(sim, RanksAll, 8) > 0.9 * whole, "the premise"


def test_a_value_that_needs_all_rows_is_waited_for() -> None:
    with pytest.warns(UserWarning, match="micro-batches wait for each other"):
        ours, _ = fitted(RanksAll, strategy=dpx.DPXStrategy(micro_batches=4))
    assert_equal(ours, fitted(RanksAll)[0])


def too_little_for_all_rows(sim: Any) -> dpx.DPXStrategy:
    """With a budget of 553 KiB beside what tests before have left on the device."""
    gc.collect()
    return dpx.DPXStrategy(memory_budget=sim.memory_allocated(0) + 553 * 2**10, plan_cache=False)


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets")  # of two rows, which are tried as well
def test_a_budget_chooses_no_micro_batches_that_wait(sim: Any, caplog: Any) -> None:
    caplog.set_level("INFO")
    on_device = {"accelerator": "sim", "devices": 1}
    ours, _ = fitted(LogsTheMetric, strategy=too_little_for_all_rows(sim), **on_device)
    assert re.search(r"\d micro-batches of \d+ rows", caplog.text)
    assert_equal(ours, fitted(LogsTheMetric)[0])
    with pytest.raises(dpx.BudgetError, match="cannot be met"):
        fitted(RanksAll, strategy=too_little_for_all_rows(sim), **on_device)
    assert re.search("micro-batches would be .* but they wait for each other in the step", caplog.text)


def test_copies_are_made_once_and_begin_anew() -> None:
    metric = MeanSquaredError()
    metric.update(torch.zeros(2), torch.ones(2))
    metrics = SliceMetrics()
    rows = torch.tensor([3.0, 3.0], requires_grad=True)
    for _ in range(2):
        value = metrics.value(metric, torch.device("cpu"), (rows, torch.zeros(2)), {})
        assert float(value.detach()) == 9.0
        value.backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [6.0, 6.0]
    assert float(metric.compute()) == 1.0, "the user's own is left alone"
