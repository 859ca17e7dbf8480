"""What hooks and steps write on a module in plain Python is as on one device."""

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer

pytestmark = pytest.mark.usefixtures("hardware")


class Collects(Classifier):
    """The idioms of Lightning 2: lists, dicts and sets filled by steps and read by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self._outputs: list[torch.Tensor] = []
        self.by_stage: dict[str, list[torch.Tensor]] = {"val": []}
        self.labels: set[int] = set()
        self.found: dict[str, int] = {}
        self.count = 0
        self.epochs: list[torch.Tensor] = []

    def on_train_epoch_start(self) -> None:
        self.scale = 1.0 + self.current_epoch  # did not exist when the replicas were made
        self.fresh: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._outputs.append(batch[0].sum(1).detach())
        self.labels |= set(batch[1].tolist())
        self.found[f"step {batch_idx} rank {self.global_rank}"] = batch_idx
        self.fresh.extend(batch[1].tolist())
        self.count += 1
        return self.scale * F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        self.epochs.append(torch.cat(self._outputs))
        self._outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.by_stage["val"].append(batch[0][:, 0])

    def on_validation_epoch_end(self) -> None:
        self.val = torch.cat(self.by_stage["val"]).cpu()
        self.by_stage["val"] = []


def fitted(kind: type[Classifier], num_rows: int = 53, **options: Any) -> Any:
    torch.manual_seed(0)
    model, loader = kind(), make_loader(num_rows)
    make_trainer(**options).fit(model, loader, loader)
    return model


def test_lists_dicts_sets_and_attributes_are_those_of_one_device(execution) -> None:
    one = fitted(Collects)
    ours = fitted(Collects, strategy=dpx.DPXStrategy(execution=execution), devices=3)
    assert len(ours.epochs) == 2
    for epoch, expected in zip(ours.epochs, one.epochs, strict=True):
        torch.testing.assert_close(epoch.cpu(), expected)
    torch.testing.assert_close(ours.val, one.val)
    assert ours.labels == one.labels
    assert ours.fresh == one.fresh
    assert ours.count == one.count == 8
    assert len(ours.found) == 3 * 3 + 1, "the last batch of five rows goes to one replica"
    assert ours._outputs == []
    assert_equal(dict(ours.state_dict()), dict(one.state_dict()))


class Schedules(Classifier):
    """Hooks that change a submodule, a tensor and an object after the replicas were made."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.5), nn.Linear(16, 3))
        self.lock = None
        self.weights = None

    def on_train_epoch_start(self) -> None:
        self.net[1].negative_slope = 0.1 * self.current_epoch
        self.weights = torch.tensor([1.0, 2.0, 3.0], device=self.device) * (1 + self.current_epoch)
        self.lock = threading.Lock()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.lock:
            return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none").mul(self.weights.sum()).mean()


def test_hooks_that_change_attributes_reach_every_replica(execution) -> None:
    ours = fitted(Schedules, strategy=dpx.DPXStrategy(execution=execution), devices=3)
    assert_equal(dict(ours.state_dict()), dict(fitted(Schedules).state_dict()))


class Grows(Classifier):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.late = nn.Identity()


def test_submodules_added_during_fit_are_refused(execution) -> None:
    with pytest.raises(dpx.ReplicationError, match="other submodules now than its replicas"):
        fitted(Grows, strategy=dpx.DPXStrategy(execution=execution), devices=2)
