"""Steps that find gradients: a new one is an activation until it has been added to the one that is there."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_dpx as dpx
from lightning_dpx.bench.allocations import peak_of_passing
from tests.conftest import SIMULATED

TOLD = "parameters have gradients"

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)  # the host's allocator is asked


def make_linear() -> tuple[nn.Module, Tensor]:
    """Most of a step that finds gradients is the new gradient of a layer."""
    layers = [nn.Sequential(nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 128)) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(32, 128)


def make_convolutions() -> tuple[nn.Module, Tensor]:
    """The gradients of weights come while an operator has more inside itself."""
    layers: list[nn.Module] = []
    for given, wanted in ((3, 64), (64, 128), (128, 64)):
        layers += [nn.Conv2d(given, wanted, 3), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(2, 3, 12, 12)


def are_the_same_steps(count: int, module: nn.Module, plain: nn.Module, x: Tensor) -> bool:
    return all(torch.equal(a, b) for _ in range(count) for a, b in zip(step(module, x), step(plain, x), strict=True))


def step(module: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    module(x).sum().backward()
    gradients = list[Tensor]()
    for parameter in module.parameters():
        assert parameter.grad is not None
        gradients.append(parameter.grad.clone())
    return gradients


def peaks_of_two_steps(module: nn.Module, x: Tensor) -> list[int]:
    """Of a step that finds no gradients, and of the next one, which finds those of the first."""
    module.zero_grad(set_to_none=True)
    return [peak_of_passing(lambda: module(x).sum().backward()) for _ in range(2)]


@pytest.mark.parametrize(("make", "budget"), [(make_linear, 1.0), (make_linear, 0.9), (make_convolutions, 1.0)])
def test_a_plan_knows_what_a_step_takes_that_finds_gradients(make: Any, budget: float) -> None:
    module, x = make()
    plan = dpx.search_plan(module, x, budget=budget, progress=False)
    applied = dpx.apply_plan(module, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peaks_of_two_steps(module, x)  # the first steps find out where hooks are needed
        first, second = peaks_of_two_steps(module, x)
    assert applied.not_found == {}
    assert plan.peak == pytest.approx(first, rel=0.002)
    assert plan.adding_peak == pytest.approx(second, rel=0.002)
    assert second > 1.2 * first


@pytest.mark.parametrize("budget", [1.0, 0.9])
def test_gradients_that_take_a_step_beyond_its_budget_are_told_of_once(budget: float) -> None:
    """As in a loop that steps every second batch, whose plan was made before the first one."""
    module, x = make_linear()
    plain = copy.deepcopy(module)
    dpx.apply_plan(module, dpx.search_plan(module, x, budget=budget, progress=False))
    for _ in range(3):  # nothing is told of steps that find none
        module.zero_grad(set_to_none=True)
        plain.zero_grad(set_to_none=True)
        assert are_the_same_steps(1, module, plain, x)
    with pytest.warns(UserWarning, match=TOLD) as told:
        assert are_the_same_steps(3, module, plain, x)
    assert len(told) == 1
    assert "accumulates=True" in str(told[0].message)


def test_nothing_is_told_of_gradients_that_are_gone_before_the_backward() -> None:
    """As where ``zero_grad`` is called between forward and backward, which Lightning does."""
    module, x = make_linear()
    dpx.apply_plan(module, dpx.search_plan(module, x, budget=1.0, progress=False))
    for _ in range(3):
        loss = module(x).sum()
        module.zero_grad(set_to_none=True)
        loss.backward()


def test_nothing_is_told_where_the_budget_has_room_for_new_gradients() -> None:
    module, x = make_linear()
    plan = dpx.search_plan(module, x, budget=1.0, progress=False)
    assert plan.adding_peak is not None
    dpx.apply_plan(module, dpx.search_plan(module, x, budget=plan.adding_peak, progress=False))
    for _ in range(3):
        step(module, x)


@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_budget_is_kept_by_steps_that_find_gradients_if_the_plan_was_made_for_them(has_gradients: bool) -> None:
    module, x = make_linear()
    if has_gradients:
        step(module, x)
    before = [parameter.grad for parameter in module.parameters()]
    unplanned = peaks_of_two_steps(copy.deepcopy(module), x)[1]
    accumulates = None if has_gradients else True
    plan = dpx.search_plan(module, x, budget=int(0.9 * unplanned), accumulates=accumulates, progress=False)
    assert [parameter.grad for parameter in module.parameters()] == before
    assert plan.unplanned_peak == pytest.approx(unplanned, rel=0.002)
    dpx.apply_plan(module, plan)
    peaks_of_two_steps(module, x)
    assert max(peaks_of_two_steps(module, x)) <= 0.9 * unplanned


def test_gradients_that_are_there_do_not_count_in_a_plan_for_steps_that_find_none() -> None:
    module, x = make_linear()
    plan = dpx.search_plan(module, x, budget=0.9, progress=False)
    step(module, x)
    before = [parameter.grad for parameter in module.parameters()]
    other = dpx.search_plan(module, x, budget=0.9, accumulates=False, progress=False)
    assert other.unplanned_peak == plan.unplanned_peak
    assert other.adding_peak is not None
    for parameter, gradient in zip(module.parameters(), before, strict=True):
        assert parameter.grad is gradient


def test_plans_for_steps_with_and_without_gradients_are_two_in_the_cache(tmp_path: Any) -> None:
    module, x = make_linear()
    peaks = list[int]()
    for _ in range(2):
        plan = dpx.search_plan(module, x, budget=1.0, plan_cache=str(tmp_path), progress=False)
        peaks.append(plan.unplanned_peak)
        step(module, x)
    assert peaks[1] > 1.2 * peaks[0]
