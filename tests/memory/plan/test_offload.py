"""Offloading or recomputing: whatever costs less, with what hides behind the computation counted for little."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.memory import Profile, extrapolate, plan_profile, profile_module, scaled
from lightning_dpx.memory.plan.forecast import HIDDEN_SHARE
from lightning_dpx.memory.plan.forecast_of_plan import forecast_plan
from lightning_dpx.memory.plan.offload import PREFETCH_DEPTH, as_planned, ways_to_offload
from lightning_dpx.memory.plan.problem import Choice, Planner, Problem
from tests.conftest import SIMULATED
from tests.memory.steps import DropsEverything

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
BLOCKS = 8
MS = 1e-3


def blocks() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Tanh()) for _ in range(BLOCKS)))
    return module.to("sim:0"), torch.randn(512, 64).to("sim:0")


def timed(copying: float, linear: float = 10 * MS, other: float = 1 * MS, room: int = 2**40) -> Profile:
    """Blocks whose operators take these times, copies included, in a step that takes three times as long as forward."""
    profile = profile_module(*blocks())
    forward = BLOCKS * (linear + 2 * other)
    values = [
        replace(v, seconds=linear if "Addmm" in v.operator else other, copying=copying if v.copying else 0.0)
        for v in profile.values
    ]
    return replace(
        profile, values=tuple(values), forward_seconds=forward, step_seconds=3 * forward, offloading_room=room
    )


def planned(profile: Profile, share: float) -> dpx.MemoryPlan:
    return plan_profile(blocks()[0], profile, round(share * profile.peak))


def actions(plan: dpx.MemoryPlan, operator: str) -> set[str]:
    return {decision.action for decision in plan.decisions if decision.operator == operator}


def test_what_is_dear_to_compute_is_offloaded_while_copies_are_short() -> None:
    plan = planned(timed(copying=0.1 * MS), 0.5)
    assert plan.names("offload")
    assert not plan.names("recompute", "recompute each time")
    assert plan.prefetch_depth == PREFETCH_DEPTH
    copies = 2 * 0.1 * MS * len(plan.names("offload"))
    assert plan.recompute_share == pytest.approx((HIDDEN_SHARE * copies + 0.2 * MS) / timed(MS).step_seconds)
    assert all(d.seconds == pytest.approx(HIDDEN_SHARE * 0.2 * MS) for d in plan.decisions if d.action == "offload")


def test_what_does_not_hide_is_computed_again_the_cheapest_first() -> None:
    plan = planned(timed(copying=10 * MS), 0.5)  # four of them take nearly half as long as forward
    assert plan.prefetch_depth == PREFETCH_DEPTH
    assert len(plan.names("offload")) == 4
    assert plan.names("recompute", "recompute each time")
    assert "offload" in actions(plan, "AddmmBackward0")
    assert "offload" not in actions(plan, "TanhBackward0") | actions(plan, "GeluBackward0")


def test_a_tighter_budget_offloads_the_dearer_half_and_computes_the_rest() -> None:
    plan = planned(timed(copying=20 * MS), 0.25)
    assert len(plan.names("offload")) > 4
    assert plan.names("recompute", "recompute each time")
    assert "offload" not in actions(plan, "TanhBackward0")


def test_nothing_is_offloaded_where_copies_take_longer_than_forward() -> None:
    profile = timed(copying=1.0)
    plan = planned(profile, 0.5)
    assert not plan.names("offload")
    assert plan.prefetch_depth == 0
    assert plan.least_share is not None
    assert plan.recompute_share is not None
    assert 0 < plan.least_share <= plan.recompute_share


@pytest.mark.parametrize("copying", [0.1 * MS, 3 * MS, 20 * MS])
@pytest.mark.parametrize("share", [0.7, 0.5, 0.3])
def test_no_plan_beats_the_bound(copying: float, share: float) -> None:
    plan = planned(timed(copying), share)
    assert plan.least_share is not None
    assert plan.recompute_share is not None
    assert plan.least_share <= plan.recompute_share


def test_the_host_has_to_have_room_for_what_could_be_computed_again() -> None:
    module, x = blocks()
    size = x.nbytes
    plan = plan_profile(module, timed(copying=0.1 * MS, room=3 * size), round(0.5 * timed(MS).peak))
    assert sum(d.num_bytes for d in plan.decisions if d.action == "offload") <= 3 * size
    assert plan.names("recompute", "recompute each time")


def test_the_smallest_budget_is_that_of_offloading() -> None:
    module, x = blocks()
    profile = timed(copying=0.1 * MS)
    without = replace(profile, values=tuple(replace(value, copying=0.0) for value in profile.values))
    least, least_without = (plan_profile(module, each, None).peak for each in (profile, without))
    assert least is not None
    assert least_without is not None
    assert least <= least_without
    with pytest.raises(dpx.BudgetError) as error:
        plan_profile(module, profile, 1000)
    assert error.value.smallest == least
    plan = plan_profile(module, profile, least)
    assert plan.peak == least
    assert plan.prefetch_depth == 0
    roomier = plan_profile(module, profile, least + 4 * x.nbytes)
    assert roomier.prefetch_depth == PREFETCH_DEPTH


def test_copies_run_beside_the_computation_where_there_is_room_even_if_they_do_not_hide() -> None:
    module, x = blocks()
    profile = timed(copying=1.0)
    least = plan_profile(module, profile, None, DropsEverything()).peak
    assert least is not None
    plans = [plan_profile(module, profile, least + count * x.nbytes, DropsEverything()) for count in range(4)]
    overlaps = [plan.prefetch_depth for plan in plans]
    assert overlaps == sorted(overlaps)
    assert overlaps[-1] == PREFETCH_DEPTH
    assert all(plan.peak <= least + count * x.nbytes for count, plan in enumerate(plans))  # type: ignore[operator]


def test_a_way_of_its_own_marks_every_value_of_a_storage() -> None:
    # A binary fraction: copies that take half of the time are to be half of them, not by rounding one less.
    profile = timed(copying=2.0**-13)
    ways = [*ways_to_offload(profile)]
    assert [way.prefetch_depth for way in ways] == [PREFETCH_DEPTH, 0, 0, 0]
    assert ways[1] == profile
    for way in (ways[0], *ways[2:]):
        offloaded = {v.storage for v in way.values if v.offloaded}
        assert all(v.offloaded and not v.inputs for v in way.values if v.storage in offloaded)
    droppable = len(Problem(profile).droppable)
    assert [sum(v.offloaded for v in way.values) for way in ways[2:]] == [droppable // 2, droppable]


def test_on_the_host_there_is_one_way() -> None:
    module, x = blocks()
    profile = profile_module(module.cpu(), x.cpu())
    assert [*ways_to_offload(profile)] == [profile]
    assert not any(value.copying or value.offloaded for value in profile.values)


def test_the_copies_of_a_plan_without_overlap_all_count() -> None:
    profile = timed(copying=0.5 * MS)
    plan = plan_profile(blocks()[0], profile, None, DropsEverything())
    waiting = replace(plan, prefetch_depth=0)
    count = len(plan.names("offload"))
    assert count
    assert forecast_plan(profile, waiting).seconds == pytest.approx(count * 2 * 0.5 * MS)
    beside = forecast_plan(profile, replace(plan, prefetch_depth=2))
    assert beside.seconds == pytest.approx(2 * 0.5 * MS + HIDDEN_SHARE * count * 2 * 0.5 * MS)
    assert beside.peak > forecast_plan(profile, waiting).peak


def test_copies_beyond_the_computation_count() -> None:
    profile = timed(copying=0.5 * MS)
    plan = replace(plan_profile(blocks()[0], profile, None, DropsEverything()), prefetch_depth=2)
    count = len(plan.names("offload"))
    quick = replace(profile, forward_seconds=count * 0.4 * MS, step_seconds=count * 0.6 * MS)
    beyond = count * (0.1 + 0.3) * MS  # what forward does not hide, and what backward does not
    assert forecast_plan(quick, plan).seconds == pytest.approx(beyond + HIDDEN_SHARE * count * 2 * 0.5 * MS)


def test_copies_grow_with_the_rows() -> None:
    profile = timed(copying=2 * MS)
    twice = scaled(profile, 2)
    assert max(value.copying for value in twice.values) == pytest.approx(4 * MS)
    assert twice.forward_seconds == 2 * profile.forward_seconds
    more = extrapolate(profile, twice, (1, 2), 4)
    assert max(value.copying for value in more.values) == pytest.approx(8 * MS)
    assert more.forward_seconds == pytest.approx(4 * profile.forward_seconds)


def test_a_plan_says_how_many_copies_are_on_their_way(tmp_path: Any) -> None:
    path, profile = tmp_path / "plan.yaml", timed(copying=0.1 * MS)
    plan = planned(profile, 0.5)
    plan.save(path)
    assert dpx.MemoryPlan.load(path) == plan
    assert as_planned(profile, plan).prefetch_depth == PREFETCH_DEPTH
    text = path.read_text()
    path.write_text(text.replace("prefetch_depth: 2", "prefetch_depth: 1"))
    edited = dpx.MemoryPlan.load(path)
    assert (edited.prefetch_depth, edited.peak) == (1, None), "an edit makes the prediction void"
    path.write_text(text.replace("prefetch_depth: 2", "prefetch_depth: many"))
    with pytest.raises(dpx.PlanError, match="prefetch_depth='many' is not allowed"):
        dpx.MemoryPlan.load(path)
    host = replace(plan.with_actions(dict.fromkeys(plan.names("offload"), "keep")), prefetch_depth=0)
    host.save(path)
    path.write_text(path.read_text().replace("prefetch_depth: 0\n", ""))  # of a time before there was any
    assert dpx.MemoryPlan.load(path) == host


class _Nothing(Planner):
    name = "nothing"

    def choose(self, problem: Problem, budget: int | None) -> Choice:
        return Choice()


def test_a_plan_that_offloads_nothing_has_no_copies_on_their_way() -> None:
    assert plan_profile(blocks()[0], timed(copying=0.1 * MS), None, _Nothing()).prefetch_depth == 0


@pytest.mark.parametrize(("pinned", "fit"), [(False, 4), (True, 2)])
def test_pinned_memory_is_counted_in_blocks_of_powers_of_two(pinned: bool, fit: int) -> None:
    profile = timed(copying=0.1 * MS)
    # A little more than a power of two, as rows that are padded.
    storages = tuple(replace(storage, num_bytes=storage.num_bytes + 64) for storage in profile.storages)
    room = 4 * max(storage.num_bytes for storage in storages)
    plan = planned(replace(profile, storages=storages, pins_offloaded=pinned, offloading_room=room), 0.5)
    assert len(plan.names("offload")) == fit
