"""How many rows of a later batch run without a plan within the budget: a profile of more of them would exceed it.

The first batch has to be run in one piece, as nothing is known before. What it took tells of the next ones.
"""

from dataclasses import dataclass

import torch

from lightning_dpx.lightning.memory.batch_shapes import bytes_of_tensors
from lightning_dpx.memory import Profile
from lightning_dpx.replicas import BatchSlice

# Calls are replayed beside all that the step keeps, to see whether they give the same: that took 1.16 times the peak of
# the step itself for a GPT and 1.4 to 1.6 times for models with few large parts.
_PROFILE_TAKES = 1.2


@dataclass(frozen=True, slots=True)
class _KnownStep:
    """What a profiled step takes without a plan.

    Attributes:
        rows: Of its slice.
        num_bytes: Of the tensors in that.
        peak: Bytes of activations.
    """

    rows: int
    num_bytes: int
    peak: int


class RowsThatFit:
    """What the rows of earlier steps took, by the device of their replicas."""

    def __init__(self) -> None:
        self._known: dict[torch.device, _KnownStep] = {}

    def note(self, batch_slice: BatchSlice, profile: Profile) -> None:
        """A step on that slice was profiled."""
        rows = batch_slice.num_rows
        if not rows:
            return
        before = self._known.get(batch_slice.replica.device)
        # One that left out layers by chance tells too little of those that do not.
        if before is None or profile.peak / rows >= before.peak / before.rows:
            step = _KnownStep(rows, bytes_of_tensors(batch_slice.batch), profile.peak)
            self._known[batch_slice.replica.device] = step

    def of(self, batch_slice: BatchSlice, room: int) -> int | None:
        """So many rows that their step takes no more than ``room`` without a plan, as far as earlier ones tell.

        Returns:
            ``None`` where all of them do, or nothing is known.
        """
        known = self._known.get(batch_slice.replica.device)
        rows = batch_slice.num_rows
        if known is None or not (rows and known.peak):
            return None
        growth = 1.0
        if known.num_bytes:
            growth = bytes_of_tensors(batch_slice.batch) / rows / (known.num_bytes / known.rows)
        # Longer rows may take more than in proportion, as attention does.
        each = known.peak / known.rows * max(growth, growth * growth)
        most = int(room / each)
        # What fits as it is needs no plan, and is run in one piece by the step itself.
        if most >= rows:
            return None
        return int(most / _PROFILE_TAKES)

    def forget(self) -> None:
        """The next run begins."""
        self._known.clear()
