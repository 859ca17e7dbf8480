"""What a step writes to shared Python objects and takes back before it ends is noticed."""

import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_dpx.replicas.passing_writes import PassingWrites
from lightning_dpx.replicas.stage_watch import StageWatch

SWITCHES = {"teacher": False}
IS_TEACHER = False
OF_THREAD = threading.local()


class Cell(nn.Module):
    """Adds to what it has kept of the last call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.memory: dict[str, Any] = {"v": 0.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory["v"] = self.memory["v"] + self.layer(x)
        return self.memory["v"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()
        self.features: list[torch.Tensor] = []
        self.rows = np.zeros((3, 2), dtype=np.float32)
        self.vocabulary = list(range(1000))

    def reset_at_the_end(self, x: torch.Tensor) -> None:
        self.cell(self.cell(x))
        self.cell.memory["v"] = 0.0

    def emptied_at_the_end(self, x: torch.Tensor) -> None:
        self.features.append(x)
        self.cell.layer(x)
        self.features.clear()

    def of_many_items(self, x: torch.Tensor) -> None:
        self.vocabulary.append(1)
        self.cell.layer(x)
        self.vocabulary.pop()

    def used_by_an_operator(self, x: torch.Tensor) -> None:
        self.features.append(x)
        x @ self.features[-1].T
        self.features.clear()

    def in_an_array(self, x: torch.Tensor) -> None:
        self.rows[:] = x.numpy()
        x + torch.as_tensor(self.rows)
        self.rows[:] = 0

    def of_a_global_dict(self, x: torch.Tensor) -> None:
        SWITCHES["teacher"] = True
        self.cell.layer(x)
        SWITCHES["teacher"] = False

    def of_a_global(self, x: torch.Tensor) -> None:
        global IS_TEACHER
        IS_TEACHER = True
        self.cell.layer(x)
        IS_TEACHER = False

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(OF_THREAD, "scale", 1.0)

    def of_its_own(self, x: torch.Tensor) -> None:
        features = [self.cell.layer(x)]
        features.append(self.cell.layer(features[0]))


@pytest.mark.parametrize(
    "step",
    [
        "reset_at_the_end",
        "emptied_at_the_end",
        "of_many_items",
        "used_by_an_operator",
        "in_an_array",
        "of_a_global_dict",
        "of_a_global",
    ],
)
def test_what_is_taken_back_before_the_step_ends_is_seen(step: str) -> None:
    net = Net()
    with StageWatch(net, ()) as watch:
        getattr(net, step)(torch.ones(3, 2))
    assert watch.compare() == (True, False)
    assert not net.cell._forward_hooks, "none is left"
    assert sys.getprofile() is None


def test_what_a_step_makes_for_itself_is_none() -> None:
    net = Net()
    with PassingWrites(net) as watch:
        net.of_its_own(torch.ones(3, 2))
    assert not watch.found


def test_what_leads_to_tensors_is_of_each_replica() -> None:
    net = Net()
    net.cell.memory["v"] = torch.zeros(3, 2)
    with PassingWrites(net) as watch:
        net.cell(torch.ones(3, 2))
    assert not watch.found


def test_objects_that_are_kept_are_not_looked_into() -> None:
    net = Net()
    with PassingWrites(net, [net.features]) as watch:
        net.emptied_at_the_end(torch.ones(3, 2))
    assert not watch.found


def test_what_a_hook_has_left_to_its_thread_is_not_found_in_others() -> None:
    net = Net()
    assert not PassingWrites(net).found, "nothing is left there"
    OF_THREAD.scale = 2.0
    try:
        assert PassingWrites(net).found
    finally:
        del OF_THREAD.scale
    net.of_thread = threading.local()
    net.of_thread.scale = 2.0
    assert PassingWrites(net).found


def test_a_profiler_of_the_user_stays_and_hooks_see_what_submodules_see() -> None:
    net = Net()

    def profiler(*_: Any) -> None:
        pass

    sys.setprofile(profiler)
    try:
        with PassingWrites(net) as watch:
            net.reset_at_the_end(torch.ones(3, 2))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert watch.found


def test_submodules_have_no_hooks_while_they_are_looked_at() -> None:
    """Calls of modules with hooks are not made again, which a memory plan may count on."""
    net = Net()
    with PassingWrites(net) as watch:
        assert not any(child._forward_hooks or child._forward_pre_hooks for child in net.modules())
        net.reset_at_the_end(torch.ones(3, 2))
    assert watch.found


def test_a_submodule_whose_hash_changes_is_looked_at() -> None:
    net = Net()
    net.mean = MeanMetric()
    with PassingWrites(net) as watch:
        net.mean(torch.ones(2))
        net.cell(torch.ones(3, 2))
        net.cell.memory["v"] = 0.0
    assert watch.found
