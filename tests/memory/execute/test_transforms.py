"""Transforms of ``torch.func`` inside and around a planned forward, and what is left of it in torch afterwards."""

import copy
import dataclasses
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph

import lightning_dpx as dpx
from lightning_dpx.memory.execute.routine_hooks import RoutineHooks
from lightning_dpx.memory.execute.transforms import STEP_ASIDE, is_transformed
from lightning_dpx.memory.plan.plan import Decision
from lightning_dpx.torch_compat import tree_leaves
from tests.memory.steps import DropsEverything, train


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def test_a_transform_runs_under_hooks_and_they_are_on_again_afterwards() -> None:
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    x = torch.randn(3, requires_grad=True)
    before = STEP_ASIDE.count
    with STEP_ASIDE.hooks(pack, lambda tensor: tensor):
        slope = torch.func.grad(lambda value: value.sin().sum())(torch.zeros(2))
        assert packed == []  # what a transform saves is its own
        y = x.exp()
    assert STEP_ASIDE.count == before + 1
    torch.testing.assert_close(slope, torch.ones(2))
    assert packed == [x.shape]
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.exp())


def test_hooks_of_others_are_refused_by_torch_as_always() -> None:
    with (
        STEP_ASIDE.hooks(_double, _double),
        graph.saved_tensors_hooks(_double, _double),
        pytest.raises(RuntimeError, match="saved tensor hooks"),
    ):
        torch.func.grad(torch.sum)(torch.zeros(2))


def test_other_threads_find_torchs_own_and_so_does_everybody_afterwards() -> None:
    own = graph.disable_saved_tensors_hooks
    found: list[object] = []
    with STEP_ASIDE.standing_in():
        thread = threading.Thread(target=lambda: found.append(graph.disable_saved_tensors_hooks))
        thread.start()
        thread.join()
        assert graph.disable_saved_tensors_hooks is not own
    assert found == [own]
    assert graph.disable_saved_tensors_hooks is own
    assert type(graph) is ModuleType


def test_a_tensor_inside_a_transform_is_told_from_others() -> None:
    seen: list[bool] = []

    def looked_at(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(is_transformed(tensor))
        return tensor.sum()

    torch.func.grad(looked_at)(torch.zeros(2))
    assert seen == [True]
    assert not is_transformed(torch.zeros(2))


def _loss(module: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.func.functional_call(module, parameters, (x,)).sin().mean()


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


AROUND: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda m, x: torch.func.grad(lambda p: _loss(m, p, x))(_parameters(m)),
    "vjp": lambda m, x: torch.func.vjp(lambda p: _loss(m, p, x), _parameters(m))[1](torch.ones(())),
    "jvp": lambda m, x: torch.func.jvp(lambda y: _loss(m, _parameters(m), y), (x,), (torch.ones_like(x),)),
    "jacrev": lambda m, x: torch.func.jacrev(lambda y: m(y).mean(0))(x[:8]),
    "of each row": lambda m, x: torch.vmap(torch.func.grad(lambda p, y: _loss(m, p, y)), (None, 0))(_parameters(m), x),
    "vmap": lambda m, x: torch.vmap(m)(x),
    "jacfwd": lambda m, x: torch.func.jacfwd(lambda y: m(y).mean(0))(x[:2]),
}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(4)))


@pytest.mark.parametrize("replays", [False, True], ids=["recompute", "replay"])
@pytest.mark.parametrize("warm", [False, True], ids=["first", "in a routine"])
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, in jvp
def test_a_transform_around_a_planned_module_runs_as_without_a_plan(name: str, *, warm: bool, replays: bool) -> None:
    module, x = _net(), torch.randn(64, 64)
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, x, planner=DropsEverything())
    if replays:
        kept = [one for one in plan.decisions if not one.name.startswith(("1", "2"))]
        calls = [Decision(name, "", 0, 0.0, "replay") for name in ("1", "2")]
        plan = dataclasses.replace(plan, decisions=(*kept, *calls))
    applied = dpx.apply_plan(module, plan)
    if warm:
        assert all(map(torch.equal, train(module, x), train(plain, x)))
    values = applied.values
    assert isinstance(values, RoutineHooks)
    was_routine = values.is_routine
    expected = tree_leaves(AROUND[name](plain, x))
    for _ in range(2):  # a hook that failed would warn, and warnings are errors
        found = tree_leaves(AROUND[name](module, x))
        tensors = [(one, other) for one, other in zip(found, expected, strict=True) if isinstance(one, Tensor)]
        assert all(torch.equal(one, other) for one, other in tensors)
    assert values.is_routine == was_routine
    assert all(map(torch.equal, train(module, x), train(plain, x)))
    assert values.is_routine
    assert not values.num_deviations
    assert replays or not applied.not_found


def test_where_hooks_are_disabled_a_planned_module_runs_without_its_plan() -> None:
    module, x = _net(), torch.randn(64, 64)
    plain = copy.deepcopy(module)
    dpx.apply_plan(module, dpx.search_plan(module, x, planner=DropsEverything()))
    with graph.disable_saved_tensors_hooks("none here"):
        assert all(map(torch.equal, train(module, x), train(plain, x)))
    assert all(map(torch.equal, train(module, x), train(plain, x)))
