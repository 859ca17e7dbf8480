"""Shares of compiled parts by hand-made numbers: who gives way, what is taken back, and what the step comes to."""

from pathlib import Path

import pytest
from torch import nn

from lightning_dpx.errors import BudgetError, PlanError
from lightning_dpx.memory import MemoryPlan, plan_profile
from lightning_dpx.memory.plan.code_shares import bytes_and_seconds, shares_for, with_shares
from lightning_dpx.memory.plan.forecast_of_plan import forecast_plan
from lightning_dpx.memory.plan.lower_bound import lower_bound
from lightning_dpx.memory.plan.plan import format_plan
from lightning_dpx.memory.profile.data import CodeRun, CompiledCall, Profile

WHOLE = CodeRun(1.0, forward=120, stays=100, backward=20, seconds=1.0)
HALF = CodeRun(0.5, forward=80, stays=60, backward=50, seconds=1.1)
NOTHING = CodeRun(0.0, forward=40, stays=10, backward=130, seconds=1.5)


def chain(*runs: tuple[CodeRun, ...]) -> Profile:
    """Parts in a row, backward in the other order; three events for each way through each."""
    calls = []
    end = 6 * len(runs)
    for number, each in enumerate(runs):
        begin, asked = 3 * number, end - 3 * number - 3
        calls.append(CompiledCall(f"parts.{number}", begin, begin + 2, asked, asked + 2, each))
    held = 0
    curve = []
    for call in calls:
        curve += [held, held + call.runs[0].forward, held + call.runs[0].stays]
        held += call.runs[0].stays
    for call in reversed(calls):
        curve += [held, held + call.runs[0].backward, held - call.runs[0].stays]
        held -= call.runs[0].stays
    return Profile((), (), (), tuple(curve), 3 * len(runs), 10.0, codes=tuple(calls))


def test_the_fewest_seconds_are_spent_with_which_the_step_fits() -> None:
    profile = chain(*[(WHOLE, HALF, NOTHING)] * 4)
    assert profile.peak == 420
    assert shares_for(profile, 420) == {}
    shares = shares_for(profile, 390)
    assert list(shares.values()) == [0.5], "one part that saves a little less is enough"
    assert with_shares(profile, shares).peak <= 390
    assert with_shares(profile, shares).replaying == pytest.approx(0.1)


def test_parts_that_gain_nothing_give_no_way() -> None:
    costly = CodeRun(0.5, forward=120, stays=90, backward=400, seconds=2.0)
    profile = chain((WHOLE, HALF), (WHOLE, costly), (WHOLE, HALF))
    assert set(shares_for(profile, None)) == {"parts.0", "parts.2"}


def test_without_a_share_a_step_is_as_it_was() -> None:
    profile = chain((WHOLE, HALF), (WHOLE, HALF))
    assert with_shares(profile, {}) is profile
    assert with_shares(profile, {"parts.0": 1.0}).curve == profile.curve
    assert bytes_and_seconds(profile, "parts.1", 0.4) == (40, pytest.approx(0.1)), "the nearest that was tried"


def test_no_bound_is_above_a_plan_in_which_compiled_parts_save_less() -> None:
    """Else micro-batches would be chosen where a step in one piece that saves less is faster."""
    profile = chain(*[(WHOLE, HALF, NOTHING)] * 4)
    plan = plan_profile(Parts(), profile, 330)
    assert plan.recompute_share is not None
    assert lower_bound(profile, 330) <= plan.recompute_share * profile.step_seconds


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))


def test_a_plan_has_a_decision_for_each_part_and_says_what_the_step_comes_to(tmp_path: Path) -> None:
    profile = chain(*[(WHOLE, HALF, NOTHING)] * 4)
    plan = plan_profile(Parts(), profile, 330)
    assert plan.shares
    assert not plan.keeps_all
    assert plan.peak is not None
    assert plan.peak <= 330
    assert plan.unplanned_peak == 420
    assert plan.recompute_share == pytest.approx(sum(d.seconds for d in plan.decisions) / 10.0)
    assert forecast_plan(profile, plan).peak == plan.peak
    assert "parts.0" in format_plan(plan)
    plan.save(tmp_path / "plan.yaml")
    assert MemoryPlan.load(tmp_path / "plan.yaml") == plan
    text = (tmp_path / "plan.yaml").read_text()
    (tmp_path / "edited.yaml").write_text(text.replace("share: 0.5", "share: 0.25", 1))
    edited = MemoryPlan.load(tmp_path / "edited.yaml")
    assert 0.25 in edited.shares.values()
    assert edited.peak is None, "what was predicted was so for the shares before"
    (tmp_path / "wrong.yaml").write_text(text.replace("share: 0.5", "share: 1.5", 1))
    with pytest.raises(PlanError, match=r"share=1\.5 is not allowed; give a number from 0 to 1"):
        MemoryPlan.load(tmp_path / "wrong.yaml")


def test_what_cannot_be_met_names_the_smallest_that_can() -> None:
    profile = chain(*[(WHOLE, HALF, NOTHING)] * 4)
    smallest = plan_profile(Parts(), profile, None).peak
    assert smallest is not None
    assert smallest < 420
    assert plan_profile(Parts(), profile, smallest).peak == smallest
    with pytest.raises(BudgetError, match="also where compiled parts save as little as they can") as refused:
        plan_profile(Parts(), profile, smallest - 1)
    assert refused.value.smallest == smallest
