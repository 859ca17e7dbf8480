"""Which batch size is fastest and fits: a few steps are run, and all batch sizes are predicted from them."""

from lightning_dpx.lightning.tuning.larger_steps import rows_of_data
from lightning_dpx.lightning.tuning.options import TuneOptions
from lightning_dpx.lightning.tuning.result import BatchSizeForecast, Tuning
from lightning_dpx.lightning.tuning.tune import tune, tune_batch_size

__all__ = ["BatchSizeForecast", "TuneOptions", "Tuning", "rows_of_data", "tune", "tune_batch_size"]
