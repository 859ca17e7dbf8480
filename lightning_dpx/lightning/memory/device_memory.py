"""What a device holds in a training step, by phase and by kind."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch

from lightning_dpx.devices import canonical_device
from lightning_dpx.units import MIB

Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations")


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
        buffers: Of all replicas and shifted parts here.
        optimizer: State of the optimizers.
        planned: The peak that a memory plan predicts; 0 without a plan.
        budget: What the plan was made for; 0 without one.
        total: The device's capacity.
        others: Held by other processes and libraries.
        process: Of the host: what this process held before the step beside the tensors above (the interpreter,
            libraries, data). It is part of ``allocated`` and of every peak there; 0 on other devices.
        micro_batches: Into how many micro-batches the device's slice of a batch is cut; no bytes.
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
    planned: int = 0
    budget: int = 0
    total: int = 0
    others: int = 0
    process: int = 0
    micro_batches: int = 1


def flat(memory: DeviceMemory) -> dict[str, int]:
    """The figures in bytes by name, the peaks of the phases among them."""
    sizes = asdict(memory)
    # A number among bytes, which loggers would show in GiB.
    del sizes["micro_batches"]
    phases = sizes.pop("peak_by_phase")
    return {**sizes, **{f"peak_{phase}": phases.get(phase, 0) for phase in PHASES}}


def table_of(
    last: Mapping[torch.device, DeviceMemory], highest: Mapping[torch.device, int]
) -> tuple[str, list[str], list[list[str]]]:
    """Title, heads and one row per device, in MiB."""
    # Most runs have none, and their table is wide enough without another column.
    is_cut = any(memory.micro_batches > 1 for memory in last.values())
    rows = []
    for device, memory in last.items():
        sizes = [getattr(memory, kind) for kind in KINDS]
        sizes += [memory.peak_by_phase.get(phase, 0) for phase in PHASES]
        sizes += [memory.peak, highest.get(device, 0)]
        unless_none = [f"{size / MIB:.1f}" if size else "-" for size in (memory.planned, memory.budget)]
        # A simulated device may have no limit, which is a total of 0.
        capacity = f"{memory.total / MIB:.0f}" if memory.total else "-"
        number = [str(memory.micro_batches)] if is_cut else []
        rows.append([str(device), *(f"{size / MIB:.1f}" for size in sizes), *unless_none, capacity, *number])
    phases = [f"peak {phase}" for phase in PHASES]
    heads = ["device", *KINDS, *phases, "peak", "highest", "planned", "budget", "of"]
    if is_cut:
        heads.append("micro-batches")
    title = "dpx: memory of the last step, in MiB"
    processes = [f"{device}: {memory.process / MIB:.1f}" for device, memory in last.items() if memory.process]
    # Nobody counts the tensors of the host by themselves, and without a word its peaks look like theirs.
    if processes:
        title = f"{title} (peaks include what the process held before the step: {', '.join(processes)})"
    return title, heads, rows


def bytes_by_device(tensors: Iterable[torch.Tensor]) -> dict[torch.device, int]:
    """Bytes of the storages behind ``tensors``, each counted once; sparse tensors are left out."""
    storages: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            # By device as well: addresses of two devices may be the same number.
            storages[canonical_device(tensor.device), storage.data_ptr()] = storage.nbytes()
    sizes: dict[torch.device, int] = {}
    for (device, _), size in storages.items():
        sizes[device] = sizes.get(device, 0) + size
    return sizes
