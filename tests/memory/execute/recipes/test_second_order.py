"""Gradients of operators, of which another gradient is taken: made again to the bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dpx.memory import apply_plan, plan_profile, remove_plan
from tests.memory.execute.test_own_backwards import Step, measured, profiled
from tests.memory.steps import DropsEverything

SECOND_ORDER: dict[str, Callable[[Tensor], Tensor]] = {
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "Gelu": lambda x: F.gelu(x, approximate="tanh"),
    "Softplus": lambda x: F.softplus(x, 2.0),
    "Hardswish": F.hardswish,
    "Threshold": torch.relu,
    "LeakyRelu": lambda x: F.leaky_relu(x, 0.2),
    "Elu": lambda x: F.elu(x, 0.7),
    "SoftmaxBackwardData": lambda x: x.softmax(-1),
    "LogSoftmaxBackwardData": lambda x: x.log_softmax(0),
}


def node_of(name: str) -> str:
    """The name of the node, which the operator of a gradient makes."""
    return f"{name}Backward0" if name.endswith("BackwardData") else f"{name}BackwardBackward0"


@pytest.mark.parametrize("name", SECOND_ORDER)
def test_the_gradient_of_an_operator_is_made_again_to_the_bit(name: str) -> None:
    torch.manual_seed(0)
    module, rows = nn.Linear(64, 64), torch.randn(64, 64)

    def run(module: nn.Module, rows: Tensor) -> Tensor:
        hidden = module(rows)
        (gradient,) = torch.autograd.grad(SECOND_ORDER[name](hidden).pow(2).sum(), hidden, create_graph=True)
        return (gradient * gradient).sum()

    step = Step(run, lambda: module)
    plan = plan_profile(module, profiled(step, module, rows), None, DropsEverything())
    assert node_of(name) in {decision.operator for decision in plan.decisions if decision.action != "keep"}
    _, plain = measured(step, module, rows)
    apply_plan(module, plan)
    _, planned = measured(step, module, rows)
    remove_plan(module)
    assert all(map(torch.equal, planned, plain))
