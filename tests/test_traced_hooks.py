"""Hooks that stand aside where a model is compiled as one graph."""

import pytest
import torch
from torch import Tensor, nn

import lightning_dpx as dpx

ROWS = torch.ones(64, 64)
ASIDE = "one that takes more than the budget is not told of"


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


def planned(budget: float) -> nn.Module:
    module = make()
    dpx.apply_plan(module, dpx.search_plan(module, ROWS, budget=budget, progress=False))
    return module


def gradients(module: nn.Module, compiled: nn.Module, rows: Tensor) -> list[Tensor]:
    module.zero_grad()
    compiled(rows).square().sum().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("eager_steps", [0, 1, 3])
def test_a_model_whose_plan_keeps_everything_is_compiled_as_one_graph(eager_steps: int) -> None:
    """Before the first step of the plan as well, and right after one that it has looked at, with hooks on all parts."""
    module = planned(1.0)
    for _ in range(eager_steps):
        gradients(module, module, ROWS)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with pytest.warns(UserWarning, match=ASIDE):
        found = gradients(module, compiled, ROWS)
    plain = make()
    assert all(map(torch.equal, found, gradients(plain, plain, ROWS)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
def test_a_model_that_is_compiled_in_parts_is_still_told_of() -> None:
    module = planned(1.0)
    torch.compiler.reset()
    compiled = torch.compile(module, backend="eager")
    for _ in range(2):
        gradients(module, compiled, ROWS)
    with pytest.warns(UserWarning, match="it is another step than the planned one, or a larger one"):
        gradients(module, compiled, ROWS.repeat(8, 1))


def test_a_plan_that_drops_something_is_not_left_out_without_a_word() -> None:
    module = planned(0.9)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(ROWS)


class Parts(nn.Module):
    """A module with a part that can be compiled alone, in which a layer has hooks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make()
        self.head = nn.Linear(64, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.body(rows))


def planned_parts(budget: float) -> Parts:
    module = Parts()
    dpx.apply_plan(module, dpx.search_plan(module, ROWS, budget=budget, progress=False))
    return module


def test_a_part_is_compiled_as_one_graph_after_a_plan_that_keeps_everything() -> None:
    torch.compiler.reset()
    module = planned_parts(1.0)
    module.body = torch.compile(module.body, fullgraph=True, backend="eager")
    with pytest.warns(UserWarning, match=ASIDE):
        # The routine that the first step teaches has hooks on what no forward has called.
        found, again = [[*gradients(module, module, ROWS)] for _ in range(2)]
    assert all(map(torch.equal, found, again))


def test_code_that_was_compiled_before_a_plan_was_put_on_is_told_of() -> None:
    torch.compiler.reset()
    module = make()
    compiled = torch.compile(lambda rows: module(rows), fullgraph=True, backend="eager")
    gradients(module, compiled, ROWS)
    dpx.apply_plan(module, dpx.search_plan(module, ROWS, budget=0.9, progress=False))
    with pytest.warns(UserWarning, match="no forward has followed the plan"):
        gradients(module, compiled, ROWS)


def test_a_model_that_is_compiled_after_a_plan_that_drops_something_is_told_of() -> None:
    """Compiled code saves what it likes, and nothing of that can be made again."""
    torch.compiler.reset()
    module = planned(0.9)
    compiled = torch.compile(module, backend="aot_eager")
    with pytest.warns(UserWarning, match="it is another step than the planned one, or a larger one"):
        gradients(module, compiled, ROWS)
