"""Which batch size is fastest and fits: one step is profiled, and every batch size is predicted from it.

    first batch --a quarter and all of its rows--> two profiles --lines through them--> the step on any rows
    where it runs: a step on more rows, beside them --> by how much larger steps are slower
    an empty step --> the loop and the optimizer; a few batches --> the loading of a row
    on an accelerator: how long the host takes to hand it a step, which may be longer than the device takes
        for every batch size, for every device: static bytes + inputs + plan within the budget --> peak, seconds
            --> samples per second --> the smallest batch size that is about as fast as the fastest that fits

DeepSpeed's autotuning answers the same question by running a job for each candidate; here one step is run twice.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from lightning_dpx.arguments import check_is_module
from lightning_dpx.devices import accelerators, counts_by_its_clock, is_host, is_modelled, named_devices
from lightning_dpx.errors import ConfigurationError, PlanError
from lightning_dpx.lightning.lightning_api import LightningModule, PossibleUserWarning, Trainer
from lightning_dpx.lightning.memory.batch_shapes import bytes_of_tensors
from lightning_dpx.lightning.memory.device_planner import micro_batches_of, say_why_whole
from lightning_dpx.lightning.memory.dry_run.device_forecast import owners_of
from lightning_dpx.lightning.memory.dry_run.first_batch import work_on_first_batch
from lightning_dpx.lightning.memory.dry_run.place import on_its_device, trainer_to_look, with_index
from lightning_dpx.lightning.memory.dry_run.settings import Settings, with_merged_replicas
from lightning_dpx.lightning.memory.dry_run.slice_planners import SlicePlanners
from lightning_dpx.lightning.memory.dry_run.step_profiles import Progress, StepProfiles, replica_to_look_at
from lightning_dpx.lightning.memory.step_times import seconds_of_update
from lightning_dpx.lightning.silence_lightning import quiet_lightning
from lightning_dpx.lightning.tuning.beside_steps import BesideSteps, Queue
from lightning_dpx.lightning.tuning.empty_step import EmptyRun, EmptySeconds, seconds_of_empty_step, seconds_of_loading
from lightning_dpx.lightning.tuning.larger_steps import Slowdown, rows_of_data, timed_larger_step
from lightning_dpx.lightning.tuning.modelled_pace import ModelledPace
from lightning_dpx.lightning.tuning.options import TuneOptions
from lightning_dpx.lightning.tuning.profiles_by_rows import ProfilesByRows
from lightning_dpx.lightning.tuning.result import BatchSizeForecast, Tuning
from lightning_dpx.lightning.tuning.size_forecasts import SizeForecasts, rows_of_slices
from lightning_dpx.memory import Planner
from lightning_dpx.memory.profile.roofline import rates_of
from lightning_dpx.replicas import MicroBatches, ReplicaSet, UncuttableBatch
from lightning_dpx.units import parse_bytes


def tune_batch_size(
    trainer: Trainer,
    module: LightningModule,
    data: Any,
    settings: Settings,
    options: TuneOptions | None = None,
    progress: Progress = lambda _: None,
) -> Tuning:
    """Predicts peaks and speed of batch sizes from steps on the first batch of ``data``; nothing is trained.

    Args:
        trainer: With the precision and the callbacks of the run; on the first of its devices that is there
            (:func:`on_its_device`), or on one CPU.
        module: What would be trained; it is not changed, beyond what its own setup hooks do.
        data: A datamodule or a loader; ``None`` if the module has its own.
        settings: Of the run.
        options: What is looked at.
        progress: Told what happens next.

    Raises:
        ConfigurationError: there is no training batch, or a setting is not allowed.
        PlanError: the rows of the batch are not known, so that other batch sizes cannot be made of it.
    """

    def work(trainer: Trainer, module: LightningModule, batch: Any) -> Tuning:
        # How many rows there are is known only here, when the Trainer has its loaders.
        return _tuned(
            trainer, module, batch, settings, options or TuneOptions(most_rows=rows_of_data(trainer)), progress
        )

    return work_on_first_batch(trainer, module, data, work)


def tune(
    module: LightningModule,
    data: Any = None,
    *,
    devices: Sequence[str | torch.device] = ("cpu",),
    budget: int | str | None = None,
    batch_sizes: Sequence[int] = (),
    micro_batches: MicroBatches | Literal["auto"] = "auto",
    planner: str | Planner = "auto",
    precision: Any = "32-true",
    dry: bool = False,
) -> Tuning:
    """Which batch size is fastest and fits, predicted from one step; ``dpx tune`` in Python.

    Args:
        module: What would be trained; nothing is trained.
        data: A datamodule or a loader; ``None`` if the module has its own.
        devices: One for each replica; they need not be there. The first that is there runs the steps.
        budget: For everything on a device: bytes, or ``"8GiB"``.
        batch_sizes: Those that are looked at; powers of two times the loader's own unless given.
        micro_batches: As in :class:`DPXStrategy`; ``"auto"`` without a budget is 1.
        planner: As in :class:`DPXStrategy`.
        precision: As in the Trainer.
        dry: Whether fake tensors are used although a device is there.

    Returns:
        A forecast for each batch size; ``tune(...).best.batch_size`` is the answer.

    Raises:
        ConfigurationError: there is no training batch, or an argument is not allowed.
        PlanError: the rows of the batch are not known.

    Examples:
        >>> data = DataLoader(torch.ones(64, 32), batch_size=4)
        >>> found = dpx.tune(BoringModel(), data, devices=["cpu", "cpu"], budget="1GiB", batch_sizes=[4, 8, 16])
        >>> found.best.batch_size in (4, 8, 16)  # print(found) shows peaks and samples per second of all
        True
    """
    check_is_module(module)
    if not devices:
        raise ConfigurationError("devices is empty; give at least one device.")
    settings = with_merged_replicas(
        Settings(
            devices=tuple(map(with_index, named_devices(devices))),
            budget=None if budget is None else parse_bytes("budget", budget),
            planner=planner,
            micro_batches=micro_batches,
        )
    )
    if isinstance(batch_sizes, str) or not isinstance(batch_sizes, Sequence):
        raise ConfigurationError(f"batch_sizes={batch_sizes!r} is not allowed; give a list of numbers of rows.")
    options = TuneOptions(batch_sizes=tuple(batch_sizes)) if batch_sizes else None
    with warnings.catch_warnings(), quiet_lightning():
        warnings.simplefilter("ignore", PossibleUserWarning)  # advice on loaders and loggers of a run that is none

        def look(home: torch.device) -> Tuning:
            # Its hooks, loaders and precision are needed; none of what it would print or write is.
            trainer = Trainer(
                **trainer_to_look(home),
                precision=precision,
                max_epochs=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            return tune_batch_size(trainer, module, data, settings, options)

        return on_its_device(settings.devices, look, dry=dry)


def _tuned(
    trainer: Trainer, module: LightningModule, batch: Any, settings: Settings, options: TuneOptions, progress: Progress
) -> Tuning:
    replicas = replica_to_look_at(trainer, settings)
    current = _rows_of(replicas, batch)
    profiles = StepProfiles(trainer, replicas, batch, current, settings, progress)
    few = _fewer_rows(current)
    whole = ProfilesByRows(profiles.of_slice, few, current)
    # Micro-batches add to gradients that are there already, which takes other memory
    # than the first.
    part = ProfilesByRows(profiles.of_part, few, current)
    whole(current)  # before the smaller one, as libraries fill their caches with it
    there = profiles.on_device(few)
    numbers, why_whole = micro_batches_of(replicas, batch, settings.micro_batches, len(settings.devices), settings.run)
    slices = SlicePlanners(
        trainer,
        module,
        settings,
        whole,
        part,
        numbers,
        inputs=bytes_of_tensors(batch),
        num_rows=current,
        others=there.others,
    )
    batch_sizes = options.sizes(current, len(settings.devices))
    pace: Callable[[int], float] = Slowdown().at
    # Elsewhere times are those of a model, which knows of no caches, and of no host that has other work.
    if _is_timed(settings, profiles.home):
        devices = _devices_of_run(settings, profiles.home)
        options_of_run = _options_of(settings, devices)
        empty = EmptyRun(devices=devices, batch=batch, options=options_of_run, logged=profiles.logged(few))
        step = seconds_of_empty_step(trainer, module, empty)
        loading = seconds_of_loading(trainer) / current
        most = [max(rows_of_slices(settings, batch_size)) for batch_size in batch_sizes]
        larger = timed_larger_step(trainer, module, profiles, whole, most, loading)
        pace = larger.slowdown.at
        beside = BesideSteps(step, loading, None if is_host(profiles.home) else Queue(there.queued, larger.busy_host))
    else:
        beside = BesideSteps(EmptySeconds(_seconds_of_update(trainer, module, settings)))
        # Its profiles have seconds that passed, and the device has those of its model.
        if is_modelled(profiles.home) and not counts_by_its_clock(profiles.home):
            pace = ModelledPace(profiles, whole).at
    sizes = SizeForecasts(settings, slices, whole, pace)
    found = []
    for batch_size in batch_sizes:
        progress(f"planning batches of {batch_size}")
        forecasts, seconds = sizes.of(batch_size)
        plans = [device.plan for device in forecasts]
        found.append(BatchSizeForecast(batch_size, forecasts, seconds, *beside.of(batch_size, seconds, plans)))
    say_why_whole(why_whole, [device.plan for one in found for device in one.devices])
    return Tuning(tuple(found), current, profiles.basis(current))


def _is_timed(settings: Settings, home: torch.device) -> bool:
    """Whether seconds are those that pass, of steps that are run on ``home``."""
    if is_host(home):
        return all(is_host(device) for device in settings.devices)
    return not is_modelled(home)


def _devices_of_run(settings: Settings, home: torch.device) -> list[torch.device]:
    """One for each replica; ``home`` alone where not all are there."""
    if is_host(home):
        return list(settings.devices)
    alike = [device for device in accelerators() if device.type == home.type]
    if all(device in alike for device in settings.devices):
        return list(settings.devices)
    return [home]


def _options_of(settings: Settings, devices: Sequence[torch.device]) -> dict[str, Any]:
    """What decides how replicas share a batch, and how their gradients come together, where all of them are there."""
    if len(devices) < len(settings.devices):
        return {}
    return {
        "reducer": settings.reducer, "workload": settings.workload, "batch_dim": settings.batch_dim,
        "batch_slicer": settings.batch_slicer,
    }  # fmt: skip


def _seconds_of_update(trainer: Trainer, module: LightningModule, settings: Settings) -> float:
    """What the optimizer takes for a batch, by the bytes that it moves, however many rows there are."""
    # A step by hand runs its optimizers itself, so they are in its time already.
    if not module.automatic_optimization:
        return 0.0
    device = next(device for device in settings.devices if not is_host(device))
    parameters = list(module.parameters())
    owners = owners_of(parameters, settings)
    return seconds_of_update(trainer.optimizers, parameters, owners, rates_of(device)) / trainer.accumulate_grad_batches


def _fewer_rows(current: int) -> int:
    """The rows of the smaller step that is profiled, of batches of ``current`` rows."""
    # Batch norm does not train on one row, so two are taken where there are more. Through the same number of rows
    # twice there is no line.
    least = min(2, current - 1)
    return max(1, least, current // 4)


def _rows_of(replicas: ReplicaSet, batch: Any) -> int:
    """Rows of a batch, of which a part can be cut off.

    Raises:
        PlanError: they are not known.
    """
    try:
        rows = replicas.slicer.num_rows(batch)
        # That rows are counted does not say that they can be cut, so it is tried.
        if rows > 1:
            replicas.slicer.cut(batch, [rows - 1, 1])
    except UncuttableBatch as error:
        raise PlanError(
            f"Batches of other sizes cannot be made of the first one, so none can be predicted. {error}"
        ) from error
    return rows
