"""What every device holds, by phase of a step and by kind, for loggers, files and a table at the end of fit."""

import csv
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_dpx.devices import allocated_and_peak, canonical_device, capacity_of, distinct_devices, reset_peak_memory
from lightning_dpx.errors import ConfigurationError

Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
WEIGHED = ("parameters", "gradients", "buffers", "optimizer", "reserved", "total", "others")
GIB = 2**30


@dataclass(slots=True)
class DeviceMemory:
    """Bytes on one device in one training step.

    Attributes:
        allocated: By tensors, at the end of the step; on the host, resident memory of the process.
        reserved: By the allocator, from the device.
        peak: The most that was allocated during the step.
        peak_by_phase: The same for forward, backward (with the reduction) and optimizer.
        activations: What forward left for backward.
        parameters: Of all replicas and shifted parts here; shared storage counts once.
        gradients: After backward and reduction.
        buffers: Likewise.
        optimizer: State of the optimizers.
        total: The device's capacity.
        others: Held by other processes and libraries.
    """

    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    peak_by_phase: dict[str, int] = field(default_factory=dict)
    activations: int = 0
    parameters: int = 0
    gradients: int = 0
    buffers: int = 0
    optimizer: int = 0
    total: int = 0
    others: int = 0


class DeviceMemoryMonitor(Callback):
    """Reports the memory of every device that training uses, with any strategy.

    Loggers get ``dpx/memory/cuda1/peak_gib`` and so on, every ``log_every_n_steps`` of the trainer; parameters,
    gradients, buffers and optimizer state are weighed in those steps only. The monitor reads counters that the
    allocators keep anyway, and resets their peaks at every phase.

    Args:
        prog_bar: Show each device's peak in the progress bar, in GiB.
        table: Print a table when fit ends.
        save_to: Also write every report to this file: one row per step and device (``.csv``) or a list (``.json``).
        warn_at: Warn once per device when the peak passes this share of its capacity; 1 never warns.

    Attributes:
        devices: The devices of the last step.
        last: By device, the last step's memory, in bytes.
        highest: By device, the highest peak of the fit, in bytes.

    Raises:
        ConfigurationError: an argument has a value that is not allowed.
    """

    def __init__(
        self, prog_bar: bool = False, table: bool = True, save_to: str | Path | None = None, warn_at: float = 0.95
    ) -> None:
        self._path = None if save_to is None else Path(save_to)
        if self._path is not None and self._path.suffix not in (".csv", ".json"):
            raise ConfigurationError(f"save_to={str(save_to)!r} is not allowed; name a .csv or a .json file.")
        if isinstance(warn_at, bool) or not isinstance(warn_at, int | float) or not 0 < warn_at <= 1:
            raise ConfigurationError(f"warn_at={warn_at!r} is not allowed; give a share of the capacity in (0, 1].")
        self._prog_bar, self._table, self._warn_at = prog_bar, table, warn_at
        self.devices: list[torch.device] = []
        self.last: dict[torch.device, DeviceMemory] = {}
        self.highest: dict[torch.device, int] = {}
        self._idle: dict[torch.device, int] = {}
        self._rows: list[dict[str, Any]] = []
        self._warned: set[torch.device] = set()
        self._due = True
        self._before: dict[torch.device, DeviceMemory] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets the fit before."""
        self.last, self.highest, self._rows, self._warned = {}, {}, [], set()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A step begins."""
        self._due = not self.last or trainer._logger_connector.should_update_logs
        if self._due:
            modules = replica_modules(trainer, pl_module)
            used = [device for module in modules for device in _devices_of(module)]
            own = getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device]
            self.devices = distinct_devices([*own, *used])
        self._before = self.last
        self.last = {device: DeviceMemory() for device in self.devices}
        self._idle = {device: allocated_and_peak(device)[0] for device in self.devices}
        self._begin_phase()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Forward is done; gradient accumulation and several backwards add up."""
        if not self.last:
            return
        for device, allocated in self._end_phase("forward").items():
            memory = self.last[device]
            memory.activations = max(memory.activations, allocated - self._idle[device])

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gradients are on their owners."""
        if not self.last:
            return
        self._end_phase("backward")
        if not self._due:
            return
        gradients = _bytes_by_device(
            parameter.grad
            for module in replica_modules(trainer, pl_module)
            for parameter in module.parameters()
            if parameter.grad is not None
        )
        for device, memory in self.last.items():
            memory.gradients = gradients.get(device, 0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The optimizer has stepped."""
        allocated = self._end_phase("optimizer")
        if self._due:
            self._weigh(trainer, pl_module)
        for device, memory in self.last.items():
            memory.allocated = allocated[device]
            memory.peak = max(memory.peak_by_phase.values())
            self.highest[device] = max(self.highest.get(device, 0), memory.peak)
            if not self._due:
                for kind in WEIGHED:
                    setattr(memory, kind, getattr(self._before[device], kind))
            self._warn(device, memory)
        self._report(trainer, pl_module)

    def _weigh(self, trainer: Trainer, module: LightningModule) -> None:
        """What walks over all parameters is done in steps that are logged."""
        modules = replica_modules(trainer, module)
        parameters = _bytes_by_device(parameter for replica in modules for parameter in replica.parameters())
        buffers = _bytes_by_device(buffer for replica in modules for buffer in replica.buffers())
        states = _bytes_by_device(
            value
            for optimizer in trainer.optimizers
            for state in optimizer.state.values()
            for value in (state.values() if isinstance(state, Mapping) else ())
            if isinstance(value, torch.Tensor)
        )
        for device, memory in self.last.items():
            memory.parameters, memory.buffers = parameters.get(device, 0), buffers.get(device, 0)
            memory.optimizer = states.get(device, 0)
            memory.reserved, memory.total, memory.others = capacity_of(device)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file and prints the table."""
        if self._path is not None and trainer.is_global_zero:
            self._write(self._path)
        if self._table and self.last:
            rank_zero_info(self.format_table())

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """What was measured until then is what one wants to see after running out of memory."""
        self.on_fit_end(trainer, pl_module)

    def format_table(self) -> str:
        """One row per device: the last step by kind, and the highest peak of the fit, in MiB."""
        kinds = ("parameters", "gradients", "optimizer", "buffers", "activations")
        heads = ["device", *kinds, *(f"peak {phase}" for phase in PHASES), "peak", "highest", "of"]
        rows = []
        for device, memory in self.last.items():
            sizes = [getattr(memory, kind) for kind in kinds]
            sizes += [memory.peak_by_phase.get(phase, 0) for phase in PHASES]
            sizes += [memory.peak, self.highest.get(device, 0)]
            capacity = f"{memory.total / 2**20:.0f}" if memory.total else "-"
            rows.append([str(device), *(f"{size / 2**20:.1f}" for size in sizes), capacity])
        widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [heads, *rows]
        ]
        return "dpx: memory of the last step, in MiB\n" + "\n".join(lines)

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

    def _warn(self, device: torch.device, memory: DeviceMemory) -> None:
        full = self._warn_at < 1 and memory.total and memory.peak > self._warn_at * memory.total
        if full and device not in self._warned:
            self._warned.add(device)
            warnings.warn(
                f"{device} is nearly full: a step's peak was {memory.peak / 2**20:.0f} of "
                f"{memory.total / 2**20:.0f} MiB. A smaller batch, or DPXStrategy(shifts='auto'), leaves more room.",
                stacklevel=2,
            )

    def _report(self, trainer: Trainer, module: LightningModule) -> None:
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if self._path is not None:
            for device, memory in self.last.items():
                self._rows.append({"step": step, "device": str(device), **_flat(memory)})
        if self._prog_bar:
            for device, memory in self.last.items():
                name = f"{_name_of(device)} GiB"
                module.log(name, memory.peak / GIB, prog_bar=True, logger=False, on_step=True, batch_size=1)
        if not self._due:
            return
        for logger in trainer.loggers:
            separator = logger.group_separator
            metrics = {
                separator.join(("dpx", "memory", _name_of(device), f"{kind}_gib")): size / GIB
                for device, memory in self.last.items()
                for kind, size in _flat(memory).items()
            }
            logger.log_metrics(metrics, step=step)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            path.write_text(json.dumps(self._rows, indent=1))
            return
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self._rows[0]) if self._rows else ["step", "device"])
            writer.writeheader()
            writer.writerows(self._rows)


def replica_modules(trainer: Trainer, module: LightningModule) -> list[nn.Module]:
    """The modules that hold parameters: all replicas of our strategy, the module itself under any other."""
    replicas = getattr(trainer.strategy, "replica_modules", None)
    return list(replicas) if replicas else [module]


def _flat(memory: DeviceMemory) -> dict[str, int]:
    sizes = asdict(memory)
    phases = sizes.pop("peak_by_phase")
    return {**sizes, **{f"peak_{phase}": phases.get(phase, 0) for phase in PHASES}}


def _name_of(device: torch.device) -> str:
    return f"{device.type}{'' if device.index is None else device.index}"


def _devices_of(module: nn.Module) -> set[torch.device]:
    return {canonical_device(tensor.device) for tensor in (*module.parameters(), *module.buffers())}


def _bytes_by_device(tensors: Iterable[torch.Tensor]) -> dict[torch.device, int]:
    storages: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            storages[canonical_device(tensor.device), storage.data_ptr()] = storage.nbytes()
    sizes: dict[torch.device, int] = {}
    for (device, _), size in storages.items():
        sizes[device] = sizes.get(device, 0) + size
    return sizes
