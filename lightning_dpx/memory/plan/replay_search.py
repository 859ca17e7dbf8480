"""Which module calls to replay as a whole, beside what is dropped value by value.

To replay every block is what people write by hand; here it is one point among others. For each kind of calls the step
with all of them replayed is looked at; from there calls are left alone again, the last ones first, as long as the
budget allows; and a planner decides about what is left, value by value, with some, most or all of them replayed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from lightning_dpx.memory.plan.forecast import Forecast, with_overheads
from lightning_dpx.memory.plan.problem import Choice, Problem
from lightning_dpx.memory.plan.replayed_steps import ReplayableStep
from lightning_dpx.memory.plan.solvers.bounds import least_bytes, least_seconds
from lightning_dpx.memory.profile.data import Profile

Choose = Callable[[Problem, int | None], Choice]
_WORTH = 0.05  # of the peak: what the calls of a kind must hold
_MOST_KINDS = 2  # that a planner is asked about
_GAIN = 0.97  # of the extra time: what could be saved at best is worth asking it
_WITHIN_REACH = 1.5  # times the budget
_MOST_MISSES = 8  # calls in a row that cannot be left alone


class ReplayChoice(NamedTuple):
    """A choice of calls to replay and values to drop.

    Attributes:
        names: Of the calls.
        problem: The step with these replayed, as planners see it.
        choice: What is dropped of the rest.
    """

    names: frozenset[str]
    problem: Problem
    choice: Choice

    @property
    def peak(self) -> int:
        """Bytes of activations at the most."""
        return self.forecast.peak

    @property
    def seconds(self) -> float:
        """Extra time of a step."""
        return self.forecast.seconds

    @property
    def forecast(self) -> Forecast:
        """The step with this choice, with the time of the replayed calls."""
        dropped = self.problem.values_of(self.choice.dropped)
        return with_overheads(self.problem.profile, self.problem.forecast(self.choice), dropped)


def with_replays(profile: Profile, plain: ReplayChoice, budget: int | None, choose: Choose) -> list[ReplayChoice]:
    """What is found with some calls replayed, and ``plain``, which replays none; the best one first.

    Args:
        profile: The step.
        plain: What was found value by value.
        budget: Bytes; ``None`` for as few as possible.
        choose: Decides about values.
    """
    groups = _groups(profile)
    if not groups:
        return [plain]
    step = ReplayableStep(profile)
    found = [plain]
    if budget is None:
        lowest = min((_mixed(step, names) for names in groups), key=lambda mixed: mixed.peak)
        # Where replays alone end far above it, values beside them are not expected to make up for
        # that, and to find out takes a long search.
        if lowest.peak <= _WITHIN_REACH * plain.peak:
            found += [lowest, lowest._replace(choice=choose(lowest.problem, None))]
            # A call keeps all that it saves until it is over, which for the last one is beside all
            # that the step keeps: value by value, less of it may do.
            fewer = _in_order(profile, lowest.names)[:-1]
            if fewer:
                part = _mixed(step, frozenset(fewer))
                found.append(part._replace(choice=choose(part.problem, None)))
        return sorted(found, key=lambda mixed: mixed.forecast.rank(None))
    whole = [_mixed(step, names) for names in groups]
    fitting = [_with_fewer(step, mixed, budget) for mixed in whole if mixed.peak <= budget]
    found += fitting
    # Values that are dropped beside the replays may take a step down to the budget, but not far.
    within_reach = [mixed for mixed in whole if mixed.peak <= _WITHIN_REACH * budget]
    near = sorted(within_reach, key=lambda mixed: mixed.forecast.rank(budget))
    for mixed in near[:_MOST_KINDS]:
        for names in _parts(profile, mixed.names):
            part = _mixed(step, names)
            leader = min(found, key=lambda mixed: mixed.forecast.rank(budget))
            relaxation = part.problem.relaxation
            # Both questions are answered at once, where a planner takes seconds: whether the
            # budget can be met with these replays, and whether anything could be gained.
            if least_bytes(relaxation, with_calls=False) > budget:
                continue
            bound = part.problem.profile.replaying + least_seconds(relaxation, budget)
            if leader.peak > budget or bound < _GAIN * leader.seconds:
                found.append(part._replace(choice=choose(part.problem, budget)))
    return sorted(found, key=lambda mixed: mixed.forecast.rank(budget))


def _mixed(step: ReplayableStep, names: frozenset[str]) -> ReplayChoice:
    return ReplayChoice(names, Problem(step.replayed(names)), Choice())


def _groups(profile: Profile) -> list[frozenset[str]]:
    """The calls of each kind that hold enough together."""
    names = dict[str, set[str]]()
    sizes = dict[str, int]()
    for call in profile.calls:
        names.setdefault(call.kind, set()).add(call.name)
        sizes[call.kind] = sizes.get(call.kind, 0) + call.small + sum(size for size, _ in call.again)
    least = _WORTH * profile.peak
    large = [kind for kind, size in sizes.items() if size >= least]
    return list(dict.fromkeys(frozenset(names[kind]) for kind in large))


def _in_order(profile: Profile, names: frozenset[str]) -> list[str]:
    return [call.name for call in profile.calls if call.name in names]


def _with_fewer(step: ReplayableStep, mixed: ReplayChoice, budget: int) -> ReplayChoice:
    """Leaves calls alone while the budget allows it, the last first: backward comes back to them soonest.

    In handfuls, halved when one is too much: a step with fewer calls takes time in the size of the whole step.
    """
    profile = step.profile
    names = mixed.names
    waiting = _in_order(profile, mixed.names)[::-1]
    size = max(1, len(waiting) // 4)
    misses = 0
    while waiting and misses < _MOST_MISSES:
        fewer = names - set(waiting[:size])
        if step.peak(fewer) <= budget:
            names = fewer
            waiting = waiting[size:]
        elif size > 1:
            size //= 2
        else:
            waiting = waiting[1:]
            misses += 1
    return _mixed(step, names)


def _parts(profile: Profile, names: frozenset[str]) -> Iterator[frozenset[str]]:
    """Parts of these calls, the first ones in each: all but one, three quarters, half, and all."""
    order: Sequence[str] = _in_order(profile, names)
    for count in dict.fromkeys((len(order) - 1, len(order) - len(order) // 4, len(order) // 2, len(order))):
        if count > 0:
            yield frozenset(order[:count])
