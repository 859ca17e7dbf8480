"""Which device is meant, and what it needs of the calling thread."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.torch_compat import privateuse1_backend_name


def canonical_device(device: torch.device | str) -> torch.device:
    """The physical device behind ``device``: an index for every accelerator, none for the host.

    ``cpu:0`` and ``cpu:3`` are the same memory, so both become ``cpu``.

    Raises:
        ConfigurationError: there is no device of this type.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None:
        try:
            return torch.device(device.type, torch.get_device_module(device).current_device())
        # A torch that was built without CUDA raises an AssertionError for it.
        except (AttributeError, RuntimeError, AssertionError) as error:
            raise ConfigurationError(f"The device {str(device)!r} is not there: {error}") from error
    return device


def is_host(device: torch.device) -> bool:
    """Whether ``device`` is the CPU, which has one memory and one random generator for all its replicas."""
    return device.type == "cpu"


def device_beside(tensor: torch.Tensor, home: torch.device, there: torch.device) -> torch.device:
    """Where a tensor belongs that goes from a replica on ``home`` to one on ``there``.

    What a user has put on the host while the module lives on an accelerator (outputs that are collected with
    ``.cpu()``, a large table) stays on the host, as it does on one device.
    """
    return tensor.device if is_host(tensor.device) and not is_host(home) else there


def distinct_devices(devices: Sequence[torch.device]) -> list[torch.device]:
    """The physical devices among ``devices``, each once, in order of first appearance."""
    # A dict keeps the order, which a set would not.
    return list(dict.fromkeys(canonical_device(device) for device in devices))


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` current for the calling thread; nothing to do on the host."""
    if is_host(device):
        return nullcontext()
    # The current device is one of the thread, so a worker has to be told.
    context: AbstractContextManager[object] = torch.get_device_module(device).device(device)
    return context


def autocast_types() -> tuple[str, ...]:
    """Device types whose autocast state a thread may carry."""
    return ("cpu", "cuda", privateuse1_backend_name())


def accelerators() -> list[torch.device]:
    """All accelerators of this process, of the kind that torch was built or simulated for."""
    # Without the check a torch that was built for CUDA names it on a machine that has no GPU.
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    return [torch.device(kind.type, index) for index in range(torch.get_device_module(kind).device_count())]


def num_usable_cpus() -> int:
    """CPUs that this process may run on."""
    # A container or taskset may leave this process fewer than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spare_devices(devices: Sequence[torch.device]) -> list[torch.device]:
    """Accelerators of the same type as ``devices`` that are not among them."""
    kind = devices[0].type
    if is_host(devices[0]):
        return []
    # Of this type alone: what is shifted goes on to the same kind of device.
    everyone = [torch.device(kind, index) for index in range(torch.get_device_module(kind).device_count())]
    return [device for device in everyone if device not in devices]
