"""Module calls that are replayed as a whole: the same bits, errors and state, and the peak that was predicted."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lightning_dpx as dpx
from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.memory import plan_profile, profile_module
from lightning_dpx.memory.apply import applied_plan
from lightning_dpx.memory.plan.forecast_of_plan import forecast_plan
from lightning_dpx.memory.plan.plan import Decision, fingerprint_of
from lightning_dpx.memory.plan.replayed_steps import replayed
from tests.memory.models import Cube
from tests.memory.steps import train

WIDTH, ROWS = 64, 48


class Block(nn.Module):
    """What a layer of a transformer does, without attention."""

    def __init__(self, p: float = 0.0, tail: Callable[["Block", Tensor], Tensor] = lambda _, x: x) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop, self.tail, self.count, self.kept = nn.Dropout(p), tail, 0, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self, x + self.drop(self.down(F.gelu(self.up(self.norm(x))))))


class Chain(nn.Module):
    """Blocks, and what runs between them."""

    def __init__(self, blocks: list[nn.Module], between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.blocks, self.head, self.between = nn.ModuleList(blocks), nn.Linear(WIDTH, 8), between
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            x = self.between(x)
        out: Tensor = self.head(x)
        return out


def chain_of(count: int = 4, **kwargs: Any) -> Chain:
    torch.manual_seed(3)
    return Chain([Block(**kwargs) for _ in range(count)])


def rows() -> Tensor:
    torch.manual_seed(4)
    return torch.randn(ROWS, WIDTH)


def by_hand(module: nn.Module, *calls: str) -> dpx.MemoryPlan:
    """A plan that replays these calls, and keeps all else."""
    decisions = tuple(Decision(name, "", 0, 0.0, "replay") for name in calls)
    return dpx.MemoryPlan("Chain", fingerprint_of(module), "by hand", None, 1, None, None, None, None, decisions)


def all_blocks(module: Chain) -> dpx.MemoryPlan:
    return by_hand(module, *(f"blocks.{number}" for number in range(len(module.blocks))))


def peak(module: nn.Module, x: Tensor) -> int:
    """Bytes of a step at the most, by the allocator's account."""
    module.zero_grad(set_to_none=True)
    return peak_of_passing(lambda: module(x).float().pow(2).mean().backward())


def assert_same(module: Chain, x: Tensor, plan: dpx.MemoryPlan | None = None) -> None:
    plain = copy.deepcopy(module)
    dpx.apply_plan(module, all_blocks(module) if plan is None else plan)
    assert all(map(torch.equal, train(module, x), train(plain, x)))
    applied = applied_plan(module)
    assert applied is not None
    assert not applied.not_found


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_blocks_give_the_same_bits_at_the_predicted_peak_which_is_that_of_checkpoints(p: float) -> None:
    module, x = chain_of(p=p), rows()
    profile = profile_module(module, x)
    plan = all_blocks(module)
    predicted = forecast_plan(profile, plan)
    by_checkpoint = copy.deepcopy(module)
    by_checkpoint.checkpoints = True
    assert peak(module, x) == pytest.approx(profile.peak, rel=0.002)
    assert_same(module, x, plan)
    assert peak(module, x) == pytest.approx(predicted.peak, rel=0.002)
    assert predicted.peak < 0.6 * profile.peak
    assert predicted.peak <= 1.002 * peak(by_checkpoint, x)
    assert predicted.seconds > 0


def test_some_calls_are_replayed_and_values_dropped_elsewhere() -> None:
    module, x = chain_of(p=0.1), rows()
    profile = profile_module(module, x)
    mixed = replayed(profile, {"blocks.0", "blocks.2"})
    plan = plan_profile(module, replace(mixed, calls=()), int(0.8 * mixed.peak))
    assert plan.dropped
    calls = by_hand(module, "blocks.0", "blocks.2").decisions
    plan = replace(plan, decisions=(*calls, *plan.decisions))
    assert forecast_plan(profile, plan).peak == plan.peak
    assert_same(module, x, plan)
    assert peak(module, x) == pytest.approx(plan.peak, rel=0.002)


def _exponential_first(x: Tensor) -> Tensor:
    shifted = x + 0.5
    # The exponential is saved before what it is made from.
    return torch.tanh(shifted.exp()) + torch.sin(shifted.square())


def test_what_leads_into_a_replayed_call_by_what_is_saved_only_later_is_kept() -> None:
    torch.manual_seed(3)
    blocks: list[nn.Module] = [Block(tail=lambda _, out: torch.tanh(Cube.apply(out))) for _ in range(3)]
    module, x = Chain(blocks, between=_exponential_first), rows()
    mixed = replayed(profile_module(module, x), {f"blocks.{number}" for number in range(3)})
    exponentials = [value for value in mixed.values if value.operator == "ExpBackward0"]
    assert len(exponentials) == 3
    for value in exponentials:
        assert value.refused.startswith("it is made from what only 'blocks.")
    plan = plan_profile(module, replace(mixed, calls=()), None)
    plan = replace(plan, decisions=(*all_blocks(module).decisions, *plan.decisions))
    assert_same(module, x, plan)
    assert peak(module, x) == pytest.approx(plan.peak, rel=0.002)


def test_a_planner_chooses_calls_and_the_file_keeps_them(tmp_path: Any) -> None:
    module, x = chain_of(8), rows()
    profile = profile_module(module, x)
    expensive = replace(profile, values=tuple(replace(v, seconds=v.seconds + 1.0) for v in profile.values))
    budget = int(0.5 * profile.peak)
    plan = plan_profile(module, expensive, budget)
    assert plan.replayed
    assert not plan.dropped
    plan.save(tmp_path / "plan.yaml")
    assert dpx.MemoryPlan.load(tmp_path / "plan.yaml") == plan
    assert_same(module, x, plan)
    assert peak(module, x) <= budget
    assert plan.peak == forecast_plan(profile, plan).peak
    assert len(plan.replayed) < len(module.blocks), "the last ones have room"
    alone = plan.with_actions(dict.fromkeys(plan.replayed, "keep"))
    assert forecast_plan(profile, alone).peak == profile.peak


def test_modules_that_are_called_again_and_again() -> None:
    torch.manual_seed(3)
    shared = Block(0.2)
    module, x = Chain([shared, shared, Block(0.2)]), rows()
    assert_same(module, x, by_hand(module, "blocks.0", "blocks.0#2", "blocks.2"))
    once = Chain([shared, shared, Block(0.2)])
    assert_same(once, x, by_hand(once, "blocks.0#2"))


def test_of_nested_calls_the_outer_one_is_replayed() -> None:
    module, x = Chain([nn.Sequential(Block(0.1), Block(0.1)), Block()]), rows()
    assert_same(module, x, by_hand(module, "blocks.0", "blocks.0.1", "blocks.1"))
    profile = profile_module(module, x)
    plan = by_hand(module, "blocks.0", "blocks.0.1")
    assert forecast_plan(profile, plan) == forecast_plan(profile, by_hand(module, "blocks.0"))


def test_random_numbers_of_any_generator_are_drawn_once() -> None:
    def noisy(_: Block, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * torch.rand_like(x)) * random.uniform(0.9, 1.1) * float(np.random.normal(1.0, 0.1))

    module, x = chain_of(tail=noisy), rows()
    plain = copy.deepcopy(module)
    dpx.apply_plan(module, all_blocks(module))
    found = []
    for subject in (module, plain):
        random.seed(5)
        np.random.seed(5)
        found.append([*train(subject, x), torch.rand(3), torch.tensor([random.random(), np.random.normal()])])
    assert all(map(torch.equal, *found))


def test_a_call_that_leaves_traces_is_kept_and_said_so() -> None:
    def counting(block: Block, x: Tensor) -> Tensor:
        block.count += 1
        return x * block.count

    module, x = chain_of(tail=counting), rows()
    assert not profile_module(module, x).calls
    plain = copy.deepcopy(module)
    dpx.apply_plan(module, all_blocks(module))
    assert all(map(torch.equal, train(module, x), train(plain, x)))
    assert [block.count for block in module.blocks] == [3] * 4
    applied = applied_plan(module)
    assert applied is not None
    assert set(applied.not_found) == {f"blocks.{number}" for number in range(4)}


def test_batch_norms_see_every_batch_once() -> None:
    torch.manual_seed(3)
    module = Chain([nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.GELU()) for _ in range(3)])
    assert_same(module, rows())


def _saved_and_returned(block: Block, x: Tensor) -> Tensor:
    return torch.tanh(x)


def _saved_and_changed_within(block: Block, x: Tensor) -> Tensor:
    y = torch.exp(0.1 * x)
    y.add_(1)
    return y


@pytest.mark.parametrize(
    ("tail", "between"),
    [(_saved_and_returned, lambda x: x.add_(1)), (_saved_and_changed_within, lambda x: x)],
)
def test_what_autograd_saves_may_not_be_written_to(tail: Any, between: Any) -> None:
    torch.manual_seed(3)
    module, x = Chain([Block(tail=tail) for _ in range(2)], between), rows()
    plain = copy.deepcopy(module)
    for subject in (plain, module):
        if subject is module:
            dpx.apply_plan(module, all_blocks(module))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            subject(x).sum().backward()


def test_what_is_returned_and_not_saved_may_be_written_to() -> None:
    torch.manual_seed(3)
    module = Chain([Block(), Block()], lambda x: x.add_(1))
    assert_same(module, rows())


def test_arguments_that_are_written_to_after_the_call_are_an_error_and_not_planned() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(WIDTH, WIDTH), Block()
            self.block.norm = nn.Identity()  # type: ignore[assignment]
            self.block.up = nn.Dropout(0.5)  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            out = self.block.down(torch.cat([self.block.up(h), h], 1))
            h.add_(1)
            return out + h

    module, x = Late(), rows()
    assert not profile_module(module, x).calls


def test_a_second_backward_through_the_same_graph() -> None:
    module, x = chain_of(p=0.2), rows()
    plain = copy.deepcopy(module)
    dpx.apply_plan(module, all_blocks(module))
    found = []
    for subject in (module, plain):
        torch.manual_seed(1)
        loss = subject(x).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([one.grad for one in subject.parameters()])
    assert all(map(torch.equal, *found))


def test_gradients_of_gradients() -> None:
    module, x = chain_of(), rows()
    plain = copy.deepcopy(module)
    dpx.apply_plan(module, all_blocks(module))
    found = []
    for subject in (module, plain):
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(subject(given).pow(2).mean(), given, create_graph=True)
        slope.pow(2).sum().backward()
        found.append([one.grad for one in subject.parameters() if one.grad is not None])
    assert all(map(torch.equal, *found))


def test_autocast_and_other_shapes() -> None:
    module, x = chain_of(p=0.2), rows()
    plain = copy.deepcopy(module)
    dpx.apply_plan(module, all_blocks(module))
    for given in (x, x[:5]):
        with torch.autocast("cpu", torch.bfloat16):
            assert all(map(torch.equal, train(module, given), train(plain, given)))


def test_a_module_that_does_something_else_the_second_time_is_not_replayed() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Tensor) -> Tensor:
            hidden = vars(F.relu6)  # nobody watches the attributes of torch's functions
            hidden["turn"] = hidden.get("turn", 0) + 1
            out: Tensor = self.inner(x) if hidden["turn"] % 2 else torch.sin(self.inner(torch.cos(x)))
            return out

    torch.manual_seed(3)
    module, x = Chain([Block(), Block()]), rows()
    module.blocks[0] = Fickle()
    try:
        assert "blocks.0" not in {call.name for call in profile_module(module, x).calls}
    finally:
        vars(F.relu6).clear()


def test_what_was_written_between_forward_and_backward() -> None:
    module, x = chain_of(), rows()
    dpx.apply_plan(module, all_blocks(module))
    loss = module(x).sum()
    with torch.no_grad():
        next(module.blocks[1].parameters()).add_(1)
    with pytest.raises(RuntimeError, match=r"blocks\.1.*changed in place between forward and backward"):
        loss.backward()


def test_nothing_stays_after_backward() -> None:
    module, x = chain_of(), rows()
    dpx.apply_plan(module, all_blocks(module))
    first = peak(module, x)
    assert [peak(module, x) for _ in range(3)] == [first] * 3
