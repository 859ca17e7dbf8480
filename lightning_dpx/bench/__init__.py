"""Measures training steps and reductions of dpx next to its peers."""

from lightning_dpx.bench.job import MODES
from lightning_dpx.bench.micro_batch_plans import (
    SHARES,
    MicroBatchContest,
    compare_micro_batches,
    format_micro_batches,
    plot_micro_batches,
)
from lightning_dpx.bench.models import MODELS
from lightning_dpx.bench.plan import BUDGETS, Contest, compare_plans, format_contests, plot_contests
from lightning_dpx.bench.plan_peers import COMPILE_BUDGETS
from lightning_dpx.bench.reduce import SIZES, Reduction, compare_reductions, format_reductions, plot_reductions
from lightning_dpx.bench.scale import SCALE_PARAMETERS, ScaleResult, Where, format_scale, measure_scale
from lightning_dpx.bench.staged import STAGED_MODELS
from lightning_dpx.bench.step import Result, compare_steps, format_table
from lightning_dpx.bench.zoo import ZOO
from lightning_dpx.bench.zoo_contest import ZooContest, compare_zoo, format_zoo

__all__ = [
    "BUDGETS",
    "COMPILE_BUDGETS",
    "MODELS",
    "MODES",
    "SCALE_PARAMETERS",
    "SHARES",
    "SIZES",
    "STAGED_MODELS",
    "ZOO",
    "Contest",
    "MicroBatchContest",
    "Reduction",
    "Result",
    "ScaleResult",
    "Where",
    "ZooContest",
    "compare_micro_batches",
    "compare_plans",
    "compare_reductions",
    "compare_steps",
    "compare_zoo",
    "format_contests",
    "format_micro_batches",
    "format_reductions",
    "format_scale",
    "format_table",
    "format_zoo",
    "measure_scale",
    "plot_contests",
    "plot_micro_batches",
    "plot_reductions",
]
