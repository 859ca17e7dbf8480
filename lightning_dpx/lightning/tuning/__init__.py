"""Which batch size is fastest and fits: a few steps are run, and all batch sizes are predicted from them."""

from lightning_dpx.lightning.tuning.batch_size_tuner import tune, tune_batch_size
from lightning_dpx.lightning.tuning.larger_steps import rows_of_data
from lightning_dpx.lightning.tuning.options import TuneOptions
from lightning_dpx.lightning.tuning.result import BatchSizeForecast, Tuning

__all__ = ["BatchSizeForecast", "TuneOptions", "Tuning", "rows_of_data", "tune", "tune_batch_size"]
