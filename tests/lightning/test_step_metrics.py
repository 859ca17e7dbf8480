"""A step that reads in the Trainer's metrics what it has logged reads what it does on one device."""

import copy
import pickle
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.lightning.step_metrics import MetricsOfStep, names_of
from tests.conftest import Classifier, StepsByHand, assert_equal, run, strategy_in


class ReadsBack(Classifier):
    """Its loss depends on what it has just logged, and on what it will log."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        last = self.trainer.callback_metrics.get("seen", torch.tensor(1.0))
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        now = self.trainer.callback_metrics["train_loss_step"]
        self.log("seen", now + 0.5 * last)
        return loss * (1 + now)

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, on_step=True)
        return loss * self.trainer.logged_metrics.copy().get("val_loss_step", 1.0)


class ReadsBackByHand(StepsByHand, ReadsBack):
    pass


class ReadsTheLast(Classifier):
    """What earlier steps have logged, all slices may read."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        last = self.trainer.callback_metrics.get("train_loss", torch.tensor(1.0))
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss * (1 + last)


def trained(kind: type[Classifier], **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return run(kind(), **options)


@cache
def of_one_device(kind: type[Classifier]) -> dict[str, torch.Tensor]:
    return trained(kind)


@pytest.mark.filterwarnings("ignore:dpx. validation_step gets all of its batches whole")
@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("kind", [ReadsBack, ReadsBackByHand])
def test_it_gets_its_batches_whole_and_reads_what_it_has_logged(kind: type[Classifier], execution: str) -> None:
    strategy = strategy_in(execution, verify="warn")
    with pytest.warns(UserWarning, match="training_step gets all of its batches whole.*It reads 'train_loss_step'"):
        ours = trained(kind, strategy=strategy, devices=2)
    assert_equal(ours, of_one_device(kind))


def test_micro_batches_are_no_other(recwarn: pytest.WarningsRecorder) -> None:
    ours = trained(ReadsBack, strategy=dpx.DPXStrategy(micro_batches=2), devices=1)
    assert_equal(ours, of_one_device(ReadsBack))
    assert any("It reads 'train_loss_step'" in str(warning.message) for warning in recwarn)


@pytest.mark.usefixtures("sim")
def test_a_profile_reads_it_as_well() -> None:
    strategy = dpx.DPXStrategy(memory_budget="1MiB", micro_batches=1)
    ours = trained(ReadsBack, strategy=strategy, devices=1, accelerator="sim")
    assert_equal(ours, of_one_device(ReadsBack))
    planner = dpx.ActivationPlanner(budget="1MiB")
    assert_equal(trained(ReadsBack, callbacks=[planner]), of_one_device(ReadsBack))


def test_what_earlier_steps_have_logged_is_no_obstacle(recwarn: pytest.WarningsRecorder) -> None:
    ours = trained(ReadsTheLast, strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    assert_equal(ours, of_one_device(ReadsTheLast))
    assert not any("whole" in str(warning.message) for warning in recwarn)


def test_every_way_of_reading_is_noted_and_copies_are_plain() -> None:
    ways: dict[str, Any] = {
        "item": lambda metrics: metrics["a"],
        "get": lambda metrics: metrics.get("a"),
        "in": lambda metrics: "a" in metrics,
        "iterate": list,
        "keys": lambda metrics: metrics.keys(),
        "values": lambda metrics: metrics.values(),
        "items": lambda metrics: metrics.items(),
        "merge": lambda metrics: {**metrics},
    }
    for name, read in ways.items():
        read_back: set[str] = set()
        metrics = MetricsOfStep({"b": 1.0}, lambda: {"a": 2.0}, read_back)
        assert metrics["b"] == 1.0
        assert not read_back
        read(metrics)
        assert read_back == {"a"}, name
    for copied in (copy.deepcopy(metrics), pickle.loads(pickle.dumps(metrics)), metrics.copy()):
        assert type(copied) is dict
        assert copied == {"a": 2.0, "b": 1.0}


def test_names_are_those_of_lightning() -> None:
    assert names_of("loss", {}, trains=True) == ("loss",)
    assert names_of("loss", {"on_epoch": True}, trains=True) == ("loss", "loss_step")
    assert names_of("loss", {"on_step": False}, trains=True) == ()
    assert names_of("loss", {}, trains=False) == ()
    assert names_of("loss", {"on_step": True}, trains=False) == ("loss", "loss_step")
