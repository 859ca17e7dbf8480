"""Every backward of a manual step asks the replica that calls it, however it is called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_dpx.lightning.manual.acts_once import viewed
from lightning_dpx.lightning.manual.backward_calls import backwards_intercepted, weighted
from lightning_dpx.replicas.context import RendezvousSlot, ReplicaRank, as_rank

RANK = ReplicaRank(0, 2, RendezvousSlot())


class View:
    """Counts the backwards; a slice of it weighs a quarter."""

    weight = 0.25

    def __init__(self) -> None:
        self.num_backwards = 0

    def run_backward(self, run: Callable[[], None], *, create_graph: bool) -> None:
        self.num_backwards += 1
        run()

    def sums_gradients_of(self, wanted: list[Any], *, create_graph: bool) -> bool:
        return True

    def total_of(self, wanted: list[Any], found: list[torch.Tensor]) -> list[torch.Tensor]:
        return [gradient * 10 for gradient in found]


CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "method": lambda loss: loss.backward(),
    "function": lambda loss: torch.autograd.backward([loss], [torch.tensor(1.0)]),
    "named": lambda loss: torch.autograd.backward(tensors=loss, grad_tensors=None),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_backward_starts_with_what_the_slice_weighs(name: str) -> None:
    view = View()
    weight = torch.ones(1, requires_grad=True)
    with backwards_intercepted():
        with viewed(view), as_rank(RANK):
            CALLS[name]((weight * 2).sum())
        assert weight.grad.tolist() == [0.5]
        CALLS[name]((weight * 2).sum())
        assert weight.grad.tolist() == [2.5], "code of no replica is left alone"
    assert view.num_backwards == 1


def test_gradients_that_are_asked_for_are_those_of_all_replicas() -> None:
    weight = torch.ones(1, requires_grad=True)
    before = torch.autograd.grad
    with backwards_intercepted(), viewed(View()), as_rank(RANK):
        (gradient,) = torch.autograd.grad((weight * 2).sum(), weight)
    assert gradient.tolist() == [2 * 0.25 * 10]
    assert torch.autograd.grad is before


def test_a_backward_inside_a_backward_is_a_part_of_it() -> None:
    view = View()
    weight = torch.ones(1, requires_grad=True)
    with backwards_intercepted(), viewed(view), as_rank(RANK):
        torch.utils.checkpoint.checkpoint(lambda x: x * x, weight, use_reentrant=True).sum().backward()
    assert view.num_backwards == 1
    assert weight.grad.tolist() == [0.5]


def test_what_torch_refuses_is_left_to_torch() -> None:
    rows = torch.ones(2, requires_grad=True)
    assert weighted((rows,), None, 0.5) == (None,)
    assert weighted((rows,), [rows], 1) == [rows]
