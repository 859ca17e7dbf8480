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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from lightning_dpx.arguments import check_is_module, is_whole_number
from lightning_dpx.devices import accelerators, counts_by_its_clock, is_host, is_modelled, named_devices
from lightning_dpx.errors import ConfigurationError, PlanError, describe_error
from lightning_dpx.lightning.beside_steps import BesideSteps, Queue
from lightning_dpx.lightning.empty_step import EmptyRun, EmptySeconds, seconds_of_empty_step, seconds_of_loading
from lightning_dpx.lightning.larger_steps import Slowdown, larger_batch, rows_worth_timing
from lightning_dpx.lightning.lightning_api import LightningModule, PossibleUserWarning, Trainer, rank_zero_warn
from lightning_dpx.lightning.memory.batch_shapes import bytes_of_tensors
from lightning_dpx.lightning.memory.device_planner import DevicePlanner, Number, micro_batches_of, say_why_whole
from lightning_dpx.lightning.memory.dry_run.device_forecast import (
    DeviceForecast,
    beside_micro_batches,
    forecast_device,
    lasting_bytes,
    owners_of,
)
from lightning_dpx.lightning.memory.dry_run.dry_run import plan_step
from lightning_dpx.lightning.memory.dry_run.first_batch import work_on_first_batch
from lightning_dpx.lightning.memory.dry_run.place import on_its_device, trainer_to_look, with_index
from lightning_dpx.lightning.memory.dry_run.settings import Settings, with_merged_replicas
from lightning_dpx.lightning.memory.dry_run.step_profiles import Progress, StepProfiles
from lightning_dpx.lightning.memory.micro_batch_cost import seconds_of_a_micro_batch
from lightning_dpx.lightning.memory.step_times import seconds_of_update
from lightning_dpx.lightning.silence_lightning import quiet_lightning
from lightning_dpx.memory import MemoryPlan, Planner, Profile, extrapolate
from lightning_dpx.memory.profile.roofline import rates_of
from lightning_dpx.memory.profile.scaling import scaled
from lightning_dpx.notebook import html_table
from lightning_dpx.replicas import MicroBatches, ReplicaSet, UncuttableBatch, parse_workload, split_sizes
from lightning_dpx.units import format_part, parse_bytes

_DOUBLINGS = 6  # beyond the batch size of the loader, where nothing else ends the list
_HALVINGS = 2  # below it
_ABOUT_AS_FAST = 0.98  # of the samples per second of the fastest: a smaller batch is better at the same speed


@dataclass(frozen=True, slots=True)
class BatchSizeForecast:
    """Training with one batch size.

    Attributes:
        batch_size: B, the rows of a batch over all devices.
        devices: One per device that gets rows, in bytes.
        compute: Seconds of a step's forward and backward on the slowest device, with what its plan computes again;
            infinite where a budget cannot be met.
        beside: Seconds of a step beside those: the optimizer; on the host also Lightning's loop with what is logged,
            slices and sums of gradients, and the loading of a batch without workers. On other devices the host does all
            that while they compute.
        queued: Seconds that the host takes for all of that, and to hand forward and backward to other devices, as far
            as it was measured: a step takes no less.
    """

    batch_size: int
    devices: tuple[DeviceForecast, ...]
    compute: float
    beside: float = 0.0
    queued: float = 0.0

    @property
    def seconds(self) -> float:
        """Of a step; infinite where a budget cannot be met. Reductions between devices are not in it."""
        return max(self.compute + self.beside, self.queued)

    @property
    def fits(self) -> bool:
        """Whether every device meets its budget."""
        return all(device.fits for device in self.devices)

    @property
    def samples_per_second(self) -> float:
        """Rows by seconds; 0 where it does not fit."""
        if self.fits:
            return self.batch_size / self.seconds
        return 0.0

    @property
    def tightest(self) -> DeviceForecast:
        """The device that takes the largest part of its budget, or most bytes where there is none."""
        return max(self.devices, key=lambda one: one.needed / (one.budget or 1))


@dataclass(frozen=True, slots=True)
class Tuning:
    """The forecasts of all batch sizes that were looked at.

    Attributes:
        batch_sizes: The forecasts, by growing batch size.
        current: The batch size of the loader.
        basis: What the figures rest on, if not on steps that were run and measured.

    Examples:
        >>> found = dpx.tune(BoringModel(), DataLoader(torch.ones(64, 32), batch_size=4), batch_sizes=[4, 8])
        >>> [one.batch_size for one in found.batch_sizes]
        [4, 8]
    """

    batch_sizes: tuple[BatchSizeForecast, ...]
    current: int
    basis: str = ""

    @property
    def best(self) -> BatchSizeForecast | None:
        """The smallest batch size that is about as fast (within 2%) as the fastest; ``None`` where none fits."""
        return _best_of(self.batch_sizes)

    def fastest(self, count: int) -> list[BatchSizeForecast]:
        """At most ``count`` forecasts that fit: the best one, then what would be the best without it, and so on."""
        # By the rule of the best one: of sizes that are about as fast the smaller ones, which are also tried sooner.
        left = list(self.batch_sizes)
        found: list[BatchSizeForecast] = []
        while len(found) < count:
            best = _best_of(left)
            if best is None:
                break
            found.append(best)
            left.remove(best)
        return found

    def __str__(self) -> str:
        """A line for each batch size."""
        best = self.best
        lines = []
        for one in self.batch_sizes:
            tightest = one.tightest
            peak = format_part(tightest.needed, tightest.budget or tightest.needed)
            speed = f"{one.samples_per_second:,.0f} samples/s" if one.fits else "does not fit"
            mark = "  <- best" if one is best else ""
            lines.append(f"batch_size={one.batch_size}: {speed}, peak {peak} on {tightest.device}{mark}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What a notebook shows: a row for each batch size, the best one in bold."""
        best = self.best
        rows: list[tuple[str, ...]] = []
        marked = -1
        for number, one in enumerate(self.batch_sizes):
            tightest = one.tightest
            peak = format_part(tightest.needed, tightest.budget or tightest.needed)
            speed = f"{one.samples_per_second:,.0f}" if one.fits else "does not fit"
            rows.append((str(one.batch_size), speed, peak, tightest.device))
            if one is best:
                marked = number
        heads = ("batch size", "samples/s", "peak", "on")
        return html_table(self.basis or "predicted from one step", heads, rows, marked=marked)


def _best_of(forecasts: Sequence[BatchSizeForecast]) -> BatchSizeForecast | None:
    """The first, by growing batch size, that is about as fast as the fastest; ``None`` where none fits."""
    most = max((one.samples_per_second for one in forecasts), default=0.0)
    for one in forecasts:
        if one.fits and one.samples_per_second >= _ABOUT_AS_FAST * most:
            return one
    return None


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Which batch sizes are looked at.

    Attributes:
        batch_sizes: Those, over all devices; powers of two times the loader's own unless given.
        most_rows: No batch size is larger; as many as the data set has unless given.
    """

    batch_sizes: Sequence[int] = ()
    most_rows: int | None = None

    def __post_init__(self) -> None:
        for size in self.batch_sizes:
            if not is_whole_number(size) or size < 1:
                raise ConfigurationError(f"batch_sizes={list(self.batch_sizes)!r} is not allowed: {size!r} is no "
                                         "positive number of rows.")  # fmt: skip

    def sizes(self, current: int, devices: int) -> list[int]:
        """The batch sizes, growing; each gives every device a row."""
        if self.batch_sizes:
            return sorted(set(self.batch_sizes))
        # The loader's own batch size is looked at however small the data set is.
        limit = current << _DOUBLINGS if self.most_rows is None else max(self.most_rows, current)
        found = {current >> step for step in range(_HALVINGS + 1)}
        found |= {current << step for step in range(_DOUBLINGS + 1)}
        return sorted(size for size in found if devices <= size <= limit) or [current]


@dataclass(slots=True)
class _Line:
    """Profiles of a step on any number of rows, from two that are made.

    Attributes:
        made: Makes the profile of so many rows.
        few: The smaller number of rows that is profiled.
        more: The larger one; the same where a batch has one row.
    """

    made: Callable[[int], Profile]
    few: int
    more: int
    _known: dict[int, Profile] = field(default_factory=dict)

    def __call__(self, rows: int) -> Profile:
        """The profile of a step on ``rows`` rows."""
        if rows not in self._known:
            self._known[rows] = self._of(rows)
        return self._known[rows]

    def _of(self, rows: int) -> Profile:
        # The two that were run are taken as they were measured.
        if rows in (self.few, self.more):
            return self.made(rows)
        if self.few == self.more:
            # Nothing tells what of one row grows with the rows, so all of it does.
            return replace(scaled(self(self.more), rows / self.more, rows / self.more), scale=1.0)
        found = extrapolate(self(self.few), self(self.more), (self.few, self.more), rows)
        return replace(found, scale=1.0)


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
    replicas = ReplicaSet(
        module,
        [trainer.strategy.root_device],
        batch_dim=settings.batch_dim,
        batch_slicer=settings.batch_slicer,
        # Copies of the module share these: a Trainer must not be copied.
        keep=[trainer, *trainer.loggers],
    )
    current = _rows_of(replicas, batch)
    profiles = StepProfiles(trainer, replicas, batch, current, settings, progress)
    few = _fewer_rows(current)
    whole = _Line(profiles.of_slice, few, current)
    # Micro-batches add to gradients that are there already, which takes other memory
    # than the first.
    part = _Line(profiles.of_part, few, current)
    whole(current)  # before the smaller one, as libraries fill their caches with it
    there = profiles.on_device(few)
    sizes = _SizeForecasts(trainer, module, settings, whole, part, bytes_of_tensors(batch), there.others)
    numbers, why_whole = micro_batches_of(replicas, batch, settings.micro_batches, len(settings.devices))
    batch_sizes = options.sizes(current, len(settings.devices))
    # Elsewhere times are those of a model, which knows of no caches, and of no host that has other work.
    if _is_timed(settings, profiles.home):
        devices = _devices_of_run(settings, profiles.home)
        options_of_run = _options_of(settings, devices)
        empty = EmptyRun(devices=devices, batch=batch, options=options_of_run, logged=profiles.logged(few))
        step = seconds_of_empty_step(trainer, module, empty)
        loading = seconds_of_loading(trainer) / current
        most = [sizes.most_rows(batch_size) for batch_size in batch_sizes]
        larger = _larger_step(trainer, module, profiles, whole, most, loading)
        sizes.pace = larger.slowdown.at
        beside = BesideSteps(step, loading, None if is_host(profiles.home) else Queue(there.queued, larger.busy_host))
    else:
        beside = BesideSteps(EmptySeconds(_seconds_of_update(trainer, module, settings)))
        # Its profiles have seconds that passed, and the device has those of its model.
        if is_modelled(profiles.home) and not counts_by_its_clock(profiles.home):
            sizes.pace = _ModelledPace(profiles, whole).at
    found = []
    for batch_size in batch_sizes:
        progress(f"planning batches of {batch_size}")
        forecasts, seconds = sizes.of(batch_size, numbers)
        plans = [device.plan for device in forecasts]
        found.append(BatchSizeForecast(batch_size, forecasts, seconds, *beside.of(batch_size, seconds, plans)))
    say_why_whole(why_whole, [device.plan for one in found for device in one.devices])
    return Tuning(tuple(found), current, profiles.basis(current))


class _LargerStep(NamedTuple):
    """What a step on more rows than the loader's batches have tells, as far as one could be timed.

    Attributes:
        slowdown: How much slower it is than on the line through two smaller ones.
        busy_host: The share of its time in which the host was busy with it, or waited for the device.
    """

    slowdown: Slowdown = Slowdown()
    busy_host: float = 0.0


def _larger_step(
    trainer: Trainer,
    module: LightningModule,
    profiles: StepProfiles,
    whole: _Line,
    candidates: Sequence[int],
    seconds_of_a_row: float,
) -> _LargerStep:
    """Times a step on more rows, of ``candidates``, beside one on a batch of the loader."""
    current = whole.more
    known = rows_of_data(trainer)
    # A batch size that was asked for may be larger than the data set, and then so many items cannot be loaded.
    there = [rows for rows in candidates if known is None or rows <= known]
    rows = rows_worth_timing(there, whole, current, seconds_of_a_row, profiles.home)
    larger = None if rows is None else larger_batch(trainer, module, rows)
    if larger is None or larger[1] <= current:
        return _LargerStep(busy_host=profiles.busy_host(current))
    batch, rows = larger
    try:
        measured = profiles.on_batch(batch, rows).timed(rows)
        # Timed again beside it: a profile may be of another day, from the cache.
        usual = profiles.timed(current)
    except Exception as error:  # noqa: BLE001  whatever the step does with so many rows
        rank_zero_warn(
            "dpx: the time of larger batches is taken from smaller ones alone: a step on "
            f"{rows} rows failed ({describe_error(error)})."
        )
        return _LargerStep(busy_host=profiles.busy_host(current))
    expected = whole(rows).step_seconds / whole(current).step_seconds
    factor = measured.whole / usual.whole / expected
    return _LargerStep(Slowdown(current, rows, factor, expected), measured.busy_host)


class _ModelledPace:
    """Steps on a simulated device, whose time is that of a model.

    Args:
        profiles: Of the step there.
        whole: The step on any rows, with other seconds.
    """

    def __init__(self, profiles: StepProfiles, whole: _Line) -> None:
        self._whole = whole
        rates = rates_of(profiles.home)
        self._known: dict[int, float] = {}
        for rows in (whole.few, whole.more):
            seconds = profiles.seconds(rows, profiles.home, rates)
            self._known[rows] = seconds.forward + seconds.backward

    def at(self, rows: int) -> float:
        """The time of a step on so many rows over what its profile says."""
        few, more = self._whole.few, self._whole.more
        of_a_row = self._known[more] / more
        if few < more:
            of_a_row = (self._known[more] - self._known[few]) / (more - few)
        return (self._known[more] + of_a_row * (rows - more)) / self._whole(rows).step_seconds


class _SizeForecasts:
    """Forecasts of steps of any size, from profiles of two.

    Args:
        trainer: Of the run.
        module: What is trained.
        settings: The devices, and what is allowed on them.
        whole: The step in one piece, by its rows.
        part: A micro-batch, by its rows.
        inputs: Bytes of a batch of as many rows as the larger step that was profiled.
        others: Bytes that a device which was asked holds beside what has a name.

    Attributes:
        pace: By which factor a step on so many rows is slower than those two say.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        settings: Settings,
        whole: _Line,
        part: _Line,
        inputs: int,
        others: int,
    ) -> None:
        self._settings = settings
        self._whole = whole
        self._part = part
        self._inputs = inputs
        self._plan = partial(plan_step, module, settings)
        self._beside = beside_micro_batches(trainer, module, settings)
        self._lasting = lasting_bytes(trainer, module, settings, others)
        self._workload = parse_workload(settings.workload, len(settings.devices))
        self.pace: Callable[[int], float] = Slowdown().at

    def most_rows(self, batch_size: int) -> int:
        """Rows of the largest slice of a batch."""
        return max(split_sizes(batch_size, self._workload))

    def of(self, batch_size: int, numbers: Sequence[Number]) -> tuple[tuple[DeviceForecast, ...], float]:
        """A step of ``batch_size`` rows: the forecasts of all devices that get any, and the seconds that it takes.

        Args:
            batch_size: Rows.
            numbers: For every device, into how many micro-batches its slice is cut.
        """
        settings = self._settings
        forecasts = []
        busy = dict[torch.device, float]()
        slices = split_sizes(batch_size, self._workload)
        for device, rows, held, number in zip(settings.devices, slices, self._lasting, numbers, strict=True):
            # A small batch may leave a device without rows: it computes nothing and holds no plan.
            if not rows:
                continue
            # A batch stays on its device for the whole step, beside what the step itself keeps.
            static = {**held, "inputs": self._inputs * rows // self._whole.more}
            planner = DevicePlanner(
                rows,
                number,
                self._whole,
                self._part,
                self._plan,
                seconds_each=seconds_of_a_micro_batch(device),
                beside=self._beside,
            )
            # A share would be another budget for every batch size.
            allowed = settings.budget_of(device)
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
        seconds = self._whole(rows).step_seconds * (1 + (plan.recompute_share or 0.0))
        return seconds * self.pace(at_once)


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


def rows_of_data(trainer: Trainer) -> int | None:
    """Rows of the data set that is trained on, where it tells."""
    data = getattr(trainer.train_dataloader, "dataset", None)
    try:
        # An iterable data set has no length, or raises where it is asked.
        return len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
