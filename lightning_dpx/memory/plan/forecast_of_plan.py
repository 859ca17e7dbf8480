"""What a plan does to a step, as far as its profile tells: also to one that the plan was not made for."""

from lightning_dpx.memory.plan.forecast import Forecast, forecast, timeline, with_overheads
from lightning_dpx.memory.plan.offload import as_planned
from lightning_dpx.memory.plan.plan import MemoryPlan
from lightning_dpx.memory.plan.problem import Problem
from lightning_dpx.memory.profile.data import Profile


def forecast_plan(profile: Profile, plan: MemoryPlan) -> Forecast:
    """The step of ``profile`` with a plan that may have been made for another one."""
    # What the plan replays and offloads is part of the step; planners only decide about the rest.
    planned = as_planned(profile, plan)
    dropped, uncached = _choice_of(planned, plan)
    return with_overheads(planned, forecast(planned, dropped, uncached), dropped)


def timeline_of(profile: Profile, plan: MemoryPlan | None = None) -> list[int]:
    """Bytes of activations at every event of the step of ``profile``, with a plan or with everything kept."""
    if plan is None:
        return list(profile.curve)
    planned = as_planned(profile, plan)
    return timeline(planned, *_choice_of(planned, plan))


def _choice_of(profile: Profile, plan: MemoryPlan) -> tuple[set[int], set[int]]:
    """The values of ``profile`` that ``plan`` drops, and those of them that go after every use."""
    problem = Problem(profile)
    named = {value.name: index for index, value in enumerate(profile.values) if value.name}
    can = problem.values_of(problem.droppable)
    can |= {index for index, value in enumerate(profile.values) if value.storage < 0}  # the plan of another device's
    # Where a plan offloads what cannot be offloaded here, or computes again what cannot be, a step
    # keeps it.
    offloaded = plan.names("offload")
    can -= {index for name, index in named.items() if profile.values[index].offloaded != (name in offloaded)}
    # Names that this step does not have belong to another shape, and drop nothing here.
    dropped = {named[name] for name in plan.dropped if name in named} & can
    return dropped, {named[name] for name in plan.uncached if name in named} & can
