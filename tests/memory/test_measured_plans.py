"""The fastest of several plans is found by running steps, which leave nothing behind."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dpx.activations import Inputs
from lightning_dpx.memory import MemoryPlan, Profile, apply_plan, profile_module, remove_plan, search_plan
from lightning_dpx.memory.measured_plans import fastest_plan
from lightning_dpx.memory.module_step import run_to_loss
from lightning_dpx.memory.plan.make_plan import plan_candidates
from lightning_dpx.python_objects.leave_no_trace import untouched

PLAIN = 2.0  # seconds, in which a scripted step says that it runs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Scripted:
    """Runs the steps of a module and says how long they take: ``PLAIN``, or so many seconds with each plan in turn."""

    def __init__(self, module: nn.Module, *planned: float) -> None:
        self._module = module
        self._planned = planned
        self._warm_up = 2 + 2 * len(planned)  # one without a plan, two with each, and one before the first turn
        self._steps = 0
        self.watches = False
        self.hooks: list[int] = []

    def in_a_row(self, measure: Callable[[], Any]) -> Any:
        with untouched(self._module):
            return measure()

    def timed(self, forward: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> tuple[float, float]:
        self.hooks.append(num_hooks(self._module))
        with untouched(self._module):
            backward(forward())
        self._steps += 1
        turn = self._steps - self._warm_up - 1
        if turn < 0 or turn % 2:
            return PLAIN, 0.0
        return self._planned[turn // 2 % len(self._planned)], 0.0


def num_hooks(module: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in module.modules())


@pytest.fixture(scope="module")
def step() -> tuple[nn.Module, Tensor, Profile]:
    torch.manual_seed(0)
    module = nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(256, 64)
    return module, x, replace(profile_module(module, x), step_seconds=1e-3)


def candidates(module: nn.Module, profile: Profile) -> list[MemoryPlan]:
    """Two plans that differ in what they drop, whichever the planner prefers today."""
    found = [plan_candidates(module, profile, int(share * profile.peak), "optimal")[0] for share in (0.6, 0.8)]
    assert len(found[0].dropped) != len(found[1].dropped)
    return found


def chosen(step: tuple[nn.Module, Tensor, Profile], plans: Sequence[MemoryPlan], *seconds: float) -> MemoryPlan:
    module, x, profile = step
    timer: Any = Scripted(module, *seconds)
    return fastest_plan(plans, profile=profile, module=module, run=run_to_loss(module, Inputs((x,), {})), timer=timer)


def test_the_time_that_was_measured_is_that_of_the_plan(step: tuple[nn.Module, Tensor, Profile]) -> None:
    first, second = candidates(step[0], step[2])
    first = replace(first, recompute_share=0.1, least_share=0.05)
    found = chosen(step, [first], 3.0)
    assert found == replace(first, recompute_share=0.5)
    assert chosen(step, [replace(first, least_share=0.9)], 3.0).least_share == 0.5
    assert chosen(step, [first], 1.0).recompute_share == 0.0
    found = chosen(step, [first, second], 4.0, 3.0)
    assert found.decisions == second.decisions
    assert found.recompute_share == 0.5
    assert chosen(step, [first, second], 3.0, 2.95).decisions == first.decisions, "that may be luck"


def test_steps_that_are_long_or_run_their_own_backward_are_not_timed(step: tuple[nn.Module, Tensor, Profile]) -> None:
    module, x, profile = step
    plans = candidates(module, profile)
    for other in (
        replace(profile, step_seconds=1.0),
        replace(profile, saves=((0, 0),)),
        replace(profile, basis="fake"),
    ):
        timer: Any = Scripted(module, 3.0, 3.0)
        assert (
            fastest_plan(plans, profile=other, module=module, run=run_to_loss(module, Inputs((x,), {})), timer=timer)
            is plans[0]
        )
        assert timer.hooks == []


def test_where_steps_are_longer_fewer_plans_are_tried(step: tuple[nn.Module, Tensor, Profile]) -> None:
    module, x, profile = step
    plans = [replace(plan, recompute_share=0.5, least_share=None) for plan in candidates(module, profile)]
    longer = replace(profile, step_seconds=0.03)
    found = chosen((module, x, longer), plans, 5.0)
    assert found == replace(plans[0], recompute_share=1.5), "the second one, which may be faster, takes too long to try"


def test_steps_without_a_plan_have_no_hooks_of_values(step: tuple[nn.Module, Tensor, Profile]) -> None:
    module, x, profile = step
    timer: Any = Scripted(module, 3.0, 3.0)
    run = run_to_loss(module, Inputs((x,), {}))
    fastest_plan(candidates(module, profile), profile=profile, module=module, run=run, timer=timer)
    turns = timer.hooks[6:]  # behind those that warm up
    assert min(turns[::2]) > 0
    assert max(turns[1::2]) == 0, "the steps in between"
    assert num_hooks(module) == 0


def test_a_search_leaves_the_module_as_it_was_and_the_plan_gives_the_same_bits(
    step: tuple[nn.Module, Tensor, Profile],
) -> None:
    module, x, _ = step
    before = copy.deepcopy(module.state_dict())
    random = torch.get_rng_state()
    plan = search_plan(module, x, budget=0.6)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], now) for name, now in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert num_hooks(module) == 0
    expected = gradients(module, x)
    apply_plan(module, plan)
    assert all(map(torch.equal, gradients(module, x), expected))
    remove_plan(module)


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    module.zero_grad()
    with untouched(module):
        module(x).pow(2).sum().backward()
        return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
