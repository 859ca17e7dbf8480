"""Before its first step a stage is rehearsed: what it decides, what it names, and that it leaves no trace."""

import copy
import gc
import os
import random
import re
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import lightning_dpx as dpx
from tests.conftest import assert_equal, make_loader, make_trainer, places

REPLICAS = pytest.mark.parametrize("num_replicas", [2, 3])


class Model(LightningModule):
    """Rows (B, 8) to logits (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass
class Seen:
    """What a user sees of a run."""

    values: dict[str, torch.Tensor]
    warned: str
    told: str
    model: Any
    predictions: Any = None


@pytest.fixture
def fitted(caplog: pytest.LogCaptureFixture) -> Callable[..., Seen]:
    """Fits (and predicts with) a model of a class: on one device without ``num_replicas``."""

    def fit(
        kind: type[LightningModule],
        num_replicas: int = 0,
        *,
        execution: str = "inline",
        predict: bool = False,
        batch_size: int = 16,
        trainer: dict[str, Any] | None = None,
        loader: Any = None,
        **options: Any,
    ) -> Seen:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        model = kind()
        if num_replicas:
            strategy = dpx.DPXStrategy(execution=execution, **options)
            where = {"devices": num_replicas, "strategy": strategy}
        else:
            where = {}
        loader = loader or make_loader(3 * batch_size, batch_size)
        chosen = make_trainer(max_epochs=1, **where, **(trainer or {}))
        evaluates = (
            hasattr(model, "validation_step") and type(model).validation_step is not LightningModule.validation_step
        )
        caplog.clear()
        with caplog.at_level("INFO"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not predict:
                chosen.fit(model, loader, loader if evaluates else None)
            predictions = chosen.predict(model, loader) if predict else None
        values = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        values |= {f"logged/{name}": torch.as_tensor(value).cpu() for name, value in chosen.callback_metrics.items()}
        ours = [str(one.message) for one in caught if "dpx" in str(one.message)]
        told = [record.message for record in caplog.records if record.message.startswith("dpx: ")]
        return Seen(values, "\n".join(ours), "\n".join(told), model, predictions)

    return fit


class OverPositives(Model):
    """The first five rows are positive, all of them: a mean over positives is one over rows there."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return losses.sum() / (batch[1] > 0).sum().clamp(min=1)


def test_a_mean_over_something_else_is_seen_where_the_first_few_rows_are_alike(hardware, fitted) -> None:
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    classes = torch.tensor([1, 2, 1, 2, 1, 0, 0, 2, 0, 0, 1, 0, 0, 0, 1, 0])
    loader = DataLoader(TensorDataset(rows, classes), 16)
    seen = fitted(OverPositives, 2, verify="first", loader=loader)
    assert "the loss is" in seen.warned
    assert_equal(seen.values, fitted(OverPositives, loader=loader).values)


# ---- what steps add up, and what they keep to be looked at ----


class AddsUp(Model):
    """A matrix of confusions, or a count of hits, without torchmetrics."""

    anew = False
    dropout = 0.0

    def on_train_epoch_start(self) -> None:
        self.hits = torch.zeros(3, device=self.device)
        self.last_loss = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = F.dropout(self.net(batch[0]), self.dropout)
        loss = F.cross_entropy(logits, batch[1])
        found = torch.bincount(batch[1], minlength=3)
        if self.anew:
            self.hits = self.hits + found
        else:
            self.hits += found
        self.last_loss = loss.detach()
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("hits", self.hits.max())


class AddsUpAnew(AddsUp):
    anew = True


class AddsUpBesideDropout(AddsUp):
    dropout = 0.5


@REPLICAS
@pytest.mark.parametrize("kind", [AddsUp, AddsUpAnew, AddsUpBesideDropout])
def test_what_steps_add_up_is_that_of_the_whole_batch(hardware, fitted, kind, num_replicas) -> None:
    seen = fitted(kind, num_replicas)
    assert "2 kept values" in seen.told
    assert not seen.warned
    expected = fitted(kind).values
    if kind.dropout:  # drawn by another generator on another device
        assert torch.equal(seen.values["logged/hits"], expected["logged/hits"])
    else:
        assert_equal(seen.values, expected)


class AddsUpMuch(AddsUp):
    """More than is put together, and kept to be looked at beside it."""

    def on_train_epoch_start(self) -> None:
        self.hits = torch.zeros(2**16 + 1, device=self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.hits[: len(batch[0])] += batch[0][:, 0].detach().abs()
        self.hits[0] += batch[0].abs().max()
        self.spread = batch[0].std()
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None: ...


def test_what_steps_add_up_in_large_tensors_is_named_and_what_they_only_keep_is_not(hardware, fitted) -> None:
    seen = fitted(AddsUpMuch, 2, verify="first")
    assert "what steps add up in self.hits is the first slice's part only" in seen.warned
    assert "self.spread" not in seen.warned
    assert_equal(seen.values, fitted(AddsUpMuch).values)


class KeepsByHand(Model):
    """Keeps what it has made for a picture, as GANs do; its optimizer has moments, which a second step goes on with."""

    automatic_optimization = False

    def on_train_epoch_start(self) -> None:
        self.total = torch.zeros(2**16 + 1, device=self.device)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.shown = self.net(batch[0]).detach()
        self.spread = self.shown.std()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class HasAFlagByHand(KeepsByHand):
    """Flags and quantized weights may be parameters, so that they are saved and copied with the others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_initialized = torch.nn.Parameter(torch.tensor(True), requires_grad=False)


@REPLICAS
def test_a_step_by_hand_with_parameters_of_whole_numbers_is_checked(hardware, fitted, num_replicas) -> None:
    seen = fitted(HasAFlagByHand, num_replicas)
    assert "dpx: checked on" in seen.told
    assert "not checked" not in seen.told
    assert_equal(seen.values, fitted(HasAFlagByHand).values)


class AddsUpByHand(KeepsByHand):
    """More than is put together, and kept to be looked at beside it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.total[:3] += torch.bincount(batch[1], minlength=3)
        super().training_step(batch, batch_idx)


@REPLICAS
def test_what_a_step_by_hand_keeps_to_be_looked_at_leaves_batches_cut(hardware, fitted, num_replicas) -> None:
    """Its second step in slices began without the optimizer's moments, and the difference was laid at what it keeps."""
    seen = fitted(KeepsByHand, num_replicas)
    assert "on the first replica" not in seen.warned
    assert "add up" not in seen.warned
    assert "What the step keeps in" in seen.told
    assert_equal(seen.values, fitted(KeepsByHand).values)


def test_what_steps_by_hand_add_up_is_told_from_what_they_make_anew_by_other_weights(hardware, fitted) -> None:
    seen = fitted(AddsUpByHand, 2)
    assert "what steps add up in self.total is the first slice's part only" in seen.warned


class SpreadOfRows(Model):
    """A slice of one row has no spread: what it logs of it is no number."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self.net(batch[0])
        self.log("spread", outputs.std(0).mean())
        return F.cross_entropy(outputs, batch[1])


def test_what_is_no_number_in_slices_alone_is_named(fitted) -> None:
    """No text was found for how far it was off, so that the rehearsal failed and slices trained unseen."""
    options = {"batch_size": 6, "trainer": {"max_steps": 1}}
    seen = fitted(SpreadOfRows, 3, **options)
    assert "training_step on 6 rows in slices of 3, 2 and 1 is not what it is on one device: logged" in seen.warned
    first = fitted(SpreadOfRows, 3, verify="first", **options)
    assert_equal(first.values, fitted(SpreadOfRows, **options).values)


class ReturnsTheTwoLargest(Model):
    """A slice of one row has no two of them; those of the run have two rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        kept = losses.detach()
        return {"loss": losses.mean(), "largest": kept.topk(2).values, "most": kept.max(), "sum": kept.sum()}


def test_what_a_rehearsal_has_found_stands_where_a_look_at_other_rows_fails(fitted) -> None:
    """The look had slices of one row, whose error ended the rehearsal of slices that have two."""
    seen = fitted(ReturnsTheTwoLargest, 4, batch_size=8, verify="first", trainer={"max_steps": 2})
    assert "output 'largest'" in seen.warned
    assert "not checked" not in seen.told
    assert_equal(seen.values, fitted(ReturnsTheTwoLargest, batch_size=8, trainer={"max_steps": 2}).values)


class DrawsBetweenSteps(Model):
    """Two steps with noise of their own, as a generator and a discriminator have."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            noise = torch.randn(len(batch[0]), 8).type_as(batch[0])
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(batch[0] + noise), batch[1]))
            optimizer.step()


class DrawsAfterAMeeting(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch[0] + torch.randn_like(batch[0])
        center = self.all_gather(rows.mean(0)).mean()
        return F.cross_entropy(self.net(rows + torch.randn_like(rows)), batch[1]) + 0 * center


@REPLICAS
@pytest.mark.parametrize("kind", [DrawsBetweenSteps, DrawsAfterAMeeting])
def test_what_replicas_draw_after_they_have_met_is_that_of_one_device(hardware, fitted, kind, num_replicas) -> None:
    """Others had drawn in between, so gradients differed in the rehearsal alone."""
    seen = fitted(kind, num_replicas)
    assert not seen.warned
    assert "dpx: checked on" in seen.told


class Forgets(Model):
    """What it counts fades."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count = 0.5 * self.count + len(batch[0])
        return super().training_step(batch, batch_idx)


def test_what_comes_together_in_a_first_step_alone_is_named(fitted) -> None:
    assert "self.count comes together from slices in a first step only" in fitted(Forgets, 2).warned


# ---- the line ----


class Logs(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss)
        self.log("rows", float(len(logits)), reduce_fx="sum")
        self.log("steps", 1.0, reduce_fx="sum")
        return {"loss": loss, "logits": logits.detach()}


@REPLICAS
def test_one_line_says_what_is_as_on_one_device(hardware, fitted, num_replicas) -> None:
    seen = fitted(Logs, num_replicas)
    rows = 7  # of 16: 4 and 3, or 3, 2 and 2; no more on one device than the slices of the batch may have
    line = rf"dpx: checked on {rows} rows: loss, 4 gradients, 3 logged values, 1 output as on one device \(largest"
    assert len(re.findall(line, seen.told)) == 1
    assert not seen.warned
    assert_equal(seen.values, fitted(Logs).values)


def test_merged_replicas_and_one_device_have_nothing_to_check(fitted) -> None:
    assert "checked" not in fitted(Logs, 2, execution="auto").told
    assert "checked" not in fitted(Logs, 1).told


def test_off_rehearses_nothing(fitted) -> None:
    assert "checked" not in fitted(Logs, 2, verify="off").told


# ---- the loss ----


class Sum(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum") / 16
        self.log("loss", loss)
        return loss


class SumByHand(Model):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum") / 16)
        optimizer.step()


@REPLICAS
@pytest.mark.parametrize("kind", [Model, Sum])
def test_whether_a_loss_is_a_mean_or_a_sum_is_seen(hardware, execution, fitted, kind, num_replicas) -> None:
    seen = fitted(kind, num_replicas, execution=execution)
    assert not seen.warned
    assert_equal(seen.values, fitted(kind).values)


class SumOfFewerDigits(Model):
    """As transformers do: the loss is computed in 32 bits, whatever the parameters have."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0].double()).float()
        return F.cross_entropy(logits, batch[1], reduction="sum") / 16


@REPLICAS
def test_a_loss_of_fewer_digits_than_the_parameters_is_compared_by_its_own(hardware, fitted, num_replicas) -> None:
    seen = fitted(SumOfFewerDigits, num_replicas)
    assert not seen.warned
    assert_equal(seen.values, fitted(SumOfFewerDigits).values)


class TurnsByHand(SumByHand):
    """Optimizers with a state, one of which no other hook knows of."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in (*self.optimizers(), self.own):
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum") / 16)
            optimizer.step()

    def on_fit_start(self) -> None:
        self.own = torch.optim.SGD(self.net[2].parameters(), lr=0.05, momentum=0.5)

    def configure_optimizers(self) -> Any:
        parts = self.net[0].parameters(), self.net[2].parameters()
        return [torch.optim.Adam(part, lr=0.01, eps=1e-3) for part in parts]


@REPLICAS
@pytest.mark.parametrize("reducer", ["auto", "colocate"])
@pytest.mark.parametrize(("kind", "num_gradients"), [(SumByHand, 4), (TurnsByHand, 8)])  # four are left by other turns
def test_a_step_by_hand_is_checked_by_the_new_weights(
    hardware, execution, fitted, kind, num_gradients, reducer, num_replicas
) -> None:
    seen = fitted(kind, num_replicas, execution=execution, reducer=reducer)
    assert f"{num_gradients} gradients, 4 new weights" in seen.told
    assert not seen.warned
    assert_equal(seen.values, fitted(kind).values)


class RootByHand(SumByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]).sqrt())
        optimizer.step()


@pytest.mark.parametrize("reducer", ["auto", "colocate"])
def test_a_step_by_hand_that_differs_is_named(hardware, fitted, reducer) -> None:
    seen = fitted(RootByHand, 2, reducer=reducer)
    assert "training_step on 7 rows in slices of 4 and 3 is not what it is on one device" in seen.warned
    assert "net.0.weight" in seen.warned


@REPLICAS
def test_a_logged_sum_adds_up_where_the_loss_is_said_to(fitted, num_replicas) -> None:
    assert_equal(fitted(Sum, num_replicas, loss_reduction="sum").values, fitted(Sum).values)


class Masked(Model):
    """Rows whose first feature is large have no label."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows, labels = batch
        loss = F.cross_entropy(self.net(rows), torch.where(rows[:, 0] > 0.3, -100, labels))
        self.log("loss", loss)
        return loss


class Weighted(Masked):
    def loss_weight(self, batch: Any) -> Any:
        return (batch[0][:, 0] <= 0.3).sum()


@REPLICAS
def test_a_mean_over_something_else_than_rows_is_named_with_both_numbers(fitted, num_replicas) -> None:
    seen = fitted(Masked, num_replicas)
    assert re.search(
        r"the loss is [\d.]+ on one device, \S+ as the mean and \S+ as the sum of the slices'", seen.warned
    )
    for way in ("training_step_end", "all_gather", "loss_weight(batch)"):
        assert way in seen.warned
    assert seen.warned.count("is not what it is on one device") == 1


@REPLICAS
@pytest.mark.parametrize("kind", [Weighted])
def test_with_the_weights_of_slices_token_means_are_exact(fitted, kind, num_replicas) -> None:
    seen = fitted(kind, num_replicas)
    assert not seen.warned
    assert_equal(seen.values, fitted(kind).values)


def test_a_slice_that_weighs_nothing_contributes_nothing(fitted) -> None:
    class FirstHalf(Weighted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rows, labels = batch
            return F.cross_entropy(self.net(rows), torch.where(rows[:, 7] > 90, -100, labels))

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            rows, labels = batch[0].clone(), batch[1]
            rows[8:, 7] = 100.0  # the mean over no rows is NaN
            return rows, labels

        def loss_weight(self, batch: Any) -> Any:
            return float((batch[0][:, 7] < 90).sum())

    seen = fitted(FirstHalf, 2)
    assert not seen.warned
    assert_equal(seen.values, fitted(FirstHalf).values)


class Contrastive(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.net(batch[0])
        return F.cross_entropy(features @ features.T, torch.arange(len(features), device=features.device))


class ClampedGradient(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))


@REPLICAS
@pytest.mark.parametrize(
    ("kind", "named"),
    [(Contrastive, "the loss is"), (ClampedGradient, "gradients differ, relatively: net.0.weight")],
)
def test_what_slices_cannot_do_is_named_and_falls_back_where_asked(fitted, kind, named, num_replicas) -> None:
    assert named in fitted(kind, num_replicas).warned
    first = fitted(kind, num_replicas, verify="first")
    assert "on the first replica" in first.warned
    assert named in first.warned
    assert_equal(first.values, fitted(kind).values)
    with pytest.raises(dpx.ParityError, match=named):
        fitted(kind, num_replicas, verify="raise")


class DropsAndKeeps(Model):
    """Dropout, and what came of it kept in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = F.dropout(self.net(batch[0]), 0.5)
        loss = F.cross_entropy(features, batch[1])
        self.kept.append(features.detach().std())  # of the slices' no mean is that of all rows
        return loss


class DropsWithoutRows(DropsAndKeeps):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * len(batch[0]) ** 0.5


@REPLICAS
def test_what_draws_random_numbers_is_compared_where_slices_draw_the_same(hardware, fitted, num_replicas) -> None:
    """One attribute that differs is no reason to leave all the rest out."""
    seen = fitted(DropsAndKeeps, num_replicas)
    assert "kept value 'self.kept.0'" in seen.warned
    assert "the loss is" not in seen.warned
    assert "the loss is" in fitted(DropsWithoutRows, num_replicas).warned


class MaxNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 8, max_norm=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0] + self.embedding(batch[1])), batch[1])


class WritesThroughData(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[0].bias.data.add_(0.01)
        return super().training_step(batch, batch_idx)


class NeedsAllRows(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) < 16:
            raise ValueError("too few rows")
        return super().training_step(batch, batch_idx)


@REPLICAS
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (MaxNorm, "writes parameter embedding.weight"),
        (WritesThroughData, "writes parameter net.0.bias"),
        (NeedsAllRows, "on a slice it raises ValueError: too few rows"),
    ],
)
def test_steps_that_slices_cannot_run_get_whole_batches(hardware, fitted, kind, named, num_replicas) -> None:
    seen = fitted(kind, num_replicas)
    assert named in seen.warned
    assert "gets all of its batches whole" in seen.warned
    assert_equal(seen.values, fitted(kind).values)


class NeedsSomeRows(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) < 4:
            raise ValueError("too few rows")
        return super().training_step(batch, batch_idx)


class HardestRows(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none").topk(6).values.mean()


def test_a_step_that_needs_more_rows_than_a_rehearsal_has_is_checked_on_all_of_them(fitted) -> None:
    seen = fitted(NeedsSomeRows, 2)
    assert "checked on 16 rows" in seen.told
    assert not seen.warned
    assert_equal(seen.values, fitted(NeedsSomeRows).values)
    assert (
        "training_step on 16 rows in slices of 8 and 8 is not what it is on one device" in fitted(HardestRows, 2).warned
    )


class FollowsOldGradients(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        old = self.net[0].weight.grad
        loss = super().training_step(batch, batch_idx)
        return loss if old is None else loss + (old.detach() * self.net[0].weight).sum()


class LogsOldGradients(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        old = self.net[0].weight.grad
        self.log("before", 0.0 if old is None else old.norm())
        return super().training_step(batch, batch_idx)


@REPLICAS
@pytest.mark.parametrize("kind", [FollowsOldGradients, LogsOldGradients])
def test_a_step_that_reads_gradients_of_the_one_before_gets_whole_batches(hardware, fitted, kind, num_replicas) -> None:
    seen = fitted(kind, num_replicas)
    assert "reads gradients that the step before has left in .grad" in seen.warned
    assert_equal(seen.values, fitted(kind).values)


@pytest.mark.parametrize("kind", [FollowsOldGradients, LogsOldGradients])
def test_micro_batches_of_one_replica_all_find_the_gradients_of_the_step_before(fitted, kind) -> None:
    seen = fitted(kind, 1, micro_batches=3)
    assert "checked on" in seen.told
    assert not seen.warned
    assert_equal(seen.values, fitted(kind).values)


class MakesAHead(Model):
    """A last layer that the first step makes, which knows its width then."""

    def __init__(self) -> None:
        super().__init__()
        self.head: nn.Linear | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.net(batch[0])
        if self.head is None:
            self.head = nn.Linear(features.shape[1], 3).to(features)
        return F.cross_entropy(self.head(features), batch[1])


@REPLICAS
def test_a_step_that_makes_parameters_gets_that_batch_whole_and_the_others_in_slices(
    hardware, fitted, num_replicas
) -> None:
    seen = fitted(MakesAHead, num_replicas)
    assert "training_step gets a batch whole" in seen.warned
    assert "The step makes parameters in it: head.weight, head.bias. Make them before fit" in seen.warned
    assert "checked on" in seen.told, "the second batch is"
    assert_equal(seen.values, fitted(MakesAHead).values)


# ---- outputs ----


class Record:
    """Of a class that nobody knows, with equality."""

    def __init__(self, value: float) -> None:
        self.value = round(value, 4)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and abs(self.value - other.value) < 1e-3

    __hash__ = None  # type: ignore[assignment]


class Result:
    """A plain Python object, as libraries return."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.parts = [rows.mean(), {"n": len(rows)}, None]


OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows": lambda x: x,
    "rows along dim 1": lambda x: x.T,
    "a constant matrix of 12 by 12": lambda x: torch.arange(144.0).view(12, 12),
    "16 features of 16 rows": lambda x: x.repeat(1, 6)[:, :16],
    "a matrix over features": lambda x: torch.ones(3, 3) * len(x),
    "two views of every row": lambda x: torch.cat([x, x + 1]),
    "a count": lambda x: len(x),
    "a count in a tensor": lambda x: (x[:, 0] > 0).sum(),
    "a mean": lambda x: x.mean(),
    "a sum": lambda x: x.sum(),
    "the largest": lambda x: x.max(),
    "a constant": lambda x: 7,
    "a word": lambda x: "word",
    "an array": lambda x: x.numpy(),
    "a number of NumPy": lambda x: np.float32(x.mean()),
    "an array of words": lambda x: np.array([f"{value:.2f}" for value in x[:, 0]]),
    "a list with an item per row": lambda x: [{"score": value, "box": [1, 2]} for value in x[:, 0]],
    "a list of objects": lambda x: [Record(float(value)) for value in x[:, 0]],
    "names of classes": lambda x: ["a", "b", "c"],
    "a dict by sample": lambda x: {f"{float(value):.3f}": float(value) for value in x[:, 0]},
    "an object": lambda x: Result(x),
    "nothing beside rows": lambda x: {"rows": x, "nothing": None},
    "nested": lambda x: ({"logits": x, "stats": [x.mean(), len(x)]}, None, x.argmax(1)),
    "the first row": lambda x: x[0],
    "whether all are finite": lambda x: bool(x.isfinite().all()),
    "a root mean square": lambda x: x.square().mean().sqrt(),
}


def predictor(output: Callable[[torch.Tensor], Any]) -> type[Model]:
    class Predicts(Model):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return output(self.net(batch[0]))

    return Predicts


def assert_same(ours: Any, theirs: Any) -> None:
    """Also in its types."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-6)
    elif isinstance(theirs, np.ndarray | np.floating) and theirs.dtype.kind == "f":
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    elif isinstance(theirs, np.ndarray):
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            assert_same(ours[key], value)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, two in zip(ours, theirs, strict=True):
            assert_same(one, two)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    elif isinstance(theirs, Result):
        assert_same(vars(ours), vars(theirs))
    else:
        assert ours == theirs


@REPLICAS
@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_outputs_are_those_of_one_device(fitted, output, num_replicas) -> None:
    kind = predictor(output)
    seen = fitted(kind, num_replicas, predict=True)
    assert not seen.warned
    assert_same(seen.predictions, fitted(kind, predict=True).predictions)


def test_outputs_of_devices_are_joined_on_the_first(fitted, sim) -> None:
    kind = predictor(lambda x: {"rows": x, "mean": x.mean(), "n": len(x)})
    strategy = dpx.DPXStrategy()
    torch.manual_seed(0)
    trainer = make_trainer(accelerator="sim", devices=2, strategy=strategy)
    assert_same(trainer.predict(kind(), make_loader(48)), fitted(kind, predict=True).predictions)


def test_an_output_that_nothing_reproduces_is_named(fitted) -> None:
    seen = fitted(predictor(lambda x: {"median": x.median(), "rows": x}), 2, predict=True)
    assert "output 'median':" in seen.warned
    assert "predict_step_end(outputs)" in seen.warned


def test_what_cannot_be_merged_at_all_comes_from_one_device(fitted) -> None:
    kind = predictor(lambda x: f"{float(x.sum()):.2f}")
    seen = fitted(kind, 2, predict=True)
    assert "gets all of its batches whole" in seen.warned
    assert seen.predictions == fitted(kind, predict=True).predictions


def test_a_count_that_is_zero_on_the_first_rows_is_still_seen_to_add_up(fitted) -> None:
    class Counts(Model):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            count = (batch[0][:, 1] > 0.9).sum()
            return {"as float": count.float(), "as int": count}

    large = next(iter(make_loader(48)))[0][:, 1] > 0.9
    assert not bool(large[:5].any()), "the premise"
    assert bool(large.any()), "the premise"
    seen = fitted(Counts, 2, predict=True)
    assert not seen.warned
    assert_same(seen.predictions, fitted(Counts, predict=True).predictions)


@REPLICAS
def test_a_count_that_was_zero_for_long_is_looked_at_again(fitted, num_replicas) -> None:
    class Late(Model):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            rows = len(batch[0]) if batch_idx else 0
            return torch.tensor(float(rows)), float(batch_idx)

    seen = fitted(Late, num_replicas, predict=True)
    theirs = fitted(Late, predict=True).predictions
    assert_same(seen.predictions[2], theirs[2])
    assert "of predict_step had been zero until the last batch" in seen.warned, "the second one is not"
    assert [constant for _, constant in seen.predictions] == [constant for _, constant in theirs]


class LearnsToCount(Model):
    """From its third step on it logs, and returns, what it did not when it was rehearsed; the second is looked at."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx < 2:
            return loss
        self.log("rows", float(len(batch[0])))
        return {"loss": loss, "rows": torch.tensor(float(len(batch[0])))}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx > 2:
            assert float(outputs["rows"]) == len(batch[0])


@pytest.mark.usefixtures("hardware")
@REPLICAS
def test_a_step_that_does_more_than_when_it_was_checked_is_checked_again(fitted, num_replicas) -> None:
    seen = fitted(LearnsToCount, num_replicas, loader=make_loader(80, 16))
    assert_equal(seen.values, fitted(LearnsToCount, loader=make_loader(80, 16)).values)
    assert "training_step has done more in the last batch than when it was checked (result, rows)" in seen.told
    assert "1 logged value" in seen.told


def test_steps_that_log_another_name_each_time_are_not_checked_for_ever(fitted) -> None:
    rows_of_calls: list[int] = []

    class Names(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rows_of_calls.append(len(batch[0]))
            self.log(f"loss {batch_idx}", 1.0)
            return super().training_step(batch, batch_idx)

    fitted(Names, 2, loader=make_loader(16 * 16, 16))
    of_the_last_steps = rows_of_calls[-10:]
    assert of_the_last_steps == [8] * 10, "two slices each, and nothing else"


# ---- logged values ----


class LogsMuch(Model):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        self.log("mean", logits.mean())
        self.log("count", float(len(logits)), reduce_fx="sum")
        self.log("int count", len(logits), reduce_fx="sum")
        self.log("constant", 1.0, reduce_fx="sum")
        self.log("constant mean", 3)
        self.log("count as mean", float(len(logits)))
        self.log("largest", logits.max(), reduce_fx="max")
        self.log("count as max", float(len(logits)), reduce_fx="max")
        self.log("rmse", logits.square().mean().sqrt())
        self.log("epoch", float(self.current_epoch))
        self.log("by hand", logits.mean(), batch_size=4)
        self.log_dict({"a": logits.std(dim=1).mean(), "b": np.float64(2.5)})
        return np.float32(logits.mean().item())


@REPLICAS
def test_logged_values_are_those_of_one_device(hardware, execution, fitted, num_replicas) -> None:
    seen = fitted(LogsMuch, num_replicas, execution=execution)
    assert not seen.warned
    assert "'rmse' is put together as the quadratic mean" in seen.told
    assert_equal(seen.values, fitted(LogsMuch).values)


class RootOfErrors(LightningModule):
    """Logs the root of the mean squared error of rows (B, 1), which are the errors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("rmse", (self.scale * batch[0]).square().mean().sqrt())


def test_means_are_told_apart_by_the_last_rows_of_a_sorted_batch_of_which_there_is_one() -> None:
    """The first 48 rows are so nearly alike that every kind of mean fits them; the last 16 are not."""
    nearly_alike = 1 + 2e-3 * torch.randn(48, 1, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(torch.cat([nearly_alike, torch.arange(16.0)[:, None]])), 64)
    (alone,) = make_trainer().validate(RootOfErrors(), loader, verbose=False)
    trainer = make_trainer(strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    (ours,) = trainer.validate(RootOfErrors(), loader, verbose=False)
    assert ours["rmse"] == pytest.approx(alone["rmse"], rel=1e-5)


class RunsOutOnLastRows(RootOfErrors):
    """A few of the last rows take more memory than there is, as longer texts do."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if len(batch[0]) < 20 and bool((batch[0] > 1.5).any()):
            raise torch.OutOfMemoryError("no room for these rows")
        super().validation_step(batch, batch_idx)


def test_what_the_first_rows_have_shown_stands_where_there_is_no_room_for_others(caplog: Any) -> None:
    """Running out of memory on the rows that are looked at beside them ended the check without a result."""
    nearly_alike = 1 + 2e-3 * torch.randn(48, 1, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(torch.cat([nearly_alike, 2 * torch.ones(16, 1)])), 64)
    trainer = make_trainer(strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    with caplog.at_level("INFO"):
        trainer.validate(RunsOutOnLastRows(), loader, verbose=False)
    assert "dpx: checked on" in caplog.text
    assert "was not checked" not in caplog.text


@pytest.mark.parametrize(
    "errors",
    [
        torch.cat([torch.ones(32), torch.full((32,), 3.5)]),  # alike within each slice
        torch.cat([torch.ones(37), torch.full((1,), 15.0), torch.ones(26)]),
        torch.cat([torch.ones(501), torch.full((1,), 99.0), torch.ones(498)]),
        torch.cat([torch.zeros(60), torch.full((4,), 3.5)]),
    ],
    ids=["halves", "an outlier", "an outlier among many", "zeros"],
)
def test_means_are_told_apart_by_all_rows_of_an_evaluation_where_a_few_are_the_same(errors: torch.Tensor) -> None:
    loader = DataLoader(TensorDataset(errors[:, None]), len(errors))
    (alone,) = make_trainer().validate(RootOfErrors(), loader, verbose=False)
    trainer = make_trainer(strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    (ours,) = trainer.validate(RootOfErrors(), loader, verbose=False)
    assert ours["rmse"] == pytest.approx(alone["rmse"], rel=1e-5)


class CountsCodes(Model):
    """As many codes as rows among the first five, and no more of them later: slices count some of them twice."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("codes", float(len(batch[1].unique())))


def test_a_count_of_what_differs_is_told_from_a_sum_by_all_rows_of_an_evaluation() -> None:
    labels = torch.tensor([0, 1, 2, 3, 4]).repeat(2)
    loader = DataLoader(TensorDataset(torch.zeros(10, 8), labels), 10)
    trainer = make_trainer(strategy=dpx.DPXStrategy(execution="inline", verify="first"), devices=2)
    with pytest.warns(UserWarning, match="its slices differ from one device: logged value 'codes'"):
        (ours,) = trainer.validate(CountsCodes(), loader, verbose=False)
    assert ours == {"codes": 5.0}


def test_a_logged_value_that_nothing_reproduces_is_named(fitted) -> None:
    class Median(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("median", self.net(batch[0]).median())
            self.log("spread", self.net(batch[0]).std())

    seen = fitted(Median, 2)
    assert "logged value 'median':" in seen.warned
    assert "logged value 'spread':" in seen.warned


def test_a_key_without_a_value_is_named(fitted) -> None:
    class LogsNone(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("the_key", None)
            return super().training_step(batch, batch_idx)

    with pytest.raises(Exception, match="the_key"):
        fitted(LogsNone, 2)


# ---- random numbers ----


class Noisy(Model):
    """Dropout as a module and a function, noise, and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = F.dropout(self.dropout(batch[0]), 0.2)
        rows = rows + 0.1 * torch.randn_like(rows)
        rows = rows * torch.empty(len(rows), 1, device=rows.device).bernoulli_(0.9)
        rows = torch.distributions.Normal(rows, torch.ones_like(rows)).rsample()
        return F.cross_entropy(self.net(rows), batch[1])


class Mixup(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        share = np.random.beta(1, 1)
        other = torch.randperm(len(batch[0]))
        rows = share * batch[0] + (1 - share) * batch[0][other]
        return share * F.cross_entropy(self.net(rows), batch[1]) + (1 - share) * random.random()


@REPLICAS
def test_dropout_and_noise_are_compared(hardware, fitted, num_replicas) -> None:
    seen = fitted(Noisy, num_replicas)
    assert "loss, 4 gradients as on one device" in seen.told
    assert not seen.warned


def test_a_sum_under_dropout_is_a_sum(fitted) -> None:
    class NoisySum(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self.net(F.dropout(batch[0], 0.3)), batch[1], reduction="sum")

    torch.manual_seed(3)
    by_rule = fitted(NoisySum, 2)
    assert_equal(by_rule.values, fitted(NoisySum, 2, loss_reduction="sum").values, bitwise=True)


def test_what_depends_on_other_draws_is_said_not_to_be_compared(fitted) -> None:
    seen = fitted(Mixup, 2)
    assert "not compared: loss (it depends on random draws), 4 gradients (they depend on random draws)" in seen.told
    assert not seen.warned


def test_batch_norm_is_named_and_the_rest_compared(fitted) -> None:
    class Normed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.net.insert(1, nn.BatchNorm1d(16))

    seen = fitted(Normed, 2)
    assert "loss, 6 gradients as on one device" in seen.told
    assert "Batch norm (net.1) normalizes by its slice" in seen.told
    assert "sync_batchnorm" in seen.told
    synchronized = fitted(Normed, 2, trainer={"sync_batchnorm": True})
    assert "Batch norm" not in synchronized.told
    assert_equal(synchronized.values, fitted(Normed).values)
    first = fitted(Normed, 2, verify="first")
    assert "net.1 would normalize by slice" in first.warned
    assert_equal(first.values, fitted(Normed).values)


# ---- state ----


class Keeps(Model):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[torch.Tensor] = []
        self.names: list[str] = []
        self.steps = 0
        self.register_buffer("largest", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows.append(batch[0].detach())
        self.names.extend(f"{float(value):.3f}" for value in batch[0][:, 0])
        self.steps += 1
        return super().training_step(batch, batch_idx)


@REPLICAS
def test_state_that_comes_together_is_counted(fitted, num_replicas) -> None:
    seen = fitted(Keeps, num_replicas)
    assert "3 changed attributes" in seen.told
    assert not seen.warned
    theirs = fitted(Keeps).model
    assert [len(rows) for rows in seen.model.rows] == [16, 16, 16]
    torch.testing.assert_close(torch.cat(seen.model.rows), torch.cat(theirs.rows))
    assert seen.model.names == theirs.names
    assert seen.model.steps == theirs.steps == 3


def test_state_that_is_that_of_a_slice_is_named(fitted) -> None:
    class Counts(Model):
        def __init__(self) -> None:
            super().__init__()
            self.num_pairs = 0
            self.losses: list[torch.Tensor] = []
            self.kept: dict[str, Any] = {"loss": None}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.num_pairs = len(batch[0]) ** 2
            self.losses.append(loss.detach())
            self.kept["loss"] = loss.detach()
            self.spread = batch[0].std()
            return loss

    warned = fitted(Counts, 2).warned
    assert "What the step keeps in self.kept, self.spread is of one slice" in warned, "by design, so it is only told"
    assert "self.num_pairs is 49 on one device, 16 in slices" in warned
    assert "self.losses" not in warned, "its items come together"


# ---- a sandbox ----


class Watched(Model):
    """Changes everything that a step can change."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(4)
        self.python = random.Random(5)
        self.register_buffer("seen", torch.zeros(()))
        self.metric = MeanMetric()
        self.kept: dict[str, dict[int, float]] = {"draws": {}}
        self.dropout = nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        batch[0].mul_(1.5)  # the batch is the step's own
        draws = self.kept["draws"]
        rows = len(batch[0])  # a number for each: slices would draw alike what is drawn once for a batch
        draws[len(draws)] = float(self.numpy.random(rows).sum())
        draws[len(draws)] = sum(self.python.random() for _ in range(rows))
        draws[len(draws)] = sum(random.random() for _ in range(rows))
        draws[len(draws)] = float(np.random.rand(rows).sum())
        draws[len(draws)] = float(torch.rand(rows, generator=self.generator).sum())
        loss = F.cross_entropy(self.net(self.dropout(batch[0])), batch[1])
        self.metric.update(loss.detach())
        self.log("metric", self.metric)
        self.log("loss", loss)
        self.trainer.should_stop = False
        torch.set_default_dtype(torch.float32)
        return loss


@REPLICAS
def test_a_run_with_a_rehearsal_is_bit_for_bit_the_run_without(hardware, execution, fitted, num_replicas) -> None:
    with_it = fitted(Watched, num_replicas, execution=execution, loss_reduction="mean")
    without = fitted(Watched, num_replicas, execution=execution, loss_reduction="mean", verify="off")
    assert "self.kept.draws is +5 items on one device" in with_it.warned, "the premise: it was rehearsed"
    assert not without.warned
    assert_equal(with_it.values, without.values, bitwise=True)
    assert with_it.model.kept == without.model.kept


def test_a_rehearsal_puts_back_all_generators_and_writes_nothing(fitted) -> None:
    states: list[Any] = []

    class Remembers(Watched):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            states.append([torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate(), batch[0].clone()])

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            if self.trainer.lightning_module is self and self.real and len(states) == 1:
                states.append(
                    [torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate(), batch[0].clone()]
                )
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        @property
        def real(self) -> bool:
            return self.trainer.train_dataloader is not None and self is model_of[0]

    model_of: list[Any] = []

    class Finds(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            model_of.append(pl_module)

    fitted(Remembers, 2, trainer={"callbacks": [Finds()], "max_steps": 1})
    before, after = states[:2]
    assert torch.equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])
    assert before[2] == after[2]
    assert torch.equal(before[3][:8], after[3][:8])


def test_callbacks_loggers_and_loaders_notice_nothing(fitted, tmp_path: Path) -> None:
    told: list[str] = []

    class Listens(Callback):
        def on_before_optimizer_step(self, *_: Any) -> None:
            told.append("step")

        def on_before_zero_grad(self, *_: Any) -> None:
            told.append("zero")

    class Rows(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            told.append("row")
            return super().__getitem__(index)

    class ByHand(SumByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.logger.log_metrics({"inside": 1.0})
            super().training_step(batch, batch_idx)

    from lightning.pytorch.loggers import CSVLogger

    counts = []
    for verify in ("warn", "off"):
        told.clear()
        torch.manual_seed(0)
        logger = CSVLogger(tmp_path, name=verify)
        strategy = dpx.DPXStrategy(execution="inline", verify=verify)
        trainer = make_trainer(
            devices=2, strategy=strategy, callbacks=[Listens()], logger=logger, max_epochs=1, log_every_n_steps=1
        )
        named = pytest.warns(UserWarning, match="calls its logger itself") if verify == "warn" else nullcontext()
        with named:
            trainer.fit(ByHand(), DataLoader(Rows(torch.randn(32, 8), torch.randint(3, (32,))), 16))
        counts.append((told.count("step"), told.count("row"), trainer.global_step))
    assert counts[0] == counts[1]
    ours, theirs = ((tmp_path / name / "version_0" / "metrics.csv").read_text() for name in ("warn", "off"))
    assert ours == theirs


def test_what_cannot_be_copied_is_named_and_trains_all_the_same(fitted) -> None:
    seen = fitted(HoldsFile, 2)
    assert "training_step was not checked against one device" in seen.told
    assert "'stream'" in seen.told
    assert not seen.warned
    assert_equal(seen.values, fitted(HoldsFile).values)


class HoldsFile(Model):
    """What no shadow can copy."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = open(__file__)  # noqa: SIM115
        weakref.finalize(self, self.stream.close)  # no teardown follows a fit that fails


class HoldsFileInEvaluation(Model):
    """Training ends its file, which validation opens."""

    def on_validation_start(self) -> None:
        self.stream = open(__file__)  # noqa: SIM115
        weakref.finalize(self, self.stream.close)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("rows", float(len(batch[0])), reduce_fx="sum")


def test_who_asks_for_parity_hears_that_it_cannot_be_checked(fitted) -> None:
    """It was a line of information, and the run went on as if it had been checked."""
    refusal = "_step was not checked against one device: .*'stream'.*verify='warn'"
    with pytest.raises(dpx.ParityError, match=f"training{refusal}"):
        fitted(HoldsFile, 2, verify="raise")
    with pytest.raises(dpx.ParityError, match=f"validation{refusal}"):
        fitted(HoldsFileInEvaluation, 2, verify="raise")


def test_a_step_that_fails_in_its_check_raises_its_own_error(fitted) -> None:
    class Fails(HoldsFile):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        fitted(Fails, 2, verify="raise")


def test_an_error_in_a_rehearsal_is_none_of_the_training(fitted) -> None:
    class Once(Model):
        """Fails whenever a shadow runs it."""

        def __init__(self) -> None:
            super().__init__()
            self.me = id(self)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if isinstance(self.logger, type(None)) is False:
                raise RuntimeError("only in a rehearsal")
            return super().training_step(batch, batch_idx)

    class Picky(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) in (3, 5, 16):
                raise RuntimeError("not so many rows")
            return super().training_step(batch, batch_idx)

    seen = fitted(Picky, 2)
    assert "training_step was not checked against one device" in seen.told
    assert "RuntimeError: not so many rows" in seen.told


def test_an_error_of_the_step_is_raised_by_the_step(fitted) -> None:
    class Fails(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own") as caught:
        fitted(Fails, 2)
    assert "In replica 0 on cpu, during training_step." in caught.value.__notes__


def test_warnings_of_a_step_come_once(fitted) -> None:
    class Warns(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            warnings.warn(f"dpx test: {batch_idx}", stacklevel=1)
            return super().training_step(batch, batch_idx)

    assert fitted(Warns, 2).warned.count("dpx test: 0") == 2, "once for each replica"


def test_every_stage_and_loader_is_rehearsed_once(caplog) -> None:
    class All(LogsMuch):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            rows = batch[0] if dataloader_idx == 0 else batch[0].T
            self.log("mean", rows.mean())

    model = All()
    trainer = make_trainer(devices=2, strategy=dpx.DPXStrategy(execution="inline"), max_epochs=2)
    with caplog.at_level("INFO"):
        trainer.fit(model, make_loader(), make_loader())
        trainer.test(model, [make_loader(), make_loader()], verbose=False)
    stages = re.findall(r"(\w+_step)\)", caplog.text)
    assert sorted(stages) == ["test_step", "training_step", "validation_step"]


@pytest.mark.parametrize("place", ["sim", "cpu"])
def test_a_shadow_leaves_nothing_on_a_device(sim, place) -> None:
    strategy = dpx.DPXStrategy(execution="inline" if place == "cpu" else "auto", verify="warn")
    model = Model()
    trainer = make_trainer(accelerator=place, devices=2, strategy=strategy, max_epochs=1)
    trainer.fit(model, make_loader())
    assert [place] * 2 == [name.partition(":")[0] for name in (places(2) if place == "cpu" else ["sim:0", "sim:1"])]
    assert all(not name.startswith("log") for name in vars(model) if name == "log")


@pytest.mark.parametrize(
    ("options", "message"), [({"verify": "loud"}, "verify='loud'"), ({"loss_reduction": "max"}, "loss_reduction='max'")]
)
def test_unknown_choices_are_refused(options, message) -> None:
    with pytest.raises(dpx.ConfigurationError, match=message):
        dpx.DPXStrategy(**options)


# ---- what is rehearsed is cut as the batch is ----


class Columns(Model):
    """Its batch has as many columns as a rehearsal has rows."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        rows, labels = batch
        return {"columns": list(rows.split([2, 2, 2, 1, 1], 1)), "labels": labels}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(torch.cat(batch["columns"], 1)), batch["labels"])


def test_a_batch_of_as_many_columns_as_few_rows_is_cut_like_any_other(fitted) -> None:
    seen = fitted(Columns, 2)
    assert "checked on 7 rows" in seen.told
    assert not seen.warned
    assert_equal(seen.values, fitted(Columns).values)


class TwoLoaders(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows, labels), (others, more) = batch
        return F.cross_entropy(self.net(torch.cat([rows, others])), torch.cat([labels, more]))


@REPLICAS
def test_batches_of_two_loaders_are_rehearsed(fitted, num_replicas) -> None:
    loaders = (make_loader(32), make_loader(32))
    seen = fitted(TwoLoaders, num_replicas, loader=loaders)
    assert "checked" in seen.told
    assert not seen.warned
    assert_equal(seen.values, fitted(TwoLoaders, loader=loaders).values)


# ---- the batch size that a value is logged with ----


class LogsSizes(Model):
    """Logs one loss with batch sizes of several kinds; the last batch is short."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        sizes = {"rows": len(batch[0]), "tokens": 3 * len(batch[0]), "constant": 5}
        for name, size in sizes.items():
            self.log(name, loss, batch_size=size, on_step=False, on_epoch=True)
        return loss


@REPLICAS
def test_a_constant_batch_size_stays_what_it_is(hardware, fitted, num_replicas) -> None:
    loader = make_loader(20)  # 16 rows, then 4 that only the first replica gets
    seen = fitted(LogsSizes, num_replicas, loader=loader)
    assert not seen.warned
    assert_equal(seen.values, fitted(LogsSizes, loader=loader).values)


class LogsLargest(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("odd", loss, batch_size=len(batch[0]) ** 2, on_step=False, on_epoch=True)
        return loss


def test_a_batch_size_that_slices_cannot_give_is_named(fitted) -> None:
    assert "logged value 'odd': batch_size=49 on one device, 16 and 9 from slices" in fitted(LogsLargest, 2).warned


# ---- what a step keeps for the next one ----


class Stateful(Model):
    """A recurrent cell whose state goes on from batch to batch, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.state: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        state = None if self.state is None or len(self.state) != len(rows) else self.state
        hidden = self.cell(rows, state)
        self.state = hidden.detach()
        return F.cross_entropy(self.net(hidden), labels)


class Remembers(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.features = self.net(batch[0])
        return F.cross_entropy(self.features, batch[1])


class StatefulPrediction(Stateful):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.state = self.cell(batch[0], self.state)
        return self.net(self.state)


@REPLICAS
def test_what_a_step_keeps_of_a_slice_for_the_next_one_lets_batches_whole(
    hardware, fitted, execution, num_replicas
) -> None:
    seen = fitted(Stateful, num_replicas, execution=execution)
    assert "A second step uses what the first one kept in self.state, which is of one slice: the loss is" in seen.warned
    assert "gets all of its batches whole" in seen.warned
    assert_equal(seen.values, fitted(Stateful).values)


class Cell(nn.Module):
    """Begins anew for another number of rows, and goes on with the state that it has for the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.memory: dict[str, Any] = {"v": 0.0}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        state = self.memory["v"]
        if not isinstance(state, torch.Tensor) or state.shape != rows.shape:
            state = torch.zeros_like(rows)
        self.memory["v"] = torch.tanh(self.layer(rows) + state)
        return self.memory["v"]


class ResetBetweenSteps(Model):
    """A second step of one device would walk back through the first one's graph, without the hook in between."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(self.cell(batch[0])), batch[1])


class ResetsAll(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for part in module.modules():
            for name, value in list(vars(part).items()):
                if type(value) is dict and name[0] != "_":
                    setattr(part, name, dict.fromkeys(value, 0.0))


@pytest.mark.parametrize("options", [{"num_replicas": 2}, {"num_replicas": 1, "micro_batches": 2}])
def test_what_slices_of_one_size_pass_on_to_each_other_needs_whole_batches(fitted, options) -> None:
    seen = fitted(ResetBetweenSteps, trainer={"callbacks": [ResetsAll()]}, **options)
    assert "A slice uses what the one before it has kept in self.cell.memory, of the same batch" in seen.warned
    assert_equal(seen.values, fitted(ResetBetweenSteps, trainer={"callbacks": [ResetsAll()]}).values)


class Anchors(Model):
    """Keeps some rows of its first batch for good, chosen at random: a second step leaves them as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("anchors", torch.zeros(2, 3))
        self.register_buffer("is_found", torch.tensor(False))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.net(batch[0])
        if not self.is_found:
            self.anchors.copy_(rows.detach()[torch.randperm(len(rows))[:2]])
            self.is_found.fill_(True)
        return (rows.unsqueeze(1) - self.anchors).square().mean()


class ReplacesRareCodes(Model):
    """Takes a random row for a code that has become rare, and logs a spread of rows, which no slices have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 3))
        self.register_buffer("uses", torch.ones(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.net(batch[0])
        nearest = torch.cdist(rows, self.codes).argmin(1)
        self.uses.mul_(0.5).add_(F.one_hot(nearest, 4).sum(0), alpha=0.5)
        self.log("spread", rows.std())
        loss = F.mse_loss(rows, self.codes[nearest])
        rare = self.uses < 2
        chosen = torch.randperm(len(rows)).repeat(4)[: int(rare.sum())]
        self.codes[rare] = rows.detach()[chosen]
        return loss


@REPLICAS
@pytest.mark.parametrize("kind", [Anchors, ReplacesRareCodes])
def test_what_a_step_keeps_of_random_draws_and_uses_again_needs_whole_batches(
    kind: type[Model], num_replicas: int, hardware, fitted
) -> None:
    """Nothing of it could be compared, so slices trained on codes that were averages of different ones."""
    seen = fitted(kind, num_replicas)
    assert "A second step uses what the first one kept in self." in seen.warned
    assert_equal(seen.values, fitted(kind).values)


class KeepsItsOrder(Model):
    """Keeps what it drew, and does not look at it again."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.order = torch.randperm(len(batch[0]))
        rows = self.net(batch[0])
        return F.mse_loss(rows, rows[self.order].detach() + 1)


def test_what_a_step_keeps_of_random_draws_and_does_not_use_leaves_all_devices_at_work(fitted) -> None:
    seen = fitted(KeepsItsOrder, 2)
    assert not seen.warned
    assert "it depends on random draws" in seen.told


def weights_of_two_runs(expected: Any, **where: Any) -> dict[str, torch.Tensor]:
    """Two fits of one trainer, with the warnings that each of them gives."""
    torch.manual_seed(0)
    model = Stateful()
    trainer = make_trainer(max_epochs=1, **where)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        with expected():
            trainer.fit(model, make_loader(16, 8))
    return model.state_dict()


def test_every_run_of_a_trainer_finds_out_for_itself() -> None:
    """A second run, with new replicas, must not take the slices that the first one has left for granted."""
    strategy = dpx.DPXStrategy(execution="inline", verify="first")
    announced = partial(pytest.warns, UserWarning, match="gets all of its batches whole")
    assert_equal(weights_of_two_runs(announced, devices=2, strategy=strategy), weights_of_two_runs(nullcontext))


def test_predictions_that_fail_on_what_a_slice_of_the_last_batch_left_stay_whole(fitted) -> None:
    seen = fitted(StatefulPrediction, 2, predict=True)
    assert "A second step runs on the whole batch, but on a slice it raises" in seen.warned
    assert_equal(seen.values, fitted(StatefulPrediction, predict=True).values)


class KeepsInPlaces(Model):
    """Counts steps and rows among other things, in a dict and in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Any] = {"name": "x"}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.counts["steps"] = self.counts.get("steps", 0) + 1
        self.sizes = ("rows", len(batch[0]))
        return super().training_step(batch, batch_idx)


def test_the_item_that_differs_is_named(fitted) -> None:
    warned = fitted(KeepsInPlaces, 2).warned
    assert "self.counts.steps is 1 on one device, 2 in slices" in warned
    assert "self.sizes.1 is 7 on one device, 4 in slices" in warned


def test_what_a_step_keeps_and_never_uses_is_only_told(fitted) -> None:
    seen = fitted(Remembers, 2)
    assert "What the step keeps in self.features is of one slice" in seen.told
    assert not seen.warned


class Cache:
    """Keeps the keys of all rows, and says itself how it is copied: nothing tells what else it is."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys

    def __reduce__(self) -> Any:
        return Cache, (self.keys,)


class ReturnsCache(Model):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"logits": self.net(batch[0]), "cache": Cache(batch[0])}


def test_an_output_that_cannot_be_put_together_gets_its_own_advice(fitted) -> None:
    seen = fitted(ReturnsCache, 2, predict=True)
    assert "What its slices return cannot be put together. The replicas returned different values" in seen.warned
    assert "let it return tensors, numbers, or containers and plain objects of them" in seen.warned
    assert [len(one["cache"].keys) for one in seen.predictions] == [16, 16, 16]


# ---- what a step changes outside the module ----

COUNTED = {"steps": 0}
TOTAL = 0


class CountsOutside(Model):
    """Counts its steps wherever Python lets it."""

    calls = 0
    history: list[int] = []  # noqa: RUF012  a class attribute is what this is about

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        global TOTAL
        TOTAL += 1
        COUNTED["steps"] += 1
        type(self).calls += 1
        self.history.append(batch_idx)
        self.trainer.callbacks[0].seen += 1
        return super().training_step(batch, batch_idx)


class Counter(Callback):
    def __init__(self) -> None:
        self.seen = 0


def counts(counter: Counter) -> list[int]:
    return [TOTAL, COUNTED["steps"], CountsOutside.calls, len(CountsOutside.history), counter.seen]


@pytest.fixture
def nothing_counted() -> None:
    global TOTAL
    TOTAL = COUNTED["steps"] = CountsOutside.calls = 0
    CountsOutside.history.clear()


@REPLICAS
def test_a_rehearsal_puts_back_what_a_step_changes_outside_the_module(
    hardware, fitted, nothing_counted, num_replicas
) -> None:
    counter = Counter()
    fitted(CountsOutside, num_replicas, trainer={"callbacks": [counter]})
    # Three batches. Each replica's step counts for itself, but what it appends to a list of its class comes together.
    each = 3 * num_replicas
    assert counts(counter) == [each, each, each, 3, each]


def test_what_slices_change_outside_the_module_is_named(fitted, nothing_counted) -> None:
    warned = fitted(CountsOutside, 2, trainer={"callbacks": [Counter()]}).warned
    names = re.findall(r"([\w.\[\]]+?)(?:\.steps)? is 1 on one device, 2 in slices", warned)
    possible = {"TOTAL", "COUNTED", "CountsOutside.calls", "trainer.callbacks[0].seen"}
    assert len(names) == 3
    assert set(names) < possible
    assert "1 more attribute" in warned


def test_a_stage_that_counts_outside_the_module_falls_back(fitted, nothing_counted) -> None:
    counter = Counter()
    fitted(CountsOutside, 2, verify="first", trainer={"callbacks": [counter]})
    assert counts(counter) == [3] * 5


def average_in_a_closure() -> Callable[[torch.Tensor], torch.Tensor]:
    held = {"mean": torch.zeros(3)}

    def centered(logits: torch.Tensor) -> torch.Tensor:
        held["mean"] = held["mean"] * 0.9 + logits.detach().mean(0) * 0.1
        return logits - held["mean"]

    return centered


class KeepsInAClosure(Model):
    centered = staticmethod(average_in_a_closure())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.centered(self.net(batch[0])), batch[1])


def test_what_changes_without_any_draw_is_no_matter_of_draws(fitted) -> None:
    """It is kept where a rehearsal cannot put it back, and differs in slices: that is named."""
    warned = fitted(KeepsInAClosure, 2).warned
    assert "is not what it is on one device: the loss is" in warned


# ---- buffers that a step writes ----


class Averages(Model):
    """A moving average of batch means, as of a teacher's center, that the loss uses; and a count of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("rows_seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits - self.center.clone(), batch[1])
        with torch.no_grad():
            self.center.mul_(0.9).add_(logits.mean(0), alpha=0.1)
        self.rows_seen += len(logits)
        self.steps += 1
        return loss


class AveragesAnew(Averages):
    """Puts a new tensor in the place of the average in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        earlier = self.center.clone()
        loss = super().training_step(batch, batch_idx)
        self.center = earlier * 0.9 + self.net(batch[0]).detach().mean(0) * 0.1
        return loss


class Spread(Model):
    """A buffer that no rule makes of those of slices."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits * self.spread.clone(), batch[1])
        self.spread.copy_(logits.detach().std())
        return loss


@REPLICAS
@pytest.mark.parametrize("kind", [Averages, AveragesAnew])
def test_buffers_come_together_by_the_rule_that_reproduces_them(hardware, fitted, kind, num_replicas) -> None:
    loader = make_loader(41)  # batches of 16, 16 and 9
    seen = fitted(kind, num_replicas, execution="threads" if num_replicas == 2 else "inline", loader=loader)
    assert "3 changed attributes as on one device" in seen.told
    assert not seen.warned
    assert_equal(seen.values, fitted(kind, loader=loader).values)


class Extremes(Model):
    """Keeps the largest and smallest logits, and counts rows, in every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.full((3,), -9.0))
        self.register_buffer("smallest", torch.full((3,), 9.0))
        self.register_buffer("rows_seen", torch.zeros((), dtype=torch.long))

    def keep(self, batch: Any) -> None:
        logits = self.net(batch[0]).detach()
        self.largest.copy_(torch.maximum(self.largest, logits.amax(0)))
        self.smallest.copy_(torch.minimum(self.smallest, logits.amin(0)))
        self.rows_seen += len(logits)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.keep(batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.keep(batch)


@REPLICAS
def test_buffers_come_together_in_every_stage(hardware, fitted, num_replicas) -> None:
    seen = fitted(Extremes, num_replicas)
    # A batch may be the first to fall below an extreme of an earlier stage, which no check has seen: it runs whole.
    assert "is not what it is on one device" not in seen.warned
    assert_equal(seen.values, fitted(Extremes).values)


class DecayingCount(Model):
    """A decayed count, which from zero grows like any other in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.count.mul_(0.9).add_(len(batch[0]))
        return super().training_step(batch, batch_idx)


class BestLoss(Model):
    """The smallest loss so far, which after the first step is a mean over rows like any loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("best", torch.tensor(1e9))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.best = torch.minimum(self.best, loss.detach())
        return loss


class LastCount(Model):
    """How many rows the last batch had, which from zero looks like a count of all, and goes round no ring."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.tensor(0))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rows.fill_(len(batch[0]))
        return super().training_step(batch, batch_idx)


class FullCount(LastCount):
    """How many rows there were, up to nine of them."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rows.copy_((self.rows + len(batch[0])).clamp(max=9))
        return Model.training_step(self, batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "name"), [(DecayingCount, "count"), (BestLoss, "best"), (LastCount, "rows"), (FullCount, "rows")]
)
def test_a_buffer_that_comes_together_once_but_not_twice_is_named(kind, name, fitted) -> None:
    warned = fitted(kind, 2).warned
    assert f"self.{name} comes together from slices in a first step, and not in a second" in warned
    assert "gets all of its batches whole" not in warned


def test_batches_stay_whole_where_slices_cannot_give_a_buffer_that_steps_use(fitted) -> None:
    seen = fitted(Spread, 2)
    assert "A second step uses what the first one kept in self.spread" in seen.warned
    assert_equal(seen.values, fitted(Spread).values)


def test_a_count_of_rows_adds_up_where_every_slice_has_one(hardware, fitted) -> None:
    seen = fitted(Averages, 3, batch_size=3)
    assert not seen.warned
    assert_equal(seen.values, fitted(Averages, batch_size=3).values)


def test_a_mean_of_buffers_that_was_asked_for_stays_one(fitted) -> None:
    seen = fitted(Averages, 2, buffers="mean", batch_size=16)
    torch.testing.assert_close(seen.values["center"], fitted(Averages, batch_size=16).values["center"])


# ---- gradients that cancel out ----


class CancelsOut(Model):
    """A loss that does not change when its inputs are shifted: the last bias has a gradient of mere rounding."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"one": self.net(batch[0]), "other": self.net(batch[0] * 1.1)}

    def training_step_end(self, outputs: Any) -> torch.Tensor:
        spread = torch.sqrt(outputs["one"].var(0) + 1e-4)
        return F.mse_loss(outputs["one"], outputs["other"]) + F.relu(1 - spread).mean()


@REPLICAS
def test_a_gradient_that_cancels_out_is_no_difference(fitted, num_replicas) -> None:
    seen = fitted(CancelsOut, num_replicas)
    assert "loss, 4 gradients" in seen.told
    assert not seen.warned


# ---- parameters that a step exchanges ----


class MovesTeacher(Model):
    """Gives the parameters of a teacher new storage in its step, as examples of BYOL do."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 3).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for parameter in self.teacher.parameters():
            parameter.data = parameter.data * 0.9 + 0.1
        return super().training_step(batch, batch_idx) + F.mse_loss(self.net(batch[0]), self.teacher(batch[0]))


def test_a_parameter_that_gets_new_storage_in_a_step_has_its_own_advice(fitted) -> None:
    seen = fitted(MovesTeacher, 2)
    text = "It writes parameter teacher.weight, teacher.bias in its forward, which each replica would do for itself."
    assert text in seen.warned
    assert "between the steps instead (on_train_batch_end)" in seen.warned
    assert_equal(seen.values, fitted(MovesTeacher).values)


# ---- parts on other devices ----


class SquareRoot(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).sqrt()


CUTS = {
    "each its own": {"sim:0": "sim:4", "sim:1": "sim:5"},
    "one for both": {"sim:0": "sim:4", "sim:1": "sim:4"},
    "the second": {"sim:1": "sim:4"},
    "to the host": {"sim:0": "cpu"},
}


@pytest.mark.parametrize("kind", [Logs, SumByHand, SquareRoot])
@pytest.mark.parametrize("cut", CUTS)
def test_steps_whose_parts_are_shifted_are_checked(sim, fitted, kind, cut) -> None:
    before = [sim.memory_allocated(index) for index in range(8)]
    options = {"shifts": CUTS[cut], "shift_activations": ["net.2"], "trainer": {"accelerator": "sim"}}
    seen = fitted(kind, 2, **options)
    if kind is SquareRoot:
        assert "training_step on 7 rows in slices of 4 and 3 is not what it is on one device" in seen.warned
    else:
        assert "dpx: checked on 7 rows" in seen.told
        assert "4 gradients" in seen.told
        assert not seen.warned
        assert_equal(seen.values, fitted(kind).values)
    gc.collect()
    left = [sim.memory_allocated(index) for index in range(8)]
    # Less where a fit lets go what an earlier test's last fit still held.
    assert all(now <= then for now, then in zip(left, before, strict=True))


@pytest.mark.parametrize("kind", [Logs, SumByHand])
def test_steps_are_checked_before_their_shifts_are_chosen(sim, fitted, kind) -> None:
    seen = fitted(kind, 2, shifts="auto", trainer={"accelerator": "sim"})
    assert "dpx: checked on 7 rows" in seen.told
    assert "nothing is shifted" in seen.told
    assert_equal(seen.values, fitted(kind).values)


class Refusing(torch.optim.SGD):
    """An optimizer that loads no states."""

    def load_state_dict(self, state_dict: Any) -> None:
        raise NotImplementedError("no states are loaded here")


class KeepsItsLossByHand(LightningModule):
    """A step by hand that keeps what it has computed last."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Linear(8, 3)
        self.last: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.last = loss.detach()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Refusing(self.parameters(), lr=0.1)


def test_a_step_by_hand_is_checked_whatever_its_optimizer_refuses(hardware: str, caplog: Any) -> None:
    """Its check ended with the optimizer's error, and what slices kept was that of one of them."""
    torch.manual_seed(0)
    model = KeepsItsLossByHand()
    other = copy.deepcopy(model)
    strategy = dpx.DPXStrategy(execution="inline")
    with caplog.at_level("INFO"):
        make_trainer(strategy=strategy, devices=3, accelerator=hardware, max_epochs=1).fit(model, make_loader())
    make_trainer(max_epochs=1).fit(other, make_loader())
    assert "dpx: checked on" in caplog.text
    torch.testing.assert_close(model.last.cpu(), other.last)


class LargestIsFirst(Model):
    """Of descending rows the largest one is that of the first slice, whichever rows are looked at."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        os.write(self.hparams.counter, b".")  # outside of the process: no rehearsal puts it back
        self.log("score", batch[0].max())


def test_no_rows_are_looked_at_twice() -> None:
    read, write = os.pipe()
    model = LargestIsFirst()
    model.hparams.counter = write
    trainer = make_trainer(strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    rows = TensorDataset(torch.arange(48.0).flip(0).reshape(6, 8), torch.zeros(6))
    trainer.validate(model, DataLoader(rows, batch_size=6), verbose=False)
    os.close(write)
    with open(read, "rb") as calls:
        # On rows 0 to 4, on all, on rows 1 to 5 and on 0 to 4 cut the other way, each whole and in two slices; and two
        # slices of the step itself.
        assert len(calls.read()) == 4 * 3 + 2
