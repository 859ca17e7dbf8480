"""How many samples every replica handles, how long it works on them and how long it waits for the others."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_dpx.devices import Stopwatch, canonical_device, is_modelled, synchronize
from lightning_dpx.lightning.lightning_api import Callback, LightningModule, Trainer
from lightning_dpx.lightning.loaded_batches import rows_to_weigh_by
from lightning_dpx.lightning.monitors.base import (
    Pace,
    RowsFile,
    log_figures,
    show_rows,
    steps_taken,
)
from lightning_dpx.lightning.strategy import DPXStrategy
from lightning_dpx.notebook import html_table
from lightning_dpx.reducers import Waits
from lightning_dpx.replicas import StepTimes


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """One replica's part of a training step.

    Attributes:
        device: Where it lives.
        samples: Rows of the batch that it got.
        share_pct: What part of the batch that is, in percent.
        forward_ms: Time in its training step, in milliseconds.
        backward_ms: Time in its backward, in milliseconds.
        idle_pct: The part of the whole step, from one batch to the optimizer's end, in which it did neither.
    """

    device: str
    samples: int
    share_pct: float
    forward_ms: float
    backward_ms: float
    idle_pct: float


@dataclass(frozen=True, slots=True)
class _MeasuredStep:
    """A step that is being measured.

    Attributes:
        times: Of its replicas.
        whole: From its start to the optimizer's step.
        waits: For other processes; ``None`` without others.
    """

    times: StepTimes
    whole: Stopwatch
    waits: Waits | None

    def seconds(self) -> float:
        """How long it took; it ends here."""
        self.whole.stop()
        synchronize(self.times.devices[0])
        return self.whole.seconds()


class DeviceThroughputMonitor(Callback):
    """Reports the work of every replica, with any strategy that runs one module per process or ours.

    Loggers get ``dpx/throughput/replica1/idle_pct`` and so on, and ``dpx/throughput/samples_per_second`` of this
    process. A replica that idles much more than the others has too few rows: see ``workload="auto"``. The first two
    steps of a fit are measured and then every ``every_n_steps``; on accelerators a measured step waits for its end.

    Of several processes of ours, ``dpx/throughput/waiting_ms`` is how long this one waited for the last of them before
    gradients were sent between them, and ``dpx/throughput/last_process`` the rank of the one that waited least: all
    others wait for a slow node, step by step. What the sending takes is no part of it, nor are collectives in a step.

    Args:
        table: Print a table when fit ends.
        save_to: Also write every report to this file: one row per step and replica (``.csv``) or a list (``.json``).
        every_n_steps: How often; the trainer's ``log_every_n_steps`` unless given.

    Attributes:
        last: The replicas of the last measured step.
        samples_per_second: Of all replicas of this process, in the last measured step.
        waiting_ms: How long this process waited for others in the last measured step; ``None`` without others.
        last_process: The rank that waited least; ``None`` where not all processes measure, or none sent gradients.

    Raises:
        ConfigurationError: an argument has a value that is not allowed.

    Examples:
        >>> monitor = dpx.DeviceThroughputMonitor(table=False)
        >>> trainer = Trainer(strategy="dpx", accelerator="cpu", devices=1, callbacks=[monitor], max_steps=2, **quiet)
        >>> trainer.fit(BoringModel())
        >>> monitor.samples_per_second > 0
        True
    """

    def __init__(self, table: bool = True, save_to: str | Path | None = None, every_n_steps: int | None = None) -> None:
        self._table = table
        self._rows = RowsFile(save_to)
        self._pace = Pace(every_n_steps)
        self.last: list[ReplicaWork] = []
        self.samples_per_second: float = 0.0
        self.waiting_ms: float | None = None
        self.last_process: int | None = None
        self._measured: _MeasuredStep | None = None
        self._watch: Stopwatch | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets the fit before; looks whether its files can be written."""
        self._rows.restart()
        self.last = []
        self._measured = None
        self._watch = None
        self.waiting_ms = None
        self.last_process = None
        self._pace.restart()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begins to measure a step, if its turn has come."""
        self._measured = None
        if not self._pace.step(trainer):
            return
        # A run on one device has no replicas to watch, and is timed from
        # outside like other strategies.
        times: StepTimes | None = None
        waits: Waits | None = None
        if isinstance(trainer.strategy, DPXStrategy):
            times = trainer.strategy.watch_replicas()
            waits = trainer.strategy.session.watch_processes()
        if times is None:
            times = StepTimes([canonical_device(trainer.strategy.root_device)])
            times.begin([rows_to_weigh_by(batch)])
        # What earlier steps have queued on a device must not count as work of this one.
        for device in {canonical_device(device) for device in times.devices}:
            synchronize(device)
        # The first device has the loss and is where Lightning's part of the step runs.
        whole = Stopwatch(times.devices[0])
        whole.start()
        self._measured = _MeasuredStep(times, whole, waits)
        self._begin("training_step")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Ends the time of forward, and begins that of backward."""
        self._end()
        self._begin("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the time of backward."""
        self._end()

    def _begin(self, stage: str) -> None:
        """A step that does not run in several replicas is timed from outside."""
        if self._measured is not None:
            self._watch = self._measured.times.watch_alone(stage)
            self._watch.start()

    def _end(self) -> None:
        # A step without a loss has no backward, and one by hand has several.
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the measured step, and reports it."""
        measured = self._measured
        if measured is None:
            return
        self._end()
        times = measured.times
        self._measured = None
        if isinstance(trainer.strategy, DPXStrategy):
            # The steps until the next measured one are not timed, so they cost nothing.
            trainer.strategy.stop_watching()
        forward = times.seconds("training_step")
        backward = times.seconds("backward")
        # Simulated devices keep a time of their own each: the slowest of them tells how long the step is.
        busy = [ahead + back for ahead, back in zip(forward, backward, strict=True)]
        step = max(measured.seconds(), *busy)
        rows = max(1, sum(times.rows))  # a batch may have none
        self.last = [
            ReplicaWork(
                str(device),
                samples,
                100 * samples / rows,
                1e3 * ahead,
                1e3 * back,
                100 * max(0.0, 1 - (ahead + back) / step),
            )
            for device, samples, ahead, back in zip(times.devices, times.rows, forward, backward, strict=True)
        ]
        self.samples_per_second = rows / step
        self._take_waits(measured.waits)
        self._report(trainer)

    def _take_waits(self, waits: Waits | None) -> None:
        self.waiting_ms = None
        self.last_process = None
        if waits is not None:
            self.waiting_ms = 1e3 * waits.own
            if waits.everyone:
                self.last_process = waits.everyone.index(min(waits.everyone))

    def _report(self, trainer: Trainer) -> None:
        step = steps_taken(trainer)
        works = [asdict(work) for work in self.last]
        # One process has nothing to wait for, and no column that says so.
        waiting: dict[str, Any] = {}
        if self.waiting_ms is not None:
            waiting = {"waiting_ms": self.waiting_ms, "last_process": self.last_process}
        self._rows.add([{"step": step, "replica": index, **work, **waiting} for index, work in enumerate(works)])
        figures: dict[tuple[str, ...], float] = {("throughput", "samples_per_second"): self.samples_per_second}
        for key, value in waiting.items():
            if value is not None:
                figures[("throughput", key)] = value
        for index, work in enumerate(works):
            figures |= {("throughput", f"replica{index}", key): work[key] for key in work if key != "device"}
        log_figures(trainer, figures, step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file and prints the table."""
        self._rows.has_news = False
        self._rows.write(trainer)
        if self._table and self.last:
            show_rows(*self._table_of_last())

    def _repr_html_(self) -> str:
        """What a notebook shows: the table that is printed when fit ends, from the first measured step on."""
        title, heads, rows = self._table_of_last()
        return html_table(title if rows else "dpx: no step has been measured", heads, rows)

    def _table_of_last(self) -> tuple[str, list[str], list[list[str]]]:
        """Title, heads and one row per replica of the last measured step."""
        heads = ["replica", "device", "samples", "share %", "forward ms", "backward ms", "idle %"]
        rows: list[list[str]] = []
        # Those without rows in the last step are there with none.
        for index, work in enumerate(self.last):
            share = f"{work.share_pct:.1f}"
            times = [f"{work.forward_ms:.2f}", f"{work.backward_ms:.2f}", f"{work.idle_pct:.0f}"]
            rows.append([str(index), work.device, str(work.samples), share, *times])
        title = f"dpx: work of the last step, {self.samples_per_second:.0f} samples/s"
        # Beside the rate of a progress bar, which is that of this machine.
        if any(is_modelled(torch.device(work.device)) for work in self.last):
            title += " in the modelled time of simulated devices"
        if self.waiting_ms is not None:
            heads.append("waiting ms")
            for row in rows:
                row.append(f"{self.waiting_ms:.2f}")  # replicas of a process wait together
        if self.last_process is not None:
            title += f", process {self.last_process} came last"
        return title, heads, rows

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Reports what was measured until then."""
        # An error before the first step, or in a validation after the fit, adds nothing to the report that is there.
        if self._rows.has_news:
            self.on_fit_end(trainer, pl_module)
