"""One backward for all replicas walks one replica's graph after the other, each in its own rank."""

import pytest
import torch

from lightning_dpx.replicas.context import RendezvousSlot, ReplicaRank, current_rank
from lightning_dpx.replicas.joint_backward import joint_backward


def ranks(count: int) -> list[ReplicaRank]:
    slot = RendezvousSlot()
    return [ReplicaRank(index, count, slot) for index in range(count)]


def test_gradients_are_those_of_each_root_and_hooks_run_in_their_replicas_rank() -> None:
    weights = [torch.ones(2, requires_grad=True) for _ in range(3)]
    order: list[tuple[int, int]] = []
    roots = []
    for index, weight in enumerate(weights):
        middle = weight * (index + 1)
        middle.register_hook(lambda _gradient, index=index: order.append((index, current_rank().rank)))
        roots.append(([middle.sum()], [torch.tensor(10.0)]))
    joint_backward(ranks(3), roots, lambda *_: None)
    assert [weight.grad.tolist() for weight in weights] == [[10, 10], [20, 20], [30, 30]]
    assert order == [(2, 2), (1, 1), (0, 0)], "the graph that was made last comes first"
    assert current_rank() is None


def test_an_error_is_told_with_the_replica_that_raised_it() -> None:
    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("odd")

    roots = []
    for index in range(2):
        middle = torch.ones(1, requires_grad=True) * 2
        if index == 0:
            middle.register_hook(fail)
        roots.append(([middle.sum()], [torch.tensor(1.0)]))
    told: list[tuple[int, BaseException]] = []
    with pytest.raises(ValueError, match="odd") as caught:
        joint_backward(ranks(2), roots, lambda place, error: told.append((place, error)))
    assert told == [(0, caught.value)]
