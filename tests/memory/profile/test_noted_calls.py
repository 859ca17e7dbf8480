"""Module calls that are watched for replaying: what they do to their own arguments."""

import copy

import torch
from torch import Tensor, nn

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
