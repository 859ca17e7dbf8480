"""Which of several batch sizes is the best."""

import lightning_dpx as dpx
from lightning_dpx.lightning import DeviceForecast
from lightning_dpx.lightning.tuning import BatchSizeForecast


def test_the_best_is_the_smallest_that_is_about_as_fast_as_the_fastest() -> None:
    device = DeviceForecast("cpu", 8, 1, 1, 1, 0, 0, 0, None, 0)
    times = {8: 1.0, 16: 1.0, 32: 1.99, 64: 3.98}  # samples per second: 8, 16, 16.1, 16.1
    found = dpx.Tuning(tuple(BatchSizeForecast(size, (device,), seconds) for size, seconds in times.items()), 8)
    assert found.best is not None
    assert found.best.batch_size == 16
    assert [one.batch_size for one in found.fastest(3)] == [16, 32, 64]
    assert "batch_size=16: 16 samples/s, peak 0.0 of 0.0 KiB on cpu  <- best" in str(found)
