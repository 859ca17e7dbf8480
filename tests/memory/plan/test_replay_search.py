"""Which calls are replayed beside what is dropped value by value."""

import torch
from torch import nn

from lightning_dpx.memory import profile_module
from lightning_dpx.memory.plan.planners.auto import SmallestPlanner
from lightning_dpx.memory.plan.problem import Choice, Problem
from lightning_dpx.memory.plan.replay_search import ReplayChoice, with_replays
from lightning_dpx.memory.plan.replayed_steps import ReplayableStep


def block(width: int) -> nn.Module:
    layers = list[nn.Module]()
    for _ in range(3):
        layers += [nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64), nn.Tanh()]
    return nn.Sequential(*layers)


def test_the_least_bytes_may_be_those_with_the_last_call_left_to_values() -> None:
    """It keeps all that it saves until it is over, beside what the step keeps."""
    torch.manual_seed(0)
    module = nn.Sequential(block(128), block(128), block(512))
    profile = profile_module(module, torch.randn(128, 64))
    step = ReplayableStep(profile)
    problem = Problem(step.replayed(frozenset({"0", "1"})))
    choose = SmallestPlanner().choose
    by_hand = problem.forecast(choose(problem, None))
    all_replayed = Problem(step.replayed(frozenset({"0", "1", "2"}))).forecast(Choice())
    assert by_hand.peak < all_replayed.peak
    plain = ReplayChoice(frozenset(), Problem(profile), Choice())
    found = with_replays(profile, plain, None, choose)
    assert found[0].peak <= by_hand.peak
