"""Measures training steps and reductions of dpx next to its peers."""

from lightning_dpx.bench.job import MODES
from lightning_dpx.bench.models import MODELS
from lightning_dpx.bench.reduce import SIZES, Reduction, compare_reductions, format_reductions, plot_reductions
from lightning_dpx.bench.step import Result, compare_steps, format_table

__all__ = [
    "MODELS",
    "MODES",
    "SIZES",
    "Reduction",
    "Result",
    "compare_reductions",
    "compare_steps",
    "format_reductions",
    "format_table",
    "plot_reductions",
]
