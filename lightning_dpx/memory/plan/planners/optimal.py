"""The least extra time within a budget: several ways to a choice compete, and the exact forecast decides.

    quickest   the knapsack of the lower bound, as it is or after a few steps       solvers/bounds.py, repair.py
               the integer program, where HiGHS is installed                        solvers/milp_model.py
               dynamic programming over stretches, in up to four variants           solvers/stretches.py
    lowest     steps down from several starts; for budgets that nothing else meets  solvers/repair.py

The knapsack is often within the budget as it is, or after a few steps, and then hardly above the lower bound of the
extra time. Of the variants of the dynamic program, units that are computed from far away may be dropped or not, and
cheap units may be forgotten after every use, so that a stretch comes back without them. It only estimates peaks: the
exact forecast moves its target until the budget is met. Whatever still fits is then kept, the costliest bytes first.

Every budget above the smallest peak can be met: where nothing else does, the choice with that peak is filled up.

Related: rotor (Beaumont et al., 2019) for chains; Checkmate (Jain et al., 2020), which solves such a choice as an
integer program.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from lightning_dpx.memory.plan.problem import Choice, Planner, Problem, best, register_planner
from lightning_dpx.memory.plan.solvers.bounds import Relaxation, knapsack
from lightning_dpx.memory.plan.solvers.highs import solver_installed
from lightning_dpx.memory.plan.solvers.milp_model import milp_choices
from lightning_dpx.memory.plan.solvers.repair import HASTENING, LOWERING, REACHING, Descent, fill, hasten
from lightning_dpx.memory.plan.solvers.stretches import StretchTable, Variant, variants
from lightning_dpx.memory.profile.data import Profile

_HEAVY = re.compile(r"mm|Linear|Convolution|Attention")
_BISECTIONS = 9  # of the target, for the lowest peak of stretches
_STARTS = 3  # of the lowest peaks found so, from which steps down begin
_AIMS = 9  # targets that are tried for a budget, between these shares of it
_LEAST_AIM = 0.5
_MOST_AIM = 2.5
_SAME_AIM = 0.02  # of the budget: nearer targets are no others
_NEAR_ENOUGH = 0.98  # of the budget: what still fits is filled up afterwards
_STRETCHES = (8, 24, 72)  # units
_MUCH_SLOWER = 3.0
_CLOSE = 0.01  # to the lower bound: nothing better is worth looking for


@register_planner("optimal")
class OptimalPlanner(Planner):
    """Dynamic programming, a knapsack and, where HiGHS is installed, an integer program, by the exact forecast."""

    def choose(self, problem: Problem, budget: int | None) -> Choice:
        """The best choice within the budget; without one, the lowest peak, see :func:`_lowered`."""
        if budget is None:
            peak = problem.forecast(lowest(problem)).peak
            # Several choices may have the lowest peak, and one that takes longer may lead to one that takes less.
            rivals = [choice for choice in _lowered(problem) if problem.forecast(choice).peak <= peak]
            until = problem.work + HASTENING
            return best(problem, [hasten(problem, choice, peak, until) for choice in rivals], None)
        relaxation = problem.relaxation
        least, dropped = knapsack(relaxation, budget)
        # Otherwise no choice is within the budget, and the lowest one is the answer.
        if least < float("inf"):
            found = []
            descent = Descent(relaxation, REACHING)
            # The quickest to find come first, and a later one is only made if no earlier one is
            # close to the bound.
            for rival in _rivals(relaxation, Choice(dropped), budget):
                found.append(fill(problem, descent.reach(rival, budget), budget))
                choice = best(problem, found, budget)
                result = problem.forecast(choice)
                least = max(least, problem.proved.get(budget, 0.0))
                if result.peak <= budget and result.seconds <= (1 + _CLOSE) * least:
                    break
            if result.peak <= budget:
                return hasten(problem, choice, budget, problem.work + HASTENING)
        return best(problem, _filled(problem, _lowered(problem), budget), budget)


def lowest(problem: Problem) -> Choice:
    """The lowest peak that was found, however long the step takes."""
    return best(problem, _lowered(problem), None)


def _filled(problem: Problem, lowered: list[Choice], budget: int) -> list[Choice]:
    """Low choices, filled up to the budget; those as they are if none is within it."""
    # The quickest only: what computes everything many times takes as many times longer to fill up, and ends
    # where the quickest does, or behind it.
    times = {choice: problem.forecast(choice).seconds for choice in lowered if problem.forecast(choice).peak <= budget}
    most = _MUCH_SLOWER * min(times.values(), default=0.0)
    until = problem.work + HASTENING  # for all of them together
    found = []
    for choice in sorted(times, key=times.__getitem__):
        if times[choice] <= most:
            # One large unit may spare most time, and take the room of several that spare more together.
            halfway = (problem.forecast(choice).peak + budget) // 2
            found.append(hasten(problem, hasten(problem, choice, halfway, until), budget, until))
            found.append(hasten(problem, fill(problem, choice, budget), budget, until))
    return found or lowered


def _lowered(problem: Problem) -> list[Choice]:
    """The lowest peaks to which steps lead from a few starts."""
    if not problem.lowered:
        problem.lowered = list(_lowered_of(_nominal(problem.profile)))
    return problem.lowered


@lru_cache(maxsize=8)
def _lowered_of(nominal: Profile) -> tuple[Choice, ...]:
    """The lowest choices of a profile; remembered, as every budget and new profile asks again."""
    problem = Problem(nominal)
    every = frozenset(problem.droppable)
    descent = Descent(problem.relaxation, LOWERING)
    # Steps down end in a low place near where they begin, so they begin in several.
    starts = [*_lowest(problem), Choice(every, problem.unnested), Choice(), *_nested(problem)]
    found = [descent.lower(start) for start in starts]
    # What is computed less often has less beside it: to spare time may spare bytes, too, and lead further down.
    smallest = best(problem, found, None)
    quicker = hasten(problem, smallest, problem.forecast(smallest).peak, problem.work + HASTENING)
    found += [quicker, Descent(problem.relaxation, REACHING).lower(quicker)]
    return tuple(dict.fromkeys(found))


def _rivals(relaxation: Relaxation, first: Choice, budget: int) -> Iterator[Choice]:
    """Choices near the budget, the quickest first."""
    problem = relaxation.problem
    yield first
    if solver_installed() and (found := milp_choices(problem, budget)):
        yield best(problem, found, budget)
    yield _within(problem, budget)


def _within(problem: Problem, budget: int) -> Choice:
    choices = [Choice(frozenset(problem.droppable))]
    for variant in variants(problem):
        choices += _aim(variant, budget)
    return best(problem, choices, budget)


def _nested(problem: Problem) -> Iterator[Choice]:
    """Choices that drop everything, and forget all but one unit in every so many after each use.

    Within such a stretch nothing stays, so that its length tells how often a unit is computed; the others come back
    once. The shorter stretches are for models in which one for all would be computed too often.
    """
    every = frozenset(problem.droppable)
    in_order = sorted(problem.forgettable)
    for length in _STRETCHES:
        if length >= len(in_order):
            yield Choice(every, frozenset(in_order))
            return
        yield Choice(every, frozenset(unit for at, unit in enumerate(in_order, 1) if at % length))


def _lowest(problem: Problem) -> list[Choice]:
    """The lowest of the solutions for ever smaller targets."""
    found: dict[Choice, int] = {}
    for variant in variants(problem):
        table = StretchTable(variant)
        low = 0
        high = problem.profile.peak
        for _ in range(_BISECTIONS):
            middle = (low + high) // 2
            choice = table.solve(middle)
            if choice is None:
                low = middle
            else:
                high = middle
                # The table's sums are estimates; what ranks a choice is the peak of its forecast.
                found[choice] = problem.forecast(choice).peak
    return sorted(found, key=found.__getitem__)[:_STARTS]


def _nominal(profile: Profile) -> Profile:
    """The same step with times by rule: one byte, one unit of time; ten for the output of a matrix product."""
    # Measured times vary from run to run, and the smallest peak should not. Nor should what the memory does
    # not depend on tell two profiles of one step apart.
    by_rule = []
    for value in profile.values:
        weight = 10 if _HEAVY.search(value.operator) else 1
        by_rule.append(replace(value, seconds=1e-9 * value.num_bytes * weight))
    values = tuple(by_rule)
    overhead = replace(profile.overhead, per_value=0.0)
    bare = replace(profile, values=values, calls=(), holds=(), operators=(), basis="", replaying=0.0, overhead=overhead)
    if any(value.offloaded for value in values):
        return bare  # the time of copies depends on how long the step takes
    values = tuple(replace(value, copying=0.0) for value in values)
    return replace(bare, values=values, step_seconds=1.0, forward_seconds=0.0)


def _aim(variant: Variant, budget: int) -> list[Choice]:
    """Solutions for targets around the budget, which close in on it: the program only estimates peaks."""
    problem = variant.problem
    choices = []
    table = StretchTable(variant)
    low = _LEAST_AIM
    high = _MOST_AIM
    target = 1.0
    for _ in range(_AIMS):
        choice = table.solve(budget * target)
        peak = problem.forecast(choice).peak if choice is not None else 0
        if choice is not None:
            choices.append(choice)
        if peak <= budget:
            low = target
        else:
            high = target
        if _NEAR_ENOUGH * budget <= peak <= budget or high - low < _SAME_AIM:
            break
        if peak > budget:
            # Lower by what was missed, but not below half the way to a target that was low enough.
            miss = max((peak - budget) / budget, _SAME_AIM)
            target = max(target - miss, (low + high) / 2 if low > _LEAST_AIM else _LEAST_AIM)
        else:
            target = (low + min(high, 1.5 * low)) / 2
    return choices
