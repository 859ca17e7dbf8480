"""A metric's value over the whole batch, with the gradients of one device."""

import pytest
import torch
from torch import Tensor

from lightning_dpx.errors import GatherError
from lightning_dpx.lightning.metrics.values import shared_value
from lightning_dpx.replicas.context import RendezvousSlot, ReplicaRank

CPU = torch.device("cpu")
Arguments = tuple[tuple[Tensor, ...], dict[str, Tensor]]


class Meeting:
    """Where all gradients of the other replica are ones."""

    def exchange(self, rank, kind, value, act=list, *, optional=False):
        return act([value, torch.ones_like(value)])

    def abandon(self) -> None:
        raise NotImplementedError


def joined(calls: dict[int, Arguments]) -> Arguments:
    return (torch.cat([args[0] for args, _ in calls.values()]),), {}


def call(arguments: Arguments) -> Tensor:
    return arguments[0][0].square().sum()


def test_the_value_is_that_of_all_rows_and_each_replica_gets_its_own_gradients() -> None:
    mine = torch.tensor([1.0, 2.0], requires_grad=True)
    theirs = torch.tensor([3.0], requires_grad=True)
    calls = {0: ((mine,), {}), 1: ((theirs,), {})}
    whole = shared_value(calls, joined, call, differentiable=True)
    rank = ReplicaRank(0, 2, RendezvousSlot(meeting=Meeting()))
    value = whole.for_replica(rank, CPU, calls[0])
    assert value.item() == 14
    (value * 2).backward()
    assert mine.grad.tolist() == [6, 12], "2 x of this replica's gradient of 2, and of the other's 1"
    assert theirs.grad is None


@pytest.mark.parametrize("differentiable", [True, False])
def test_histories_are_cut_where_no_gradients_flow(differentiable: bool) -> None:
    mine = torch.ones(2, requires_grad=True)
    with torch.no_grad() if differentiable else torch.enable_grad():
        whole = shared_value({0: ((mine,), {})}, joined, call, differentiable=differentiable)
    rank = ReplicaRank(0, 1, RendezvousSlot())
    assert not whole.for_replica(rank, CPU, ((mine,), {})).requires_grad


def test_arguments_that_do_not_fit_together_are_called_with_one_by_one() -> None:
    def refuse(calls: dict[int, Arguments]) -> Arguments:
        raise GatherError("no common shape")

    calls = {0: ((torch.ones(1),), {}), 1: ((torch.full((1,), 2.0),), {})}
    whole = shared_value(calls, refuse, call, differentiable=False)
    assert whole.separate == "no common shape"
    assert {rank: value.item() for rank, value in whole.values.items()} == {0: 1, 1: 4}
