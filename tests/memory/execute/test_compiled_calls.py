"""Hooks round compiled code, and plans that call it again as a whole."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.memory.execute.compiled_calls import code_of, hook_compiled_call
from lightning_dpx.torch_compat import find_compile_backend, functorch_config
from tests.conftest import COMPILES

pytestmark = COMPILES
CHEAP = "aot_eager_decomp_partition"  # partitions as inductor does, and compiles nothing


def stubborn(graph: Any, inputs: Any) -> Any:
    """A backend that saves what it likes, whatever share it may."""
    with functorch_config().patch(activation_memory_budget=1.0):
        return find_compile_backend(CHEAP)(graph, inputs)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = nn.functional.gelu(self.one(x))
        return x + self.two(nn.functional.silu(torch.tanh(middle) * middle))


class Model(nn.Module):
    def __init__(self, form: str, backend: Any = CHEAP) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 1)
        for index, block in enumerate(self.blocks):
            if form == "in place":
                block.compile(backend=backend)
            elif form == "method":
                block.forward = torch.compile(block.forward, backend=backend)
            else:
                self.blocks[index] = torch.compile(block, backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def peak(model: nn.Module, x: torch.Tensor) -> int:
    model.zero_grad()
    return peak_of_passing(lambda: model(x).sum().backward())


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("form", ["in place", "wrapped", "method"])
def test_compiled_blocks_are_called_again_with_the_same_bits_and_no_more_code(form: str) -> None:
    torch.manual_seed(0)
    model, x = Model(form, stubborn), torch.randn(128, 64)
    expected = gradients(model, x)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    plan = dpx.search_plan(model, x, budget=0.8)
    assert plan.replayed
    assert {name.partition(".")[0] for name in plan.replayed} == {"blocks"}
    applied = dpx.apply_plan(model, plan)
    for _ in range(2):
        assert all(map(torch.equal, gradients(model, x), expected))
    assert not applied.not_found
    dpx.remove_plan(model)
    assert all(map(torch.equal, gradients(model, x), expected))
    # One more share is tried, which changes nothing here.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= graphs + 2, "hooks of ours are not compiled"


def test_hooks_round_a_compiled_call_are_told_of_it_and_go() -> None:
    block = Block()
    block.compile(backend="eager")
    before = block._compiled_call_impl
    told: list[str] = []
    outer = hook_compiled_call(block, lambda *_: told.append("enter"), lambda *_: told.append("leave"))
    inner = hook_compiled_call(block, lambda *_: told.append("inner enter"), lambda *_: told.append("inner leave"))
    assert code_of(block) is before
    block(torch.ones(2, 64))
    assert told == ["enter", "inner enter", "inner leave", "leave"]
    assert copy.deepcopy(block._compiled_call_impl, {id(block): block}) is not block._compiled_call_impl
    outer.remove()
    inner.remove()
    inner.remove()
    assert block._compiled_call_impl is before


def test_a_failing_compiled_call_is_left() -> None:
    block = Block()
    block.compile(backend="eager")
    left: list[Any] = []
    hook_compiled_call(block, lambda *_: None, lambda module, args, output: left.append(output))
    with pytest.raises(RuntimeError, match=r"reduction dim|cannot be multiplied"):
        block(torch.ones(2, 3))
    assert left == [None]
