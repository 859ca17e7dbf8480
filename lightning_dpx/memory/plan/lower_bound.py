"""What no plan within a budget can be faster than, as far as it is proved."""

from lightning_dpx.memory.plan.offload import least_seconds_with_offloading
from lightning_dpx.memory.plan.problem import Problem
from lightning_dpx.memory.plan.solvers.bounds import least_seconds
from lightning_dpx.memory.profile.data import Profile


def lower_bound(profile: Profile, budget: int) -> float:
    """Seconds that no choice within ``budget`` goes below, as far as is proved."""
    # What is proved about values says nothing about compiled code that saves less.
    if any(len(call.runs) > 1 for call in profile.codes):
        return 0.0
    return _lower_bound_of(Problem(profile), budget, 0.0)


def bound_of_plans(profile: Profile, budget: int, original: Problem, spent: float) -> float:
    """A proven lower bound, in seconds, on the extra time of any plan within the budget."""
    # The integer program knows neither values that are made from others that do not stay, nor replayed
    # calls: where these are ahead of what it has proved, that is a proof about other plans only.
    proved = original.proved.get(budget, 0.0)
    # A bound holds for every plan only on the profile as it is: a way to offload has prices of its
    # own.
    problem = original if original.profile is profile else Problem(profile)
    if proved > spent:
        proved = 0.0
    return min(spent, _lower_bound_of(problem, budget, proved))


def _lower_bound_of(problem: Problem, budget: int, proved: float) -> float:
    """The best proof there is, or one ``proved`` already."""
    # The knapsack knows values that are computed again only; a copy may cost less.
    if any(value.copying for value in problem.profile.values):
        return least_seconds_with_offloading(problem, budget)
    return max(least_seconds(problem.relaxation, budget), proved)
