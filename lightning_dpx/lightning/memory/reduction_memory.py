"""What the sums of gradients take on every device, beside the gradients: tried on zeros, before any step."""

import operator
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dpx.devices import canonical_device
from lightning_dpx.gradient_sums import GradientSums
from lightning_dpx.memory import MemoryTrace

_KIND = operator.attrgetter("device", "dtype", "shape", "requires_grad")  # what a reduction depends on
_Columns = Sequence[Sequence[torch.nn.Parameter]]


@dataclass(frozen=True, slots=True)
class _TriedReduction:
    """What reductions have taken.

    Attributes:
        kinds: K x N: of what kind the parameters were.
        buckets: Those of the sums.
        taken: By the replicas that have gradients, bytes of every device.
    """

    kinds: list[list[tuple[Any, ...]]]
    buckets: list[list[int]]
    taken: dict[frozenset[int], dict[torch.device, int]]


class ReductionMemory:
    """Bytes that reductions take at their peak.

    Args:
        sums: Whose.
    """

    def __init__(self, sums: GradientSums) -> None:
        self._sums = sums
        self._tried: _TriedReduction | None = None

    def bytes_by_device(self, active: Collection[int]) -> dict[torch.device, int]:
        """What a reduction takes on every device beside the gradients, at its peak: bucket by bucket.

        Tried once for the same gradients: the zeros are as large as they are, and later steps, which ask again, have
        room for what was planned only.

        Args:
            active: The replicas that have gradients.
        """
        columns = self._sums.columns
        if len(columns) == 1:  # nothing travels
            return self._nothing(columns)
        kinds = [[_KIND(parameter) for parameter in column] for column in columns]
        tried = self._tried
        # Replicas that were made anew, and another reducer, have other buckets.
        if tried is None or tried.kinds != kinds or tried.buckets is not self._sums.buckets:
            tried = _TriedReduction(kinds, self._sums.buckets, {})
            self._tried = tried
        # A short batch leaves some without any, and the next one is whole again.
        key = frozenset(active)
        if key not in tried.taken:
            tried.taken[key] = self._try_reduction(active, columns)
        return dict(tried.taken[key])

    def _nothing(self, columns: _Columns) -> dict[torch.device, int]:
        """Of every device that a reduction may take memory on."""
        # Parameters of shifted parts lie on other devices, and so do their sums.
        places: set[torch.device] = set()
        for column in columns:
            places.update(canonical_device(parameter.device) for parameter in column)
        return dict.fromkeys((*self._sums.devices, *places), 0)

    def _try_reduction(self, active: Collection[int], columns: _Columns) -> dict[torch.device, int]:
        """Bytes by device of a reduction of zeros."""
        most = self._nothing(columns)
        for bucket in self._sums.buckets:
            trained = [index for index in bucket if columns[0][index].requires_grad]
            if not trained:
                continue
            # Idle replicas of a short batch have none, and those take the plain way of missing
            # gradients.
            zeros: list[list[torch.Tensor | None]] = []
            for replica, column in enumerate(columns):
                is_active = replica in active
                zeros.append([torch.zeros_like(column[index]) if is_active else None for index in trained])
            # One trace for each device, and all at once: a sum may take memory on several.
            traces = {place: MemoryTrace(place) for place in most}
            with ExitStack() as stack, torch.no_grad():
                for trace in traces.values():
                    stack.enter_context(trace)
                self._sums.sum_of_bucket(trained, zeros)
            for place, trace in traces.items():
                most[place] = max(most[place], *trace.curve, 0)
        return most
