"""Module calls that are watched for replaying: what they do to their own arguments."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_dpx.errors import BudgetError
from lightning_dpx.memory import apply_plan, search_plan


class _Router(nn.Module):
    """Scales what it is given in place, as routers of mixtures of experts do with their jitter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x *= 1.5
        out: Tensor = self.inner(x)
        return out.tanh()


def test_a_call_that_writes_to_its_own_argument_is_planned_round() -> None:
    """It cannot be replayed, for its argument is another one by then; its values can be dropped."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.LayerNorm(32), _Router()) for _ in range(3)]
    module = nn.Sequential(*parts, nn.Linear(32, 8))
    other = copy.deepcopy(module)
    rows = torch.randn(64, 32)
    plan = search_plan(module, rows, budget=0.8)
    assert not plan.keeps_all
    applied = apply_plan(module, plan)
    for _ in range(2):
        module(rows).sin().sum().backward()
        other(rows).sin().sum().backward()
    for given, expected in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(given.grad, expected.grad)
    assert not applied.not_found


class _Unrolled(nn.Module):
    """A few rows of a recurrent net: none of the tensors that it saves is worth a decision of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 32)
        for _ in range(24):
            state = self.cell(x, state)
        return state


def test_where_all_that_is_saved_is_small_calls_are_replayed_all_the_same() -> None:
    torch.manual_seed(0)
    module = _Unrolled()
    other = copy.deepcopy(module)
    rows = torch.randn(4, 16)
    with pytest.raises(BudgetError, match="too small to be dropped alone; only whole calls of modules") as refused:
        search_plan(module, rows, budget=1)
    smallest = refused.value.smallest
    assert smallest is not None
    plan = search_plan(module, rows, budget=smallest)
    assert plan.unplanned_peak is not None
    assert smallest < 0.75 * plan.unplanned_peak
    assert plan.replayed
    apply_plan(module, plan)
    for one in (module, other):
        one(rows).sin().sum().backward()
    for given, expected in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(given.grad, expected.grad)
