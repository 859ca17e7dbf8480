"""Which steps follow the plans that there are: by the shapes of their slices, and by what they have saved."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_dpx.lightning.memory.covered_steps import CoveredSteps
from lightning_dpx.lightning.memory.profiled_steps import SeenStep
from lightning_dpx.memory import apply_plan, remove_plan, search_plan
from lightning_dpx.replicas import BatchSlice, Replica
from tests.memory.made_up import chain


def _slice(*shape: int) -> BatchSlice:
    return BatchSlice(Replica(0, torch.device("cpu"), nn.Linear(4, 4)), shape[0], torch.zeros(shape))


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


class _WithMore(nn.Module):
    """Saves more in its forward from a step on, as a network of a GAN in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()
        self.other = _net()
        self.runs_other = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        if self.runs_other:
            out = out + self.other(x)
        return out


def test_slices_that_are_no_larger_than_known_ones_are_covered() -> None:
    covered = CoveredSteps()
    assert not covered.has_slices([_slice(8, 4)])
    covered.add_slices([_slice(8, 4), _slice(6, 9)])
    assert covered.has_slices([_slice(8, 4)])
    assert covered.has_slices([_slice(2, 3), _slice(5, 9)])
    assert not covered.has_slices([_slice(2, 3), _slice(7, 9)]), "within none of the two"
    covered.forget_slices()
    assert not covered.has_slices([_slice(8, 4)])


def _replicas_of(module: nn.Module) -> Any:
    return SimpleNamespace(replicas=[Replica(0, torch.device("cpu"), module)])


def test_a_step_that_saves_what_no_profile_has_shown_is_expected_again() -> None:
    module = _WithMore()
    x = torch.randn(32, 64)
    plan = search_plan(module, x, budget=None)
    covered = CoveredSteps()
    apply_plan(module, plan, watches=True)
    try:
        module(x).sum().backward()
        covered.note_last_step(_replicas_of(module))
        assert not covered.expects_others, "the step that was planned for"
        module.runs_other = True
        module(x).sum().backward()
        covered.note_last_step(_replicas_of(module))
        assert covered.expects_others
    finally:
        remove_plan(module)
    assert not covered.found_in([SeenStep((chain(2),), (1,))]), "this profile has none of it"
    assert covered.expects_others
    covered.forget()
    assert not covered.expects_others


def test_a_module_without_a_plan_tells_nothing() -> None:
    covered = CoveredSteps()
    covered.note_last_step(_replicas_of(_net()))
    assert not covered.expects_others
