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
    """Attention as on a GPU, whose random state is another one in every call; and what others might call alike.

    ``dpx_tests::round`` reads its state in backward, although it drops nothing.
    """
    attention, others = torch.library.Library("aten", "IMPL"), torch.library.Library("dpx_tests", "DEF")
    others.define("round(Tensor x, float dropout_p=0.) -> (Tensor output, Tensor rng_state)")
    others.define("drop(Tensor x, Tensor dropout_p) -> (Tensor output, Tensor rng_state)")
    others.define("state(Tensor x, float dropout_p=0.) -> Tensor rng_state")

    def next_state() -> Tensor:
        global _next_state
        _next_state += 1
        return torch.tensor(_next_state)

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        return query.sin(), query[..., 0] + 0, next_state(), next_state()

    def attend_backward(gradient: Tensor, query: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
        return gradient * query.cos(), torch.zeros_like(query), torch.zeros_like(query), None

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[1])

    def backward(ctx: Any, gradient: Tensor, _state: Any) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None

    attention.impl("_scaled_dot_product_efficient_attention", attend, "CPU")
    attention.impl("_scaled_dot_product_efficient_attention_backward", attend_backward, "CPU")
    others.impl("round", lambda x, dropout_p=0.0: (x.clone(), next_state()), "CPU")
    others.impl("drop", lambda x, dropout_p: (x.clone(), next_state()), "CPU")
    others.impl("state", lambda x, dropout_p=0.0: next_state(), "CPU")
    torch.library.register_autograd("dpx_tests::round", backward, setup_context=save, lib=others)
    yield
    attention._destroy()
    others._destroy()


def attended(rows: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """The result, and a state, of attention that may drop something."""
    heads = rows[None, None]
    found = torch.ops.aten._scaled_dot_product_efficient_attention(heads, heads, heads, None, True, dropout)
    return found[0][0, 0], found[2]


class Block(nn.Module):
    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(attended(self.first(x).tanh(), self.dropout)[0]).tanh()


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(torch.ops.dpx_tests.round(self.first(x).tanh())[0]).tanh()


class Others(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        dropped = torch.ops.dpx_tests.drop(x, torch.zeros(2))[0]
        y: Tensor = self.layer(dropped).tanh() * torch.ops.dpx_tests.state(x)
        return y


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


def test_what_other_libraries_call_alike_is_compared() -> None:
    module = nn.Sequential(*(Rounding() for _ in range(4)))
    assert not profile_module(module, torch.randn(256, 64)).calls, "its backward would read another state"


def test_operators_whose_arguments_or_results_only_look_alike_are_profiled() -> None:
    assert profile_module(Others(), torch.randn(256, 64)).values


def test_a_state_is_known_while_its_memory_is_there() -> None:
    rows = torch.randn(4, 4)
    with MemoryTrace(CPU) as trace:
        output, state = attended(rows, 0.0)
        _, drawn = attended(rows, 0.5)
    assert trace.idle_states.has(state)
    assert trace.idle_states.has(state.detach())
    assert not any(map(trace.idle_states.has, (output, drawn, rows)))
    del state
    gc.collect()
    assert not any(trace.idle_states.has(torch.tensor(number)) for number in range(64))
