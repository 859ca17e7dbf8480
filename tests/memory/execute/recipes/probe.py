"""One operator in a small module, and whether its recipe repeats it to the bit."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import lightning_dpx as dpx
from tests.memory.steps import DropsEverything, train

Function = Callable[["Probe", Tensor], Tensor]


def line(x: Tensor) -> Tensor:
    """As (16, 8, 64)."""
    return x.flatten(2)


def cube(x: Tensor) -> Tensor:
    """As (2, 8, 8, 8, 8)."""
    return x.view(2, 8, 8, 8, 8)


def as_complex(p: "Probe", x: Tensor) -> Tensor:
    """With the imaginary part of the probe."""
    return torch.complex(x, p.x)


def node_name(name: str) -> str:
    """The autograd node of an example: its first word."""
    first = name.split()[0]
    return first if "Backward" in first else f"{first}Backward0"


class Probe(nn.Module):
    """One operator on (16, 8, 8, 8), followed by one that saves its result."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.x, self.matrix = nn.Parameter(torch.rand(16, 8, 8, 8) + 0.1), nn.Parameter(torch.randn(8, 8))
        self.kernel, self.bias = nn.Parameter(torch.randn(8, 8, 3, 3)), nn.Parameter(torch.rand(8) + 0.5)
        self.frozen = nn.Parameter(torch.rand(8) + 0.5, requires_grad=False)
        self.table = nn.Parameter(torch.rand(1, 12, 8), requires_grad=False)
        self.register_buffer("large", torch.rand(16, 8, 8, 8))
        self.register_buffer("counter", torch.ones(1))
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("indices", torch.randint(8, (64, 8)))
        self.function = function
        with torch.no_grad():
            self.weight = nn.Parameter(torch.randn_like(self.result()))

    def result(self) -> Tensor:
        return self.function(self, torch.sin(self.x)).neg()

    def count(self, x: Tensor) -> Tensor:
        result = x + self.counter
        self.counter += 1
        return result

    def forward(self, _: Tensor) -> Tensor:
        result = self.result() * self.weight
        return torch.view_as_real(result) if result.is_complex() else result.float()


def check_recipe(name: str, function: Function) -> None:
    """Drops the result of ``function`` and finds the same gradients."""
    torch.manual_seed(0)
    module = Probe(function)
    node = module.result().grad_fn
    assert node is not None
    source = node.next_functions[0][0]
    made_by = source.name() if source is not None else ""
    wanted = node_name(name)[:-1]
    views = ("ViewBackward0", "UnsafeViewBackward0")  # of torch before and from 2.15
    assert made_by.startswith(wanted) or (wanted == "AddmmBackward" and made_by in views), made_by
    plan = dpx.search_plan(module, torch.ones(1), planner=DropsEverything())
    assert "NegBackward0" in {d.operator for d in plan.decisions if d.action == "recompute"}, "its result was refused"
    torch.manual_seed(0)
    plain = Probe(function)
    plain.load_state_dict(module.state_dict())
    applied = dpx.apply_plan(module, plan)
    assert all(map(torch.equal, train(module, torch.ones(1)), train(plain, torch.ones(1))))
    assert not applied.not_found


def check_on_a_gpu(module: nn.Module, x: Tensor, operator: str) -> None:
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, x, planner=DropsEverything())
    # What is small is sent to the host's memory sooner than it is made again.
    names = [d.name for d in plan.decisions if d.operator.startswith(operator)]
    assert names, [(d.operator, d.action) for d in plan.decisions]
    applied = dpx.apply_plan(module, plan.with_actions(dict.fromkeys(names, "recompute")))
    for one, other in zip(train(module, x), train(plain, x), strict=True):
        torch.testing.assert_close(one, other)
    assert not applied.not_found
