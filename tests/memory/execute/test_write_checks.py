"""Where autograd refuses a saved tensor that was written to, a planned step refuses it at the same moment."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_dpx as dpx
from lightning_dpx.memory import Planner
from lightning_dpx.memory.plan.problem import Choice, Problem
from tests.memory.steps import DropsEverything


class _Nothing(Planner):
    name = "nothing"

    def choose(self, problem: Problem, budget: int | None) -> Choice:
        return Choice()


class Saves(nn.Module):
    """Saves parameters, views of them, small and large tensors, its input and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.table, self.frozen = nn.Parameter(torch.randn(4, 64)), nn.Parameter(torch.randn(64), requires_grad=False)
        self.register_buffer("scale", torch.rand(64))
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.one(x))
        self.seen["large"] = h
        h = self.two(h) * self.table[1] * self.frozen * self.scale
        weights = torch.softmax(h.mean(0), 0)
        self.seen["small"] = weights
        self.seen["unsaved"] = h = self.three(h)
        return h * weights


WRITES: dict[str, Callable[[Saves, Tensor], Any]] = {
    "nothing": lambda module, x: None,
    "a parameter": lambda module, x: module.two.weight.add_(1),
    "a parameter's view": lambda module, x: module.table[3].add_(1),
    "a frozen parameter": lambda module, x: module.frozen.mul_(2),
    "a buffer": lambda module, x: module.scale.mul_(2),
    "the input": lambda module, x: x.mul_(2),
    "a small tensor": lambda module, x: module.seen["small"].mul_(2),
    "a large tensor": lambda module, x: module.seen["large"].mul_(2),
    "data, which nobody counts": lambda module, x: module.two.bias.data.mul_(1),
}


@pytest.mark.parametrize("planner", [_Nothing(), DropsEverything()], ids=["kept", "dropped"])
@pytest.mark.parametrize("name", WRITES)
def test_what_autograd_refuses_is_refused(name: str, planner: Planner) -> None:
    torch.manual_seed(0)
    module = Saves()
    results: list[Any] = []
    for planned in (False, True):
        each, x = copy.deepcopy(module), torch.linspace(-1, 1, 4096).view(64, 64)
        if planned:
            plan = dpx.search_plan(each, x, planner=planner)
            dpx.apply_plan(each, plan)
        order: list[str] = []
        out = each(x)
        each.seen["unsaved"].register_hook(lambda _, order=order: order.append("three"))
        each.seen["large"].register_hook(lambda _, order=order: order.append("one"))
        with torch.no_grad():
            WRITES[name](each, x)
        error = ""
        try:
            out.pow(2).sum().backward()
        except RuntimeError as found:
            error = str(found)
        assert not error or "modified by an inplace operation" in error
        results.append((bool(error), order, [p.grad.tolist() for p in each.parameters() if p.grad is not None]))
    (error, order, gradients), (error_planned, order_planned, gradients_planned) = results
    assert error_planned == error
    if isinstance(planner, _Nothing) or not error:
        assert (order_planned, gradients_planned) == (order, gradients)
    else:  # what is computed again may need it earlier
        assert order_planned == order[: len(order_planned)]
    assert error == (name not in ("nothing", "data, which nobody counts"))


def test_a_part_of_a_backward_takes_no_changed_weight_for_what_it_was() -> None:
    """Autograd runs the last layer alone, which needs what the layers before it made of their weights of then."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.rand(64, 64, requires_grad=True)
    dpx.apply_plan(module, dpx.search_plan(module, x, planner=DropsEverything()))
    loss = module(x).sum()
    with torch.no_grad():
        module[2].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, list(module[4].parameters()))
