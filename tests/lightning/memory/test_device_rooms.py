"""A search for reference cycles takes 0.3 s in a large process: it is made only where what lies in them counts."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.lightning.memory.device_rooms import DeviceRooms
from lightning_dpx.replicas import BatchSlice, ReplicaSet
from tests.conftest import SIMULATED, sim_device


def finds_garbage(budget: Any, device: torch.device) -> bool:
    replicas = ReplicaSet(nn.Linear(2, 1).to(device), [device])
    slices = [BatchSlice(replicas.root, 1, None)]
    garbage = type("Garbage", (), {})()
    garbage.itself = garbage
    seen = weakref.ref(garbage)
    del garbage
    DeviceRooms(budget).free_what_counts(replicas, slices)
    return seen() is None


def test_what_the_user_gave_stays_what_it_was_after_an_error_out_of_memory() -> None:
    rooms = DeviceRooms(None)
    rooms.allow_what_is_free()
    assert rooms.budgets.given == "auto"
    assert rooms.given is None


@pytest.mark.parametrize("budget", ["1GiB", 2**20, 0.5])
def test_garbage_that_no_budget_sees_is_not_looked_for(budget: Any, no_collection: None) -> None:
    assert not finds_garbage(budget, torch.device("cpu"))


def test_garbage_is_looked_for_where_the_budget_is_what_is_free(no_collection: None) -> None:
    assert finds_garbage("auto", torch.device("cpu"))


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_garbage_is_looked_for_where_the_device_counts_it(no_collection: None) -> None:
    assert finds_garbage("1GiB", sim_device(0))
