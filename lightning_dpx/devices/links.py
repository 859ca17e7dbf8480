"""How values get from one device to another."""

import operator
from collections.abc import Sequence
from itertools import combinations

import torch

from lightning_dpx.boundaries import halves
from lightning_dpx.devices.identity import is_host, is_only_of_its_type
from lightning_dpx.torch_compat import foreach_copy_

_DEVICE = operator.attrgetter("device")


def has_nccl(devices: Sequence[torch.device]) -> bool:
    """Whether NCCL can work between these devices from one process."""
    return all(device.type == "cuda" for device in devices) and torch.distributed.is_nccl_available()


def wire_device(device: torch.device) -> torch.device:
    """Where torch.distributed can send a tensor of ``device`` from: the device itself, or the host."""
    # gloo, the backend of all others, sends from the host.
    if device.type == "cuda":
        return device
    return torch.device("cpu")


def default_backend(device: torch.device) -> str:
    """The backend of torch.distributed for processes whose first device this is."""
    # NCCL sends no tensors of the host, and objects that processes exchange travel in those.
    if device.type == "cuda":
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def synchronize(device: torch.device) -> None:
    """Waits until ``device`` has done what was queued; the host always has."""
    if is_host(device):
        return
    module = torch.get_device_module(device)
    if is_only_of_its_type(device):
        module.synchronize()
    else:
        module.synchronize(device)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``, without waiting where that is safe: the host would read before the copy has arrived."""
    return tensor.to(device, non_blocking=not is_host(device))


def copy_values(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Each target gets the values of its source, without waiting where that is safe: see :func:`moved`."""
    # A set, as there are thousands of tensors on a few devices.
    waits = any(map(is_host, set(map(_DEVICE, targets))))
    foreach_copy_(list(targets), list(sources), non_blocking=not waits)


def linked_groups(devices: Sequence[torch.device]) -> list[list[int]]:
    """Indices of devices that reach each other directly, in groups; two halves where nothing is known of the links."""
    if any(device.type != "cuda" for device in devices):
        return halves(len(devices))
    groups: list[list[int]] = []
    for index, device in enumerate(devices):
        # A device joins only where it reaches every member directly.
        for group in groups:
            if all(torch.cuda.can_device_access_peer(device, devices[other]) for other in group):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def num_direct_links(devices: Sequence[torch.device]) -> int:
    """Pairs of devices that copy to each other without a detour through the host."""
    of_cuda = [device for device in devices if device.type == "cuda"]
    return sum(torch.cuda.can_device_access_peer(one, other) for one, other in combinations(of_cuda, 2))
