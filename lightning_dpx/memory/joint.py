"""One plan for a step that runs on several devices: a profile for each of them, and a budget for each.

A profile counts the bytes of one device, and knows of the other only which values lie there. So each device is planned
by itself, what both drop is put together, and the whole is forecast once more on each: a value that is made from one on
the other device may now have to wait for that one to be made again.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightning_dpx.errors import BudgetError
from lightning_dpx.memory.plan.forecast import Forecast, forecast, with_overheads
from lightning_dpx.memory.plan.make_plan import plan_profile
from lightning_dpx.memory.plan.offload import as_planned
from lightning_dpx.memory.plan.plan import MemoryPlan, Model
from lightning_dpx.memory.plan.problem import Planner
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.units import format_bytes

_ATTEMPTS = 4  # to make room on each device for what the other one drops


def plan_devices(
    module: Model, profiles: Sequence[Profile], budgets: Sequence[int], planner: str | Planner = "auto"
) -> list[MemoryPlan]:
    """Plans that decide alike about every value, one per device with the figures of that device.

    Args:
        module: The module whose step was profiled.
        profiles: Of the same step, one per device.
        budgets: Bytes of activations on each.
        planner: Who decides.

    Raises:
        BudgetError: a budget cannot be met; :attr:`BudgetError.device_index` tells which one.
    """
    if len(profiles) > 1:  # a call may have parts on both
        profiles = [replace(profile, calls=(), holds=(), codes=()) for profile in profiles]
    rooms = list(budgets)
    peaks = [profile.peak for profile in profiles]
    for _ in range(_ATTEMPTS):
        plans = []
        for device_index, (profile, room) in enumerate(zip(profiles, rooms, strict=True)):
            try:
                plans.append(plan_profile(module, profile, room, planner))
            except BudgetError as error:
                error.device_index = device_index
                raise
        if len(plans) == 1:
            return plans
        # A value that one device drops may be computed from values that the other drops, so that
        # only a forecast of all decisions tells the peaks.
        both = _together(profiles, plans)
        found = [forecast_named(profile, both) for profile in profiles]
        peaks = [result.peak for result in found]
        if all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True)):
            figured = []
            for plan, profile, budget, result in zip(plans, profiles, budgets, found, strict=True):
                figured.append(with_figures(both, profile, budget, result, plan.least_share))
            return figured
        # What is too much on a device is what the other one's decisions add there: it plans once
        # more for so much less.
        rooms = [room - max(0, peak - budget) for room, peak, budget in zip(rooms, peaks, budgets, strict=True)]
    device_index = max(range(len(peaks)), key=lambda index: peaks[index] - budgets[index])
    raise BudgetError(
        f"A budget of {format_bytes(budgets[device_index])} for activations was not met together with that of the "
        f"other device: plans that meet each take {format_bytes(peaks[device_index])}. Allow more on either, or "
        "choose another cut.",
        peaks[device_index],
        device_index,
    )


def with_figures(
    plan: MemoryPlan, profile: Profile, budget: int, result: Forecast, least_share: float | None
) -> MemoryPlan:
    """``plan`` with what it comes to in the step of ``profile``."""
    return replace(
        plan,
        budget=budget,
        unplanned_peak=profile.peak,
        peak=result.peak,
        saved_bytes=result.kept,
        recompute_share=result.seconds / profile.step_seconds,
        least_share=least_share,
    )


def forecast_named(profile: Profile, plan: MemoryPlan) -> Forecast:
    """The step of ``profile`` with all that ``plan`` drops, also on devices that the profile does not count."""
    profile = as_planned(profile, plan)
    dropped = [index for index, value in enumerate(profile.values) if value.name in plan.dropped]
    uncached = [index for index in dropped if profile.values[index].name in plan.uncached]
    return with_overheads(profile, forecast(profile, dropped, uncached), dropped)


def _together(profiles: Sequence[Profile], plans: Sequence[MemoryPlan]) -> MemoryPlan:
    """Every device decides about its own values."""
    # Of any device: all profiles are of the same step.
    order = {value.name: index for index, value in enumerate(profiles[0].values) if value.name}
    decisions = {}
    for plan in plans:
        for decision in plan.decisions:
            decisions[decision.name] = decision
    # All follow one plan, and what is on its way takes memory: as much as each of them has room
    # for.
    prefetch_depth = min((plan.prefetch_depth for plan in plans if plan.names("offload")), default=0)
    in_order = tuple(sorted(decisions.values(), key=lambda d: order.get(d.name, len(order))))
    return replace(plans[0], decisions=in_order, prefetch_depth=prefetch_depth)
