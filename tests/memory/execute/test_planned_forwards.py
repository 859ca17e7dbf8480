"""A plan on a module whose forward is interrupted: nothing of that forward stays, and the next one follows the plan."""

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

import lightning_dpx as dpx
from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.memory.plan.plan import Decision, fingerprint_of
from lightning_dpx.torch_compat import top_saved_tensors_hooks
from tests.memory.steps import train


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.interrupts = False

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        if self.interrupts:
            raise KeyboardInterrupt
        return x + self.down(y)


def blocks() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(6))), torch.randn(128, 64)


def plan_of(module: nn.Module, x: Tensor, action: str) -> dpx.MemoryPlan:
    """Drops values, or replays whole calls."""
    if action == "recompute":
        return dpx.search_plan(module, x, budget=0.6, planner="optimal")
    decisions = tuple(Decision(str(number), "", 0, 0.0, action) for number in range(6))
    return dpx.MemoryPlan("Sequential", fingerprint_of(module), "by hand", None, 1, None, None, None, None, decisions)


def peak(module: nn.Module, x: Tensor) -> int:
    module.zero_grad(set_to_none=True)
    return peak_of_passing(lambda: module(x).pow(2).mean().backward())


def interrupt(module: nn.Sequential, x: Tensor, root: nn.Module | None = None) -> None:
    """Ctrl-C within the fourth block, in a call of ``root`` if that holds the module."""
    block = module[3]
    assert isinstance(block, Block)
    block.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        (root or module)(x)
    block.interrupts = False


@pytest.mark.parametrize("earlier_steps", [0, 3])
@pytest.mark.parametrize("action", ["recompute", "replay"])
def test_after_an_interrupted_forward_the_plan_is_followed_as_before(action: str, earlier_steps: int) -> None:
    module, x = blocks()
    plain = copy.deepcopy(module)
    plan = plan_of(module, x, action)
    dpx.apply_plan(plain, plan)
    undisturbed = peak(plain, x)
    dpx.remove_plan(plain)
    applied = dpx.apply_plan(module, plan)
    for _ in range(earlier_steps):
        peak(module, x)
    interrupt(module, x)
    assert peak(module, x) == undisturbed
    assert all(map(torch.equal, train(module, x), train(plain, x)))
    assert not applied.not_found
    assert top_saved_tensors_hooks(True) is None


@pytest.mark.parametrize("action", ["recompute", "replay"])
def test_with_the_plan_goes_what_an_interrupted_forward_has_left(action: str) -> None:
    module, x = blocks()
    dpx.apply_plan(module, plan_of(module, x, action))
    interrupt(module, x)
    dpx.remove_plan(module)
    assert top_saved_tensors_hooks(True) is None


def test_hooks_of_others_stay_where_an_interrupted_forward_has_left_some_below_them() -> None:
    module, x = blocks()
    dpx.apply_plan(module, plan_of(module, x, "recompute"))
    interrupt(module, x)
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dpx.remove_plan(module)
        module(x)
    assert seen
    assert top_saved_tensors_hooks(True) is None


def test_a_forward_within_a_forward_is_no_interrupted_one() -> None:
    module, x = blocks()

    class CallsItself(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = module

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            x = self.net(x)
            return self(x, again=False) if again else x

    outer = CallsItself()
    plain = copy.deepcopy(outer)
    plan = dpx.search_plan(outer, x, budget=0.7)
    dpx.apply_plan(plain, plan)
    first = peak(plain, x)
    dpx.remove_plan(plain)
    dpx.apply_plan(outer, plan)
    assert peak(outer, x) == first < peak(plain, x)
    assert all(map(torch.equal, train(outer, x), train(plain, x)))


class Catches(nn.Module):
    """Goes on after an error of this ``kind`` in a part of it."""

    def __init__(self, net: nn.Module, kind: type[BaseException]) -> None:
        super().__init__()
        self.net, self.more, self.kind = net, Block(), kind

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.net(x)
        except self.kind:
            assert top_saved_tensors_hooks(True) is not None
        return self.more(x)


@pytest.mark.parametrize("action", ["recompute", "replay"])
def test_of_planned_modules_in_each_other_an_interrupted_forward_leaves_nothing(action: str) -> None:
    module, x = blocks()
    outer = nn.Sequential(Block(), module)
    plain = copy.deepcopy(outer)
    plan = dpx.search_plan(outer, x, budget=0.9)
    dpx.apply_plan(module, plan_of(module, x, action))
    dpx.apply_plan(outer, plan)
    interrupt(module, x, outer)
    assert all(map(torch.equal, train(outer, x), train(plain, x)))
    assert top_saved_tensors_hooks(True) is None


@pytest.mark.parametrize("action", ["recompute", "replay"])
def test_a_planned_forward_may_go_on_after_one_within_it_that_was_interrupted(action: str) -> None:
    module, x = blocks()
    outer = Catches(module, KeyboardInterrupt)
    plan = dpx.search_plan(outer, x, budget=0.9)
    dpx.apply_plan(module, plan_of(module, x, action))
    dpx.apply_plan(outer, plan)
    block = module[3]
    assert isinstance(block, Block)
    block.interrupts = True
    gradients = torch.autograd.grad(outer(x).sum(), list(outer.more.parameters()))
    assert top_saved_tensors_hooks(True) is None
    expected = torch.autograd.grad(outer.more(x).sum(), list(outer.more.parameters()))
    assert all(map(torch.equal, gradients, expected))


def test_what_is_left_goes_with_the_next_planned_forward_also_where_another_thread_took_the_plan_off() -> None:
    module, x = blocks()
    plan = plan_of(module, x, "recompute")
    dpx.apply_plan(module, plan)
    interrupt(module, x)
    remover = threading.Thread(target=dpx.remove_plan, args=(module,))
    remover.start()
    remover.join()
    dpx.apply_plan(module, plan)
    module(x)
    assert top_saved_tensors_hooks(True) is None


def refuse(_module: nn.Module, _inputs: tuple[Tensor, ...]) -> None:
    raise ValueError("these rows are not allowed")


def test_a_forward_that_a_hook_before_those_of_the_plan_refuses_ends_no_forward_around_it() -> None:
    module, x = blocks()
    outer = Catches(module, ValueError)
    plan = dpx.search_plan(outer, x, budget=0.9)
    dpx.apply_plan(module, plan_of(module, x, "recompute"))
    dpx.apply_plan(outer, plan)
    module.register_forward_pre_hook(refuse, prepend=True)
    gradients = torch.autograd.grad(outer(x).sum(), list(outer.more.parameters()))
    assert top_saved_tensors_hooks(True) is None
    expected = torch.autograd.grad(outer.more(x).sum(), list(outer.more.parameters()))
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.filterwarnings("error")
def test_where_a_hook_before_those_of_the_plan_refuses_a_forward_its_error_is_all_that_is_told() -> None:
    module, x = blocks()
    dpx.apply_plan(module, plan_of(module, x, "recompute"))
    module.register_forward_pre_hook(refuse, prepend=True)
    with pytest.raises(ValueError, match="not allowed"):
        module(x)


def test_a_block_that_follows_the_plan_does_so_after_an_interrupted_forward() -> None:
    module, x = blocks()
    applied = dpx.apply_plan(module, plan_of(module, x, "recompute"))

    def step() -> None:
        module.zero_grad(set_to_none=True)
        with applied.active((x,)):
            y = x
            for block in module:
                y = block(y)
        y.pow(2).mean().backward()

    step()
    expected = peak_of_passing(step)
    interrupt(module, x)
    assert peak_of_passing(step) == expected
    assert top_saved_tensors_hooks(True) is None


def hooks_on(module: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in module.modules())


@pytest.mark.parametrize("action", ["recompute", "replay"])
def test_a_plan_that_is_taken_off_within_a_forward_leaves_nothing(action: str) -> None:
    module, x = blocks()
    plain = copy.deepcopy(module)
    dpx.apply_plan(module, plan_of(module, x, action))
    remover = module[3].register_forward_pre_hook(lambda *_: dpx.remove_plan(module))
    y = module(x)
    remover.remove()
    assert top_saved_tensors_hooks(True) is None
    assert hooks_on(module) == 0
    gradients = torch.autograd.grad(y.sum(), list(module.parameters()))
    assert all(map(torch.equal, gradients, torch.autograd.grad(plain(x).sum(), list(plain.parameters()))))


def test_a_plan_that_keeps_everything_leaves_no_hooks_where_it_is_taken_off_within_a_block() -> None:
    module, x = blocks()
    applied = dpx.apply_plan(module, dpx.search_plan(module, x, budget="1GiB"))
    with applied.active((x,)):
        y = module[:3](x)
        dpx.remove_plan(module)
        module[3:](y)
    assert hooks_on(module) == 0
