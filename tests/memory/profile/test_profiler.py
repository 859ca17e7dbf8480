"""Profiling a step ends, whatever the shape of its graph."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dpx.memory import profile_module, profile_step
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.profiler import NotWorthProfilingError
from tests.memory.profile.test_full_step import Doubled


def test_a_step_that_takes_too_long_is_timed_and_leaves_no_profile() -> None:
    module = Doubled()
    rows = torch.randn(32, 64)
    told: list[float] = []
    runs: list[int] = []

    def run() -> Tensor:
        runs.append(1)
        loss: Tensor = module(rows).sum()
        return loss

    def is_worth(seconds: float) -> bool:
        told.append(seconds)
        return len(told) > 1

    with pytest.raises(NotWorthProfilingError) as refused:
        profile_step(module, run, torch.device("cpu"), is_worth=is_worth)
    timed = len(runs)
    assert told == [refused.value.seconds]
    assert all(parameter.grad is None for parameter in module.parameters())
    assert profile_step(module, run, torch.device("cpu"), is_worth=is_worth).peak
    assert len(runs) > 2 * timed


class Forces(nn.Module):
    """As models of molecules: the gradient of the energy is a result."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        energy = self.two(torch.tanh(h))
        (force,) = torch.autograd.grad(energy.sum(), h, create_graph=True)
        return energy + force.pow(2).sum()


class InTurns(nn.Module):
    """Writes to another one of its tensors in every forward; the turn is one that can be put back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.turn = nn.Linear(64, 64), 0
        self.notes = [torch.zeros(4) for _ in range(8)]

    def forward(self, x: Tensor) -> Tensor:
        self.notes[self.turn].add_(1.0)
        self.turn += 1
        return torch.tanh(self.layer(x))


def test_steps_that_are_timed_leave_nothing_behind() -> None:
    module = InTurns()
    profile_module(module, torch.randn(32, 64))
    assert module.turn == 0
    assert not any(note.any() for note in module.notes)


def test_a_part_of_the_rows_has_the_values_that_all_rows_have() -> None:
    """Too small a tensor is no value and has no number: of few rows that is another one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 16), nn.Sigmoid())
    rows = torch.randn(32, 2, 16)

    def names(count: int, **options: Any) -> list[str]:
        part = rows[:count]
        costs = CostModel(torch.device("cpu"), **options)
        profile = profile_step(module, lambda: module(part).sin().mean(), torch.device("cpu"), costs=costs)
        return [value.name for value in profile.values if value.name]

    assert names(4) != names(32)
    assert names(4, part=(4, 32)) == names(32)


def test_statistics_of_channels_do_not_grow_with_the_rows() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 512), nn.BatchNorm1d(512), nn.Tanh(), nn.Linear(512, 512), nn.BatchNorm1d(512))
    rows = torch.randn(256, 16)

    def names(count: int, **options: Any) -> list[str]:
        part = rows[:count]
        costs = CostModel(torch.device("cpu"), **options)
        profile = profile_step(module, lambda: module(part).sin().mean(), torch.device("cpu"), costs=costs)
        return [value.name for value in profile.values if value.name]

    assert names(64, part=(64, 256)) == names(256)
