"""Operators are timed where they run: on accelerators without what it takes to start one and to wait for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_dpx.memory import profile_step
from lightning_dpx.memory.execute.values import Value
from lightning_dpx.memory.profile import costs
from lightning_dpx.memory.profile.bookkeeping import Bookkeeping, measured_bookkeeping
from lightning_dpx.memory.profile.costs import CostModel
from tests.conftest import SIMULATED

WAIT = 1e-4


class Clock:
    """Time passes for operators only: for each that starts, and for its elements."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def timed(self, tensor: torch.Tensor) -> torch.Tensor:
        self.now += WAIT if tensor.numel() == 1 else WAIT + tensor.numel() * 1e-6
        return tensor.clone()


@pytest.fixture
def clock(monkeypatch: Any) -> Clock:
    """Of a simulated device that is taken for a real one."""
    found = Clock()
    monkeypatch.setattr(costs, "clock_of", lambda device: found)
    monkeypatch.setattr(costs, "is_modelled", lambda device: False)
    monkeypatch.setattr(torch, "neg", found.timed)
    return found


def repeats(make: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> Value:
    kept = Value("", "")
    kept.keep(tensor)
    value = Value("", "")
    value.learn(make, [kept])
    return value


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.parametrize(("rows", "expected"), [(100, 100e-6), (1, 2e-6)])
def test_an_operator_takes_what_it_takes_beyond_one_that_does_nothing(clock: Clock, rows: int, expected: float) -> None:
    model = CostModel(torch.device("sim", 0))
    assert model.times_steps
    found = model.trial_of(repeats(clock.timed, torch.ones(rows, device="sim:0")))
    assert found.seconds == pytest.approx(expected)


def test_on_the_host_nothing_is_taken_off(monkeypatch: Any) -> None:
    clock = Clock()
    monkeypatch.setattr(costs, "clock_of", lambda device: clock)
    found = CostModel(torch.device("cpu")).trial_of(repeats(clock.timed, torch.ones(1)))
    assert found.seconds == pytest.approx(WAIT)


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_steps_of_a_device_whose_time_is_modelled_are_not_timed() -> None:
    assert not CostModel(torch.device("sim", 0)).times_steps


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_bookkeeping_that_no_step_tells_takes_what_it_takes_elsewhere(clock: Clock) -> None:
    """Operators lose the time of their start; with nothing in its place thousands of small ones cost nothing again."""
    module = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(3)))
    module.to("sim:0").automatic_optimization = False
    x = torch.ones(64, 32, device="sim:0")
    # Planned steps are not timed of steps that run their backwards by hand.
    profile = profile_step(module, lambda: module(x).sum().backward(), torch.device("sim", 0))
    known = measured_bookkeeping()
    again = [value.seconds for value in profile.values if value.seconds and not value.call]
    assert again
    assert min(again) >= known.value
    # What is offloaded passes the same hooks.
    assert profile.overhead.per_offload == known.value


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_bookkeeping_takes_nothing_where_time_is_modelled() -> None:
    assert CostModel(torch.device("sim", 0)).bookkeeping() == Bookkeeping()
