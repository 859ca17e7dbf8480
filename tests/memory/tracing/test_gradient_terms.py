"""Gradients that autograd adds up in place are one storage, as without a trace."""

import torch
from torch import Tensor

from lightning_dpx.memory import MemoryTrace


def _num_made(*, hold: bool) -> int:
    """Storages of a step in which a value has two uses, and so two gradients that are added up."""
    x = torch.ones(16, requires_grad=True)
    y = x * 2
    held: list[Tensor | None] = []
    with MemoryTrace(torch.device("cpu")) as trace:
        powers = y.exp()
        waves = y.sin()
        if hold:
            for node in (powers.grad_fn, waves.grad_fn):
                node.register_hook(lambda gradients, _: held.extend(gradients))
        (powers + waves).sum().backward()
    return sum(allocation.num_bytes == x.nbytes for allocation in trace.allocations)


def test_a_sum_in_backward_is_made_in_its_first_term() -> None:
    # The two powers and waves, what they add up to; then a cosine, the two gradients of y, and that of x.
    assert _num_made(hold=False) == 7


def test_a_sum_whose_terms_are_held_has_memory_of_its_own() -> None:
    assert _num_made(hold=True) == 8
