"""What public functions ask of their arguments: numbers of any library, and modules that are some."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.arguments import check_is_module, is_number, is_whole_number
from lightning_dpx.memory.plan.plan import MemoryPlan


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers_of_any_library_are_numbers(value: object) -> None:
    assert is_whole_number(value)
    assert is_number(value)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), Fraction(1, 2)])
def test_other_numbers_are_not_whole(value: object) -> None:
    assert is_number(value)
    assert not is_whole_number(value)


@pytest.mark.parametrize("value", [True, np.bool_(True), "3", None, [3], 3j, torch.tensor(3)])
def test_what_is_true_or_a_text_or_a_container_is_no_number(value: object) -> None:
    assert not is_number(value)
    assert not is_whole_number(value)


def test_a_plan_is_made_and_saved_for_numbers_of_numpy(tmp_path: Any) -> None:
    rows = torch.ones(64, 64)
    plan = dpx.search_plan(layers(), rows, budget=np.float64(0.9), micro_batches=np.int64(2), progress=False)
    expected = dpx.search_plan(layers(), rows, budget=0.9, micro_batches=2, progress=False)
    assert (plan.micro_batches, plan.budget) == (expected.micro_batches, expected.budget)
    plan.save(tmp_path / "plan.yaml")
    assert MemoryPlan.load(tmp_path / "plan.yaml").micro_batches == 2


def test_a_strategy_takes_numbers_of_numpy() -> None:
    options = {"workload": [np.int64(2), np.float32(1)], "micro_batches": np.int64(2), "memory_budget": np.int64(2**30)}
    dpx.DPXStrategy(**options)


def test_a_group_cuts_by_numbers_of_numpy() -> None:
    group = dpx.ReplicaGroup(nn.Linear(4, 2), ["cpu", "cpu"], workload=[np.int64(2), np.int64(1)])
    group.reshape(np.int64(9))
    assert [one.stop - one.start for one in group.slices] == [6, 3]


PLAN = dpx.search_plan(layers(), torch.ones(64, 64), budget=0.9, progress=False)
CALLS: dict[str, Callable[[Any], Any]] = {
    "ReplicaGroup": lambda module: dpx.ReplicaGroup(module, ["cpu"]),
    "search_plan": lambda module: dpx.search_plan(module, torch.ones(4), budget=1.0),
    "apply_plan": lambda module: dpx.apply_plan(module, PLAN),
    "remove_plan": dpx.remove_plan,
    "estimate_cost": lambda module: dpx.estimate_cost(module, PLAN, torch.ones(4)),
    "shift_activations": lambda module: dpx.shift_activations(module, "*", {"cpu": "sim:0"}),
    "unshift_activations": dpx.unshift_activations,
    "offload_activations": lambda module: dpx.offload_activations(module, "*"),
    "unoffload_activations": dpx.unoffload_activations,
    "trace_activations": dpx.trace_activations,
    "tune": dpx.tune,
}


@pytest.mark.parametrize("module", [3, None, [nn.Linear(2, 2)], "net"], ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_module_is_refused_by_every_function_that_takes_one(name: str, module: object) -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"module=.* is not allowed; give an instance of torch.nn.Module"):
        CALLS[name](module)


def test_of_a_class_an_instance_is_asked_for() -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"give an instance of the class: Linear\(\.\.\.\)"):
        check_is_module(nn.Linear)


def test_the_grid_of_a_search_is_checked_whichever_planner_is_asked_for() -> None:
    with pytest.raises(dpx.ConfigurationError, match="num_trials=0 is not allowed"):
        dpx.search_plan(layers(), torch.ones(64, 64), budget=1.0, num_trials=0)


def test_names_of_parameters_are_a_list() -> None:
    with pytest.raises(dpx.ConfigurationError, match="fixed_params=3 is not allowed; give a list of names"):
        dpx.ReplicaGroup(nn.Linear(2, 2), ["cpu"], fixed_params=3)


def test_a_pattern_of_names_is_a_text() -> None:
    with pytest.raises(dpx.ConfigurationError, match="pattern=3 is no text"):
        dpx.TensorMonitor(pattern=3)


def test_what_is_no_planner_is_refused_before_it_is_written_on() -> None:
    with pytest.raises(dpx.ConfigurationError, match="planner"):
        dpx.register_planner("none")(3)
