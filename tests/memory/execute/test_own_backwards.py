"""Steps that run backwards of their own: forces, gradient penalties, several graphs, one after another and at once."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import lightning_dpx as dpx
from lightning_dpx.memory import Profile, applied_plan, apply_plan, plan_profile, profile_step, remove_plan
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace

HOST = torch.device("cpu")


class Potential(nn.Module):
    """Positions (B, 64) to a loss of energies and forces, as interatomic potentials are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
        self.out = nn.Linear(64, 1)

    def forward(self, positions: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        energy = self.out(self.layers(positions)).sum()
        (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy + gradient.pow(2).sum()


class Network(nn.Module):
    """Rows (B, 64) to scores (B, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())))
        self.last = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 1))

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(rows))
        return result


@dataclass(frozen=True)
class Step:
    """A whole step, with its backwards; what the gradients are is found on the module."""

    run: Callable[[nn.Module, Tensor], Tensor | None]
    module: Callable[[], nn.Module] = Network


def _penalized(module: nn.Module, rows: Tensor) -> Tensor:
    """As a WGAN-GP's critic."""
    mixed = (rows * 0.5).requires_grad_()
    (gradient,) = torch.autograd.grad(module(mixed).sum(), mixed, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).pow(2).mean()
    return module(rows).mean() - module(rows * 2).mean() + penalty


def _one_after_another(module: nn.Module, rows: Tensor) -> None:
    for factor in (1, 2, 3):
        module(rows * factor).mean().backward()


def _at_once(module: nn.Module, rows: Tensor) -> None:
    losses = [module(rows * factor).mean() for factor in (1, 2, 3)]
    for loss in losses:
        loss.backward()


def _twice_through_the_same(module: nn.Module, rows: Tensor) -> None:
    scores = module(rows)
    scores.mean().backward(retain_graph=True)
    scores.pow(2).mean().backward()


def _in_part(module: nn.Module, rows: Tensor) -> None:
    """The second backward goes only so far as the first one has not been."""
    assert isinstance(module, Network)
    features = module.first(rows)
    features.mean().backward()
    module.last(features).mean().backward(inputs=list(module.last.parameters()))


def _let_go(module: nn.Module, rows: Tensor) -> Tensor:
    """A part of the graph that no backward will go through dies in the forward."""
    chosen = module(rows * 2).argmax(dim=0)
    return module(rows).mean() + chosen.sum() * 0.0


def _in_a_hook(module: nn.Module, rows: Tensor) -> Tensor:
    """As deep equilibria are trained: the hook's own graph goes with the loss, when the step is over."""
    assert isinstance(module, Network)
    features = module.first(rows)
    apart = features.detach().requires_grad_()
    once_more = module.first(apart)

    def solve(gradient: Tensor) -> Tensor:
        for _ in range(2):
            gradient = torch.autograd.grad(once_more, apart, gradient, retain_graph=True)[0]
        return gradient

    features.register_hook(solve)
    return module.last(features).mean()


STEPS = {
    "forces": Step(lambda module, rows: module(rows), Potential),
    "gradient penalty": Step(_penalized),
    "one after another": Step(_one_after_another),
    "at once": Step(_at_once),
    "twice through the same": Step(_twice_through_the_same),
    "in part": Step(_in_part),
    "in a hook": Step(_in_a_hook),
    "let go": Step(_let_go),
}


def measured(step: Step, module: nn.Module, rows: Tensor) -> tuple[int, list[Tensor | None]]:
    """The peak of a step by its operators, and the gradients."""
    for parameter in module.parameters():
        parameter.grad = None
    trace, applied = MemoryTrace(HOST), applied_plan(module)
    with trace:
        if applied is None:
            loss = step.run(module, rows)
        else:
            with applied.active():
                loss = step.run(module, rows)
        if loss is not None:
            loss.backward()
        del loss
    return trace.peak_of_passing(), [parameter.grad for parameter in module.parameters()]


def profiled(step: Step, module: nn.Module, rows: Tensor) -> Profile:
    return profile_step(module, lambda: step.run(module, rows), HOST)


@pytest.mark.parametrize("name", STEPS)
def test_the_predicted_peak_is_the_measured_one_and_gradients_are_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    step, rows = STEPS[name], torch.randn(256, 64)
    module = step.module()
    profile = profiled(step, module, rows)
    peak, gradients = measured(step, module, rows)
    assert profile.peak == peak
    smallest = plan_profile(module, profile, None)
    budgets = [(smallest.peak or 0) + (peak - (smallest.peak or 0)) * part // 3 for part in (2, 1, 0)]
    assert budgets[-1] < 0.95 * peak
    for budget in budgets:
        plan = plan_profile(module, profile, budget)
        applied = apply_plan(module, plan)
        planned_peak, planned_gradients = measured(step, module, rows)
        remove_plan(module)
        assert not applied.not_found
        assert plan.peak is not None
        assert bool(plan.dropped or plan.replayed) == (budget < peak)
        assert planned_peak == pytest.approx(plan.peak, rel=1e-3)
        assert plan.peak <= budget
        for planned, plain in zip(planned_gradients, gradients, strict=True):
            assert planned is plain is None or (
                planned is not None and plain is not None and torch.equal(planned, plain)
            )


def test_what_dies_in_the_forward_is_not_held_by_the_profile() -> None:
    module, rows = Network(), torch.randn(256, 64)
    profile = profiled(STEPS["let go"], module, rows)
    plain = profile_step(module, lambda: module(rows).mean(), HOST)
    assert profile.peak < 1.2 * plain.peak


class _Keeping(nn.Module):
    """Keeps a part of its graph until the next forward, as layers keep what an additional loss may be made of."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.beside = Network(), nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.kept: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        self.kept = self.beside(rows)
        scores: Tensor = self.network(rows)
        return scores


def test_what_the_module_keeps_of_the_graph_for_longer_than_the_step_makes_no_room() -> None:
    module, rows, step = _Keeping(), torch.randn(256, 64), Step(lambda module, rows: module(rows).mean(), _Keeping)
    profile = profiled(step, module, rows)
    assert profile.peak == measured(step, module, rows)[0]
    plan = plan_profile(module, profile, None)
    assert plan.dropped
    assert not any(name.startswith("beside") for name in plan.dropped)
    apply_plan(module, plan)
    assert measured(step, module, rows)[0] == plan.peak


def test_search_plan_of_a_potential() -> None:
    module, rows = Potential(), torch.randn(256, 64)
    plan = dpx.search_plan(module, rows, budget=0.9)
    assert plan.dropped
    assert plan.peak is not None
    assert plan.peak <= 0.9 * plan.unplanned_peak


def test_a_step_without_any_backward_asks_for_nothing() -> None:
    """The first step by hand may train nothing; it is no reason not to train."""
    module, rows = Network(), torch.randn(256, 64)

    def run() -> None:
        module(rows)

    profile = profile_step(module, run, HOST)
    assert not profile.requests
    assert profile.forward_events == len(profile.curve)
