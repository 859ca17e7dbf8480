"""Whether tensors hold other bits than before, also where nothing counts that they were written (through ``.data``)."""

import itertools
from collections.abc import Sequence

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIN_PART = 2**15  # in elements: below, the calls take longer than the sums
_MAX_PARTS = 2**5  # of a large tensor: on an accelerator each is three kernels to launch


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The sum of the bits of each tensor, read as integers: exact in any order, and changed by any single change."""
    if not tensors:
        return []
    sums = []
    for tensor in tensors:
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        # As integers: a sum of floats depends on the order, and loses small changes to large
        # values.
        bits = _in_memory_order(real).view(-1).view(_INTEGERS[real.element_size()])
        sums.append(_sum_in_parts(bits))
    values: list[int] = []
    for of_device in _by_device(sums):
        values += map(int, of_device)
    return values


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its dims as they lie in memory: a copy takes as much again, and a sum needs no order."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).contiguous()


def _sum_in_parts(bits: torch.Tensor) -> torch.Tensor:
    """The sum of integers, of a small part at a time."""
    # torch copies what it sums to the type of the sum first, which takes twice the memory of a parameter, beside all
    # activations of a step.
    length = max(_MIN_PART, bits.numel() // _MAX_PARTS)
    if bits.numel() <= length:  # most parameters, whose calls take longer than their sums
        return bits.sum(dtype=torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in torch.split(bits, length):
        total += part.sum(dtype=torch.int64)
    return total


def _by_device(sums: list[torch.Tensor]) -> list[list[int]]:
    """Runs of neighbors on one device travel to the host together."""
    runs = [list(run) for _, run in itertools.groupby(sums, key=lambda value: value.device)]
    return [torch.stack(run).tolist() for run in runs]
