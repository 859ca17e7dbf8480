"""What a training step would take on devices that need not be there: profiled on the CPU, planned for each device.

A step of one replica is watched on the CPU, on as many rows as each device would get: on fake tensors, which take no
memory, or on a part of the rows where fakes cannot run it; only a step for the host itself is run and measured. Bytes
of tensors are the same on every device, operators that keep other things on a GPU are replaced, and what a device's
libraries take inside of operators is known by rule. Gradients count all through the step, as they do when they
accumulate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dpx.activations import arguments_of_step
from lightning_dpx.devices import is_host
from lightning_dpx.errors import BudgetError, ConfigurationError, PlanError
from lightning_dpx.lightning.logging import StepLog
from lightning_dpx.lightning.memory.auto_shift import states_of
from lightning_dpx.lightning.memory.planning_cache import key_of_run_step
from lightning_dpx.lightning.memory.profiling import Step, keeps_gradients, profile_absent_slice, profile_slice
from lightning_dpx.lightning.rehearsal.guest_step import ManualGuest
from lightning_dpx.lightning.whole_batches import rows_to_weigh_by
from lightning_dpx.memory import MemoryPlan, Planner, Profile, extrapolate
from lightning_dpx.memory.plan_cache import PlanCache, found_or_planned
from lightning_dpx.python_objects.preserve import preserve_rng_state
from lightning_dpx.reducers import GradientReducer, make_reducer
from lightning_dpx.replicas import (
    BatchDim,
    BatchSlice,
    ReplicaSet,
    UncuttableBatch,
    check_paths,
    parse_workload,
    split_sizes,
)
from lightning_dpx.torch_compat import tree_leaves

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What of the strategy decides about memory.

    Attributes:
        devices: One per replica; they need not exist.
        workload: As in the strategy; ``"auto"`` counts as even.
        batch_dim: As in the strategy.
        batch_slicer: As in the strategy.
        reducer: As in the strategy.
        budget: Bytes on each device, by device where they differ; or ``None``.
        planner: As in the strategy.
        cache: Where profiles and plans of earlier dry runs are.
    """

    devices: tuple[torch.device, ...]
    workload: str | Sequence[float] = "even"
    batch_dim: BatchDim = 0
    batch_slicer: Any = None
    reducer: str | GradientReducer = "auto"
    budget: int | Mapping[torch.device, int] | None = None
    planner: str | Planner = "auto"
    cache: PlanCache = field(default_factory=lambda: PlanCache(False))


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

    @property
    def static(self) -> int:
        """Everything but activations."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.inputs

    @property
    def peak(self) -> int:
        """The predicted peak, with the plan if there is one."""
        return self.static + (self.unplanned if self.plan is None or self.plan.peak is None else self.plan.peak)

    @property
    def fits(self) -> bool:
        """Whether the budget is met."""
        return not self.budget or (self.plan is not None and self.peak <= self.budget)


@dataclass(frozen=True, slots=True)
class DryRun:
    """What was found: a forecast per active device, and the profile of a step by its number of rows."""

    forecasts: tuple[DeviceForecast, ...]
    profiles: dict[int, Profile]

    @property
    def fits(self) -> bool:
        """Whether every device meets the budget."""
        return all(forecast.fits for forecast in self.forecasts)

    @property
    def basis(self) -> str:
        """What the figures rest on, if not on a step that was run and measured."""
        return next((profile.basis for profile in self.profiles.values()), "")

    @property
    def tightest(self) -> DeviceForecast | None:
        """The device whose plan drops most; its plan serves all."""
        planned = [forecast for forecast in self.forecasts if forecast.plan is not None]
        return min(planned, key=lambda forecast: forecast.plan.peak or 0, default=None)  # type: ignore[union-attr]


class _Seen(Exception):  # noqa: N818  it ends a fit and is no error
    """The first batch is there, the step must not happen."""


class _FirstBatch(Callback):
    """Works on the first training batch, where everything that Lightning sets up is there, and ends the fit."""

    def __init__(self, work: Callable[[Trainer, LightningModule, Any], DryRun]) -> None:
        self._work = work
        self.found: DryRun | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Looks at the batch instead of training on it."""
        self.found = self._work(trainer, pl_module, batch)
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
    first = _FirstBatch(lambda trainer, module, batch: _forecast(trainer, module, batch, settings, progress))
    with _with_callback(trainer, first):
        arguments = {"datamodule" if hasattr(data, "prepare_data") else "train_dataloaders": data} if data else {}
        with preserve_rng_state(modules=[module]), suppress(_Seen):
            trainer.fit(module, **arguments)
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


def _sizes(replicas: ReplicaSet, batch: Any, settings: Settings) -> tuple[int, tuple[int, ...]]:
    """The rows of the batch, and of every device; all are the first one's where the batch cannot be cut."""
    workload = parse_workload(settings.workload, len(settings.devices))
    whole = rows_to_weigh_by(batch)
    if len(settings.devices) == 1:
        return whole, (whole,)
    check_paths(batch, settings.batch_dim)
    try:
        num_rows = replicas.slicer.num_rows(batch)
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
    num_rows, sizes = _sizes(replicas, batch, settings)
    profiles: dict[int, Profile] = {}
    for size in sorted({size for size in sizes if size}, reverse=True):
        if len(profiles) > 1:  # weights that a library repacks do not grow with the rows
            few = min(profiles)
            more = max(profiles)
            profiles[size] = extrapolate(profiles[few], profiles[more], (few, more), size)
            continue
        progress(f"profiling a step on {size} rows")
        part = batch if size == num_rows else replicas.slicer.cut(batch, [size, num_rows - size])[0]
        batch_slice = BatchSlice(replicas.root, size, part)
        accelerator = next((str(device) for device in settings.devices if not is_host(device)), "")
        key = ""
        if settings.cache.is_on:
            others = size, num_rows, accelerator, keeps_gradients(trainer)
            key = key_of_run_step(trainer, module, part, torch.device("cpu"), *others)
        profiles[size] = settings.cache.profile(
            key,
            partial(_profile, replicas, batch_slice, _runner(trainer, module), accelerator, keeps_gradients(trainer)),
        )
    if not module.automatic_optimization and not any(profile.requests for profile in profiles.values()):
        raise PlanError("There is nothing to plan: the step runs no backward that needs what it saves.")
    inputs = sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    forecasts = []
    for device, size, static in zip(settings.devices, sizes, _static(trainer, module, settings), strict=True):
        if size:
            progress(f"planning {device}")
            static["inputs"] = inputs * size // num_rows
            forecasts.append(_device(module, device, size, static, profiles[size], settings))
    return DryRun(tuple(forecasts), profiles)


def _profile(replicas: ReplicaSet, batch_slice: BatchSlice, run: Step, accelerator: str, accumulates: bool) -> Profile:
    """Of a step on ``batch_slice``, as it would be on ``accelerator`` if that is named."""
    if accelerator:
        return profile_absent_slice(replicas, batch_slice, run, torch.device(accelerator), accumulates=accumulates)
    return profile_slice(replicas, batch_slice, run, accumulates=accumulates)


def _runner(trainer: Trainer, module: LightningModule) -> Callable[[Any, Any, int], Any]:
    guest = ManualGuest(trainer.strategy, module, list(module.parameters()), [torch.device("cpu")])

    def run(shadow: Any, rows: Any, num_rows: int) -> Any:
        if shadow.automatic_optimization:
            return step(shadow, rows, num_rows)
        with guest.visit(shadow):
            return step(shadow, rows, num_rows)

    def step(shadow: Any, rows: Any, num_rows: int) -> Any:
        with StepLog(BatchSlice(None, num_rows, rows)).recording(shadow):  # type: ignore[arg-type]
            with trainer.precision_plugin.train_step_context():
                return shadow.training_step(*arguments_of_step(shadow.training_step, rows))

    return run


def _static(trainer: Trainer, module: LightningModule, settings: Settings) -> list[dict[str, int]]:
    """Per replica, the bytes that are there all the time."""
    parameters = list(module.parameters())
    here = "collective" if settings.reducer in ("auto", "nccl") else settings.reducer  # the same owners, anywhere
    owners = make_reducer(here, settings.devices).owners([p.numel() for p in parameters])
    several = len(set(settings.devices)) > 1
    states = max((states_of(optimizer) for optimizer in trainer.optimizers), default=0)
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
            }
        )
    return found


def _device(
    module: LightningModule,
    device: torch.device,
    rows: int,
    static: dict[str, int],
    profile: Profile,
    settings: Settings,
) -> DeviceForecast:
    budget = settings.budget
    held = sum(static.values())
    allowed = budget[device] if isinstance(budget, Mapping) else budget
    common = {"device": str(device), "rows": rows, **static, "unplanned": profile.peak, "budget": allowed or 0}
    try:
        room = None if allowed is None else max(1, allowed - held)
        allowed_here = profile.peak if room is None else room
        plan, found = found_or_planned(settings.cache, module, profile, allowed_here, settings.planner)
        if found:
            settings.cache.say(f"dpx: the memory plan was found in the cache, in {settings.cache.path_of(found)}.")
    except BudgetError as error:
        smallest = held + (error.smallest if error.smallest is not None else 0)
        return DeviceForecast(**common, plan=None, smallest=smallest)  # type: ignore[arg-type]
    return DeviceForecast(**common, plan=plan)  # type: ignore[arg-type]
