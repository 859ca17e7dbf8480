"""What a training step would take on devices that need not be there: profiled on the CPU, planned for each device.

A step of one replica is watched on the CPU, on as many rows as each device would get: on fake tensors, which take no
memory, or on a part of the rows where fakes cannot run it; only a step for the host itself is run and measured. Bytes
of tensors are the same on every device, operators that keep other things on a GPU are replaced, and what a device's
libraries take inside of operators is known by rule. Gradients count all through the step, as they do when they
accumulate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch
from torchmetrics import Metric

from lightning_dpx.activations import arguments_of_step
from lightning_dpx.devices import is_host
from lightning_dpx.errors import BudgetError, ConfigurationError, PlanError
from lightning_dpx.lightning.lightning_api import Callback, LightningModule, Trainer, rank_zero_warn
from lightning_dpx.lightning.logging import StepLog
from lightning_dpx.lightning.memory.auto_shift import most_states_of
from lightning_dpx.lightning.memory.batch_shapes import bytes_of_tensors
from lightning_dpx.lightning.memory.device_planner import DevicePlanner, micro_batches_of, say_why_whole
from lightning_dpx.lightning.memory.micro_batch_cost import seconds_of_a_micro_batch
from lightning_dpx.lightning.memory.planning_cache import is_short_of_rows, key_of_run_step
from lightning_dpx.lightning.memory.profiling import (
    Step,
    keeps_earlier_gradients,
    keeps_gradients,
    profile_absent_slice,
    profile_slice,
    run_once,
    seconds_of_slice,
    timed_slice,
)
from lightning_dpx.lightning.memory.step_times import Machines, SliceOfStep, predicted_steps
from lightning_dpx.lightning.rehearsal.manual_shadow_step import ManualSandbox
from lightning_dpx.lightning.whole_batches import rows_to_weigh_by
from lightning_dpx.memory import BesideActivations, MemoryPlan, Planner, Profile, extrapolate
from lightning_dpx.memory.plan_cache import PlanCache, found_or_planned
from lightning_dpx.memory.profile.roofline import Rates
from lightning_dpx.memory.profile.step_seconds import StepSeconds
from lightning_dpx.python_objects.preserve import preserve_rng_state
from lightning_dpx.reducers import GradientReducer, make_reducer
from lightning_dpx.replicas import (
    BatchDim,
    BatchSlice,
    MicroBatches,
    Replica,
    ReplicaSet,
    UncuttableBatch,
    check_paths,
    parse_workload,
    split_sizes,
)
from lightning_dpx.step_time import StepTime

Progress = Callable[[str], None]
LoggedValue = tuple[str, dict[str, Any]]  # its name, and with which options
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Settings:
    """What of the strategy decides about memory.

    Attributes:
        devices: One per replica; they need not exist.
        workload: As in the strategy; ``"auto"`` counts as even.
        batch_dim: As in the strategy.
        batch_slicer: As in the strategy.
        reducer: As in the strategy.
        budget: On each device, by device where they differ; or ``None``. An ``int`` is in bytes, a ``float`` a share
            of what the device would take without a plan.
        planner: As in the strategy.
        cache: Where profiles and plans of earlier dry runs are.
        micro_batches: As in the strategy; ``"auto"`` without a budget is 1.
        machines: What steps are timed for; ``None`` if they are not.
        keeps_buckets: Whether DDP holds every gradient once more, in the buckets that it sends.
    """

    devices: tuple[torch.device, ...]
    workload: str | Sequence[float] = "even"
    batch_dim: BatchDim = 0
    batch_slicer: Any = None
    reducer: str | GradientReducer = "auto"
    budget: int | float | Mapping[torch.device, int | float] | None = None
    planner: str | Planner = "auto"
    cache: PlanCache = field(default_factory=lambda: PlanCache(False))
    micro_batches: MicroBatches | Literal["auto"] = 1
    machines: Machines | None = None
    keeps_buckets: bool = False


def with_merged_replicas(settings: Settings) -> Settings:
    """``settings`` with one entry for replicas that are neighbours on one device, and take their slices as one.

    Raises:
        ConfigurationError: replicas on one device are no neighbours.
    """
    # Of each group of neighbours, their places.
    groups: list[list[int]] = []
    for index, device in enumerate(settings.devices):
        if groups and settings.devices[groups[-1][0]] == device:
            groups[-1].append(index)
        else:
            groups.append([index])
    devices = tuple(settings.devices[group[0]] for group in groups)
    again = [str(device) for index, device in enumerate(devices) if device in devices[:index]]
    if again:
        raise ConfigurationError(
            f"{again[0]} is named in two places, with other devices between them, and what replicas take that run "
            "beside each other on one device is not predicted; name it once, or its replicas one after the other."
        )
    if len(groups) == len(settings.devices):
        return settings
    shares = parse_workload(settings.workload, len(settings.devices))
    merged = replace(settings, devices=devices, workload=[sum(shares[index] for index in group) for group in groups])
    if not isinstance(settings.micro_batches, int | str):
        numbers = [settings.micro_batches[group[0]] for group in groups]
        merged = replace(merged, micro_batches=numbers)
    return merged


@dataclass(frozen=True, slots=True)
class DeviceForecast:
    """One device in a training step, in bytes.

    Attributes:
        device: Its name.
        rows: Of the batch.
        parameters: Of the replica.
        gradients: Of the replica, and what arrives from others on an owner.
        optimizer: State of the parameters that it owns.
        buffers: Of the replica.
        inputs: Its part of the batch.
        unplanned: Activations at their peak, if all are kept.
        plan: What is kept and what is computed again; ``None`` where the budget cannot be met.
        budget: What was allowed in all; 0 without a budget.
        smallest: The least that the device can do with in all; 0 if it was not asked for.
        communication: What processes need to share parameters and gradients: buckets of DDP, and with FSDP2 what is
            there at the peak beside activations, such as whole parameters.
    """

    device: str
    rows: int
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    inputs: int
    unplanned: int
    plan: MemoryPlan | None
    budget: int
    smallest: int = 0
    communication: int = 0

    @property
    def static(self) -> int:
        """Everything but activations."""
        held = self.parameters + self.gradients + self.optimizer + self.buffers
        return held + self.inputs + self.communication

    @property
    def peak(self) -> int:
        """The predicted peak, with the plan if there is one."""
        return self.static + (self.unplanned if self.plan is None or self.plan.peak is None else self.plan.peak)

    @property
    def needed(self) -> int:
        """The predicted peak, or the least that the device can do with where that is over the budget."""
        if self.fits:
            return self.peak
        return max(self.smallest, self.budget)

    @property
    def fits(self) -> bool:
        """Whether the budget is met."""
        return not self.budget or (self.plan is not None and self.peak <= self.budget)


@dataclass(frozen=True, slots=True)
class DryRun:
    """What was found.

    Attributes:
        forecasts: One per active device.
        profiles: Of each of them, the step that its plan is followed in: that of a micro-batch where it is cut.
        plan_at: The plan of one of the forecasts for another room for activations, in bytes; raises BudgetError.
        steps: Their times on 1, 2, 4, ... nodes, where they were asked for.
    """

    forecasts: tuple[DeviceForecast, ...]
    profiles: tuple[Profile, ...]
    plan_at: Callable[[DeviceForecast, int], MemoryPlan]
    steps: tuple[StepTime, ...] = ()

    def profile_of(self, forecast: DeviceForecast) -> Profile:
        """The step that the plan of a forecast is followed in."""
        return self.profiles[self.forecasts.index(forecast)]

    @property
    def fits(self) -> bool:
        """Whether every device meets the budget."""
        return all(forecast.fits for forecast in self.forecasts)

    @property
    def basis(self) -> str:
        """What the figures rest on, if not on a step that was run and measured."""
        return next((profile.basis for profile in self.profiles), "")

    @property
    def tightest(self) -> DeviceForecast | None:
        """The device whose plan drops most; its plan serves all."""
        planned = [forecast for forecast in self.forecasts if forecast.plan is not None]
        return min(planned, key=lambda forecast: forecast.plan.peak or 0, default=None)  # type: ignore[union-attr]


# Lightning runs the step whatever a callback's on_train_batch_start returns, so only an
# exception keeps it from happening.
class _Seen(Exception):  # noqa: N818  it ends a fit and is no error
    """The first batch is there, the step must not happen."""


class _FirstBatch(Callback, Generic[Found]):
    """Works on the first training batch, where everything that Lightning sets up is there, and ends the fit."""

    def __init__(self, work: Callable[[Trainer, LightningModule, Any], Found]) -> None:
        self._work = work
        self.found: Found | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Looks at the batch instead of training on it."""
        self.found = self._work(trainer, pl_module, batch)
        # The loops unwind, and the Trainer tears the run down as after any other error.
        raise _Seen


def dry_run(
    trainer: Trainer,
    module: LightningModule,
    data: Any,
    settings: Settings,
    progress: Progress = lambda _: None,
) -> DryRun:
    """Predicts the memory of every device in a training step of ``module`` on the first batch of ``data``.

    Args:
        trainer: On one CPU, with the precision and the callbacks of the run.
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


def work_on_first_batch(
    trainer: Trainer, module: LightningModule, data: Any, work: Callable[[Trainer, LightningModule, Any], Found]
) -> Found:
    """What ``work(trainer, module, batch)`` finds of the first training batch, on which nothing is trained.

    Raises:
        ConfigurationError: there is no training batch.
    """
    first = _FirstBatch(work)
    with _with_callback(trainer, first):
        arguments = {}
        # A loader may have no length to be asked for.
        if data is not None:
            kind = "datamodule" if hasattr(data, "prepare_data") else "train_dataloaders"
            arguments = {kind: data}
        # Shuffling and augmentation draw numbers, and what the caller runs next must not notice.
        with preserve_rng_state(modules=[module]), suppress(_Seen):
            trainer.fit(module, **arguments)
    # The fit has ended by itself, without a step.
    if first.found is None:
        raise ConfigurationError("There is no training batch to look at: the loader is empty, or no step is allowed.")
    return first.found


@contextmanager
def _with_callback(trainer: Trainer, callback: Callback) -> Iterator[None]:
    trainer.callbacks.append(callback)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        trainer.callbacks.remove(callback)  # type: ignore[attr-defined]


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
    replicas = ReplicaSet(
        module,
        [torch.device("cpu")],
        batch_dim=settings.batch_dim,
        batch_slicer=settings.batch_slicer,
        keep=[trainer, *trainer.loggers],
    )
    num_rows, sizes = slice_sizes(replicas, batch, settings)
    profiles = StepProfiles(trainer, replicas, batch, num_rows, settings, progress)
    # The largest and the next one are profiled; the sizes of further devices lie
    # on the line through them.
    for size in sorted({size for size in sizes if size}, reverse=True):
        profiles.of_slice(size)
    # With automatic optimization a step without a loss is refused while it is profiled; one by hand
    # returns none and may have run no backward at all.
    if not module.automatic_optimization and not any(profile.requests for profile in profiles.slices.values()):
        raise PlanError("There is nothing to plan: the step runs no backward that needs what it saves.")
    inputs = bytes_of_tensors(batch)
    numbers, why_whole = micro_batches_of(replicas, batch, settings.micro_batches, len(sizes))
    forecasts = []
    followed = []
    planners = []
    held = lasting_bytes(trainer, module, settings)
    beside = beside_micro_batches(trainer, module)
    for device, size, static, number in zip(settings.devices, sizes, held, numbers, strict=True):
        if size:
            progress(f"planning {device}")
            static["inputs"] = inputs * size // num_rows
            planner = DevicePlanner(
                size,
                number,
                profiles.of_slice,
                profiles.of_part,
                partial(plan_step, module, settings),
                seconds_each=seconds_of_a_micro_batch(device),
                beside=beside,
            )
            forecast = forecast_device(device, size, static, planner, settings)
            forecasts.append(forecast)
            followed.append(planner.followed(forecast.plan))
            planners.append(planner)
    say_why_whole(why_whole, [forecast.plan for forecast in forecasts])

    def plan_at(forecast: DeviceForecast, room: int) -> MemoryPlan:
        return planners[forecasts.index(forecast)].plan(room)

    steps = _steps(trainer, module, settings, forecasts, profiles)
    return DryRun(tuple(forecasts), tuple(followed), plan_at, tuple(steps))


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


class StepProfiles:
    """Profiles of a step on some rows of a batch, each made once.

    Args:
        trainer: Of the dry run.
        replicas: The one on the CPU.
        batch: The whole of it.
        num_rows: Its rows.
        settings: Of the run.
        progress: Told what happens next.

    Attributes:
        slices: What was made for slices of devices, by rows.
    """

    def __init__(
        self,
        trainer: Trainer,
        replicas: ReplicaSet,
        batch: Any,
        num_rows: int,
        settings: Settings,
        progress: Progress,
    ) -> None:
        self.slices: dict[int, Profile] = dict[int, Profile]()
        self._parts = dict[int, Profile]()
        self._trainer = trainer
        self._replicas = replicas
        self._batch = batch
        self._num_rows = num_rows
        self._settings = settings
        self._progress = progress

    def on_batch(self, batch: Any, num_rows: int) -> "StepProfiles":
        """Those of the same step on another batch.

        Raises:
            PlanError: the batch has other rows than those.
        """
        found = self._replicas.slicer.num_rows(batch)
        if found != num_rows:
            raise PlanError(f"The batch has {found} rows where {num_rows} were asked for.")
        return StepProfiles(self._trainer, self._replicas, batch, num_rows, self._settings, self._progress)

    def of_slice(self, rows: int) -> Profile:
        """The step on the slice of a device; on a line through two that are known, if there are two."""
        if rows not in self.slices and len(self.slices) > 1:
            few = min(self.slices)  # weights that a library repacks do not grow with the rows
            more = max(self.slices)
            self.slices[rows] = extrapolate(self.slices[few], self.slices[more], (few, more), rows)
        elif rows not in self.slices:
            self.slices[rows] = self._made(rows, accumulates=keeps_gradients(self._trainer))
        return self.slices[rows]

    def of_part(self, rows: int) -> Profile:
        """The step on a micro-batch, whose gradients are added to those of the ones before."""
        if rows not in self._parts:
            self._parts[rows] = self._made(rows, accumulates=True)
        return self._parts[rows]

    def seconds(self, rows: int, device: torch.device, rates: Rates) -> StepSeconds:
        """How long the step on the slice of a device takes, by its rates."""
        self._progress(f"timing a step on {rows} rows")
        run = _runner(self._trainer, self._trainer.lightning_module)
        return seconds_of_slice(self._replicas, self._slice(rows), run, device, rates)

    def timed(self, rows: int) -> float:
        """Seconds of forward and backward on so many rows, here."""
        self._progress(f"timing a step on {rows} rows")
        return timed_slice(self._replicas, self._slice(rows), _runner(self._trainer, self._trainer.lightning_module))

    def logged(self, rows: int) -> list[LoggedValue]:
        """What the step on so many rows logs, but for metrics, whose cost is in what they compute."""
        log = _LastLog()
        run_once(self._replicas, self._slice(rows), _runner(self._trainer, self._trainer.lightning_module, log.note))
        return log.values

    def _slice(self, rows: int) -> BatchSlice:
        others = [rows, self._num_rows - rows]
        part = self._batch if rows == self._num_rows else self._replicas.slicer.cut(self._batch, others)[0]
        return BatchSlice(self._replicas.root, rows, part)

    def _made(self, rows: int, *, accumulates: bool) -> Profile:
        self._progress(f"profiling a step on {rows} rows")
        trainer = self._trainer
        settings = self._settings
        module = trainer.lightning_module
        batch_slice = self._slice(rows)
        # One profile serves all devices, so the first that is no host stands for the others.
        accelerator = next((str(device) for device in settings.devices if not is_host(device)), "")
        key = ""
        # To make a key takes a look at the whole module, which an unused cache is not worth.
        if settings.cache.is_on:
            known = rows, self._num_rows, accelerator, accumulates
            key = key_of_run_step(trainer, module, batch_slice.batch, torch.device("cpu"), *known)
        run = _runner(trainer, module)
        make = partial(_profile, self._replicas, batch_slice, run, accelerator, accumulates)
        # What is scaled for a device that is not there takes no room here.
        if accelerator:
            return settings.cache.profile(key, make)
        device = batch_slice.replica.device
        return settings.cache.profile(key, make, is_poor=lambda profile: is_short_of_rows(profile, device))


def _profile(replicas: ReplicaSet, batch_slice: BatchSlice, run: Step, accelerator: str, accumulates: bool) -> Profile:
    """The profile of a step on ``batch_slice``, as on ``accelerator`` if that is named."""
    # Fake tensors, and the rules of the accelerator's libraries in place of the host's.
    if accelerator:
        return profile_absent_slice(replicas, batch_slice, run, torch.device(accelerator), accumulates=accumulates)
    return profile_slice(replicas, batch_slice, run, accumulates=accumulates)


class _LastLog:
    """What a step has logged.

    Attributes:
        values: Names and options.
    """

    def __init__(self) -> None:
        self.values: list[LoggedValue] = []

    def note(self, log: StepLog) -> None:
        """Takes the place of what an earlier step logged."""
        self.values.clear()
        for (name, _), (value, options) in log.entries.items():
            if not isinstance(value, Metric):
                self.values.append((name, options))


def _say_nothing(log: StepLog) -> None:
    """What a step logs is of no interest."""


def _runner(
    trainer: Trainer, module: LightningModule, note: Callable[[StepLog], None] = _say_nothing
) -> Callable[[Any, Any, int], Any]:
    # One for all runs: a step by hand is profiled several times, each time from the same state.
    sandbox = ManualSandbox(trainer.strategy, module, list(module.parameters()), [torch.device("cpu")])

    def run(shadow: Any, rows: Any, num_rows: int) -> Any:
        if shadow.automatic_optimization:
            return unlogged_step(trainer, shadow, rows, num_rows, note)
        with sandbox.opened(shadow):
            return unlogged_step(trainer, shadow, rows, num_rows, note)

    return run


def unlogged_step(
    trainer: Trainer, module: Any, rows: Any, num_rows: int, note: Callable[[StepLog], None] = _say_nothing
) -> Any:
    """What the training step of ``module`` returns for a batch of so many ``rows``.

    What it logs goes nowhere but to ``note``: the Trainer's own logs belong to a step that never happens.
    """
    replica = Replica(0, module.device, module)
    log = StepLog(BatchSlice(replica, num_rows, rows))
    with log.recording_alone(module):
        with trainer.precision_plugin.train_step_context():
            output = module.training_step(*arguments_of_step(module.training_step, rows))
    note(log)
    return output


def lasting_bytes(trainer: Trainer, module: LightningModule, settings: Settings) -> list[dict[str, int]]:
    """Per replica, the bytes that are there all the time."""
    parameters = list(module.parameters())
    owners = owners_of(parameters, settings)
    several = len(set(settings.devices)) > 1
    states = most_states_of(trainer.optimizers)
    trained = [(p.nbytes if p.requires_grad else 0, owner) for p, owner in zip(parameters, owners, strict=True)]
    all_gradients = sum(size for size, _ in trained)
    found = []
    for index in range(len(settings.devices)):
        owned = sum(size for size, owner in trained if owner == index)
        # Between devices the reduction needs room for what arrives, beside the replica's own gradients.
        arriving = owned if several else 0
        found.append(
            {
                "parameters": sum(parameter.nbytes for parameter in parameters),
                "gradients": all_gradients + arriving,
                "optimizer": states * owned,
                "buffers": sum(buffer.nbytes for buffer in module.buffers()),
                "communication": all_gradients if settings.keeps_buckets else 0,
            }
        )
    return found


def owners_of(parameters: Sequence[torch.nn.Parameter], settings: Settings) -> list[int]:
    """By parameter, the device that its gradients are summed for, and that its optimizer's state is on."""
    here = "collective" if settings.reducer in ("auto", "nccl") else settings.reducer  # the same owners, anywhere
    return make_reducer(here, settings.devices).owners([parameter.numel() for parameter in parameters])


def beside_micro_batches(trainer: Trainer, module: LightningModule) -> BesideActivations:
    """Earlier batches' gradients, aside while micro-batches add up their own, and the buffers of each."""
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    if not keeps_earlier_gradients(trainer, module):
        return BesideActivations(buffers=buffers)
    gradients = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    return BesideActivations(gradients=gradients, buffers=buffers)


def forecast_device(
    device: torch.device, rows: int, static: dict[str, int], planner: DevicePlanner, settings: Settings
) -> DeviceForecast:
    budget = settings.budget
    held = sum(static.values())
    allowed = budget[device] if isinstance(budget, Mapping) else budget
    # Of the step in one piece, with which the user compares what micro-batches or a plan save.
    unplanned = planner.whole.peak
    if isinstance(allowed, float):
        # A share is of what this device would take, as the device itself need
        # not be there to be asked.
        allowed = int(allowed * (held + unplanned))
    common = {"device": str(device), "rows": rows, **static, "unplanned": unplanned, "budget": allowed or 0}
    try:
        # At least one byte: where nothing is left, the planner says how much is missing.
        plan = planner.plan(None if allowed is None else max(1, allowed - held))
    except BudgetError as error:
        smallest = held + (error.smallest if error.smallest is not None else 0)
        return DeviceForecast(**common, plan=None, smallest=smallest)  # type: ignore[arg-type]
    # Known only now: a step that stays in one piece keeps no earlier gradients aside, and has its buffers once.
    if plan is not None and plan.micro_batches > 1:
        common["gradients"] = static["gradients"] + planner.beside.gradients
        common["buffers"] = static["buffers"] + plan.micro_batches * planner.beside.buffers
    return DeviceForecast(**common, plan=plan)  # type: ignore[arg-type]


def plan_step(module: LightningModule, settings: Settings, profile: Profile, room: int | None) -> MemoryPlan:
    plan, found = found_or_planned(settings.cache, module, profile, room, settings.planner)
    if found:
        settings.cache.say(f"dpx: the memory plan was found in the cache, in {settings.cache.path_of(found)}.")
    return plan
