"""Replicas meet between threads or turns: the same answer for all, or an error for all that says who is missing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.replicas import collectives
from lightning_dpx.replicas.collectives import Rendezvous
from lightning_dpx.replicas.context import RendezvousSlot, ReplicaRank
from lightning_dpx.replicas.executor import Task
from lightning_dpx.replicas.threaded_executor import ThreadedExecutor

CPU = torch.device("cpu")


def run(act: Callable[[ReplicaRank], Any], world_size: int = 3, **options: Any) -> list[Any]:
    """What ``act`` returns in each of the ranks, every one in a thread of its own."""
    meeting = Rendezvous(world_size, **options)
    slot = RendezvousSlot(meeting=meeting)

    def task(index: int) -> Any:
        try:
            return act(ReplicaRank(index, world_size, slot))
        finally:
            meeting.end(index)

    executor = ThreadedExecutor(range(world_size))
    try:
        return executor.run([Task(index, CPU, "forward", lambda i=index: task(i)) for index in range(world_size)])
    finally:
        executor.close()


@pytest.mark.parametrize(("operation", "expected"), [("mean", 2.0), ("sum", 6.0), ("min", 1.0), ("max", 3.0)])
def test_every_rank_gets_the_same_reduced_value(operation: str, expected: float) -> None:
    found = run(lambda rank: collectives.reduce(rank, torch.tensor(float(rank.rank + 1)), operation))
    assert [value.item() for value in found] == [expected] * 3


def test_what_is_gathered_is_in_rank_order_and_a_broadcast_is_the_sources() -> None:
    found = run(lambda rank: collectives.all_gather(rank, torch.tensor(rank.rank)))
    assert [value.tolist() for value in found] == [[0, 1, 2]] * 3
    assert run(lambda rank: collectives.broadcast(rank, f"of {rank.rank}", 1)) == ["of 1"] * 3


def test_gradients_of_a_sum_and_of_gathered_values_are_sums_over_the_ranks() -> None:
    def backward(rank: ReplicaRank) -> list[float]:
        value = torch.tensor([1.0, 2.0], requires_grad=True)
        total = collectives.sum_over_replicas(rank, value)
        gathered = collectives.all_gather(rank, value, sync_grads=True)
        (total.sum() + (rank.rank + 1) * gathered.sum()).backward()
        return value.grad.tolist()

    assert run(backward, 2) == [[2 + 3, 2 + 3]] * 2


def wait(rank: ReplicaRank, kind: str) -> Any:
    return None if kind == "ends" else rank.meet(kind, rank.rank)


@pytest.mark.parametrize(
    ("kinds", "options", "message"),
    [
        (("sum", "max"), {}, "0 calls sum, 1 calls max"),
        (("sum", "ends"), {}, r"replicas 0 \(sum\) wait for replicas 1, which have ended"),
        (("sum", "sum"), {"refusal": "no reason"}, "sum inside a step is not possible here: no reason"),
    ],
)
def test_a_meeting_that_cannot_be_is_an_error_for_all(
    kinds: tuple[str, str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(dpx.CollectiveError, match=message):
        run(lambda rank: wait(rank, kinds[rank.rank]), 2, **options)


def test_shapes_that_differ_are_named() -> None:
    with pytest.raises(dpx.CollectiveError, match=r"shapes \(1\), \(2\)|shapes \(1,\), \(2,\)"):
        run(lambda rank: collectives.all_gather(rank, torch.ones(rank.rank + 1)), 2)


def test_those_that_need_not_wait_for_all_go_on_among_themselves() -> None:
    def act(rank: ReplicaRank) -> Any:
        return None if rank.rank == 1 else rank.meet_present("step", rank.rank, list)

    assert run(act) == [[0, 2], None, [0, 2]]


def test_the_error_of_what_all_met_for_is_every_ranks_error() -> None:
    def act(rank: ReplicaRank) -> str:
        with pytest.raises(ZeroDivisionError):
            rank.meet("divide", 0, lambda values: 1 / sum(values))
        return "told"

    assert run(act) == ["told"] * 3


def test_gradients_that_would_wait_for_each_other_in_one_thread_are_refused() -> None:
    slot = RendezvousSlot(oversubscribed="cuda:0")
    with pytest.raises(dpx.CollectiveError, match="cuda:0 holds several replicas"):
        collectives.check_differentiable(ReplicaRank(0, 2, slot))
