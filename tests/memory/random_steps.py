"""Profiles of small random steps, and every choice there is for them."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dpx.memory import Profile, profile_module
from lightning_dpx.memory.plan.problem import Choice, Problem

_WIDTH = 32  # 32 x 32 floats are as many bytes as are worth the bookkeeping


class RandomGraph(nn.Module):
    """Operators on results of earlier ones, which save their input, their result, both or nothing."""

    def __init__(self, generator: random.Random, length: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(2))
        names = ("linear", "tanh", "relu", "sin", "mul", "mul", "add", "exp", "gated", "square")
        self.plan = [(generator.choice(names), generator.random(), generator.random()) for _ in range(length)]

    def forward(self, x: Tensor) -> Tensor:
        pool = [self.layers[0](x)]
        for name, *where in self.plan:
            a, b = (pool[int(len(pool) * share**0.5)] for share in where)  # rather late ones
            if name == "linear":
                pool.append(self.layers[1](a))
            elif name in ("mul", "add"):
                pool.append(getattr(torch, name)(a, b))
            elif name == "gated":
                left, right = torch.cat([a, b]).chunk(2)
                pool.append(left.sigmoid() * right)
            else:
                pool.append(getattr(torch, name)(a))
        return torch.stack([value.mean() for value in pool]).sum()


def blocks(number: int, *, usual: int) -> list[Any]:
    """Blocks of random steps: the first ones are run every time, and the others where tests may be slow."""
    return [pytest.param(block, marks=[] if block < usual else [pytest.mark.slow]) for block in range(number)]


def random_profile(seed: int, length: int) -> Profile:
    """A real profile; only the times are drawn."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    profile = profile_module(RandomGraph(generator, length), torch.randn(_WIDTH, _WIDTH))
    values = tuple(replace(value, seconds=generator.choice((0.0, 1.0, 2.0, 7.0))) for value in profile.values)
    return replace(profile, values=values, step_seconds=100.0)


MOST_UNITS = 5  # or there are too many choices


def every_choice(problem: Problem) -> Iterator[Choice]:
    """Keep, drop, or drop after every use, for each unit."""
    for actions in product(range(3), repeat=len(problem.droppable)):
        pairs = list(zip(problem.droppable, actions, strict=True))
        yield Choice(frozenset(u for u, a in pairs if a), frozenset(u for u, a in pairs if a == 2))


def budgets_and_least(problem: Problem, seed: int) -> list[tuple[int, float]]:
    """Some budgets, and the least seconds of all choices within each: infinite below the smallest peak.

    Without those that are nested, which the program leaves out.
    """
    results = [problem.forecast(choice) for choice in every_choice(problem) if not problem.is_nested(choice)]
    peaks = sorted({result.peak for result in results if result.peak < problem.profile.peak})
    if not peaks:
        return []
    chosen = {peaks[0] - 1, *peaks[:2], random.Random(seed).choice(peaks)}
    return [
        (budget, min((result.seconds for result in results if result.peak <= budget), default=float("inf")))
        for budget in sorted(chosen)
    ]
