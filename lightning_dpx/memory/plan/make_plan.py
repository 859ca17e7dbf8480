"""From a profile and a budget to a plan: the planner that was asked for, or the best of all."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_dpx.errors import BudgetError
from lightning_dpx.memory.plan.budget_error import budget_error, of_compiled_whole, surely_needed
from lightning_dpx.memory.plan.code_shares import shares_for, with_shares
from lightning_dpx.memory.plan.decisions import decisions_about_calls, decisions_about_code, decisions_about_values
from lightning_dpx.memory.plan.lower_bound import bound_of_plans
from lightning_dpx.memory.plan.offload import ways_to_offload
from lightning_dpx.memory.plan.plan import MemoryPlan, Model, fingerprint_of
from lightning_dpx.memory.plan.planners.auto import AutoPlanner, SmallestPlanner
from lightning_dpx.memory.plan.problem import PLANNERS, Choice, Planner, Problem
from lightning_dpx.memory.plan.replay_search import ReplayChoice, with_replays
from lightning_dpx.memory.plan.solvers.bounds import least_bytes
from lightning_dpx.memory.plan.solvers.repair import HASTENING, fill, hasten
from lightning_dpx.memory.profile.data import PREFETCH_DEPTH, Profile
from lightning_dpx.python_objects.gc_pause import COLLECTOR
from lightning_dpx.units import format_bytes, format_least

_NEAR = 1.35  # times the extra time of the best: a plan that is said to take so much may be faster


def make_planner(planner: str | Planner) -> Planner:
    """A planner by name, or the one that was given.

    Raises:
        ConfigurationError: there is no planner of this name.
    """
    if isinstance(planner, Planner):
        return planner
    return PLANNERS[planner]()


def plan_profile(module: Model, profile: Profile, budget: int | None, planner: str | Planner = "auto") -> MemoryPlan:
    """The plan for ``module``, whose step is ``profile``.

    Raises:
        BudgetError: the budget, in bytes, cannot be met; names the smallest that can, and what stands in the way.
    """
    return plan_candidates(module, profile, budget, planner)[0]


def plan_candidates(
    module: Model, profile: Profile, budget: int | None, planner: str | Planner = "auto"
) -> list[MemoryPlan]:
    """Plans for ``module``, the best one first; behind it those of another sort that may well be as fast.

    What a step takes beside its operators is an estimate that may be off by more for replayed calls than for single
    values, so the best plan of each sort is worth a try where steps can be timed.

    Args:
        module: What is planned for.
        profile: Of its step.
        budget: Bytes; ``None`` for as few as possible.
        planner: Who decides.

    Raises:
        BudgetError: the budget cannot be met; names the smallest that can, and what stands in the way.
    """
    chosen = make_planner(planner)
    # What fits as it is needs no search, and no plan is faster than one that drops nothing.
    # A search makes many objects and no cycles; one look for those, among all that a process with a
    # large library has imported, took as long as the search of a BERT.
    with COLLECTOR.resting():
        if budget is not None and profile.peak <= budget:
            searched = _nothing_dropped(profile)
        else:
            searched = _with_or_without_shares(profile, budget, chosen)
    best_one = searched.found[0]
    # What is proved about values says nothing about compiled code that saves less.
    is_proved = budget is not None and not searched.shares
    bound = bound_of_plans(profile, budget or 0, searched.problem, best_one.seconds) if is_proved else None
    # Without a budget the fewest bytes count, which need not be timed.
    others = [] if budget is None else _of_other_sorts(searched.found, budget)
    step = with_shares(profile, searched.shares)
    shared = tuple(decisions_about_code(profile, searched.shares))
    plans = []
    for mixed in (best_one, *others):
        plan = _plan_of(module, step, budget, chosen, mixed, bound)
        plans.append(replace(plan, unplanned_peak=profile.peak, decisions=(*shared, *plan.decisions)))
    return plans


class _SearchResult(NamedTuple):
    """What a search has found.

    Attributes:
        shares: By path of a compiled part, the fraction of its saved bytes that it keeps; empty where all is saved.
        problem: What was searched value by value.
        found: The best first: all that is within the budget, or what is nearest to it.
    """

    shares: Mapping[str, float]
    problem: Problem
    found: list[ReplayChoice]


def _nothing_dropped(profile: Profile) -> _SearchResult:
    problem = Problem(profile)
    return _SearchResult({}, problem, [ReplayChoice(frozenset(), problem, Choice())])


def _with_or_without_shares(profile: Profile, budget: int | None, chosen: Planner) -> _SearchResult:
    """What was found for the step with shares of compiled parts, or without where the step is better so.

    Raises:
        BudgetError: nothing is within the budget.
    """
    shares = shares_for(profile, budget) if chosen.replays else {}
    if not shares:
        return _search_values_and_calls(profile, budget, chosen)
    tried: list[_SearchResult] = []
    smallest: list[int] = []
    for some, step in ((shares, with_shares(profile, shares)), ({}, profile)):
        fits = budget is not None and step.peak <= budget
        try:
            searched = _nothing_dropped(step) if fits else _search_values_and_calls(step, budget, chosen)
        except BudgetError as error:
            smallest.append(error.smallest or profile.peak)
        else:
            tried.append(searched._replace(shares=some))
    if not tried:
        raise BudgetError(
            f"A budget of {format_bytes(budget or 0)} for activations cannot be met; the smallest that can is "
            f"{format_least(min(smallest))}, also where compiled parts save as little as they can, and without a plan "
            f"it is {format_bytes(profile.peak)}. {of_compiled_whole(profile)}Allow more, or use a smaller batch.",
            min(smallest),
        )
    return min(tried, key=lambda searched: searched.found[0].forecast.rank(budget))


def _search_values_and_calls(profile: Profile, budget: int | None, chosen: Planner) -> _SearchResult:
    """Searches values, and calls to replay beside them.

    Raises:
        BudgetError: nothing is within the budget.
    """
    problems = [Problem(way) for way in ways_to_offload(profile)]
    surely = surely_needed(problems)
    if budget is not None and budget < surely:  # no search for what cannot be
        raise budget_error(profile, budget, _smallest_plan(problems), surely, chosen.name)
    if chosen.replays and budget is not None and not _in_reach_by_value(problems, budget):
        original, choice = problems[0], Choice()  # calls that are replayed may reach it
    else:
        original, choice = _best_choice(problems, budget, chosen)
    found = [ReplayChoice(frozenset(), original, choice)]
    if chosen.replays:
        # Calls are replayed in the step with the way to offload that won: these decisions go
        # together.
        found = with_replays(original.profile, found[0], budget, chosen.choose)
    if budget is not None and found[0].peak > budget:
        # A refusal says which budget can be met, which takes a search of its own.
        smallest = _smallest_plan(problems)
        if smallest.peak > budget or not isinstance(chosen, AutoPlanner):
            raise budget_error(profile, budget, smallest, surely, chosen.name, found[0].peak)
        # That search leads by other ways, and so may end within a budget that was missed.
        found = [_filled_up(smallest, budget)]
    return _SearchResult({}, original, found)


def _filled_up(found: ReplayChoice, budget: int) -> ReplayChoice:
    """The same replays, with as much kept beside them as the budget allows."""
    problem = found.problem
    filled = fill(problem, found.choice, budget)
    return found._replace(choice=hasten(problem, filled, budget, problem.work + HASTENING))


def _of_other_sorts(found: Sequence[ReplayChoice], budget: int) -> list[ReplayChoice]:
    """Behind the best: the best of those that replay calls, or no call, or nothing else, where these are near."""
    seen = {_sort_of(found[0])}
    near = []
    for mixed in found[1:]:
        if mixed.peak <= budget and mixed.seconds <= _NEAR * found[0].seconds and _sort_of(mixed) not in seen:
            seen.add(_sort_of(mixed))
            near.append(mixed)
    return near


def _sort_of(mixed: ReplayChoice) -> tuple[bool, bool]:
    """Whether calls are replayed, and whether values are dropped."""
    return bool(mixed.names), bool(mixed.choice.dropped)


def _plan_of(
    module: Model, profile: Profile, budget: int | None, chosen: Planner, found: ReplayChoice, bound: float | None
) -> MemoryPlan:
    """What was found, as a plan with names instead of numbers."""
    found = _with_most_overlap(found, budget)
    decisions = (
        *decisions_about_calls(profile, found.names),
        *decisions_about_values(profile, found.problem, found.choice),
    )
    result = found.problem.forecast(found.choice)
    is_offloading = any(decision.action == "offload" for decision in decisions)
    return MemoryPlan(
        model=type(module).__name__,
        fingerprint=fingerprint_of(module),
        planner=chosen.name,
        budget=budget,
        unplanned_peak=profile.peak,
        peak=result.peak,
        saved_bytes=result.kept,
        recompute_share=found.seconds / profile.step_seconds,
        least_share=None if bound is None else bound / profile.step_seconds,
        decisions=decisions,
        prefetch_depth=found.problem.profile.prefetch_depth if is_offloading else 0,
        basis=profile.basis,
        units=profile.units,
        recipes=profile.recipes,
    )


def _in_reach_by_value(problems: Sequence[Problem], budget: int) -> bool:
    """Whether nothing proves that values have to be replayed with their calls."""
    return any(least_bytes(problem.relaxation, with_calls=False) <= budget for problem in problems)


def _smallest_plan(problems: Sequence[Problem]) -> ReplayChoice:
    """What takes least of all that is known; nothing is done about its time."""
    planner = SmallestPlanner()
    problem, choice = _best_choice(problems, None, planner)
    return with_replays(problem.profile, ReplayChoice(frozenset(), problem, choice), None, planner.choose)[0]


def _best_choice(problems: Sequence[Problem], budget: int | None, planner: Planner) -> tuple[Problem, Choice]:
    """What to drop, and the way to offload that it was found with."""
    # The ways are in the order of their price: the first is for the fastest plan.
    found: list[tuple[Problem, Choice]] = []
    for problem in problems:
        found.append((problem, planner.choose(problem, budget)))
        if budget is not None and len(found) == 1 and _is_good(*found[0], budget):
            break  # the others are for less room
    return min(found, key=lambda each: each[0].forecast(each[1]).rank(budget))


def _is_good(problem: Problem, choice: Choice, budget: int) -> bool:
    """Whether other ways to offload need not be looked at."""
    return problem.forecast(choice).peak <= budget and not problem.is_nested(choice)


def _with_most_overlap(found: ReplayChoice, budget: int | None) -> ReplayChoice:
    """The choice with as many copies beside the computation as there is room for."""
    problem = found.problem
    choice = found.choice
    dropped = problem.values_of(choice.dropped)
    if not any(problem.profile.values[index].offloaded for index in dropped):
        return found
    limit = found.peak if budget is None else budget
    # A choice from a way without copies beside the computation may have room for some all the
    # same: the most that fit, down to those that it was found with.
    for prefetch_depth in range(PREFETCH_DEPTH, problem.profile.prefetch_depth, -1):
        wider = Problem(replace(problem.profile, prefetch_depth=prefetch_depth))
        if wider.forecast(choice).peak <= limit:
            return found._replace(problem=wider)
    return found
