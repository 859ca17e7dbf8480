"""What a forward uses by itself, whatever autograd keeps."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.lifetimes import AsksItselfError, Lifetimes, natural_lifetimes


class Kept(nn.Module):
    """(B, 64) to a number; the first activation is used once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        first = self.first(rows).tanh()
        second = self.second(first).tanh().sigmoid()
        return (second * first).sum()


def lifetimes_of(module: nn.Module, run, **options: bool) -> Lifetimes:
    names = CallNames(module)
    try:
        return natural_lifetimes(names, run, CostModel(torch.device("cpu")), nullcontext, **options)
    finally:
        names.remove()


def test_what_is_used_again_lives_longer_than_what_is_not() -> None:
    module = Kept()
    rows = torch.rand(32, 64)
    found = lifetimes_of(module, lambda: module(rows))
    last = [use for use in found.last_uses.values() if use is not None]
    assert len(set(last)) > 1
    assert max(last) <= found.num_operators


def test_of_a_run_that_differs_nothing_is_known() -> None:
    found = Lifetimes({"a": 3, "b": None}, 10)
    assert found.last_use("a", 10) == 3
    assert found.last_use("b", 10) is None
    assert found.last_use("a", 11) == 11, "it may be used to the last"


def asks_itself(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    wanted = rows.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module(wanted), wanted, create_graph=True)
    return gradient.square().sum()


def test_a_backward_of_its_own_needs_copies() -> None:
    module = Kept()
    rows = torch.rand(32, 64)
    with pytest.raises(AsksItselfError):
        lifetimes_of(module, lambda: asks_itself(module, rows))
    assert lifetimes_of(module, lambda: asks_itself(module, rows), copies=True).last_uses
