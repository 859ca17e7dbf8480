"""Profiles and times of a training step on some rows of a batch, for devices that need not be there."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torchmetrics import Metric

from lightning_dpx.activations import arguments_of_step
from lightning_dpx.devices import is_host
from lightning_dpx.errors import PlanError
from lightning_dpx.lightning.lightning_api import LightningModule, Trainer
from lightning_dpx.lightning.logging import StepLog
from lightning_dpx.lightning.memory.dry_run.device_forecast import counts_gradients
from lightning_dpx.lightning.memory.dry_run.settings import Settings
from lightning_dpx.lightning.memory.planning_cache import is_short_of_rows, key_of_run_step
from lightning_dpx.lightning.memory.profiling import (
    keeps_gradients,
    profile_absent_slice,
    profile_slice,
    run_once,
    seconds_of_slice,
    timed_slice,
)
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
        self._counts_gradients = counts_gradients(trainer, trainer.lightning_module, settings)

    def on_batch(self, batch: Any, num_rows: int) -> "StepProfiles":
        """Those of the same step on another batch.

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
        counts = self._counts_gradients and not accumulates
        key = ""
        # To make a key takes a look at the whole module, which an unused cache is not worth.
        if settings.cache.is_on:
            known = rows, self._num_rows, accelerator, accumulates, counts
            key = key_of_run_step(trainer, module, batch_slice.batch, torch.device("cpu"), *known)
        run = _runner(trainer, module)
        # Fake tensors, and the rules of the accelerator's libraries in place of the host's.
        make = partial(
            partial(profile_absent_slice, target=torch.device(accelerator)) if accelerator else profile_slice,
            self._replicas,
            batch_slice,
            run,
            accumulates=accumulates,
            counts_gradients=counts,
        )
        # What is scaled for a device that is not there takes no room here.
        if accelerator:
            return settings.cache.profile(key, make)
        device = batch_slice.replica.device
        return settings.cache.profile(key, make, is_poor=lambda profile: is_short_of_rows(profile, device))


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
        # The step calls its optimizers itself, and must not find those of the run.
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
