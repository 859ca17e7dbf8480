"""A replica's part of a stage runs in its rank and is timed; an error of it says which module raised it."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.replicas import BatchSlice, current_rank
from lightning_dpx.replicas.context import RendezvousSlot, ReplicaRank
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.replica_task import ReplicaTask

CPU = torch.device("cpu")


class Fails(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no {rows.shape}")


class Notes:
    """A stopwatch that notes what it is told."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def start(self) -> None:
        self.told.append("start")

    def stop(self) -> None:
        self.told.append("stop")


@pytest.fixture
def replica() -> Replica:
    replica = Replica(1, CPU, nn.Sequential(nn.Identity(), Fails()))
    replica.refresh()
    return replica


def task(replica: Replica, call: Any, told: list[str], **options: Any) -> ReplicaTask:
    rank = ReplicaRank(1, 2, RendezvousSlot())
    batch_slice = BatchSlice(replica, 2, torch.ones(2, 3))
    options = {"searched": False, "before": lambda: told.append("before"), **options}
    return ReplicaTask(1, CPU, "step", call, rank=rank, batch_slice=batch_slice, watches=[Notes(told)], **options)


def test_its_call_gets_the_slice_in_the_rank_of_the_replica(replica: Replica) -> None:
    told: list[str] = []

    def call(part: BatchSlice) -> Any:
        told.append("call")
        return current_rank().rank, part.num_rows

    outcome = task(replica, call, told).attempt()
    assert outcome.error is None
    assert outcome.value == (1, 2)
    assert told == ["before", "start", "call", "stop"]
    assert current_rank() is None


@pytest.mark.parametrize("searched", [False, True])
def test_an_error_is_the_original_object_and_names_the_module(replica: Replica, searched: bool) -> None:
    told: list[str] = []
    outcome = task(replica, lambda part: replica.module(part.batch), told, searched=searched).attempt()
    assert isinstance(outcome.error, ValueError)
    assert outcome.error.__notes__ == ["In module 1."]
    assert told == ["before", "start"]


def test_an_exit_reaches_the_caller_as_an_outcome(replica: Replica) -> None:
    def leave(_: BatchSlice) -> None:
        raise SystemExit(3)

    outcome = task(replica, leave, []).attempt()
    assert isinstance(outcome.error, SystemExit)
