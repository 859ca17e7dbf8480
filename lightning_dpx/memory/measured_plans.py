"""The fastest of several plans, found by running steps with each: what a step takes with it is then no sum.

A forecast adds up what single operators, calls and hooks take. In a step that is as long as a few dozen operators that
adds up to too much or too little: what they leave in the processor's caches, and how often Python stands in the way,
depends on their neighbors. A few steps tell, and where operators take long, none are needed.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from lightning_dpx.devices import canonical_device, is_host
from lightning_dpx.memory.execute.module_calls import compiled_parts
from lightning_dpx.memory.execute.routine_hooks import RoutineHooks
from lightning_dpx.memory.execute.whole_call_replays import Replays
from lightning_dpx.memory.plan.plan import MemoryPlan
from lightning_dpx.memory.plan_hooks import hooks_for_values
from lightning_dpx.memory.profile import timing_effort
from lightning_dpx.memory.profile.ambient_autocast import AmbientAutocast
from lightning_dpx.memory.profile.bookkeeping_in_step import Within
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.memory.profile.profiled_step import FreshForward
from lightning_dpx.memory.profile.step_timer import StepTimer
from lightning_dpx.progress import at

_WARM_UP = 2  # steps: in its first one a plan learns where hooks are needed
_FEWEST_TURNS = 5
_MOST_TURNS = 21
_ENOUGH = 0.5  # seconds of steps
_TOO_MUCH = 0.7  # seconds: steps that take more for the fewest turns are not timed
_SURELY = 0.95  # of the time with the plan that is said to be fastest: less is no luck


class _PlanAtWork:
    """The hooks of a plan, on and off the modules.

    Args:
        module: What runs.
        plan: Which.
    """

    def __init__(self, module: nn.Module, plan: MemoryPlan) -> None:
        values = hooks_for_values(module, plan, watches=False) if plan.dropped else None
        assert values is None or isinstance(values, RoutineHooks), "no part is compiled"
        self._values = values
        self._replays = Replays(module, plan.replayed) if plan.replayed else None

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context for a forward that follows the plan."""
        with (
            nullcontext() if self._values is None else self._values.active(),
            nullcontext() if self._replays is None else self._replays.active(),
        ):
            yield

    def put_on(self) -> None:
        """Puts on what costs other steps time."""
        if self._values is not None:
            self._values.put_on()

    def remove(self) -> None:
        """Takes that off."""
        if self._values is not None:
            self._values.remove()

    def end(self) -> None:
        """Takes all hooks off."""
        self.remove()
        if self._replays is not None:
            self._replays.remove()


def fastest_plan(
    plans: Sequence[MemoryPlan],
    *,
    profile: Profile,
    module: nn.Module,
    run: Callable[[], Tensor | None],
    timer: StepTimer | None = None,
) -> MemoryPlan:
    """The plan with which a step takes least, and with that as its extra time; the first where steps are not timed.

    Timed are steps on the host that are short, that run their backward at the end, and that are not compiled. They
    leave nothing behind.

    Args:
        plans: The one that is said to be fastest first.
        profile: Of the step.
        module: What runs.
        run: One forward that returns what backward is to run from.
        timer: Times its steps; one that puts back what they change unless given.
    """
    tried = _timed_plans(plans, profile) if _can_be_timed(profile, module) else []
    if not tried:
        return plans[0]
    at("timing steps with plans")
    costs = CostModel(torch.device("cpu"))  # only steps on the host are timed
    autocast = AmbientAutocast()
    forward = FreshForward(module, run, autocast.entered_by(nullcontext))
    try:
        with torch.enable_grad(), autocast.suspended():
            ratios = _ratios(tried, timer or costs.timer(module), module, forward)
    finally:
        costs.forget_reach()
    if not ratios:
        return plans[0]
    # The first one stays unless another is faster for sure: measured times jitter, and a plan
    # should not depend on that.
    ranked = [ratios[0] * _SURELY, *ratios[1:]]
    best = ranked.index(min(ranked))
    share = max(0.0, ratios[best] - 1.0)
    # A bound is of predicted times. What was measured may be below it, and is then the better one.
    least = plans[best].least_share
    return replace(plans[best], recompute_share=share, least_share=None if least is None else min(least, share))


def _can_be_timed(profile: Profile, module: nn.Module) -> bool:
    """Whether steps can be run here with one plan after the other, and their times compared."""
    if profile.basis or not getattr(module, "automatic_optimization", True):
        return False
    # Steps with backwards of their own and compiled parts follow no routine, which is what is
    # timed; and other processes would have to run as many steps.
    if profile.saves or profile.communicates or compiled_parts(module):
        return False
    homes = {canonical_device(parameter.device) for parameter in module.parameters()}
    return all(is_host(home) for home in homes)


def _timed_plans(plans: Sequence[MemoryPlan], profile: Profile) -> list[MemoryPlan]:
    """The first plans, as many as short enough steps allow; none if one of them does nothing."""
    for plan in plans:
        does_something = plan.dropped or plan.replayed
        if not does_something or plan.names("offload"):
            return []
    count = len(plans)
    # Fewer plans in enough turns tell more than all of them in too few.
    while count and _seconds_of_turns(plans[:count], profile) > _TOO_MUCH:
        count -= 1
    return list(plans[:count])


def _seconds_of_turns(plans: Sequence[MemoryPlan], profile: Profile) -> float:
    """What the fewest turns take, as far as is known."""
    with_plans = sum(1.0 + (plan.recompute_share or 0.0) for plan in plans)
    steps = (_WARM_UP + _FEWEST_TURNS) * with_plans + _FEWEST_TURNS * len(plans)
    return steps * profile.step_seconds


def _ratios(plans: Sequence[MemoryPlan], timer: StepTimer, module: nn.Module, forward: FreshForward) -> list[float]:
    """The time of a step with each plan over that without; nothing where steps are watched, which takes time."""
    # The first step is watched, and tells whether the next ones have to be.
    timer.timed(forward, Tensor.backward)
    if timer.watches:
        return []
    at_work = [_PlanAtWork(module, plan) for plan in plans]
    try:
        return timer.in_a_row(partial(_ratios_in_turns, at_work, timer, forward))
    finally:
        for hooks in at_work:
            hooks.end()


def _ratios_in_turns(at_work: Sequence[_PlanAtWork], timer: StepTimer, forward: FreshForward) -> list[float]:
    """The medians of steps with each plan over the steps without one right before and after."""
    # A processor that others use as well may be half as fast for a second: that cancels out within a turn,
    # where the least times of all may come from different seconds.
    spent = 0.0
    ratios: list[list[float]] = [[] for _ in at_work]
    for hooks in at_work:  # they are put on when they are made
        hooks.remove()
    for hooks in at_work:
        for _ in range(_WARM_UP):
            _timed_with(hooks, timer, forward)
    before, _ = timer.timed(forward, Tensor.backward)
    turn = 0
    fewest = timing_effort.rounds(_FEWEST_TURNS)
    enough = timing_effort.seconds(_ENOUGH)
    while turn < fewest or (spent < enough and turn < _MOST_TURNS):
        for hooks, found in zip(at_work, ratios, strict=True):
            with_plan = _timed_with(hooks, timer, forward)
            after, _ = timer.timed(forward, Tensor.backward)
            spent += with_plan + after
            found.append(2.0 * with_plan / (before + after))
            before = after
        turn += 1
    return [statistics.median(found) for found in ratios]


def _timed_with(plan: _PlanAtWork, timer: StepTimer, forward: FreshForward) -> float:
    """Seconds of a step with a plan, whose hooks are on for that step only: others would pay for them."""
    plan.put_on()
    seconds, _ = timer.timed(Within(plan.active, forward), Tensor.backward)
    plan.remove()
    return seconds
