"""What a training step would take on devices that need not be there: profiled on one of them, or on the CPU.

A step of one replica is watched on as many rows as each device would get. Where the Trainer has one of the devices, and
for the host itself, it is run and measured there. For others it is watched on the CPU: on fake tensors, which take no
memory, or on a part of the rows where fakes cannot run it. Bytes of tensors are the same on every device, operators
that keep other things on a GPU are replaced then, and what a device's libraries take inside of operators is known by
rule. Gradients count all through the step where several devices sum them, batches accumulate them or anything looks at
those of the step before, and else from when they come.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dpx.errors import PlanError
from lightning_dpx.lightning.lightning_api import LightningModule, Trainer, rank_zero_warn
from lightning_dpx.lightning.loaded_batches import rows_to_weigh_by
from lightning_dpx.lightning.memory.batch_shapes import bytes_of_tensors
from lightning_dpx.lightning.memory.device_planner import micro_batches_of, say_why_whole
from lightning_dpx.lightning.memory.dry_run.device_forecast import DeviceForecast, forecast_device
from lightning_dpx.lightning.memory.dry_run.first_batch import work_on_first_batch
from lightning_dpx.lightning.memory.dry_run.settings import Settings
from lightning_dpx.lightning.memory.dry_run.slice_planners import SlicePlanners
from lightning_dpx.lightning.memory.dry_run.step_profiles import Progress, StepProfiles, replica_to_look_at
from lightning_dpx.lightning.memory.step_times import SliceOfStep, predicted_steps
from lightning_dpx.memory import MemoryPlan, Profile
from lightning_dpx.replicas import (
    ReplicaSet,
    UncuttableBatch,
    check_paths,
    parse_workload,
    split_sizes,
)
from lightning_dpx.step_time import StepTime


@dataclass(frozen=True, slots=True)
class DryRun:
    """What was found.

    Attributes:
        forecasts: One per active device.
        profiles: Of each of them, the step that its plan is followed in: that of a micro-batch where it is cut.
        plan_at: The plan of one of the forecasts for another room for activations, in bytes; raises BudgetError.
        steps: Their times on 1, 2, 4, ... nodes, where they were asked for.
        basis: What the figures rest on, if not on a step that was run and measured on the host.
    """

    forecasts: tuple[DeviceForecast, ...]
    profiles: tuple[Profile, ...]
    plan_at: Callable[[DeviceForecast, int], MemoryPlan]
    steps: tuple[StepTime, ...] = ()
    basis: str = ""

    def profile_of(self, forecast: DeviceForecast) -> Profile:
        """The step that the plan of a forecast is followed in."""
        return self.profiles[self.forecasts.index(forecast)]

    @property
    def fits(self) -> bool:
        """Whether every device meets the budget."""
        return all(forecast.fits for forecast in self.forecasts)

    @property
    def tightest(self) -> DeviceForecast | None:
        """The device whose plan drops most; its plan serves all."""
        planned = [forecast for forecast in self.forecasts if forecast.plan is not None]
        return min(planned, key=lambda forecast: forecast.plan.peak or 0, default=None)  # type: ignore[union-attr]


def dry_run(
    trainer: Trainer,
    module: LightningModule,
    data: Any,
    settings: Settings,
    progress: Progress = lambda _: None,
) -> DryRun:
    """Predicts the memory of every device in a training step of ``module`` on the first batch of ``data``.

    Args:
        trainer: With the precision and the callbacks of the run; on the first of its devices that is there
            (:func:`on_its_device`), or on one CPU.
        module: What would be trained; it is not changed, beyond what its own setup hooks do.
        data: A datamodule or a loader; ``None`` if the module has its own.
        settings: Of the run.
        progress: Told what happens next.

    Raises:
        ConfigurationError: there is no training batch, or a setting is not allowed.
    """
    return work_on_first_batch(
        trainer, module, data, lambda trainer, module, batch: _forecast(trainer, module, batch, settings, progress)
    )


def slice_sizes(replicas: ReplicaSet, batch: Any, settings: Settings) -> tuple[int, tuple[int, ...]]:
    """The rows of the batch, and of every device; all are the first one's where the batch cannot be cut."""
    workload = parse_workload(settings.workload, len(settings.devices))
    whole = rows_to_weigh_by(batch)
    if len(settings.devices) == 1:
        return whole, (whole,)
    # Only where it is cut: one device needs to know nothing of its dims.
    check_paths(batch, settings.batch_dim)
    try:
        num_rows = replicas.slicer.num_rows(batch)
        # Tried and thrown away: that rows can be counted does not say that
        # all of the batch can be cut.
        replicas.slicer.cut(batch, split_sizes(num_rows, workload))
    except UncuttableBatch as error:
        rank_zero_warn(f"dpx: the batch goes whole to the first device: {error}")
        return whole, (whole, *(0,) * (len(settings.devices) - 1))
    return num_rows, split_sizes(num_rows, workload)


def _forecast(trainer: Trainer, module: LightningModule, batch: Any, settings: Settings, progress: Progress) -> DryRun:
    replicas = replica_to_look_at(trainer, settings)
    num_rows, sizes = slice_sizes(replicas, batch, settings)
    profiles = StepProfiles(trainer, replicas, batch, num_rows, settings, progress)
    plain = profiles.without_budget()
    # The largest and the next one are profiled; the sizes of further devices lie
    # on the line through them.
    for size in sorted({size for size in sizes if size}, reverse=True):
        profiles.of_slice(size)
    # With automatic optimization a step without a loss is refused while it is profiled; one by hand
    # returns none and may have run no backward at all.
    if not module.automatic_optimization and not any(profile.requests for profile in profiles.slices.values()):
        raise PlanError("There is nothing to plan: the step runs no backward that needs what it saves.")
    numbers, why_whole = micro_batches_of(replicas, batch, settings.micro_batches, len(sizes), settings.run)
    forecasts = []
    followed = []
    planners = []
    slices = SlicePlanners(
        trainer,
        module,
        settings,
        profiles.of_slice,
        profiles.of_part,
        numbers,
        inputs=bytes_of_tensors(batch),
        num_rows=num_rows,
        others=profiles.on_device(max(sizes)).others,
    )
    for index, (device, size) in enumerate(zip(settings.devices, sizes, strict=True)):
        if size:
            progress(f"planning {device}")
            static = slices.static_bytes(index, size)
            planner = slices.planner(index, size)
            allowed = settings.budget_of(device)
            # The device itself need not be there to be asked, so a share is of what the step would take on it.
            if isinstance(allowed, float):
                allowed = int(allowed * (sum(static.values()) + plain.of_slice(size).peak))
            forecast = forecast_device(device, size, static, planner, allowed)
            forecasts.append(forecast)
            followed.append(planner.followed(forecast.plan))
            planners.append(planner)
    say_why_whole(why_whole, [forecast.plan for forecast in forecasts])

    def plan_at(forecast: DeviceForecast, room: int) -> MemoryPlan:
        return planners[forecasts.index(forecast)].plan(room)

    steps = _steps(trainer, module, settings, forecasts, profiles)
    return DryRun(tuple(forecasts), tuple(followed), plan_at, tuple(steps), profiles.basis(max(sizes)))


def _steps(
    trainer: Trainer,
    module: LightningModule,
    settings: Settings,
    forecasts: Sequence[DeviceForecast],
    profiles: "StepProfiles",
) -> list[StepTime]:
    """The times of a step with the plans of ``forecasts``; none if they were not asked for."""
    machines = settings.machines
    if machines is None:
        return []
    # All others wait for it.
    slowest = max(forecasts, key=lambda forecast: forecast.rows)
    plan = slowest.plan
    share = SliceOfStep(
        seconds=profiles.seconds(slowest.rows, torch.device(slowest.device), machines.rates),
        extra=(plan.recompute_share or 0.0) if plan is not None else 0.0,
        micro_batches=plan.micro_batches if plan is not None else 1,
        rows=sum(forecast.rows for forecast in forecasts),
    )
    return predicted_steps(trainer, module, settings.devices, settings.reducer, machines, share)
