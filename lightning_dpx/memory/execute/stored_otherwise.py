"""Values that are kept in another form until backward asks for them: a mask in bytes, or on the host."""

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.memory.execute.offload import Offloader
from lightning_dpx.memory.execute.values import Value
from lightning_dpx.torch_compat import (
    DisableAutocast,
)


def compress(value: Value) -> bool:
    """Keeps a tensor of zeros and one other number, such as the mask of a dropout, in a byte per element.

    Returns:
        Whether it is such a tensor; nothing is changed otherwise.
    """
    mask = value.held()
    if not mask.dtype.is_floating_point or not is_host(mask.device) or not mask.numel():
        return False  # devices have operators that save masks as bytes, and finding out would wait for them
    # The value was a mask when it was profiled; this time it is looked at again, bit by bit.
    with torch.no_grad(), DisableAutocast():
        other = mask.amax()
        small = mask.ne(0)
        if not torch.equal(small.to(mask.dtype).mul_(other), mask):
            return False
    value.learn(_expand_mask, (small, other, mask.dtype))
    value.operator = "mask"
    value.drop(mask)
    return True


def offload(value: Value, offloading: Offloader) -> None:
    """Keeps a tensor of a device in the host's memory until backward asks for it."""
    tensor = value.held()
    fetch, slot = offloading.offload(tensor, value.version, value.name)
    value.learn(fetch, (slot,))
    value.drop(tensor)


def _expand_mask(small: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return small.to(dtype).mul_(other)
