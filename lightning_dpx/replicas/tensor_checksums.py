"""Whether tensors hold other bits than before, also where nothing counts that they were written (through ``.data``)."""

import itertools
from collections.abc import Sequence

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        bits = real.contiguous().view(-1).view(_INTEGERS[real.element_size()])
        sums.append(bits.sum(dtype=torch.int64))
    values: list[int] = []
    for of_device in _by_device(sums):
        values += map(int, of_device)
    return values


def _by_device(sums: list[torch.Tensor]) -> list[list[int]]:
    """Runs of neighbors on one device travel to the host together."""
    runs = [list(run) for _, run in itertools.groupby(sums, key=lambda value: value.device)]
    return [torch.stack(run).tolist() for run in runs]
