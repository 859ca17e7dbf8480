"""Tries thresholds: first guesses from the square root rule, then a grid.

As MXNet's memory monger searches: the bytes kept and the longest stretch at one threshold give the next guess,
sqrt(kept * stretch / 2); after three guesses the range between the shortest stretch and sqrt(2) times the last guess
is divided into ``num_trials`` steps. The cost of a plan is its forecast.
"""

from lightning_dpx.arguments import is_whole_number
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.memory.plan.problem import Choice, Planner, Problem, best, register_planner
from lightning_dpx.memory.plan.solvers.mirror import make_mirror_plan

_GUESSES = 3


@register_planner("search")
class SearchPlanner(Planner):
    """The best of several thresholds.

    Args:
        num_trials: Steps of the grid.

    Raises:
        ConfigurationError: that is no positive integer.
    """

    def __init__(self, num_trials: int = 6) -> None:
        if not is_whole_number(num_trials) or num_trials < 1:
            raise ConfigurationError(f"num_trials={num_trials!r} is not allowed; give a positive integer.")
        self._num_trials = num_trials

    def choose(self, problem: Problem, budget: int | None) -> Choice:
        """The best of the thresholds that were tried; without a budget, the lowest peak."""
        # To drop nothing is a choice as well, and the best one where that fits.
        choices = [Choice()]
        threshold = 0
        longest: list[int] = []  # bytes; a module that is called again may take more than it frees
        for _ in range(_GUESSES):
            plan = make_mirror_plan(problem, threshold)
            choices.append(plan.choice)
            longest.append(plan.max_size)
            threshold = round((plan.save_size * plan.max_size / 2) ** 0.5)
        shortest = min(longest)
        step = round((threshold * 2**0.5 - shortest) / self._num_trials)
        if step > 0:
            for trial in range(1, self._num_trials + 1):
                choices.append(make_mirror_plan(problem, shortest + trial * step).choice)
        return best(problem, choices, budget)
