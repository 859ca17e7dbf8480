"""Why a budget cannot be met: the smallest that can, what is proved about it, and the transient that sets it."""

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from lightning_dpx.errors import BudgetError
from lightning_dpx.memory.plan.solvers.bounds import least_bytes
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.units import format_bytes, format_least

if TYPE_CHECKING:
    from lightning_dpx.memory.plan.problem import Problem
    from lightning_dpx.memory.plan.replay_search import ReplayChoice


def budget_error(
    profile: Profile, budget: int, smallest: "ReplayChoice", surely: int, planner: str, reached: int = 0
) -> BudgetError:
    """The error of a budget that is not met.

    Args:
        profile: The step.
        budget: Bytes.
        smallest: What takes least.
        surely: Bytes that every plan takes.
        planner: The name of the one that was asked.
        reached: Bytes that it comes down to, where it was asked.
    """
    least = smallest.peak
    # Where other planners reach the budget, it is this one that cannot.
    other = f" by planner={planner!r}, which reaches {format_bytes(reached)}" if least <= budget else ""
    sentences = [
        f"A budget of {format_bytes(budget)} for activations cannot be met{other}; the smallest that can is "
        f"{format_least(least)}, without a plan it is {format_bytes(profile.peak)}, and nothing that drops and "
        f"computes again takes less than {format_bytes(surely)}.",
        _costliest_moment(smallest),
        _bottleneck(smallest.problem),
        f"{of_compiled_whole(profile)}Allow more, or use a smaller batch.",
    ]
    # Of the costliest moment nothing is said where no value tells what is running then.
    return BudgetError(" ".join(sentence for sentence in sentences if sentence), least)


def of_compiled_whole(profile: Profile) -> str:
    """Words on a model that is one piece of compiled code, with a space behind them; empty for any other."""
    if not any(code.name == "" for code in profile.codes):
        return ""
    return (
        "The model is compiled as a whole: a plan can only have its code save less, and what backward computes again "
        "is there all at once. Blocks that are compiled one by one (block.compile() for each) can be planned for less. "
    )


def surely_needed(problems: Sequence["Problem"]) -> int:
    """Bytes that are there at some event in every plan, in whichever of these ways it offloads."""
    return min(least_bytes(problem.relaxation) for problem in problems)


def _costliest_moment(found: "ReplayChoice") -> str:
    """A sentence on where the step needs most: the operator, its module, and what passes there; empty if unknown."""
    profile = found.problem.profile
    curve = found.problem.timeline(found.choice)
    event = int(curve.argmax()) if len(curve) else 0
    # Values that are saved tell where forward is, and requests where backward is.
    if event < profile.forward_events:
        begun = [value for value in profile.values if value.name and value.saved <= event]
        value = max(begun, key=lambda value: value.saved, default=None)
        when = "forward"
    else:
        requests = [request for request in profile.requests if request.event <= event]
        value = profile.values[requests[-1].value] if requests else None
        when = "backward"
    if value is None:
        return ""
    module = value.name.rpartition(":")[0] or "the step itself"
    # What an operator takes inside is counted at its own event, so the last one up to this event
    # is the one at work.
    begun_there = bisect_right(profile.operators, event, key=itemgetter(0))
    operator = f"{profile.operators[begun_there - 1][1]} in " if begun_there else ""
    of = f" ({value.operator})" if value.operator else ""
    said = f"What sets that is {operator}the {when} at {module!r}{of}"
    passing = _passing(profile, event)
    if not passing:
        return f"{said}."
    return f"{said}, where {format_bytes(passing)} pass: gradients, and what operators take inside."


def _passing(profile: Profile, event: int) -> int:
    """Bytes that are there at an event of the unplanned step, and that are not saved."""
    # Several values may share a storage: it is there from the first of them on.
    first = dict[int, int]()
    for value in profile.values:
        if value.storage >= 0:
            first[value.storage] = min(value.saved, first.get(value.storage, value.saved))
    saved = 0
    for number, storage in enumerate(profile.storages):
        if first.get(number, 0) <= event < storage.freed:
            saved += storage.num_bytes
    return max(0, profile.curve[event] - saved)


def _bottleneck(problem: "Problem") -> str:
    """The largest unit that sets the floor."""
    if not problem.units and problem.profile.calls:
        return "All that is saved is too small to be dropped alone; only whole calls of modules can be replayed."
    if not problem.units:
        return "Nothing that is saved is large enough to drop."
    unit = max(problem.units, key=lambda unit: unit.num_bytes)
    value = problem.profile.values[unit.values[0]]
    why = f", which must be kept: {value.refused}" if value.refused else ""
    size = format_bytes(unit.num_bytes)
    return f"The largest single activation, {size}, is saved by {value.name.rpartition(':')[0]!r}{why}."
