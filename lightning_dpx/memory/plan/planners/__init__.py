"""Ways to choose: one file each, registered by name."""

# Importing a file registers its planner.
from lightning_dpx.memory.plan.planners import auto, milp, optimal, search, threshold

__all__ = ["auto", "milp", "optimal", "search", "threshold"]
