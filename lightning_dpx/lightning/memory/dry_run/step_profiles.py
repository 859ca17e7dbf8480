"""Profiles and times of a training step on some rows of a batch, on a device, or for some that need not be there."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torchmetrics import Metric

from lightning_dpx.activations import arguments_of_step
from lightning_dpx.devices import allocated_and_peak, canonical_device, free_garbage, is_host
from lightning_dpx.errors import PlanError
from lightning_dpx.lightning.lightning_api import Trainer
from lightning_dpx.lightning.logging import StepLog
from lightning_dpx.lightning.memory.batch_shapes import arrays_in
from lightning_dpx.lightning.memory.dry_run.device_forecast import counts_gradients
from lightning_dpx.lightning.memory.dry_run.place import describe_measured
from lightning_dpx.lightning.memory.dry_run.settings import Settings
from lightning_dpx.lightning.memory.kept_gradients import keeps_gradients
from lightning_dpx.lightning.memory.planning_cache import is_short_of_rows, key_of_run_step
from lightning_dpx.lightning.memory.profiling import profile_absent_slice, profile_slice
from lightning_dpx.lightning.memory.slice_timing import TimedSlice, run_once, seconds_of_slice, timed_slice
from lightning_dpx.lightning.rehearsal.manual_shadow_step import ManualSandbox
from lightning_dpx.memory import Profile, extrapolate
from lightning_dpx.memory.profile.roofline import Rates
from lightning_dpx.memory.profile.step_seconds import StepSeconds
from lightning_dpx.replicas import (
    BatchSlice,
    Replica,
    ReplicaSet,
)

LoggedValue = tuple[str, dict[str, Any]]  # its name, and with which options
Progress = Callable[[str], None]


class OnDevice(NamedTuple):
    """What only a device that is there can tell of a step.

    Attributes:
        queued: Seconds of the host until it has handed a forward and a backward to the device, however many rows.
        others: Bytes on the device that are neither parameters nor buffers nor the batch: workspaces that libraries
            keep once they were used, and tensors of the run that nothing names.
    """

    queued: float = 0.0
    others: int = 0


def _say_nothing(log: StepLog) -> None:
    """What a step logs is of no interest."""


def replica_to_look_at(trainer: Trainer, settings: Settings) -> ReplicaSet:
    """The one replica on which steps of a dry run are tried: the Trainer's module, where its strategy has it."""
    return ReplicaSet(
        trainer.lightning_module,
        [trainer.strategy.root_device],
        batch_dim=settings.batch_dim,
        batch_slicer=settings.batch_slicer,
        # Copies of the module share these: a Trainer must not be copied.
        keep=[trainer, *trainer.loggers],
    )


class StepProfiles:
    """Profiles of a step on some rows of a batch, each made once.

    Args:
        trainer: Of the dry run.
        replicas: The one on the device that steps are run on; on the CPU, where those of the settings are not there.
        batch: The whole of it.
        num_rows: Its rows.
        settings: Of the run.
        progress: Told what happens next.

    Attributes:
        slices: What was made for slices of devices, by rows.
        home: Where steps are run.
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
        self._counts_gradients = counts_gradients(trainer, trainer.lightning_module, settings)
        self.home: torch.device = replicas.root.device

    def on_batch(self, batch: Any, num_rows: int) -> "StepProfiles":
        """The profiles of the same step on another batch.

        Raises:
            PlanError: the batch has other rows than those.
        """
        found = self._replicas.slicer.num_rows(batch)
        if found != num_rows:
            raise PlanError(f"The batch has {found} rows where {num_rows} were asked for.")
        return StepProfiles(self._trainer, self._replicas, batch, num_rows, self._settings, self._progress)

    def without_budget(self) -> "StepProfiles":
        """Those of the same step in a run that does nothing about memory."""
        if not self._counts_gradients:
            return self
        plain = replace(self._settings, budget=None)
        return StepProfiles(self._trainer, self._replicas, self._batch, self._num_rows, plain, self._progress)

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
        # Kept apart from slices: a micro-batch adds to gradients that are there, and a slice may find none.
        if rows not in self._parts:
            self._parts[rows] = self._made(rows, accumulates=True)
        return self._parts[rows]

    def seconds(self, rows: int, device: torch.device, rates: Rates) -> StepSeconds:
        """How long the step on the slice of a device takes, by its rates."""
        self._progress(f"timing a step on {rows} rows")
        run = self._runner()
        return seconds_of_slice(self._replicas, self._slice(rows), run, device, rates)

    def timed(self, rows: int) -> TimedSlice:
        """Seconds of forward and backward on so many rows, where steps are run."""
        self._progress(f"timing a step on {rows} rows")
        return timed_slice(self._replicas, self._slice(rows), self._runner())

    def on_device(self, rows: int) -> OnDevice:
        """What the device tells of the step on so many rows, whose profile is known; nothing of the host."""
        if is_host(self.home):
            return OnDevice()
        # Profiles may be from the cache, and then no library has been used yet.
        queued = self.timed(self._fitting(rows)).queued
        free_garbage()  # the shadow that ran it
        return OnDevice(queued, max(0, allocated_and_peak(self.home)[0] - self._bytes_named()))

    def busy_host(self, rows: int) -> float:
        """The share of a step on so many rows, if they fit, in which the host is busy with it; nothing of the host."""
        if is_host(self.home):
            return 0.0
        return self.timed(self._fitting(rows)).busy_host

    def _fitting(self, rows: int) -> int:
        """So many rows, or as many as were profiled in place of them, because they did not fit."""
        return max(1, round(rows / self.of_slice(rows).scale))

    def basis(self, rows: int) -> str:
        """What the figures of the step on so many rows rest on; nothing of a step that was run on the host."""
        profile = self.of_slice(rows)
        # One that was not run as it is says so itself.
        if profile.basis:
            return profile.basis
        return describe_measured(self.home, self._settings.devices, on_fewer_rows=profile.scale > 1)

    def _bytes_named(self) -> int:
        """Bytes on the device that a forecast has under other names."""
        module = self._trainer.lightning_module
        tensors = [*module.parameters(), *module.buffers()]
        tensors += [array for array in arrays_in(self._batch) if isinstance(array, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors if canonical_device(tensor.device) == self.home)

    def logged(self, rows: int) -> list[LoggedValue]:
        """What the step on so many rows logs, but for metrics, whose cost is in what they compute."""
        log = _LastLog()
        run_once(self._replicas, self._slice(rows), self._runner(log.note))
        return log.values

    def _slice(self, rows: int) -> BatchSlice:
        others = [rows, self._num_rows - rows]
        part = self._batch if rows == self._num_rows else self._replicas.slicer.cut(self._batch, others)[0]
        return BatchSlice(self._replicas.root, rows, part)

    def _runner(self, note: Callable[[StepLog], None] = _say_nothing) -> Callable[[Any, Any, int], Any]:
        trainer = self._trainer
        module = trainer.lightning_module
        # One for all runs: a step by hand is profiled several times, each time from the same state.
        sandbox = ManualSandbox(trainer.strategy, module, list(module.parameters()), [self.home])

        def run(shadow: Any, rows: Any, num_rows: int) -> Any:
            if shadow.automatic_optimization:
                return unlogged_step(trainer, shadow, rows, num_rows, note)
            # The step calls its optimizers itself, and must not find those of the run.
            with sandbox.opened(shadow):
                return unlogged_step(trainer, shadow, rows, num_rows, note)

        return run

    def _made(self, rows: int, *, accumulates: bool) -> Profile:
        self._progress(f"profiling a step on {rows} rows")
        trainer = self._trainer
        settings = self._settings
        module = trainer.lightning_module
        batch_slice = self._slice(rows)
        counts = self._counts_gradients and not accumulates
        target = self._absent_target()
        key = ""
        # To make a key takes a look at the whole module, which an unused cache is not worth.
        if settings.cache.is_on:
            absent = "" if target is None else str(target)
            known = rows, self._num_rows, absent, accumulates, counts
            key = key_of_run_step(trainer, module, batch_slice.batch, self.home, *known)
        # Fake tensors, and the rules of the accelerator's libraries in place of the host's.
        make = partial(
            profile_slice if target is None else partial(profile_absent_slice, target=target),
            self._replicas,
            batch_slice,
            self._runner(),
            accumulates=accumulates,
            counts_gradients=counts,
        )
        # What is scaled for a device that is not there takes no room here.
        if target is not None:
            return settings.cache.profile(key, make)
        return settings.cache.profile(key, make, is_poor=lambda profile: is_short_of_rows(profile, self.home))

    def _absent_target(self) -> torch.device | None:
        """The device that is not there and for which steps are watched on fakes; ``None`` where they are run."""
        if not is_host(self.home):
            return None
        # One profile serves all devices, so the first that is no host stands for the others.
        return next((device for device in self._settings.devices if not is_host(device)), None)


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
