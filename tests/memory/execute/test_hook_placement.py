"""Hooks are on all modules while forwards are followed, else on those of the routine, and copies have none at work."""

import copy

import torch
from torch import nn

from lightning_dpx.memory.execute.hook_placement import HookPlacement, paths_of
from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.routine import ROOT, Entered, Routine, Saved

DROPPED = Saved("1:1", "TanhBackward0")
ROUTINE = Routine(
    stretches={ROOT: (None, DROPPED), Entered("1", 0): (DROPPED,)},
    calls={"1": 1, "3": 1},
    unseen=frozenset({Entered("3", 0)}),
    passed=frozenset({Entered("2", 0)}),
    noting={},
)


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def hooked(module: nn.Module) -> list[str]:
    return [path for path, part in module.named_modules() if part._forward_pre_hooks]


def test_a_routine_has_hooks_where_stretches_begin_and_where_calls_were_never_seen() -> None:
    assert paths_of(ROUTINE) == {"1", "3"}, "a stretch of the step itself begins without a hook"


def test_without_a_routine_all_modules_have_hooks_and_with_one_those_that_it_needs() -> None:
    module = chain()
    placement = HookPlacement(CallNames(module), is_off=False)
    entered: list[str] = []
    placement.put_on([], entered.append)
    assert hooked(module) == ["0", "1", "2", "3", "4"]
    module(torch.ones(2, 4))
    assert not entered, "that is for the hooks of a routine"
    placement.routine = ROUTINE
    placement.put_on(["4"], entered.append)
    assert hooked(module) == ["1", "3", "4"]
    module(torch.ones(2, 4))
    assert entered == ["1", "3", "4"]
    placement.remove()
    assert not hooked(module)


def test_calls_that_are_made_again_keep_their_hooks_beside_a_routine() -> None:
    module = chain()
    placement = HookPlacement(CallNames(module, again=["2", "4#2"]), is_off=False)
    placement.routine = ROUTINE
    placement.put_on([], lambda _path: None)
    assert hooked(module) == ["1", "2", "3", "4"]


def test_a_plan_that_only_looks_begins_without_hooks() -> None:
    module = chain()
    placement = HookPlacement(CallNames(module), is_off=True)
    assert not hooked(module)
    assert placement.is_off
    placement.put_on([], lambda _path: None)
    assert not placement.is_off
    assert len(hooked(module)) == 5


def test_copies_of_a_module_tell_nothing() -> None:
    module = chain()
    placement = HookPlacement(CallNames(module), is_off=False)
    placement.routine = ROUTINE
    entered: list[str] = []
    placement.put_on([], entered.append)
    copy.deepcopy(module)(torch.ones(2, 4))
    assert not entered
