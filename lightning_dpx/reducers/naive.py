"""Plain sums, dealt round-robin to the devices (tensorpack's ``allreduce_grads_naive``)."""

from collections.abc import Sequence

import torch

from lightning_dpx.reducers.base import Dense, GradientReducer, register_reducer
from lightning_dpx.torch_compat import foreach_add_


@register_reducer("naive")
class NaiveReducer(GradientReducer):
    """Parameter j is summed on one device, in replica order, then handed to the owner.

    Parameters are dealt from the last to the first, because backward finishes the last ones first and they are often
    the large ones. The order of the additions never changes: two runs are bit-equal.
    """

    def sum_between_devices(self, lists: Sequence[Dense], targets: Sequence[int]) -> Dense:
        # Lists of D devices: the sums are spread over all of them, in turn.
        dealt = {index: turn % len(lists) for turn, index in enumerate(reversed(range(len(targets))))}
        return self._sum_at(lists, [dealt[index] for index in range(len(targets))], targets)

    def _sum_at(self, lists: Sequence[Dense], meeting: Sequence[int], targets: Sequence[int]) -> Dense:
        """Gradient j is summed on the device ``meeting[j]`` and moved to ``targets[j]``."""
        result: list[torch.Tensor] = list(lists[0])
        for number, device in enumerate(self.distinct_devices):
            indices = [index for index, where in enumerate(meeting) if where == number]
            if not indices:
                continue
            sums = [self.move(lists[0][index], device) for index in indices]
            # All tensors of a device in one call: for the many small ones of a network the calls are the time.
            for row in lists[1:]:
                foreach_add_(sums, [self.move(row[index], device) for index in indices])
            for index, total in zip(indices, sums, strict=True):
                result[index] = self.move(total, self.distinct_devices[targets[index]])
        return result
