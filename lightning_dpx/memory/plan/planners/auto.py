"""The best of several planners, for the fastest plan within a budget and for the smallest of all."""

from lightning_dpx.memory.plan.planners.optimal import OptimalPlanner, lowest
from lightning_dpx.memory.plan.planners.search import SearchPlanner
from lightning_dpx.memory.plan.problem import Choice, Planner, Problem, best, register_planner


@register_planner("auto")
class AutoPlanner(Planner):
    """What ``"search"`` and ``"optimal"`` find, whichever is better; alone, or beside calls that are replayed."""

    replays = True

    def choose(self, problem: Problem, budget: int | None) -> Choice:
        """The fastest within the budget; without one, the smallest."""
        planners: list[Planner] = [SearchPlanner(), OptimalPlanner()]
        return best(problem, [planner.choose(problem, budget) for planner in planners], budget)


class SmallestPlanner(Planner):
    """The plan with the lowest peak, however slow: used for refusals, and as a start for filling up."""

    name = "smallest"

    def choose(self, problem: Problem, budget: int | None) -> Choice:
        """The lowest peak, whatever the budget."""
        return best(problem, [SearchPlanner().choose(problem, None), lowest(problem)], None)
