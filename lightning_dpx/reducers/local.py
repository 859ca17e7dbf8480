"""Sums of lists of gradients that lie in one memory."""

from collections.abc import Sequence

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.torch_compat import foreach_add_

BLOCK = 1 << 20  # elements: 4 MiB of float32, which stay in the cache while K blocks are added to them


def add_in_place(total: list[torch.Tensor], others: Sequence[Sequence[torch.Tensor]]) -> None:
    """Adds every list of ``others`` to ``total``, in order; all tensors are on one device.

    On the host, large tensors are added block by block, so that the running sum is read from memory once and not once
    per list: (K + 1) instead of 3 (K - 1) times the bytes of one list.
    """
    if not total or not others:
        return
    # On an accelerator starting the kernels is what costs, and one takes all tensors of a list.
    if not is_host(total[0].device):
        for other in others:
            foreach_add_(total, list(other))
        return
    # A foreach kernel reads and writes the running sum once per list; where that is larger than the cache, its way to
    # memory and back is most of the time. Small tensors are in the cache anyway, and one kernel takes all of them.
    large = [index for index, tensor in enumerate(total) if tensor.numel() > BLOCK and _is_flat(total, others, index)]
    if not large:  # to choose from the lists would take as long as to add small tensors
        for other in others:
            foreach_add_(total, list(other))
        return
    small = set(range(len(total))).difference(large)
    if small:
        small_totals = [total[index] for index in small]
        for other in others:
            foreach_add_(small_totals, [other[index] for index in small])
    for index in large:
        rows = [other[index].view(-1).split(BLOCK) for other in others]  # type: ignore[no-untyped-call]
        for number, block in enumerate(total[index].view(-1).split(BLOCK)):  # type: ignore[no-untyped-call]
            for row in rows:
                block.add_(row[number])


def _is_flat(total: Sequence[torch.Tensor], others: Sequence[Sequence[torch.Tensor]], index: int) -> bool:
    return total[index].is_contiguous() and all(other[index].is_contiguous() for other in others)
