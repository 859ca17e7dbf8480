"""A reduce-scatter and a gather over plain copies between devices, in one process."""

from collections.abc import Sequence

import torch

from lightning_dpx.reducers.base import Dense, GradientReducer, register_reducer
from lightning_dpx.reducers.buckets import alike, flatten_each, unflatten_into


@register_reducer("collective")
class CollectiveReducer(GradientReducer):
    """Each of D devices sums 1/D of all elements; the shares are then gathered by the owner, or by every device.

    An all-reduce sends and receives 2 (D-1)/D of the bytes per device, which is the least possible (Patarasuk and Yuan
    2009); no device becomes a bottleneck. Additions are in the order of the devices: two runs are bit-equal.
    """

    def sum_between_devices(self, lists: Sequence[Dense], targets: Sequence[int]) -> Dense:
        result: Dense = list(lists[0])
        for indices in alike(lists[0], targets):
            # One bucket for each dtype and owner: device d then sums its share of all of them in
            # one go.
            shares = self._shares(flatten_each(lists, indices))
            device = self.distinct_devices[targets[indices[0]]]
            unflatten_into(self._gathered(shares, device), lists[0], indices, result)
        return result

    def sum_on_every_device(self, lists: Sequence[Dense]) -> list[Dense]:
        spread: list[Dense] = [list(lists[0]) for _ in lists]
        for indices in alike(lists[0], [0] * len(lists[0])):
            shares = self._shares(flatten_each(lists, indices))
            for device, result in zip(self.distinct_devices, spread, strict=True):
                unflatten_into(self._gathered(shares, device), lists[0], indices, result)
        return spread

    def _shares(self, buckets: Dense) -> Dense:
        """The sum of all devices' buckets, in D pieces, piece d on device d."""
        # One for each device: all send and receive alike, so that no link is slower than the others.
        pieces = [bucket.tensor_split(len(buckets)) for bucket in buckets]
        shares = []
        for number, device in enumerate(self.distinct_devices):
            # In the order of the devices, whichever sums: float addition is not associative, and runs shall repeat.
            total = self.move(pieces[0][number], device)
            for row in pieces[1:]:
                total = total.add_(self.move(row[number], device))
            shares.append(total)
        return shares

    def _gathered(self, shares: Dense, device: torch.device) -> torch.Tensor:
        # The gather copies in any case, as the shares come from D devices.
        return torch.cat([self.move(share, device) for share in shares])
