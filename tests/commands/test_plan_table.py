"""A planned step as a table, and as JSON has it."""

from lightning_dpx.commands.plan_table import forecast_as_dict, format_dry_run
from lightning_dpx.lightning.memory.dry_run.device_forecast import DeviceForecast
from lightning_dpx.lightning.memory.dry_run.dry_run import DryRun
from lightning_dpx.memory import MemoryPlan

MIB = 1 << 20


def forecast(index: int) -> DeviceForecast:
    return DeviceForecast(
        device=f"cuda:{index}",
        rows=4,
        parameters=MIB,
        gradients=MIB,
        optimizer=0,
        buffers=0,
        inputs=0,
        unplanned=2 * MIB,
        plan=None,
        budget=0,
    )


def never_planned(_forecast: DeviceForecast, _room: int) -> MemoryPlan:
    raise AssertionError


def test_many_devices_that_take_the_same_share_a_row() -> None:
    table = format_dry_run(DryRun(tuple(map(forecast, range(9))), (), never_planned))
    assert "cuda:0 to cuda:8" in table
    assert "cuda:3" not in table
    few = format_dry_run(DryRun(tuple(map(forecast, range(2))), (), never_planned))
    assert "cuda:1 " in few


def test_json_has_what_follows_from_the_numbers() -> None:
    values = forecast_as_dict(forecast(0))
    assert values["peak"] == 4 * MIB
    assert values["fits"]
    assert values["micro_batches"] is None
    assert "plan" not in values
