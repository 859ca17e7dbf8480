"""Peaks and seconds of steps of any size, on every device, from the profiles of two."""

from collections.abc import Callable, Sequence

import torch

from lightning_dpx.lightning.memory.dry_run.device_forecast import DeviceForecast, forecast_device
from lightning_dpx.lightning.memory.dry_run.settings import Settings
from lightning_dpx.lightning.memory.dry_run.slice_planners import ProfileOfRows, SlicePlanners
from lightning_dpx.memory import MemoryPlan
from lightning_dpx.replicas import parse_workload, split_sizes


class SizeForecasts:
    """Forecasts of steps of any size.

    Args:
        settings: The devices, and what is allowed on them.
        slices: What plans the slice of each device.
        whole: The step in one piece, by its rows.
        pace: By which factor a step on so many rows is slower than that says.
    """

    def __init__(
        self, settings: Settings, slices: SlicePlanners, whole: ProfileOfRows, pace: Callable[[int], float]
    ) -> None:
        self._settings = settings
        self._slices = slices
        self._whole = whole
        self._pace = pace

    def of(self, batch_size: int) -> tuple[tuple[DeviceForecast, ...], float]:
        """A step of ``batch_size`` rows: the forecasts of all devices that get any, and the seconds that it takes."""
        forecasts = []
        busy = dict[torch.device, float]()
        for index, rows in enumerate(rows_of_slices(self._settings, batch_size)):
            # A small batch may leave a device without rows: it computes nothing and holds no plan.
            if not rows:
                continue
            device = self._settings.devices[index]
            # A share would be another budget for every batch size.
            allowed = self._settings.budget_of(device)
            static = self._slices.static_bytes(index, rows)
            planner = self._slices.planner(index, rows)
            forecast = forecast_device(device, rows, static, planner, None if allowed is None else int(allowed))
            forecasts.append(forecast)
            # Replicas on one device take turns, so their times add up.
            busy[device] = busy.get(device, 0.0) + self._seconds(rows, forecast.plan)
        return tuple(forecasts), max(busy.values())

    def _seconds(self, rows: int, plan: MemoryPlan | None) -> float:
        """Seconds of a slice; without a plan, as a budget cannot be met, infinite: no such size is the best."""
        if plan is None:
            return float("inf")
        # A micro-batch is a step on its own rows, whose tensors are as small as those of a smaller batch.
        at_once = -(-rows // plan.micro_batches)
        # The share is of the step in one piece, and has what cutting it costs in it.
        seconds = self._whole(rows).step_seconds * (1 + (plan.recompute_share or 0.0))
        return seconds * self._pace(at_once)


def rows_of_slices(settings: Settings, batch_size: int) -> Sequence[int]:
    """The rows that each device gets of a batch."""
    return split_sizes(batch_size, parse_workload(settings.workload, len(settings.devices)))
