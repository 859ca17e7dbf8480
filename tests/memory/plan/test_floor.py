"""How little a step can take: values that are made again from others that are made again, level by level.

What a plan is said to take is compared with raw events of ``torch.profiler``, which is not the planner's account.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.activations import Inputs
from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.memory import plan_profile, profile_module
from lightning_dpx.memory.module_step import run_to_loss
from lightning_dpx.memory.plan.forecast import forecast
from lightning_dpx.memory.plan.problem import Choice, Problem
from lightning_dpx.memory.plan.solvers.bounds import Relaxation, least_bytes
from lightning_dpx.memory.profile.data import Profile, Request, SavedStorage, SavedValue
from tests.memory.allocating_nets import NETS

FLOORS = {"perceptron": 0.25, "convolution": 0.51, "channels last": 0.41, "one dimension": 0.40}


@pytest.mark.parametrize("name", FLOORS)
def test_values_are_made_from_others_that_do_not_stay(name: str) -> None:
    torch.manual_seed(0)
    module, rows = NETS[name]()
    run = run_to_loss(module, Inputs((rows,), {}))
    run().backward()  # libraries fill caches
    module.zero_grad()
    torch.manual_seed(1)
    run().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    profile = profile_module(module, rows)
    plan = plan_profile(module, profile, None)
    assert plan.peak is not None
    assert plan.peak <= FLOORS[name] * profile.peak
    assert least_bytes(Relaxation(Problem(profile))) <= plan.peak
    dpx.apply_plan(module, plan)
    torch.manual_seed(1)
    assert peak_of_passing(lambda: run().backward()) == pytest.approx(plan.peak, rel=0.002)
    assert all(map(torch.equal, expected, (parameter.grad for parameter in module.parameters())))


class WaveNet(nn.Module):
    """Gated convolutions with holes, whose skips are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**number) for number in range(6))
        self.mixes = nn.ModuleList(nn.Conv1d(8, 16, 1) for _ in range(6))
        self.last = nn.Conv1d(8, 16, 1)

    def forward(self, sound: Tensor) -> Tensor:
        skips: Any = 0
        for number, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            value, opening = gate(F.pad(sound, (2**number, 0))).chunk(2, 1)
            more, skip = mix(torch.tanh(value) * torch.sigmoid(opening)).chunk(2, 1)
            sound = sound + more
            skips = skips + skip
        loss: Tensor = self.last(F.relu(skips)).square().mean()
        return loss


def test_a_budget_that_is_kept_with_the_smallest_peak_is_not_refused() -> None:
    """The search for a budget goes other ways than that for the smallest peak, and may end above it."""
    torch.manual_seed(0)
    module, sound = WaveNet(), torch.randn(4, 8, 200, requires_grad=True)
    profile = profile_module(module, sound)
    smallest = plan_profile(module, profile, None)
    assert smallest.peak is not None
    plan = plan_profile(module, profile, smallest.peak)
    assert plan.peak is not None
    assert plan.peak <= smallest.peak
    with pytest.raises(dpx.PlanError, match="cannot be met by planner='threshold', which reaches"):
        plan_profile(module, profile, smallest.peak, "threshold")


def chain(length: int, *, residual: bool) -> Profile:
    """Values of 100 bytes, each made in a second from the one before, or from the two before."""
    values = [SavedValue("0:1", "", 100, 0, (), 0.0, "it does not come from the graph")]
    for at in range(1, length):
        inputs = (at - 1, at - 2) if residual and at > 1 else (at - 1,)
        values.append(SavedValue(f"{at}:1", "Sin", 100, at, inputs, 1.0, "", saved=at))
    end = 2 * length
    storages = [SavedStorage(100, min(at + 2, length), end - at) for at in range(length)]
    requests = [Request(end - at - 1, at, end - at) for at in reversed(range(length))]
    curve = [100 * (min(event, length - 1, end - event - 1) + 1) for event in range(end)]
    return Profile(tuple(values), tuple(storages), tuple(requests), tuple(curve), length, float(end))


@pytest.mark.parametrize("residual", [False, True])
def test_each_value_is_made_once_on_the_way_to_another(residual: bool) -> None:
    """Were it made once for each of its uses, the time of a residual chain would double with every value."""
    length = 40
    profile = chain(length, residual=residual)
    dropped = range(1, length)
    result = forecast(profile, dropped, dropped)
    once = sum(range(length))  # one way from the beginning for each request
    assert once <= result.seconds <= once + length, "only the first one, which is made from what is kept, for each use"
    assert result.peak <= 100 * (6 if residual else 5)
    assert forecast(profile, dropped).peak >= 100 * length


def test_long_chains_keep_some_values_so_that_none_is_made_too_often() -> None:
    problem = Problem(chain(300, residual=True))
    result = problem.forecast(dpx.memory.PLANNERS["optimal"]().choose(problem, None))
    assert result.peak <= 0.15 * problem.profile.peak
    assert result.seconds <= 40 * 300


def test_a_budget_above_the_floor_is_filled_with_what_need_not_be_forgotten() -> None:
    problem = Problem(chain(24, residual=True))
    planner = dpx.memory.PLANNERS["optimal"]()
    floor = problem.forecast(planner.choose(problem, None))
    above = problem.forecast(planner.choose(problem, 2 * floor.peak))
    assert above.peak <= 2 * floor.peak
    assert above.seconds < floor.seconds
    assert Choice() == planner.choose(problem, problem.profile.peak)


def test_a_long_chain_that_goes_after_every_use_does_not_recurse() -> None:
    """The last use of each value is that of all before it."""
    module = nn.Sequential(*(nn.Tanh() for _ in range(1200)))
    x = torch.randn(2, 1024, requires_grad=True)
    plan = dpx.search_plan(module, x, planner="threshold")  # of which only the names count, and it searches least
    names = [decision.name for decision in plan.decisions if decision.operator]
    segments = {name: "recompute" if at % 10 else "keep" for at, name in enumerate(names)}
    plan = plan.with_actions(segments | dict.fromkeys(names[600:700], "recompute each time"))
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    dpx.apply_plan(module, plan)
    (found,) = torch.autograd.grad(module(x).sum(), x)
    assert torch.equal(found, expected)


class Masked(torch.autograd.Function):
    """A dropout that no recipe knows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.empty_like(x).bernoulli_(0.9)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


class Drawing(nn.Module):
    """No recipe makes the mask that it draws, so the call is made again."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        return x + Masked.apply(torch.tanh(query * key) * value)


def test_the_states_of_generators_that_are_kept_count() -> None:
    """Five thousand bytes for each call that is made again, beside activations of little more."""
    torch.manual_seed(0)
    module, x = nn.Sequential(*(Drawing() for _ in range(6))), torch.randn(2, 32, 32)
    run = run_to_loss(module, Inputs((x,), {}))
    run().backward()
    module.zero_grad()
    profile = profile_module(module, x)
    plan = plan_profile(module, profile, None)
    assert plan.calls or plan.replayed
    dpx.apply_plan(module, plan)
    for _ in range(2):
        run().backward()
        module.zero_grad()
    assert peak_of_passing(lambda: run().backward()) == pytest.approx(plan.peak, rel=0.005)


class Numbers:
    """What a plan is made for, without any tensor."""

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return []

    def named_modules(self) -> list[tuple[str, nn.Module]]:
        return []


def test_a_plan_is_made_of_numbers_alone() -> None:
    profile = chain(12, residual=False)
    plan = plan_profile(Numbers(), profile, profile.peak // 2)
    assert plan.peak is not None
    assert plan.peak <= profile.peak // 2
    assert len(plan.decisions) == 12
    with pytest.raises(dpx.BudgetError, match=r"A budget of 90 bytes .* takes less than 400 bytes"):
        plan_profile(Numbers(), profile, 90)
