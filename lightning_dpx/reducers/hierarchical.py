"""Two levels: within groups of well linked devices, then between the groups (tensorpack's DGX-1 mode, generalized)."""

from collections.abc import Sequence
from itertools import chain

import torch

from lightning_dpx.devices import linked_groups
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.reducers.base import Dense, GradientReducer, register_reducer
from lightning_dpx.reducers.buckets import alike, flatten_each, split_at_boundaries, unflatten_into


@register_reducer("hierarchical")
class HierarchicalReducer(GradientReducer):
    """Every group sums to one of its devices; only those sums cross to the owner's group, once per gradient.

    Where a group meets rotates from gradient to gradient, so that all links of a group carry a share. For
    any number of devices and any grouping; with eight devices in two groups it is the scheme of the DGX-1.

    Args:
        devices: See :class:`GradientReducer`.
        communication_dtype: See :class:`GradientReducer`.
        groups: Indices of the D distinct devices, each once; by the links between CUDA devices, or two halves, unless
            given.

    Raises:
        ConfigurationError: the groups do not hold every device once.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        communication_dtype: torch.dtype | None = None,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(devices, communication_dtype)
        if groups is None:
            groups = linked_groups(self.distinct_devices)
        self.groups = [list(group) for group in groups]
        # A device that is missing would lose its gradients, one that comes twice would count
        # double.
        if sorted(chain.from_iterable(self.groups)) != list(range(len(self.distinct_devices))):
            raise ConfigurationError(
                f"groups={self.groups} is not allowed; name every device from 0 to "
                f"{len(self.distinct_devices) - 1} once."
            )

    def sum_between_devices(self, lists: Sequence[Dense], targets: Sequence[int]) -> Dense:
        result: Dense = list(lists[0])
        for turn, indices in enumerate(self._buckets(lists[0], targets)):
            target = targets[indices[0]]
            buckets = flatten_each(lists, indices)
            # The owner's group comes first: the sums are then added where the result is wanted, and each other group
            # sends one bucket across the slow link, however many devices it has.
            groups = sorted(self.groups, key=lambda group: target not in group)
            leaders = [self._sum_group(buckets, group, turn) for group in groups]
            bucket = self.move(self._sum_leaders(leaders), self.distinct_devices[target])
            unflatten_into(bucket, lists[target], indices, result)
        return result

    def sum_on_every_device(self, lists: Sequence[Dense]) -> list[Dense]:
        spread: list[Dense] = [list(lists[0]) for _ in lists]
        for turn, indices in enumerate(self._buckets(lists[0], [0] * len(lists[0]))):
            buckets = flatten_each(lists, indices)
            # All to the first leader, and from there to the other groups: each bucket crosses the
            # slow link once in each direction, as the leaders hand it on within their groups.
            leaders = [self._sum_group(buckets, group, turn) for group in self.groups]
            homes = [leader.device for leader in leaders]
            total = self._sum_leaders(leaders)
            for group, home in zip(self.groups, homes, strict=True):
                arrived = self.move(total, home)
                for member in group:
                    unflatten_into(
                        self.move(arrived, self.distinct_devices[member]), lists[member], indices, spread[member]
                    )
        return spread

    def _buckets(self, like: Dense, targets: Sequence[int]) -> list[list[int]]:
        """Indices of what is reduced as one: enough buckets that every device of a group leads some."""
        # Twice as many as devices: every one leads some even if buckets are unequal.
        num_splits = 2 * max(len(group) for group in self.groups)
        buckets = []
        for indices in alike(like, targets):
            sizes = [like[index].numel() for index in indices]
            for split in split_at_boundaries(sizes, num_splits):
                buckets.append([indices[position] for position in split])
        return buckets

    def _sum_group(self, buckets: Dense, group: Sequence[int], turn: int) -> torch.Tensor:
        """The sum of a group at its leader of this turn, in the order of its devices."""
        leader = self.distinct_devices[group[turn % len(group)]]
        # In the order of the group and not from the leader on, or the bits would depend on the
        # turn.
        total = self.move(buckets[group[0]], leader)
        for member in group[1:]:
            total = total.add_(self.move(buckets[member], leader))
        return total

    def _sum_leaders(self, leaders: Dense) -> torch.Tensor:
        total = leaders[0]
        for other in leaders[1:]:
            total = total.add_(self.move(other, total.device))
        return total
