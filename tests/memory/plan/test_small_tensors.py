"""Tensors that are too small for a decision of their own go with the calls of modules that save them."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_dpx as dpx
from lightning_dpx.activations import Inputs
from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.memory import plan_profile, profile_module
from lightning_dpx.memory.execute.saved_tensor_hooks import SMALL
from lightning_dpx.memory.module_step import run_to_loss
from lightning_dpx.memory.plan.problem import Problem
from lightning_dpx.memory.plan.solvers.bounds import Relaxation, least_bytes

ROWS, WIDTH, TURNS = 8, 32, 40
assert ROWS * WIDTH * 4 < SMALL


class Recurrence(nn.Module):
    """A loop over the time whose states are a KiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.decay = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 32)."""
        state, found = torch.zeros(ROWS, WIDTH), []
        for row in self.norm(x).unbind(1):
            state = torch.tanh(state * self.decay.exp() + row)
            found.append(state * row)
        return x + torch.stack(found, 1)


class Blocks(nn.Module):
    """Several of them, each checkpointed by hand if ``by_hand``."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        self.blocks, self.by_hand = nn.ModuleList(Recurrence() for _ in range(4)), by_hand

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.by_hand else block(x)
        return x


class Cells(nn.Module):
    """A cell that is called for every time, each call checkpointed if ``by_hand``; all it saves is 2 KiB at a time."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        self.cell, self.by_hand = nn.GRUCell(WIDTH, WIDTH), by_hand
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 32)."""
        state, found = x.new_zeros(len(x), WIDTH), []
        for row in x.unbind(1):
            state = checkpoint(self.cell, row, state, use_reentrant=False) if self.by_hand else self.cell(row, state)
            found.append(state)
        return self.head(torch.stack(found, 1))


def made(*, by_hand: bool = False) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Blocks(by_hand=by_hand), torch.randn(ROWS, TURNS, WIDTH)


def peak(module: nn.Module, x: Tensor) -> int:
    run = run_to_loss(module, Inputs((x,), {}))
    run().backward()
    module.zero_grad()
    return peak_of_passing(lambda: run().backward())


def test_a_budget_near_that_of_checkpointed_blocks_is_reached() -> None:
    """Not the very one: until a call is over, and known to be one that can be replayed, all that it saves is there."""
    plain, by_hand = peak(*made()), peak(*made(by_hand=True))
    assert by_hand < 0.7 * plain
    module, x = made()
    expected = torch.autograd.grad(run_to_loss(module, Inputs((x,), {}))(), list(module.parameters()))
    plan = dpx.search_plan(module, x, budget=int(1.1 * by_hand))
    dpx.apply_plan(module, plan)
    assert all(
        map(
            torch.equal,
            expected,
            torch.autograd.grad(run_to_loss(module, Inputs((x,), {}))(), list(module.parameters())),
        )
    )
    assert peak(module, x) <= 1.1 * by_hand
    times = [decision.seconds for decision in plan.decisions if decision.action == "replay"]
    assert times
    assert min(times) > 0.0, "the calls count"


def test_calls_that_save_nothing_but_small_tensors_are_replayed() -> None:
    torch.manual_seed(0)
    module, x = Cells(), torch.randn(ROWS, TURNS, WIDTH)
    plain, by_hand = peak(module, x), peak(Cells(by_hand=True), x)
    assert by_hand < plain
    expected = torch.autograd.grad(run_to_loss(module, Inputs((x,), {}))(), list(module.parameters()))
    plan = dpx.search_plan(module, x, budget=by_hand)
    dpx.apply_plan(module, plan)
    assert all(
        map(
            torch.equal,
            expected,
            torch.autograd.grad(run_to_loss(module, Inputs((x,), {}))(), list(module.parameters())),
        )
    )
    assert plan.peak is not None
    assert plan.peak <= by_hand
    assert peak(module, x) <= min(by_hand, 1.01 * plan.peak)


def test_what_is_said_of_all_plans_holds_for_those_that_replay_calls() -> None:
    module, x = made()
    profile = profile_module(module, x)
    smallest = plan_profile(module, profile, None)
    surely = least_bytes(Relaxation(Problem(profile)))
    assert smallest.replayed
    assert smallest.peak is not None
    assert surely <= smallest.peak < 0.7 * profile.peak
    with pytest.raises(dpx.BudgetError, match="nothing that drops and computes again takes less than") as error:
        plan_profile(module, profile, surely - 1)
    assert error.value.smallest == smallest.peak
