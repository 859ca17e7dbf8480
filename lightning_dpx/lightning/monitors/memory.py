"""What every device holds, by phase of a step and by kind, for loggers, files and a table at the end of fit."""

import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_dpx.arguments import is_number
from lightning_dpx.devices import (
    allocated_and_peak,
    canonical_device,
    capacity_of,
    distinct_devices,
    is_host,
    reset_peak_memory,
)
from lightning_dpx.errors import ConfigurationError, UnsupportedError
from lightning_dpx.lightning.lightning_api import Callback, LightningModule, Trainer
from lightning_dpx.lightning.memory.device_memory import DeviceMemory, Phase, bytes_by_device, flat, table_of
from lightning_dpx.lightning.monitors.base import (
    Pace,
    RowsFile,
    check_writable,
    format_rows,
    log_figures,
    short_name,
    show_rows,
    steps_taken,
)
from lightning_dpx.lightning.monitors.pictures import takes_pictures
from lightning_dpx.lightning.monitors.report import (
    MemoryPlans,
    draw_report,
    memory_plans,
    micro_batches_on,
    planned_activations,
)
from lightning_dpx.lightning.strategy import DPXStrategy
from lightning_dpx.notebook import html_table
from lightning_dpx.units import GIB, format_mib


class DeviceMemoryMonitor(Callback):
    """Reports the memory of every device that training uses, with any strategy.

    Loggers get ``dpx/memory/cuda1/peak_gib`` and so on. The first two steps of a fit are measured and then every
    ``every_n_steps``; the steps between cost nothing, and their peak still counts, because allocators keep it anyway.

    Args:
        prog_bar: Show each device's peak in the progress bar, in GiB.
        table: Print a table when fit ends.
        save_to: Also write every report to this file: one row per step and device (``.csv``) or a list (``.json``).
        warn_at: Warn once per device when the peak passes this share of its capacity; 1 never warns.
        every_n_steps: How often; the trainer's ``log_every_n_steps`` unless given.
        report: Write a page with tables and pictures to this ``.html`` file when fit ends. Loggers that take pictures
            (TensorBoard, Weights & Biases, MLflow) get them anyway, where matplotlib is installed.

    Attributes:
        devices: The devices of the last measured step.
        last: By device, the last measured step's memory, in bytes.
        highest: By device, the highest peak of the fit, in bytes.

    Raises:
        ConfigurationError: an argument has a value that is not allowed.
        UnsupportedError: ``report`` is given, and matplotlib is missing.

    Examples:
        >>> monitor = dpx.DeviceMemoryMonitor(table=False)
        >>> trainer = Trainer(strategy="dpx", accelerator="cpu", devices=1, callbacks=[monitor], max_steps=2, **quiet)
        >>> trainer.fit(BoringModel())
        >>> list(monitor.last)
        [device(type='cpu')]
    """

    def __init__(
        self,
        prog_bar: bool = False,
        table: bool = True,
        save_to: str | Path | None = None,
        warn_at: float = 0.95,
        every_n_steps: int | None = None,
        report: str | Path | None = None,
    ) -> None:
        if report is not None and Path(report).suffix != ".html":
            raise ConfigurationError(f"report={str(report)!r} is not allowed; name an .html file.")
        # Now, not at the end of a run of many hours.
        if report is not None and find_spec("matplotlib") is None:
            raise UnsupportedError(
                f"report={str(report)!r} has pictures, which need matplotlib; pip install 'lightning-dpx[plots]'."
            )
        if not is_number(warn_at) or not 0 < warn_at <= 1:
            raise ConfigurationError(f"warn_at={warn_at!r} is not allowed; give a share of the capacity in (0, 1].")
        self._rows = RowsFile(save_to)
        self._pace = Pace(every_n_steps)
        self._prog_bar = prog_bar
        self._table = table
        self._warn_at = warn_at
        self.devices: list[torch.device] = []
        self.last: dict[torch.device, DeviceMemory] = {}
        self.highest: dict[torch.device, int] = {}
        self._idle: dict[torch.device, int] = {}
        self._warned: set[torch.device] = set()
        self._measuring = False
        self._plans: MemoryPlans = {}  # when fit ends, the strategy has forgotten them
        self._page = None if report is None else Path(report)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets the fit before; looks whether its files can be written."""
        # A run of many hours must not end with a file that cannot be written.
        self._rows.restart()
        check_writable("report", self._page)
        self.last = {}
        self._warned = set()
        self._measuring = False
        self.highest.clear()
        self._pace.restart()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begins to measure a step, if its turn has come."""
        self._measuring = self._pace.step(trainer)
        if not self._measuring:
            return
        self._note_peaks()  # of the steps since the last one that was measured
        # Looked for in every measured step, as parts may be shifted after the first batch.
        used: list[torch.device] = []
        for module in replica_modules(trainer, pl_module):
            used += _devices_of(module)
        # Strategies of one device have no list of them.
        own = getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device]
        self.devices = distinct_devices([*own, *used])
        self.last = {device: DeviceMemory() for device in self.devices}
        # What is there before forward is subtracted, so that the rest is what forward has left.
        self._idle = {device: allocated_and_peak(device)[0] for device in self.devices}
        self._begin_phase()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Forward is done; gradient accumulation and several backwards add up."""
        if not self._measuring:
            return
        for device, allocated in self._end_phase("forward").items():
            memory = self.last[device]
            # A step by hand has several backwards, of which the largest counts.
            memory.activations = max(memory.activations, allocated - self._idle[device])

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures the backward, and the gradients that are on their owners by now."""
        if not self._measuring:
            return
        self._end_phase("backward")
        # Counted now, as a step by hand may set gradients to None before it ends.
        found: list[torch.Tensor] = []
        for module in replica_modules(trainer, pl_module):
            found += [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        gradients = bytes_by_device(found)
        for device, memory in self.last.items():
            memory.gradients = gradients.get(device, 0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measures the optimizer's step, and reports all of it."""
        if not self._measuring:
            return
        self._measuring = False
        allocated = self._end_phase("optimizer")
        self._weigh(trainer, pl_module)
        for device, memory in self.last.items():
            memory.allocated = allocated[device]
            # Each phase has reset the allocator's own peak, so that of the
            # step is put together here.
            memory.peak = max(memory.peak_by_phase.values())
            self._note_peak(device, memory.peak)
        self._report(trainer, pl_module)

    def _weigh(self, trainer: Trainer, module: LightningModule) -> None:
        """Measures what takes a walk over all parameters."""
        # The Trainer tears the strategy down before it calls on_fit_end.
        self._plans = memory_plans(trainer)
        modules = replica_modules(trainer, module)
        parameters = bytes_by_device(chain.from_iterable(replica.parameters() for replica in modules))
        buffers = bytes_by_device(chain.from_iterable(replica.buffers() for replica in modules))
        held: list[torch.Tensor] = []
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                if isinstance(state, Mapping):  # by parameter; what an optimizer keeps for all lies beside
                    held += [value for value in state.values() if isinstance(value, torch.Tensor)]
        states = bytes_by_device(held)
        for device, memory in self.last.items():
            memory.parameters = parameters.get(device, 0)
            memory.buffers = buffers.get(device, 0)
            memory.optimizer = states.get(device, 0)
            memory.reserved, memory.total, memory.others = capacity_of(device)
            memory.micro_batches = micro_batches_on(trainer, device)
            planned, memory.budget = planned_activations(trainer, device)
            static = memory.parameters + memory.buffers + memory.gradients + memory.optimizer
            # A plan is for activations alone, and peaks are of all that is there.
            memory.planned = static + planned if planned else 0
            # Pages that were freed and kept may make it less than nothing.
            memory.process = max(0, self._idle[device] - static) if is_host(device) else 0

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the table, writes the files and gives pictures to loggers."""
        self._note_peaks()
        self._rows.has_news = False
        # One file for all processes, which rank zero writes for its own devices.
        self._rows.write(trainer)
        if not self.last or not trainer.is_global_zero:
            return
        table = table_of(self.last, self.highest)
        if self._table:
            show_rows(*table)
        takers = [logger for logger in trainer.loggers if takes_pictures(logger)]
        # The page was asked for, and has what it needs; pictures for loggers are a bonus.
        if self._page is not None or (takers and find_spec("matplotlib")):
            draw_report(steps_taken(trainer), self.last, table, self._plans, takers, self._page)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Reports what was measured until then, which tells most after running out of memory."""
        # An error before the first step, or in a validation after the fit, adds nothing to the report that is there.
        if self._rows.has_news:
            self.on_fit_end(trainer, pl_module)

    def format_table(self) -> str:
        """One row per device: the last measured step by kind, and the highest peak of the fit, in MiB."""
        return format_rows(*table_of(self.last, self.highest))

    def _repr_html_(self) -> str:
        """What a notebook shows: the same table, from the first measured step on."""
        title, heads, rows = table_of(self.last, self.highest)
        return html_table(title if rows else "dpx: no step has been measured", heads, rows)

    def _begin_phase(self) -> None:
        for device in self.devices:
            reset_peak_memory(device)

    def _end_phase(self, phase: Phase) -> dict[torch.device, int]:
        allocated = {}
        for device, memory in self.last.items():
            allocated[device], peak = allocated_and_peak(device)
            memory.peak_by_phase[phase] = max(memory.peak_by_phase.get(phase, 0), peak)
        self._begin_phase()
        return allocated

    def _note_peaks(self) -> None:
        for device in self.last:
            self._note_peak(device, allocated_and_peak(device)[1])

    def _note_peak(self, device: torch.device, peak: int) -> None:
        self.highest[device] = max(self.highest.get(device, 0), peak)
        total = self.last[device].total
        # Without a limit a device is never nearly full.
        full = self._warn_at < 1 and total and peak > self._warn_at * total
        if full and device not in self._warned:
            self._warned.add(device)
            warnings.warn(
                f"{device} is nearly full: a step's peak was {format_mib(peak, 0)} of {format_mib(total, 0)}. A "
                "smaller batch, DPXStrategy(memory_budget='auto') or DPXStrategy(shifts='auto') leave more room.",
                stacklevel=2,
            )

    def _report(self, trainer: Trainer, module: LightningModule) -> None:
        step = steps_taken(trainer)
        rows: list[dict[str, Any]] = []
        for device, memory in self.last.items():
            rows.append({"step": step, "device": str(device), **flat(memory), "micro_batches": memory.micro_batches})
        self._rows.add(rows)
        if self._prog_bar:
            for device, memory in self.last.items():
                name = f"{short_name(device)} GiB"
                # Not to the loggers, which get all figures below; the batch size is named, or
                # Lightning would look for one in the batch.
                module.log(name, memory.peak / GIB, prog_bar=True, logger=False, on_step=True, batch_size=1)
        figures: dict[tuple[str, ...], float] = {}
        for device, memory in self.last.items():
            for kind, size in flat(memory).items():
                figures["memory", short_name(device), f"{kind}_gib"] = size / GIB
            if memory.micro_batches > 1:
                figures["memory", short_name(device), "micro_batches"] = memory.micro_batches
        log_figures(trainer, figures, step)


def replica_modules(trainer: Trainer, module: LightningModule) -> list[nn.Module]:
    """The modules that hold parameters: all replicas of our strategy, the module itself under any other."""
    # Before setup, and on one device, there are no replicas but the module itself.
    replicas = trainer.strategy.replica_modules if isinstance(trainer.strategy, DPXStrategy) else []
    return replicas or [module]


def _devices_of(module: nn.Module) -> set[torch.device]:
    return {canonical_device(tensor.device) for tensor in (*module.parameters(), *module.buffers())}
