"""Autocast around a search is entered anew by every step that the search runs, as by steps of training."""

from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

import lightning_dpx as dpx
from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.memory import profile_module
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.memory.profile.profiler import profile_step


class Blocks(nn.Module):
    """Weights that take as much as activations; a loss; and one layer that autocast leaves alone."""

    def __init__(self, autocasts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.autocasts = autocasts
        self.blocks = nn.Sequential(*(self._block() for _ in range(4)))
        self.exact = nn.Linear(128, 128)

    @staticmethod
    def _block() -> nn.Module:
        return nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocasts or torch.is_autocast_enabled("cpu")):
            x = self.blocks(x)
            with torch.autocast("cpu", enabled=False):
                x = torch.tanh(self.exact(x.float()))
            return x.sin().mean()


def _amp() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


def _peak(module: nn.Module, x: Tensor) -> int:
    """Measured, of a step that leaves autocast before its backward."""

    def step() -> None:
        with _amp():
            loss = module(x)
        loss.backward()

    step()
    module.zero_grad()
    return peak_of_passing(step)


def _course(profile: Profile) -> tuple[int, list[int]]:
    """The peak, and the curve without the end of forward: the cache lets go of casts in the order of addresses."""
    let_go = 10  # biases, and the first weight: backward does not need these
    events = [*profile.curve]
    del events[profile.forward_events - let_go : profile.forward_events]
    return profile.peak, events


def test_the_profile_is_that_of_a_step_which_enters_autocast_itself() -> None:
    x = torch.rand(128, 128)
    expected = profile_module(Blocks(autocasts=True), x)
    with _amp():
        found = profile_module(Blocks(), x)
    assert _course(found) == _course(expected)
    assert [one.num_bytes for one in found.storages] == [one.num_bytes for one in expected.storages]
    assert [value.name for value in found.values] == [value.name for value in expected.values]
    assert found.peak == pytest.approx(_peak(Blocks(), x), rel=0.01)


def test_a_context_for_each_forward_gives_the_same_profile() -> None:
    x = torch.rand(128, 128)
    module, other = Blocks(), Blocks()
    within = profile_step(module, lambda: module(x), x.device, context=_amp)
    with _amp():
        around = profile_step(other, lambda: other(x), x.device)
    assert _course(around) == _course(within)


@pytest.mark.parametrize("share", [0.9, 0.7])
def test_a_budget_holds_in_steps_that_enter_autocast_anew(share: float) -> None:
    x, module, plain = torch.rand(128, 128), Blocks(), Blocks()
    budget = int(share * _peak(plain, x))
    with _amp():
        plan = dpx.search_plan(module, x, budget=budget)
        assert torch.is_autocast_enabled("cpu"), "it is as the caller had it"
    dpx.apply_plan(module, plan)
    assert _peak(module, x) <= 1.005 * budget
    for one in (module, plain):
        one.zero_grad()
        with _amp():
            loss = one(x)
        loss.backward()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
