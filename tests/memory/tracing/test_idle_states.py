"""Random states that nobody has drawn from are no difference, and others are."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dpx.memory import apply_plan, profile_module, remove_plan, search_plan
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace

CPU = torch.device("cpu")
_next_state = 0


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """``dpx_tests::attend(x, dropout_p)``: as attention on a GPU, its random state is another one in every call."""
    library = torch.library.Library("dpx_tests", "DEF")
    library.define("attend(Tensor x, float dropout_p=0.) -> (Tensor output, Tensor philox_seed)")

    def run(x: Tensor, dropout_p: float = 0.0) -> tuple[Tensor, Tensor]:
        global _next_state
        _next_state += 1
        return x.sin(), torch.tensor(_next_state)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output[1])

    def backward(ctx: Any, gradient: Tensor, _state: Any) -> tuple[Tensor, None]:
        x, _ = ctx.saved_tensors
        return gradient * x.cos(), None

    library.impl("attend", run, "CPU")
    torch.library.register_autograd("dpx_tests::attend", backward, setup_context=save, lib=library)
    yield
    library._destroy()


class Block(nn.Module):
    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = torch.ops.dpx_tests.attend(self.first(x).tanh(), self.dropout)[0]
        return x + self.last(attended).tanh()


def blocks(*, dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dropout=dropout) for _ in range(4)))


@pytest.mark.parametrize(("dropout", "are_replayed"), [(0.0, True), (0.1, False)])
def test_a_call_is_replayed_whatever_state_it_did_not_draw_from(dropout: float, are_replayed: bool) -> None:
    names = {call.name for call in profile_module(blocks(dropout=dropout), torch.randn(256, 64)).calls}
    assert names.issuperset({"0", "1", "2", "3"}) is are_replayed
    assert not names or are_replayed


def test_a_plan_that_replays_such_calls_gives_the_same_bits() -> None:
    module, rows = blocks(dropout=0.0), torch.randn(256, 64)
    module(rows).sum().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    plan = search_plan(module, rows, budget=0.6)
    apply_plan(module, plan)
    module(rows).sum().backward()
    remove_plan(module)
    assert all(torch.equal(parameter.grad, one) for parameter, one in zip(module.parameters(), expected, strict=True))


def test_a_state_is_known_while_its_memory_is_there() -> None:
    rows = torch.randn(4, 4)
    with MemoryTrace(CPU) as trace:
        output, state = torch.ops.dpx_tests.attend(rows, 0.0)
        _, drawn = torch.ops.dpx_tests.attend(rows, 0.5)
    assert trace.idle_states.has(state)
    assert trace.idle_states.has(state.detach())
    assert not any(map(trace.idle_states.has, (output, drawn, rows)))
    del state
    gc.collect()
    assert not any(trace.idle_states.has(torch.tensor(number)) for number in range(64))
