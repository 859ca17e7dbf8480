"""A budget is kept by the allocator's own account: what operators take inside themselves, and copies of gradients.

The account on the host is not the planner's: raw events of ``torch.profiler`` round whole steps (bench/allocations.py).
On simulated devices it is that of their allocator.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

import lightning_dpx as dpx
from lightning_dpx.activations import Inputs
from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.memory import Profile, plan_profile, profile_module
from lightning_dpx.memory.module_step import run_to_loss
from lightning_dpx.memory.profile.data import most_with
from lightning_dpx.memory.tracing.allocator_account import OperatorMemory
from tests.conftest import SIMULATED
from tests.memory.allocating_nets import NETS

WITHIN = 0.002
FIRST, ACCUMULATING = (0.8, 0.45), (0.6,)  # shares of the unplanned peak


def build(name: str, *, gradients: bool) -> tuple[nn.Module, Tensor]:
    """A net that has taken a step, and kept the gradients of it or not."""
    torch.manual_seed(0)
    module, rows = NETS[name]()
    run_to_loss(module, Inputs((rows,), {}))().backward()
    if not gradients:
        module.zero_grad(set_to_none=True)
    return module, rows


def peak_and_gradients(module: nn.Module, rows: Tensor) -> tuple[int, list[Tensor]]:
    """Of one step; gradients and buffers are left as they were."""
    gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]
    buffers = [buffer.clone() for buffer in module.buffers()]
    torch.manual_seed(1)
    peak = peak_of_passing(lambda: run_to_loss(module, Inputs((rows,), {}))().backward())
    found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        parameter.grad = gradient
    for buffer, before in zip(module.buffers(), buffers, strict=True):
        buffer.copy_(before)
    return peak, found


def plan_or_smallest(module: nn.Module, profile: Profile, budget: int) -> dpx.MemoryPlan:
    """Where a budget is refused, for the smallest that the message names."""
    try:
        return plan_profile(module, profile, budget)
    except dpx.BudgetError as error:
        return plan_profile(module, profile, error.smallest)


@pytest.mark.parametrize(("gradients", "shares"), [(False, FIRST), (True, ACCUMULATING)], ids=["first", "accumulating"])
@pytest.mark.parametrize("name", NETS)
def test_budgets_are_kept_by_the_account_of_the_allocator(
    name: str, gradients: bool, shares: tuple[float, ...]
) -> None:
    module, rows = build(name, gradients=gradients)
    unplanned, expected = peak_and_gradients(module, rows)
    profile = profile_module(module, rows)
    assert not profile.basis
    assert profile.peak == pytest.approx(unplanned, rel=WITHIN)
    for share in shares:
        plan = plan_or_smallest(module, profile, int(share * unplanned))
        budget = plan.budget or 0
        dpx.apply_plan(module, plan)
        peak, found = peak_and_gradients(module, rows)
        dpx.remove_plan(module)
        assert peak <= (1 + WITHIN) * budget
        assert peak == pytest.approx(plan.peak, rel=0.01)
        assert all(map(torch.equal, found, expected))


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.parametrize("name", ["convolution", "encoder", "perceptron", "neighbors"])
def test_so_they_are_on_devices_whose_allocator_counts(name: str, sim: Any) -> None:
    module, rows = build(name, gradients=True)
    module, rows = module.to("sim:0"), rows.to("sim:0")

    def peak() -> int:
        before = sim.memory_allocated(0)
        sim.reset_peak_memory_stats(0)
        run_to_loss(module, Inputs((rows,), {}))().backward()
        return int(sim.max_memory_allocated(0) - before)

    peak()  # leaves gradients there
    unplanned = peak()
    profile = profile_module(module, rows)
    assert profile.peak == pytest.approx(unplanned, rel=WITHIN)
    plan = plan_or_smallest(module, profile, int(0.6 * unplanned))
    dpx.apply_plan(module, plan)
    assert peak() == pytest.approx(plan.peak, rel=WITHIN)


def test_beside_a_profiler_of_others_it_says_what_is_missing() -> None:
    module, rows = build("convolution", gradients=False)
    alone = profile_module(module, rows)
    with profiler(activities=[ProfilerActivity.CPU]):
        beside = profile_module(module, rows)
    assert beside.basis == "without what operators take inside: a profiler that runs in this thread already hides it"
    assert beside.peak < alone.peak


def test_an_operator_that_fails_leaves_no_profiler_behind() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(32, 64))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            profile_module(module, torch.ones(4, 64))
    assert not torch._C._autograd._profiler_enabled()


def test_blocks_that_stay_count_from_when_they_came() -> None:
    """Of two blocks of one size, one of which goes, the later one stays: what was there before it came is most."""
    taken = OperatorMemory(130, (100, 30, -100, 100, 20, -20))
    assert taken.until_each_stays() == [(30, 100), (100, 130)]


def test_what_is_wanted_of_a_call_adds_to_what_follows_its_end() -> None:
    stretches = (50, 80, 20)  # the first tensor goes after 50, the second after 80
    assert most_with(stretches, []) == 80
    assert most_with(stretches, [(1, 10)]) == 90
    assert most_with(stretches, [(2, 70)]) == 90
    assert most_with(stretches, [(1, 10), (2, 70)]) == 100
