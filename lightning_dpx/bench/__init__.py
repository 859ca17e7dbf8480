"""Measures training steps and reductions of dpx next to its peers."""

from lightning_dpx.bench.job import MODES
from lightning_dpx.bench.models import MODELS
from lightning_dpx.bench.plan import BUDGETS, Contest, compare_plans, format_contests, plot_contests
from lightning_dpx.bench.plan_peers import COMPILE_BUDGETS
from lightning_dpx.bench.reduce import SIZES, Reduction, compare_reductions, format_reductions, plot_reductions
from lightning_dpx.bench.staged import STAGED_MODELS
from lightning_dpx.bench.step import Result, compare_steps, format_table

__all__ = [
    "BUDGETS",
    "COMPILE_BUDGETS",
    "MODELS",
    "MODES",
    "SIZES",
    "STAGED_MODELS",
    "Contest",
    "Reduction",
    "Result",
    "compare_plans",
    "compare_reductions",
    "compare_steps",
    "format_contests",
    "format_reductions",
    "format_table",
    "plot_contests",
    "plot_reductions",
]
