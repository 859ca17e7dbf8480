"""Metric objects are exact, whatever was cut."""

import inspect
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MetricTracker, MinMetric, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassRecall,
)
from torchmetrics.regression import MeanSquaredError
from torchmetrics.wrappers import MinMaxMetric

import lightning_dpx as dpx
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer, run, strategy_in

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
    ours = measured(Measured, loader, strategy=strategy_in(execution), devices=3)
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
    run(model, loader, strategy=strategy_in(execution), devices=3)
    assert model.found == loader.dataset.tensors[0].abs().max()


class Helper:
    """An object of one's own that holds a metric."""

    def __init__(self) -> None:
        self.error = MeanSquaredError(squared=False)


class InAStep(Classifier):
    """What a step may do with a metric beside updating it."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(MulticlassAccuracy(3), maximize=True)
        self.error, self.latest, self.rows = MeanSquaredError(squared=False), MeanMetric(), SumMetric()
        self.best = MinMaxMetric(MeanSquaredError())
        self.helper = Helper()
        self.seen: list[Any] = []

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch[0])
        self.tracker.update(logits, batch[1])
        error = self.error(logits[:, 0], batch[0][:, 0])  # a root, whose mean over slices is another number
        self.log("error", error)
        self.log("rows", self.rows(float(len(logits))), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("best", self.best(logits[:, 0], batch[0][:, 0])["max"])
        kept = batch[0].clone()
        self.latest.reset()
        self.latest.update(kept)
        kept.zero_()  # the metric has been given what was there
        self.log("latest", self.latest.compute())
        self.helper.error.to(self.device).update(logits[:, 1], batch[0][:, 1])
        if self.trainer.is_global_zero:
            self.seen.append([self.helper.error.compute().item(), len(self.tracker), error.item()])
        return nn.functional.cross_entropy(logits, batch[1]) + 0.5 * error

    def on_train_epoch_end(self) -> None:
        self.seen.append([self.tracker.compute().item(), self.error.compute().item(), self.rows.compute().item()])


class AsksMethods(Classifier):
    """Looks at methods of a metric, one of which it has wrapped, besides calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()
        self.error.reset = Mock(side_effect=self.error.reset)
        self.told: set[Any] = set()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch[0])
        self.error.update(logits[:, 0], batch[0][:, 0])
        signatures = [inspect.signature(method) for method in (self.error.update, self.error.forward)]
        names = tuple(tuple(signature.parameters) for signature in signatures)
        self.error.reset.asked = True
        self.error.reset.reset_mock()
        self.told.add((names, self.error.update.__name__, self.error.reset.call_count))
        return nn.functional.cross_entropy(logits, batch[1])


def test_a_step_finds_on_methods_of_metrics_what_is_there(execution: str) -> None:
    torch.manual_seed(0)
    model = AsksMethods()
    trainer = make_trainer(strategy=strategy_in(execution), devices=2, num_sanity_val_steps=0)
    trainer.fit(model, make_loader(16), make_loader(8))
    one = AsksMethods()
    make_trainer(num_sanity_val_steps=0).fit(one, make_loader(16), make_loader(8))
    assert model.told == one.told
    assert len(model.told) == 1
    assert model.error.reset.asked
    with pytest.raises(AttributeError, match="no_such"):
        model.error.update.no_such  # noqa: B018  asked for its error


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_what_a_step_asks_a_metric_is_answered_for_the_whole_batch(execution: str, num_replicas: int) -> None:
    def fitted(**options: Any) -> tuple[InAStep, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = InAStep()
        trainer = make_trainer(max_epochs=2, num_sanity_val_steps=0, **options)
        trainer.fit(model, make_loader(37), make_loader(5))
        logged = {f"logged/{name}": value.cpu() for name, value in trainer.callback_metrics.items()}
        return model, {**{name: value.cpu() for name, value in model.state_dict().items()}, **logged}

    (ours, our_state), (one, state) = (
        fitted(strategy=strategy_in(execution), devices=num_replicas),
        fitted(),
    )
    assert_equal(our_state, state)
    torch.testing.assert_close(ours.seen, one.seen, rtol=1e-5, atol=1e-6)


class SomeRows(Classifier):
    """Calls a metric only where there are rows for it, which some slices lack."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MeanSquaredError(), MeanSquaredError(squared=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch[0]
        chosen = rows[rows[:, 0] > 1.2]
        if len(chosen):
            self.log("first", self.first(chosen[:, 1], chosen[:, 2]), batch_size=1)
        self.log("second", self.second(rows[:, 1], rows[:, 2]))
        return super().training_step(batch, batch_idx)


@pytest.mark.host
def test_slices_that_do_not_call_a_metric_are_not_waited_for(execution: str) -> None:
    ours = run(SomeRows(), strategy=strategy_in(execution), devices=3, max_epochs=1)
    assert_equal(
        {name: ours[name] for name in ours if "logged/f" in name or "logged/s" in name},
        {
            name: value
            for name, value in run(SomeRows(), max_epochs=1).items()
            if "logged/f" in name or "logged/s" in name
        },
    )


class KeepsLogits(Classifier):
    """Gives metrics tensors with a history, which those that keep every row hold on to."""

    def __init__(self) -> None:
        super().__init__()
        self.area = MulticlassAUROC(3, thresholds=None)
        self.areas = [MulticlassAUROC(3, thresholds=None)]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        probabilities = self.net(batch[0]).softmax(-1)
        self.area(probabilities, batch[1])
        self.areas[0].update(probabilities, batch[1])
        return nn.functional.nll_loss(probabilities.log(), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.area.update(self.net(batch[0]).softmax(-1), batch[1])
        self.log("area", self.area)


@pytest.mark.parametrize("execution", ["auto", "inline"])
def test_fit_then_test_then_fit_with_rows_that_a_metric_has_kept(execution: Any) -> None:
    def trainer_of(execution: Any) -> Any:
        if execution is None:
            return make_trainer(max_epochs=1)
        return make_trainer(max_epochs=1, strategy=strategy_in(execution), devices=2)

    def stages(execution: Any = None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model, loader = KeepsLogits(), make_loader(48)
        trainer_of(execution).fit(model, loader, loader)
        trainer = trainer_of(execution)
        (logged,) = trainer.test(model, loader, verbose=False)
        trainer.fit(model, loader, loader)
        kept = torch.cat(model.areas[0].preds).detach().cpu()
        return {**model.state_dict(), "kept": kept, "area": torch.tensor(logged["area"])}

    assert_equal(stages(execution=execution), stages())


def test_an_error_in_a_metric_names_it(execution: str) -> None:
    class Wrong(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(3)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.accuracy.update(self.net(batch[0]), batch[1][:, None, None])
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="shape") as caught:
        run(Wrong(), strategy=strategy_in(execution), devices=2)
    assert "In update of the metric accuracy (MulticlassAccuracy)." in caught.value.__notes__


class Ragged(Classifier):
    """Gives a metric what is as wide as the longest row of a slice, which cannot be joined."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.calls = SumMetric(), 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch[0].clamp(min=0)
        widest = 1 + int((rows * torch.arange(8, device=rows.device) > 3.0).any(0).nonzero().max())
        self.total.update(rows[:, :widest] if widest < 8 else rows)
        return super().training_step(batch, batch_idx)


def fitted_ragged(rows: torch.Tensor) -> Ragged:
    """Trained on three batches of these rows."""
    loader = DataLoader(TensorDataset(rows.repeat(3, 1), torch.zeros(3 * len(rows), dtype=torch.long)), len(rows))
    model = Ragged()
    trainer = make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    with pytest.warns(UserWarning, match=r"training_step gets all of its batches whole.* total\.update\(\) cannot be"):
        trainer.fit(model, loader, loader)
    return model


@pytest.mark.host
def test_arguments_that_cannot_be_joined_give_the_stage_its_batches_whole() -> None:
    rows = torch.zeros(160, 8)
    rows[:80, 4], rows[80:, 2] = 1.0, 2.0  # the first slice is 5 wide, the second 3, which no few rows show
    model = fitted_ragged(rows)
    assert model.total.compute() == 3 * 240
    assert model.total.update_count == 4  # twice in the first step, then once in each


@pytest.mark.host
def test_arguments_that_cannot_be_joined_in_the_rehearsal_give_the_stage_its_batches_whole() -> None:
    """The announcement must not be lost among the warnings of a rehearsal, which nobody sees."""
    rows = torch.zeros(16, 8)
    rows[:3, 4], rows[3:, 2] = 1.0, 2.0  # three rows and two are tried
    model = fitted_ragged(rows)
    assert model.total.compute() == 3 * (3 + 26)
    assert model.total.update_count == 3


class SumsOfTheBatch(Classifier):
    """Metrics that are called give values of the whole batch, of which every slice logs the same."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hits = (batch[1] == 1).float()
        for reduce_fx in ("sum", "max", "mean"):
            self.log(f"hits_{reduce_fx}", self.hits(hits), reduce_fx=reduce_fx, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("execution", ["inline", "threads"])
def test_what_a_metric_gives_of_the_whole_batch_is_logged_once_also_unchecked(execution: str) -> None:
    def logged(**options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        trainer = make_trainer(max_epochs=1, **options)
        trainer.fit(SumsOfTheBatch(), make_loader(), make_loader())
        return {name: value for name, value in trainer.callback_metrics.items() if name.startswith("hits")}

    strategy = dpx.DPXStrategy(execution=execution, verify="off")  # type: ignore[arg-type]
    assert_equal(logged(strategy=strategy, devices=3), logged())


class AddsInPlace(Metric):
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.total: torch.Tensor
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values: torch.Tensor) -> None:
        self.total += values.sum()

    def compute(self) -> torch.Tensor:
        return self.total


class UpdatesInInferenceMode(Classifier):
    """A state that was made in inference mode is written in no other, wherever the user's step has it written."""

    def __init__(self) -> None:
        super().__init__()
        self.added = AddsInPlace()

    def on_train_start(self) -> None:
        with torch.inference_mode():
            self.added.reset()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.inference_mode():
            self.added.update(batch[0])
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def test_a_metric_is_updated_in_the_mode_in_which_the_step_calls_it() -> None:
    totals = []
    for strategy in ("auto", strategy_in("inline")):
        torch.manual_seed(0)
        model = UpdatesInInferenceMode()
        options = {} if strategy == "auto" else {"strategy": strategy, "devices": 2}
        make_trainer(**options).fit(model, make_loader(24), make_loader(24))
        totals.append(model.added.compute().cpu())
    torch.testing.assert_close(*totals)
