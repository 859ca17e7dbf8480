"""One backward for all replicas walks one replica's graph after the other, each in its own rank."""

import pytest
import torch

from lightning_dpx.errors import CollectiveError
from lightning_dpx.replicas.context import current_rank
from lightning_dpx.replicas.joint_backward import joint_backward


def test_gradients_are_those_of_each_root_and_hooks_run_in_their_replicas_rank() -> None:
    weights = [torch.ones(2, requires_grad=True) for _ in range(3)]
    order: list[tuple[int, int]] = []
    roots = []
    for index, weight in enumerate(weights):
        middle = weight * (index + 1)
        middle.register_hook(lambda _gradient, index=index: order.append((index, current_rank().rank)))
        roots.append(([middle.sum()], [torch.tensor(10.0)]))
    joint_backward(roots, lambda *_: None)
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
        joint_backward(roots, lambda place, error: told.append((place, error)))
    assert told == [(0, caught.value)]


def test_a_last_replica_without_anything_to_do_has_no_turn() -> None:
    ranks: list[int] = []
    roots = []
    for _ in range(2):
        middle = torch.ones(1, requires_grad=True) * 2
        middle.register_hook(lambda _gradient: ranks.append(current_rank().rank))
        roots.append(([middle.sum()], [torch.tensor(1.0)]))
    joint_backward([*roots, ([], [])], lambda *_: None)
    assert ranks == [1, 0]


def test_replicas_cannot_meet_in_it() -> None:
    middle = torch.ones(1, requires_grad=True) * 2
    middle.register_hook(lambda _gradient: current_rank().meet("a sum", 1))
    other = torch.ones(1, requires_grad=True) * 2
    roots = [([one.sum()], [torch.tensor(1.0)]) for one in (middle, other)]
    with pytest.raises(CollectiveError, match="no step before met in it"):
        joint_backward(roots, lambda *_: None)
