"""What a device takes in a step, and whether that is within its budget."""

from dataclasses import replace

from lightning_dpx.lightning.memory.dry_run.device_forecast import DeviceForecast

HELD = {"parameters": 10, "gradients": 10, "optimizer": 20, "buffers": 1, "inputs": 2, "communication": 7}
FORECAST = DeviceForecast(device="cuda:0", rows=4, unplanned=50, plan=None, budget=0, **HELD)


def test_all_but_activations_is_there_all_the_time() -> None:
    assert FORECAST.static == 50
    assert FORECAST.peak == 100


def test_a_device_without_a_budget_fits() -> None:
    assert FORECAST.fits
    assert FORECAST.needed == 100


def test_where_no_plan_meets_the_budget_the_least_is_needed() -> None:
    short = replace(FORECAST, budget=60, smallest=80)
    assert not short.fits
    assert short.needed == 80
