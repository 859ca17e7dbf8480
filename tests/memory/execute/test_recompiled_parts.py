"""Compiled parts that save a share of what they would: the step fits as predicted, with the same bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.errors import BudgetError
from lightning_dpx.memory import plan_profile, profile_module
from lightning_dpx.memory.plan.plan import Decision
from tests.conftest import COMPILES
from tests.memory.execute.test_compiled_calls import CHEAP, Block, Model, gradients, peak

pytestmark = COMPILES


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("form", ["in place", "wrapped", "method"])
def test_compiled_blocks_save_less_as_predicted_with_the_same_bits_and_no_more_code(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Model(form), torch.randn(1024, 64)
    expected = gradients(model, x)
    before = [dict(vars(block)) for block in model.blocks]
    model.zero_grad()
    # Without calls to replay, which are the faster choice by the times of some moments.
    profile = replace(profile_module(model, x), calls=())
    plan = plan_profile(model, profile, int(0.75 * profile.peak))
    assert set(plan.shares) <= {"blocks.0", "blocks.1", "blocks.2", "blocks.3"}
    assert plan.shares
    assert plan.peak is not None
    assert plan.peak <= 0.75 * plan.unplanned_peak
    plan.save(tmp_path / "plan.yaml")
    again = dpx.MemoryPlan.load(tmp_path / "plan.yaml")
    assert again == plan
    compiled = graphs()
    applied = dpx.apply_plan(model, again)
    assert all(map(torch.equal, gradients(model, x), expected))
    assert peak(model, x) == pytest.approx(plan.peak, rel=0.05)
    assert graphs() == compiled, "equal parts with an equal share are one code, and the search has compiled it"
    assert not applied.not_found
    dpx.remove_plan(model)
    assert [dict(vars(block)) for block in model.blocks] == before
    assert all(map(torch.equal, gradients(model, x), expected))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("form", ["in place", "wrapped"])
def test_a_model_that_is_compiled_as_a_whole_saves_less(form: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1024, 64)
    model: nn.Module = Blocks()
    if form == "in place":
        model.compile(backend=CHEAP)
    else:
        model = torch.compile(model, backend=CHEAP)
    expected = gradients(model, x)
    model.zero_grad()
    plan = dpx.search_plan(model, x, budget=0.85)
    assert list(plan.shares) == [""]
    assert plan.peak is not None
    dpx.apply_plan(model, plan)
    assert all(map(torch.equal, gradients(model, x), expected))
    assert peak(model, x) == pytest.approx(plan.peak, rel=0.05)
    assert plan.peak <= 0.85 * plan.unplanned_peak
    dpx.remove_plan(model)
    assert peak(model, x) == pytest.approx(plan.unplanned_peak, rel=0.05)
    with pytest.raises(dpx.BudgetError, match=r"is compiled as a whole: .* compiled one by one"):
        dpx.search_plan(model, x, budget=0.1)
    with pytest.raises(BudgetError):
        dpx.search_plan(model, x, budget=0.05)


def test_parts_that_are_not_compiled_save_what_they_did_and_it_is_told() -> None:
    model = Blocks()
    decision = Decision("blocks.1", "compiled code", 0, 0.0, "save less", share=0.5)
    plan = replace(dpx.search_plan(model, torch.randn(8, 64), budget=1.0), decisions=(decision,))
    with pytest.warns(UserWarning, match=r"blocks\.1 save 50% of what its compiled code would, but it is not compiled"):
        applied = dpx.apply_plan(model, plan)
    assert list(applied.not_found) == ["blocks.1"]
    dpx.remove_plan(model)
