"""Plain sums, dealt round-robin to the devices (tensorpack's ``allreduce_grads_naive``)."""

from collections.abc import Sequence

import torch

from lightning_dpx.devices import canonical_device
from lightning_dpx.reducers.base import GradientReducer, Gradients, register_reducer


@register_reducer("naive")
class NaiveReducer(GradientReducer):
    """Parameter j is summed on one device, in replica order, then handed to the owner.

    Parameters are dealt from the last to the first, because backward finishes the last ones first and they are often
    the large ones. The order of the additions never changes: two runs are bit-equal.
    """

    def _sum(self, grads: Sequence[Gradients]) -> Gradients:
        num_parameters, owner = len(grads[0]), canonical_device(self.devices[0])
        result: Gradients = [None] * num_parameters
        dense: dict[torch.device, list[int]] = {}
        for turn, index in enumerate(reversed(range(num_parameters))):
            place = canonical_device(self.devices[turn % len(self.devices)])
            column = [row[index] for row in grads]
            if all(g is not None and g.layout == torch.strided for g in column):
                dense.setdefault(place, []).append(index)
            else:
                result[index] = _add(column, place, owner)
        for place, indices in dense.items():
            for index, total in zip(indices, _add_many(grads, indices, place), strict=True):
                result[index] = total.to(owner)
        return result


def _add(column: Sequence[torch.Tensor | None], place: torch.device, owner: torch.device) -> torch.Tensor | None:
    present = [g for g in column if g is not None]
    if not present:
        return None
    total = present[0].to(place)
    for g in present[1:]:
        total = total + g.to(place)
    return total.to(owner)


def _add_many(grads: Sequence[Gradients], indices: Sequence[int], place: torch.device) -> list[torch.Tensor]:
    def column(row: Gradients) -> list[torch.Tensor]:
        return [g.to(place) for g in (row[index] for index in indices) if g is not None]

    totals = column(grads[0])
    for row in grads[1:]:
        torch._foreach_add_(totals, column(row))
    return totals
