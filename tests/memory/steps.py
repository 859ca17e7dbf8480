"""Steps of small models, and the planner that drops all it can."""

import torch
from torch import Tensor, nn

from lightning_dpx.memory import (
    Planner,
)
from lightning_dpx.memory.plan.problem import Choice, Problem


def train(module: nn.Module, x: Tensor, steps: int = 3) -> list[Tensor]:
    """Gradients of the first step, then weights and buffers after a few."""
    optimizer, results = torch.optim.SGD(module.parameters(), lr=0.1), []
    torch.manual_seed(7)
    for step in range(steps):
        optimizer.zero_grad()
        module(x).float().pow(2).mean().backward()
        if step == 0:
            results += [p.grad.clone() for p in module.parameters() if p.grad is not None]
        optimizer.step()
    return results + [value.detach().clone() for value in module.state_dict().values()]


class DropsEverything(Planner):
    """Drops what can be dropped, whatever it costs."""

    name = "everything"

    def choose(self, problem: Problem, budget: int | None) -> Choice:
        return Choice(frozenset(problem.droppable))
