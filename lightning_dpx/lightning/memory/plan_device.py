"""The plans of one device: the steps that were seen there, what it has room for, and what the planner makes of both."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.errors import BudgetError
from lightning_dpx.lightning.memory.batch_shapes import most_demanding
from lightning_dpx.lightning.memory.device_plans import DeviceDecision
from lightning_dpx.lightning.memory.device_rooms import DeviceRooms
from lightning_dpx.lightning.memory.planning_cache import PlanningCache
from lightning_dpx.lightning.memory.profiled_steps import KnownProfiles, SeenStep, pressure
from lightning_dpx.lightning.memory.profiling import devices_of
from lightning_dpx.lightning.memory.static import StaticMemory
from lightning_dpx.memory import MemoryPlan, Planner, Profile, describe_cut, format_plan, in_micro_batches
from lightning_dpx.replicas import BatchSlice, ReplicaSet
from lightning_dpx.units import format_mib, format_part

_HALF = 1.5  # times the rows of a profile: fewer would be told as all of them


@dataclass
class MicroBatchFigures:
    """What is known of the micro-batches of a batch.

    Attributes:
        cut_costs: By a replica's device, seconds of a step in its micro-batches over those in one piece, where known.
        run_forward_twice: Whether every micro-batch runs forward once more, without a graph, before all others.
        profiles: Those of steps of the batch, where they are known.
    """

    cut_costs: dict[torch.device, float] = field(default_factory=dict)
    run_forward_twice: bool = False
    profiles: KnownProfiles = field(default_factory=dict)


def plan_device(
    replicas: ReplicaSet,
    largest: BatchSlice,
    steps: list[SeenStep],
    static: StaticMemory,
    *,
    rooms: DeviceRooms,
    before: DeviceDecision | None,
    cache: PlanningCache,
    planner: Planner,
    micro_batches: MicroBatchFigures,
) -> DeviceDecision:
    """The plans of the devices that the replicas on one device run on.

    Args:
        replicas: All of them.
        largest: The slice that fills the device most.
        steps: One of each shape that was seen there.
        static: What a step needs beside its activations.
        rooms: What the budgets leave.
        before: What was decided for the device before; those plans are kept where they still do.
        cache: Of plans of earlier runs.
        planner: Who decides.
        micro_batches: What is known of those of the batch.

    Raises:
        BudgetError: a budget cannot be met.
    """
    budgets = rooms.budgets
    devices = devices_of(largest.replica)
    # With shifts there are two: where the replica is, and where its shifted parts run.
    limits = [budgets.limit(device, replicas.devices) for device in devices]
    free = [rooms.room(device, static, limit) for device, limit in zip(devices, limits, strict=True)]
    if before is None or is_host(devices[0]):
        free = _less_what_steps_leave(free, steps, _num_copies_left_behind(replicas, static.slices, devices[0]))
    held = [limit - room for limit, room in zip(limits, free, strict=True)]
    # Every plan is forecast for all of these, so planning would take longer
    # with each new shape of batch.
    steps = most_demanding(steps, partial(pressure, free=free))
    shares = []
    for step in steps:
        # All replicas of a device have run forward before the first backward, so their
        # activations are there together.
        shares.append([room // sharing for room, sharing in zip(free, step.sharing, strict=True)])
    # A plan that still does is kept, without a search; those of all devices decide alike.
    now = None if before is None else before.plans[0]
    try:
        profiles = [step.profiles for step in steps]
        # What is free differs by some bytes in each run, so it cannot be
        # part of the key in the cache.
        measured = any(budgets.is_measured(device, replicas.devices) for device in devices)
        shared = cache.plan_shapes(replicas.root.module, profiles, shares, planner, now, measured=measured)
    except BudgetError as error:
        # Without a least number of bytes there is nothing to tell beside
        # what the error says already.
        if error.smallest is not None:
            index = error.device_index
            rooms.explain(error, devices[index], held[index], limits[index], steps[-1].sharing[index])
        raise
    plans = _in_micro_batches(shared.plans, replicas, largest, micro_batches, steps[shared.worst[0]].profiles[0])
    counted = tuple(map(static.counted_gradients, devices))
    return DeviceDecision(tuple(devices), tuple(steps), plans, shared.worst, tuple(limits), tuple(held), counted)


def bytes_planned_to_be_left(steps: Sequence[SeenStep]) -> int:
    """Bytes that plans for these steps expect one of them to leave on its module."""
    return max((step.profiles[0].left_behind for step in steps), default=0)


def _less_what_steps_leave(free: list[int], steps: list[SeenStep], number: int) -> list[int]:
    """What is free once ``number`` steps have left what they keep, each its own.

    Later plans of an accelerator find that among what is allocated by then; on the host nothing tells of it.
    """
    found = []
    for index, room in enumerate(free):
        left = number * max(step.profiles[index].left_behind for step in steps)
        # A plan for next to nothing is refused with what the step needs, which tells more than a lack of room.
        found.append(max(1, room - left))
    return found


def _num_copies_left_behind(replicas: ReplicaSet, slices: Sequence[BatchSlice], home: torch.device) -> int:
    """How many copies there are of what a slice's step leaves, where replicas are on ``home``."""
    here = [one.replica for one in slices if one.replica.device == home]
    # Every other replica is to begin its next step with what the first one has left, of which it holds a copy.
    return len(here) + sum(replica is not replicas.root for replica in here)


def _in_micro_batches(
    plans: tuple[MemoryPlan, ...], replicas: ReplicaSet, largest: BatchSlice, figures: MicroBatchFigures, worst: Profile
) -> tuple[MemoryPlan, ...]:
    """Plans for one micro-batch, with what is known of all of them together, such as a share of forwards again."""
    number = replicas.partition.numbers(training=True)[replicas.partition.device_of[largest.replica.index]]
    if number == 1 or not replicas.cuts_slices:
        return plans
    # Where the number was given and not chosen, nobody has timed what the cutting costs.
    cost = figures.cut_costs.get(largest.replica.device, 1.0)
    again = 0.0
    if figures.run_forward_twice:
        # The first of two passes runs without a graph: it takes the time of a forward,
        # and no memory for backward.
        again = worst.forward_seconds / worst.step_seconds
    shares = [cost * (1 + again + (plan.recompute_share or 0.0)) for plan in plans]
    pairs = zip(plans, shares, strict=True)
    return tuple(in_micro_batches(plan, number, largest.num_rows, share) for plan, share in pairs)


def origin(profile: Profile, num_steps: int) -> str:
    """Which step a plan was made from, for its announcement; nothing to say of a whole one that is alone."""
    guess = ""
    if profile.scale > 1:
        part = "a part" if profile.scale < _HALF else f"1/{profile.scale:.0f}"
        guess = f"; profiled on {part} of the rows, because all did not fit"
    # Of batches of other shapes, or of one shape where steps differ.
    worst = f"; the worst of {num_steps} steps that are planned for" if num_steps > 1 else ""
    return worst + guess


def announcement(device: torch.device, plan: MemoryPlan, static: int, limit: int, sharing: int, remark: str) -> str:
    """What is said of the plan of a device: its peak within the budget, and what is computed again."""
    how = f" ({sharing} replicas share the device)" if sharing > 1 else ""
    peak = static + sharing * (plan.peak or 0)
    figures = (
        f"{format_mib(peak)} predicted of {format_mib(limit)} allowed, {format_mib(static)} of it beside activations"
    )
    head = f"dpx: memory of {device}{how}: {figures}{remark}"
    if plan.micro_batches > 1:
        head += f"\n{describe_cut(plan)}, peak {format_part(peak, limit)}"
    if not plan.keeps_all:
        return f"{head}\n{format_plan(plan)}"
    if plan.micro_batches > 1:
        return head
    return f"{head}\neverything fits; nothing is computed again"
