"""Mixed-integer programming with HiGHS."""

from lightning_dpx.memory.plan.planners.optimal import OptimalPlanner
from lightning_dpx.memory.plan.problem import Choice, Planner, Problem, best, register_planner
from lightning_dpx.memory.plan.solvers.highs import require_solver
from lightning_dpx.memory.plan.solvers.milp_model import milp_choices
from lightning_dpx.memory.plan.solvers.repair import fill


@register_planner("milp")
class MilpPlanner(Planner):
    """Mixed-integer programming alone; see :mod:`lightning_dpx.memory.plan.solvers.milp_model`."""

    def choose(self, problem: Problem, budget: int | None) -> Choice:
        """The program's choice; without a budget, or where it finds none, ``"optimal"`` chooses.

        Raises:
            UnsupportedError: HiGHS is not installed.
        """
        require_solver()
        if budget is not None:
            found = [fill(problem, choice, budget) for choice in milp_choices(problem, budget)]
            if found:
                choice = best(problem, found, budget)
                if problem.forecast(choice).peak <= budget:
                    return choice
        return OptimalPlanner().choose(problem, budget)
