"""NCCL between the CUDA devices of one process."""

import threading
from collections.abc import Sequence

import torch
from torch.cuda import nccl

from lightning_dpx.devices import has_nccl
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.reducers.base import Dense, GradientReducer, register_reducer
from lightning_dpx.reducers.buckets import alike, flatten_each, unflatten_into

# Autograd's threads reduce while backward runs, and nobody guards torch's communicators: two reductions that are queued
# in one order on one device and in another on the next wait for each other.
_one_at_a_time = threading.Lock()


@register_reducer("nccl")
class NCCLReducer(GradientReducer):
    """One bucket per dtype and owner, reduced by NCCL's own rings and trees.

    The order of additions is NCCL's: two runs are equal as far as NCCL's are.

    Raises:
        ConfigurationError: the devices are not distinct CUDA devices, or this PyTorch has no NCCL.
    """

    def __init__(self, devices: Sequence[torch.device], communication_dtype: torch.dtype | None = None) -> None:
        super().__init__(devices, communication_dtype)
        # With one device nothing is reduced, and no NCCL is needed.
        if len(self.devices) > 1 and (
            len(self.distinct_devices) < len(self.devices) or not has_nccl(self.distinct_devices)
        ):
            raise ConfigurationError(
                f"reducer='nccl' needs a PyTorch with NCCL and a CUDA device per replica, got "
                f"{', '.join(map(str, self.devices))}; use 'auto', 'collective' or 'naive' here."
            )

    def sum_between_devices(self, lists: Sequence[Dense], targets: Sequence[int]) -> Dense:
        result: Dense = list(lists[0])
        for indices in alike(lists[0], targets):
            target = targets[indices[0]]
            buckets = self._buckets(lists, indices)
            with _one_at_a_time:
                nccl.reduce(buckets, output=buckets[target], root=target)  # type: ignore[no-untyped-call]
            # NCCL has written into the owner's bucket, in the dtype that travelled.
            own = lists[target]
            unflatten_into(_arrived(buckets[target], own[indices[0]].dtype), own, indices, result)
        return result

    def sum_on_every_device(self, lists: Sequence[Dense]) -> list[Dense]:
        spread: list[Dense] = [list(row) for row in lists]
        for indices in alike(lists[0], [0] * len(lists[0])):
            buckets = self._buckets(lists, indices)
            with _one_at_a_time:
                nccl.all_reduce(buckets)  # type: ignore[no-untyped-call]
            for bucket, row, result in zip(buckets, lists, spread, strict=True):
                unflatten_into(_arrived(bucket, row[indices[0]].dtype), row, indices, result)
        return spread

    def _buckets(self, lists: Sequence[Dense], indices: Sequence[int]) -> Dense:
        buckets = flatten_each(lists, indices)
        wire = self.communication_dtype
        dtype = buckets[0].dtype
        if dtype.is_complex:
            # NCCL has no complex numbers, and sums their parts as well.
            return [torch.view_as_real(bucket.resolve_conj()).view(-1) for bucket in buckets]
        # Integers are counts, and complex numbers have no narrower kind: only floats travel in fewer bits.
        if wire is None or not dtype.is_floating_point or wire.itemsize >= dtype.itemsize:
            return buckets
        return [bucket.to(wire) for bucket in buckets]


def _arrived(bucket: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What NCCL has summed, in the dtype that it had."""
    if dtype.is_complex:
        return torch.view_as_complex(bucket.view(-1, 2))
    return bucket.to(dtype)
