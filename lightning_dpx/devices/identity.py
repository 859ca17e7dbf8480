"""Which device is meant, and what it needs of the calling thread."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.torch_compat import privateuse1_backend_name

_NOTHING = nullcontext()  # keeps nothing between its blocks, so one serves all tasks of all steps


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
            # Torch names the only one by this index, and never asks which one is current.
            if is_only_of_its_type(device):
                only = torch.device(device.type, 0)
                _check_present(only)
                return only
            return torch.device(device.type, torch.get_device_module(device).current_device())
        # A torch that was built without CUDA raises an AssertionError for it.
        except (AttributeError, RuntimeError, AssertionError) as error:
            raise ConfigurationError(f"The device {str(device)!r} is not there: {error}") from error
    return device


def named_devices(devices: Sequence[torch.device | str]) -> list[torch.device]:
    """The devices that a user has named, which need not be there.

    Raises:
        ConfigurationError: it is no list, or what it has names no device.
    """
    # A text is a sequence, too, of letters.
    if isinstance(devices, str | torch.device):
        raise ConfigurationError(f"devices={str(devices)!r} is not allowed; give a list: [{str(devices)!r}].")
    if not isinstance(devices, Sequence):
        raise ConfigurationError(f"devices={devices!r} is not allowed; give a list such as ['cuda:0', 'cuda:1'].")
    return [_named_device(name) for name in devices]


def _named_device(name: torch.device | str) -> torch.device:
    try:
        return torch.device(name)
    # torch lists its twenty device types, of which a user of this package needs three.
    except (RuntimeError, TypeError) as error:
        way_out = "give a type and an index, such as 'cuda:0', or 'cpu'"
        # The type is known to torch only once there are such devices.
        if str(name).partition(":")[0] == "sim":
            way_out = "call lightning_dpx.simulate() first, which makes simulated devices"
        raise ConfigurationError(f"{name!r} names no device here; {way_out}.") from error


def present_devices(devices: Sequence[torch.device | str]) -> list[torch.device]:
    """The devices that a user has named, as :func:`canonical_device` has them.

    Raises:
        ConfigurationError: it is no list, or one of them is no name of a device, or is not there.
    """
    found = []
    for named in named_devices(devices):
        device = canonical_device(named)
        if not is_host(device):
            _check_present(device)
        found.append(device)
    return found


def _check_present(device: torch.device) -> None:
    try:
        count = torch.get_device_module(device).device_count()
    except (AttributeError, RuntimeError) as error:
        raise ConfigurationError(f"The device {str(device)!r} is not there: {error}") from error
    if device.index is not None and device.index >= count:
        raise ConfigurationError(
            f"The device {str(device)!r} is not there: torch finds {count} of the type {device.type!r} on this machine."
        )


def is_only_of_its_type(device: torch.device) -> bool:
    """Whether torch knows no second device of this type, so that its functions take none: Apple's GPU (``mps``)."""
    return not hasattr(torch.get_device_module(device), "current_device")


def is_host(device: torch.device) -> bool:
    """Whether ``device`` is the CPU, which has one memory and one random generator for all its replicas."""
    return device.type == "cpu"


def device_beside(tensor: torch.Tensor, home: torch.device, there: torch.device) -> torch.device:
    """Where a tensor belongs that goes from a replica on ``home`` to one on ``there``.

    What a user has put on the host while the module lives on an accelerator (outputs that are collected with
    ``.cpu()``, a large table) stays on the host, as it does on one device.
    """
    if is_host(tensor.device) and not is_host(home):
        return tensor.device
    return there


def distinct_devices(devices: Sequence[torch.device]) -> list[torch.device]:
    """The physical devices among ``devices``, each once, in order of first appearance."""
    # A dict keeps the order, which a set would not.
    return list(dict.fromkeys(canonical_device(device) for device in devices))


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` current for the calling thread; nothing to do where there is no other of its type."""
    if is_host(device) or is_only_of_its_type(device):
        return _NOTHING
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
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def spare_devices(devices: Sequence[torch.device]) -> list[torch.device]:
    """Accelerators of the same type as ``devices`` that are not among them."""
    kind = devices[0].type
    if is_host(devices[0]):
        return []
    # Of this type alone: what is shifted goes on to the same kind of device.
    everyone = [torch.device(kind, index) for index in range(torch.get_device_module(kind).device_count())]
    return [device for device in everyone if device not in devices]
