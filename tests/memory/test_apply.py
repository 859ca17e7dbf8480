"""A plan is put on the module that it was made for, once, and taken off where there is one."""

import pytest
import torch
from torch import nn

import lightning_dpx as dpx


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


def test_a_plan_of_another_model_is_refused() -> None:
    module = net()
    plan = dpx.search_plan(module, torch.ones(64, 64), budget=0.7)
    with pytest.raises(dpx.PlanError, match="made for a Sequential with parameters"):
        dpx.apply_plan(nn.Linear(2, 2), plan)


def test_a_module_has_one_plan_at_a_time() -> None:
    module = net()
    plan = dpx.search_plan(module, torch.ones(64, 64), budget=0.7)
    dpx.apply_plan(module, plan)
    with pytest.raises(dpx.PlanError, match="applied already"):
        dpx.apply_plan(module, plan)
    dpx.remove_plan(module)
    with pytest.raises(dpx.PlanError, match="No plan is applied"):
        dpx.remove_plan(module)
