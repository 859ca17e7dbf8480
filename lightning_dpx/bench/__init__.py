"""Standing comparisons, shown by ``dpx bench``: ratios measured in one run against a named peer."""

from lightning_dpx.bench.job import MODES
from lightning_dpx.bench.models import MODELS
from lightning_dpx.bench.step import Result, compare_steps, format_table

__all__ = ["MODELS", "MODES", "Result", "compare_steps", "format_table"]
