"""Drops stretches of a given size; see :mod:`lightning_dpx.memory.plan.solvers.mirror`."""

from lightning_dpx.memory.plan.problem import Choice, Planner, Problem, register_planner
from lightning_dpx.memory.plan.solvers.mirror import make_mirror_plan


@register_planner("threshold")
class ThresholdPlanner(Planner):
    """Stretches of a given size.

    Args:
        threshold: Bytes of a stretch; the square root of the total times its largest unit unless given.
    """

    def __init__(self, threshold: int | None = None) -> None:
        self._threshold = threshold

    def choose(self, problem: Problem, budget: int | None) -> Choice:
        """One walk; the budget does not matter."""
        threshold = self._threshold
        if threshold is None:
            free = make_mirror_plan(problem, 0)
            threshold = round((free.save_size * free.max_size / 2) ** 0.5)
        return make_mirror_plan(problem, threshold).choice
