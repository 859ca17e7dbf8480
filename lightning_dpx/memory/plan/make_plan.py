"""From a profile and a budget to a plan: the planner that was asked for, or the best of all."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

from torch import nn

from lightning_dpx.errors import BudgetError
from lightning_dpx.memory.plan.offload import PREFETCH_DEPTH, least_seconds_with_offloading, ways_to_offload
from lightning_dpx.memory.plan.plan import Action, Decision, MemoryPlan, fingerprint_of
from lightning_dpx.memory.plan.planners.milp import programmed
from lightning_dpx.memory.plan.planners.optimal import OptimalPlanner
from lightning_dpx.memory.plan.planners.search import SearchPlanner
from lightning_dpx.memory.plan.problem import PLANNERS, Choice, Planner, Problem, best, rank, register_planner
from lightning_dpx.memory.plan.replay_search import Mixed, with_replays
from lightning_dpx.memory.plan.solvers.bounds import Relaxation, least_bytes, least_seconds
from lightning_dpx.memory.plan.solvers.highs import require_solver
from lightning_dpx.memory.plan.solvers.repair import fill
from lightning_dpx.memory.profile.data import Profile, SavedValue


@register_planner("auto")
class AutoPlanner(Planner):
    """What ``"search"`` and ``"optimal"`` find, whichever is better; alone, or beside calls that are replayed."""

    replays = True

    def choose(self, problem: Problem, budget: int | None) -> Choice:
        """The fastest within the budget; without one, the smallest."""
        planners: list[Planner] = [SearchPlanner(), OptimalPlanner()]
        return best(problem, [planner.choose(problem, budget) for planner in planners], budget)


@register_planner("milp")
class MilpPlanner(Planner):
    """Mixed-integer programming alone; see :mod:`lightning_dpx.memory.plan.planners.milp`."""

    def choose(self, problem: Problem, budget: int | None) -> Choice:
        """Where the programme finds nothing within the budget, and without one, what ``"optimal"`` finds.

        Raises:
            UnsupportedError: HiGHS is not installed.
        """
        require_solver()
        if budget is not None:
            found = [fill(problem, choice, budget) for choice in programmed(problem, budget)]
            if found and problem.forecast(choice := best(problem, found, budget)).peak <= budget:
                return choice
        return OptimalPlanner().choose(problem, budget)


def make_planner(planner: str | Planner) -> Planner:
    """A planner by name, or the one that was given.

    Raises:
        ConfigurationError: there is no planner of this name.
    """
    return planner if isinstance(planner, Planner) else PLANNERS[planner]()


def plan_profile(
    module: nn.Module, profile: Profile, budget: int | None, planner: str | Planner = "auto"
) -> MemoryPlan:
    """The plan for ``module``, whose step is ``profile``.

    Raises:
        BudgetError: the budget, in bytes, cannot be met; names the smallest that can, and what stands in the way.
    """
    chosen, enough = make_planner(planner), budget is not None and profile.peak <= budget
    problems = [Problem(way) for way in ([profile] if enough else ways_to_offload(profile))]
    problem, choice = (problems[0], Choice()) if enough else _chosen(problems, budget, chosen)
    replayed_calls, original = frozenset[str](), problem
    if chosen.replays and not enough:
        replayed_calls, problem, choice = with_replays(
            problem.profile, Mixed(replayed_calls, problem, choice), budget, chosen.choose
        )
    result = problem.forecast(choice)
    if budget is not None and result.peak > budget:
        least, smallest_choice = _chosen(problems, None, AutoPlanner())
        _, least, smallest_choice = with_replays(
            least.profile, Mixed(frozenset(), least, smallest_choice), None, AutoPlanner().choose
        )
        smallest = least.forecast(smallest_choice).peak
        surely = min(least_bytes(Relaxation(each)) for each in problems)
        raise BudgetError(
            f"A budget of {_mib(budget)} for activations cannot be met"
            + (f" by planner={chosen.name!r}, which reaches {_mib(result.peak)}" if smallest <= budget else "")
            + f"; the smallest that can is {_mib(smallest)}, without a plan it is {_mib(profile.peak)}, and nothing "
            f"that drops and computes again takes less than {_mib(surely)}. "
            f"{_crest(least, smallest_choice)} {_bottleneck(problem)} Allow more, or use a smaller batch.",
            smallest,
        )
    dropped, uncached = problem.values_of(choice.dropped), problem.values_of(choice.uncached)
    if any(problem.profile.values[index].offloaded for index in dropped):
        problem = _with_most_overlap(problem, choice, result.peak if budget is None else budget)
        result = problem.forecast(choice)
    shares = _shares_of_calls(profile)
    decisions = [
        Decision(
            call.name,
            f"a call of {call.kind}",
            call.small + sum(size for size, _ in call.again),
            call.seconds,
            "replay",
        )
        for call in profile.calls
        if call.name in replayed_calls
    ]
    decisions += [
        Decision(
            planned.name,
            value.operator,
            value.num_bytes,
            (planned if index in dropped else value).seconds
            + (shares.get(index, 0.0) if not planned.offloaded else 0.0),
            _action(planned, index in dropped, index in uncached),
            _calls(profile, index) or ((planned.within,) if planned.within else ()),
        )
        for index, (value, planned) in enumerate(zip(profile.values, problem.profile.values, strict=True))
        if value.name and value.storage >= 0
    ]
    spent = result.seconds + problem.profile.replaying
    bound = None
    if budget is not None:
        # The programme knows neither nested values nor replayed calls; what these show to be wrong is no proof.
        proved = original.proved.get(budget, 0.0)
        bound = min(spent, lower_bound(profile, budget, proved if proved <= spent else 0.0))
    return MemoryPlan(
        model=type(module).__name__,
        fingerprint=fingerprint_of(module),
        planner=chosen.name,
        budget=budget,
        unplanned_peak=profile.peak,
        peak=result.peak,
        saved_bytes=result.kept,
        recompute_share=spent / profile.step_seconds,
        least_share=None if bound is None else bound / profile.step_seconds,
        decisions=tuple(decisions),
        prefetch_depth=problem.profile.prefetch_depth
        if any(decision.action == "offload" for decision in decisions)
        else 0,
        basis=profile.basis,
    )


def _chosen(problems: Sequence[Problem], budget: int | None, planner: Planner) -> tuple[Problem, Choice]:
    """What to drop, and the way to offload that it was found with."""
    found: list[tuple[Problem, Choice]] = []
    for problem in problems:
        found.append((problem, planner.choose(problem, budget)))
        if budget is not None and len(found) == 1 and _is_good(*found[0], budget):
            break  # the others are for less room
    return min(found, key=lambda each: rank(each[0], each[1], budget))


def _is_good(problem: Problem, choice: Choice, budget: int) -> bool:
    return problem.forecast(choice).peak <= budget and not problem.is_nested(choice)


def _shares_of_calls(profile: Profile) -> dict[int, float]:
    """Of the seconds of a module call that is made again, what falls to each value that is picked from it, by bytes."""
    values, sizes = profile.values, Counter[int]()
    for value in values:
        if value.picked:
            sizes[value.inputs[0]] += value.num_bytes
    return {
        index: values[value.inputs[0]].seconds * value.num_bytes / sizes[value.inputs[0]]
        for index, value in enumerate(values)
        if value.picked and sizes[value.inputs[0]]
    }


def _calls(profile: Profile, index: int) -> tuple[str, ...]:
    """The module calls that are made again on the way to a value.

    Also those behind what is saved only later: whether that is kept is not known yet when the value is dropped.
    """
    if profile.values[index].refused:
        return ()
    saved, stack = profile.values[index].saved, list(profile.values[index].inputs)
    seen, calls = set[int](), set[str]()
    while stack:
        source = stack.pop()
        value = profile.values[source]
        is_there = value.storage >= 0 and value.saved <= saved
        if source not in seen and not is_there and (value.storage >= 0 or not value.name):
            seen.add(source)
            stack += value.inputs
            calls |= {value.call} - {""}
    return tuple(sorted(calls))


def _with_most_overlap(problem: Problem, choice: Choice, limit: int) -> Problem:
    """With as many copies beside the computation as there is room for."""
    for prefetch_depth in range(PREFETCH_DEPTH, problem.profile.prefetch_depth, -1):
        wider = Problem(replace(problem.profile, prefetch_depth=prefetch_depth))
        if wider.forecast(choice).peak <= limit:
            return wider
    return problem


def lower_bound(profile: Profile, budget: int, proved: float = 0.0) -> float:
    """Seconds that no choice within ``budget`` goes below: the best proof there is, or one ``proved`` already."""
    if any(value.copying for value in profile.values):
        return least_seconds_with_offloading(Problem(profile), budget)
    return max(least_seconds(Relaxation(Problem(profile)), budget), proved)


def _action(value: SavedValue, dropped: bool, uncached: bool) -> Action:
    if not dropped:
        return "replay" if value.within else "keep"
    if value.offloaded:
        return "offload"
    if value.compact:
        return "compress each time" if uncached else "compress"
    return "recompute each time" if uncached else "recompute"


def _crest(problem: Problem, choice: Choice) -> str:
    """Where the step needs most, if it follows ``choice``: the operator at work, its module, and what passes there."""
    profile = problem.profile
    curve = problem.timeline(choice)
    event = int(curve.argmax()) if len(curve) else 0
    if event < profile.forward_events:
        begun = [value for value in profile.values if value.name and value.saved <= event]
        value, when = max(begun, key=lambda value: value.saved, default=None), "forward"
    else:
        asked = [request for request in profile.requests if request.event <= event]
        value, when = profile.values[asked[-1].value] if asked else None, "backward"
    if value is None:
        return ""
    module = value.name.rpartition(":")[0] or "the step itself"
    begun_there = bisect_right(profile.operators, event, key=itemgetter(0))
    operator = f"{profile.operators[begun_there - 1][1]} in " if begun_there else ""
    of = f" ({value.operator})" if value.operator else ""
    said = f"What sets that is {operator}the {when} at {module!r}{of}"
    passing = _passing(profile, event)
    return f"{said}, where {_mib(passing)} pass: gradients, and what operators take inside." if passing else f"{said}."


def _passing(profile: Profile, event: int) -> int:
    """Bytes that are there at an event of the unplanned step, and that nobody saves."""
    first = dict[int, int]()
    for value in profile.values:
        if value.storage >= 0:
            first[value.storage] = min(value.saved, first.get(value.storage, value.saved))
    saved = sum(
        storage.num_bytes
        for number, storage in enumerate(profile.storages)
        if first.get(number, 0) <= event < storage.freed
    )
    return max(0, profile.curve[event] - saved)


def _bottleneck(problem: Problem) -> str:
    """The largest unit that sets the floor."""
    if not problem.units:
        return "Nothing that is saved is large enough to drop."
    unit = max(problem.units, key=lambda unit: unit.num_bytes)
    value = problem.profile.values[unit.values[0]]
    why = f", which must be kept: {value.refused}" if value.refused else ""
    return f"The largest single activation, {_mib(unit.num_bytes)}, is saved by {value.name.rpartition(':')[0]!r}{why}."


def _mib(size: float) -> str:
    """Bytes in the unit that shows them."""
    if size < 1024:
        return f"{size:.0f} bytes"
    return f"{size / 2**10:.2f} KiB" if size < 2**20 else f"{size / 2**20:.2f} MiB"
