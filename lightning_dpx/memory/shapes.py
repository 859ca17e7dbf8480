"""One plan for steps of several shapes: in each of them within the budget, so buckets share what the worst needs.

Values have the same names whatever the shape, so a plan made for one shape can be forecast for the others. Where none
that was made for a single shape does for all, plans are put together: every value is decided about where it is largest,
or dropped where any plan drops it. What then exceeds its budget somewhere is planned for less.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain

from torch import nn

from lightning_dpx.errors import BudgetError
from lightning_dpx.memory.joint import plan_devices, with_figures
from lightning_dpx.memory.plan.forecast import Forecast
from lightning_dpx.memory.plan.forecast_of_plan import forecast_plan
from lightning_dpx.memory.plan.lower_bound import lower_bound
from lightning_dpx.memory.plan.make_plan import plan_profile
from lightning_dpx.memory.plan.plan import Decision, MemoryPlan
from lightning_dpx.memory.plan.problem import Planner
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.units import format_bytes

_ATTEMPTS = 5  # to find plans that do for all once each shape has its own
_LEAST = 0.02  # of a room, by which it is made smaller at least: what is dropped is never a few bytes


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """What was decided for S shapes of a step on P devices.

    Attributes:
        plans: P, which decide alike, each with the figures of its device in the step that leaves least room there.
        worst: P, the index of that step.
    """

    plans: tuple[MemoryPlan, ...]
    worst: tuple[int, ...]


def plan_shapes(
    module: nn.Module,
    steps: Sequence[Sequence[Profile]],
    budgets: Sequence[Sequence[int]],
    planner: str | Planner = "auto",
    now: MemoryPlan | None = None,
) -> SharedPlan:
    """The plan that is followed now, if it does for all shapes; otherwise a new one.

    Args:
        module: The module whose steps were profiled.
        steps: S x P profiles: S shapes, each seen from P devices; the latest shape last.
        budgets: S x P bytes of activations.
        planner: Who decides.
        now: The plan that is followed.

    Raises:
        BudgetError: a budget cannot be met; :attr:`BudgetError.device_index` tells on which device.
    """
    search = _SharedSearch(module, steps, budgets, planner)
    if now is None:
        plans = search.plan_alone(len(steps) - 1)
        if len(steps) == 1:
            return SharedPlan(tuple(plans), (0,) * len(plans))
        # Plans of several devices decide alike, and differ in their figures only.
        now = plans[0]
    return search.from_plan(now)


def complete_plan(
    module: nn.Module, plan: MemoryPlan, profiles: Sequence[Profile], planner: str | Planner = "auto"
) -> MemoryPlan:
    """``plan``, and as few activations as possible also of what it does not know and other steps save.

    Args:
        module: The module whose steps were profiled.
        plan: Made for one of them.
        profiles: Of its steps.
        planner: Who decides.
    """
    for profile in profiles:
        known = {decision.name for decision in plan.decisions}
        if any(value.name and value.storage >= 0 and value.name not in known for value in profile.values):
            plan = _completed(plan, plan_profile(module, profile, None, planner))
    return plan


class _SharedSearch:
    """Looks for one plan for all steps: turn by turn, the one in which most is missing has a say.

    Args:
        module: The module whose steps were profiled.
        steps: S x P profiles.
        budgets: S x P bytes of activations.
        planner: Who decides.
    """

    def __init__(
        self,
        module: nn.Module,
        steps: Sequence[Sequence[Profile]],
        budgets: Sequence[Sequence[int]],
        planner: str | Planner,
    ) -> None:
        self._module = module
        self._steps = steps
        self._budgets = budgets
        self._planner = planner
        # What each step is planned for: its budgets, until steps have to give way to each other.
        self._rooms = [list(each) for each in budgets]
        self._alone: dict[int, MemoryPlan] = {}  # by step, the plan that was made for it only
        self._least: set[int] = set()  # steps whose plans take as little as can be

    def plan_alone(self, step: int) -> list[MemoryPlan]:
        """The plans of the devices for one step only."""
        plans = plan_devices(self._module, self._steps[step], self._rooms[step], self._planner)
        self._alone[step] = plans[0]
        return plans

    def from_plan(self, now: MemoryPlan) -> SharedPlan:
        """``now``, if it does for all steps; otherwise a plan that does.

        Raises:
            BudgetError: none was found.
        """
        candidates = [now]
        for _ in range(1 + len(self._steps) + _ATTEMPTS):
            plan, found = self._best(candidates)
            excess = _excess(found, self._budgets)
            # The step in which most is missing has a say in the plan next.
            step = max(range(len(self._steps)), key=lambda index: max(excess[index]))
            if max(excess[step]) <= 0:
                return _with_figures(plan, self._steps, self._budgets, found)
            if step not in self._alone:
                self.plan_alone(step)
            elif len(self._least) == len(self._steps):  # together the least of each is too much
                break
            else:  # too much, beside what the others want: all give way
                self._give_way(_missing_part(excess[step], self._budgets[step]), now)
            candidates = self._put_together(step, plan, now)
        raise _not_met(found[step], excess[step], self._budgets[step])

    def _best(self, candidates: Sequence[MemoryPlan]) -> tuple[MemoryPlan, list[list[Forecast]]]:
        """The plan that fits best, and its forecasts (S x P)."""
        judged = [(plan, _forecasts(self._steps, plan)) for plan in candidates]
        return min(judged, key=partial(_rank, budgets=self._budgets))

    def _give_way(self, part: float, now: MemoryPlan) -> None:
        """Plans every step that can take less for that part less of its room."""
        for step in set(range(len(self._steps))) - self._least:
            self._rooms[step] = [int(room * (1 - part)) for room in self._rooms[step]]
            before = self._alone.get(step, now)
            self._alone[step], meets = self._nearest(step, before)
            if not meets:
                self._least.add(step)

    def _nearest(self, step: int, before: MemoryPlan) -> tuple[MemoryPlan, bool]:
        """The plan for the rooms of a step, or for the least that can be, if that is found; and whether it meets them.

        Args:
            step: Which.
            before: Its plan until here.
        """
        rooms = self._rooms[step]
        reachable = list(rooms)
        for _ in range(1 + len(rooms)):
            try:
                plans = plan_devices(self._module, self._steps[step], reachable, self._planner)
                return plans[0], reachable == rooms
            except BudgetError as error:
                # The device that was refused says how much it needs, and gets that; another one may be
                # refused next.
                if error.smallest is None:
                    break
                reachable[error.device_index] = max(error.smallest, reachable[error.device_index])
        return before, False

    def _put_together(self, step: int, best: MemoryPlan, now: MemoryPlan) -> list[MemoryPlan]:
        """Plans that are put together from those of single steps; their forecasts decide.

        Args:
            step: In which most is missing.
            best: The plan that fits best so far.
            now: That of steps for which none was made.
        """
        each = [self._alone.get(index, now) for index in range(len(self._steps))]
        # Three ways: that of this step first of all, every value by where it is largest, and all
        # that any of them drops.
        return [_completed(self._alone[step], best), _by_size(each, self._steps), reduce(_together, each)]


def _missing_part(excess: Sequence[int], budgets: Sequence[int]) -> float:
    """The part of a step's budgets (P) by which its plans take more, on the device where that is most."""
    part = _LEAST
    for more, budget in zip(excess, budgets, strict=True):
        part = max(part, more / max(1, budget))
    return part


def _not_met(found: Sequence[Forecast], excess: Sequence[int], budgets: Sequence[int]) -> BudgetError:
    """The error of a step in which too much is missing on a device (P of each)."""
    device_index = max(range(len(excess)), key=lambda index: excess[index])
    return BudgetError(
        f"A budget of {format_bytes(budgets[device_index])} for activations was not met for all shapes of batches "
        f"together: plans that meet each take {format_bytes(found[device_index].peak)}. Allow more, or use "
        "batches of more equal shapes.",
        found[device_index].peak,
        device_index,
    )


def _forecasts(steps: Sequence[Sequence[Profile]], plan: MemoryPlan) -> list[list[Forecast]]:
    """The plan in every step, seen from every device (S x P)."""
    forecasts = []
    for profiles in steps:
        forecasts.append([forecast_plan(profile, plan) for profile in profiles])
    return forecasts


def _excess(found: Sequence[Sequence[Forecast]], budgets: Sequence[Sequence[int]]) -> list[list[int]]:
    """Bytes above each budget, negative where there is room (S x P)."""
    excess = []
    for results, allowed in zip(found, budgets, strict=True):
        excess.append([result.peak - budget for result, budget in zip(results, allowed, strict=True)])
    return excess


def _rank(judged: tuple[MemoryPlan, list[list[Forecast]]], budgets: Sequence[Sequence[int]]) -> tuple[bool, float]:
    """What fits, the fastest first; then what comes nearest to it."""
    most = max(map(max, _excess(judged[1], budgets)))
    if most > 0:
        return True, most
    return False, sum(result.seconds for result in chain.from_iterable(judged[1]))


def _completed(own: MemoryPlan, other: MemoryPlan) -> MemoryPlan:
    """``own``, and what ``other`` decides about values that are not there in the steps ``own`` was made for."""
    known = {decision.name for decision in own.decisions}
    missing = [decision for decision in other.decisions if decision.name not in known]
    return replace(own, decisions=(*own.decisions, *missing))


def _by_size(plans: Sequence[MemoryPlan], steps: Sequence[Sequence[Profile]]) -> MemoryPlan:
    """What the plan of that step decides about a value in which it is largest."""
    sizes = [Counter[str]() for _ in steps]
    for size, profiles in zip(sizes, steps, strict=True):
        for profile in profiles:
            for value in profile.values:
                if value.name:
                    size[value.name] += value.num_bytes
    chosen: dict[str, tuple[int, Decision]] = {}
    for plan, size in zip(plans, sizes, strict=True):
        for decision in plan.decisions:
            # Where it is largest, most depends on what is done with it.
            if decision.name not in chosen or chosen[decision.name][0] < size[decision.name]:
                chosen[decision.name] = size[decision.name], decision
    return replace(plans[-1], decisions=tuple(decision for _, decision in chosen.values()))


def _together(own: MemoryPlan, other: MemoryPlan) -> MemoryPlan:
    """Drops what either drops."""
    theirs = {decision.name: decision for decision in other.decisions}
    # What one keeps the other decides about; what both drop is dropped in the first one's way.
    both = []
    for mine in own.decisions:
        both.append(theirs.get(mine.name, mine) if mine.action == "keep" else mine)
    return _completed(replace(own, decisions=tuple(both)), other)


def _with_figures(
    plan: MemoryPlan,
    steps: Sequence[Sequence[Profile]],
    budgets: Sequence[Sequence[int]],
    found: Sequence[Sequence[Forecast]],
) -> SharedPlan:
    plans = []
    worst = []
    for device_index in range(len(steps[0])):
        ratios = [found[i][device_index].peak / max(1, budgets[i][device_index]) for i in range(len(steps))]
        step = ratios.index(max(ratios))
        profile = steps[step][device_index]
        budget = budgets[step][device_index]
        result = found[step][device_index]
        least = lower_bound(profile, budget) / profile.step_seconds
        plans.append(with_figures(plan, profile, budget, result, least))
        worst.append(step)
    return SharedPlan(tuple(plans), tuple(worst))
