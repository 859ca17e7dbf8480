"""How many rows of a later batch run without a plan within the budget: a profile of more of them would exceed it.

The first batch has to be run in one piece, as nothing is known before. What it took tells of the next ones.
"""

from dataclasses import dataclass, replace

import torch

from lightning_dpx.lightning.memory.batch_shapes import bytes_of_tensors
from lightning_dpx.memory import Profile
from lightning_dpx.memory.profile.scaling import scaled
from lightning_dpx.replicas import BatchSlice

# Calls are replayed beside all that the step keeps, to see whether they give the same: that took 1.16 times the peak of
# the step itself for a GPT and 1.4 to 1.6 times for models with few large parts.
_PROFILE_TAKES = 1.3
# Times the bytes of a known batch: what grows faster than those is seen when the step has run, see grown_steps.py.
_IN_PROPORTION = 1.5


@dataclass(frozen=True, slots=True)
class _KnownStep:
    """What a profiled step takes without a plan.

    Attributes:
        rows: Of its slice.
        num_bytes: Of the tensors in that.
        profile: Of the step.
    """

    rows: int
    num_bytes: int
    profile: Profile

    @property
    def peak(self) -> int:
        """Bytes of activations."""
        return self.profile.peak


class RowsThatFit:
    """What the rows of earlier steps took, by the device of their replicas."""

    def __init__(self) -> None:
        self._known: dict[torch.device, _KnownStep] = {}
        self._is_off = False

    @property
    def knows_any(self) -> bool:
        """Whether any step was profiled."""
        return bool(self._known)

    def note(self, batch_slice: BatchSlice, profile: Profile) -> None:
        """A step on that slice was profiled."""
        rows = batch_slice.num_rows
        if not rows:
            return
        before = self._known.get(batch_slice.replica.device)
        # One that left out layers by chance tells too little of those that do not.
        if before is None or profile.peak / rows >= before.peak / before.rows:
            step = _KnownStep(rows, bytes_of_tensors(batch_slice.batch), profile)
            self._known[batch_slice.replica.device] = step
            self._is_off = False

    def were_too_few(self) -> None:
        """A profile of them has not shown what steps save: the next one is of all rows."""
        self._is_off = True

    def of(self, batch_slice: BatchSlice, room: int) -> int | None:
        """So many rows that their step takes no more than ``room`` without a plan, as far as earlier ones tell.

        Returns:
            ``None`` where all of them do, or nothing is known.
        """
        known = self._known.get(batch_slice.replica.device)
        rows = batch_slice.num_rows
        if self._is_off or known is None or not (rows and known.peak):
            return None
        growth = 1.0
        if known.num_bytes:
            growth = bytes_of_tensors(batch_slice.batch) / rows / (known.num_bytes / known.rows)
        # A batch without tensors, such as a loader that the step itself asks, does not tell what is in it.
        if not growth:
            return None
        # Longer rows may take more than in proportion, as attention does.
        each = known.peak / known.rows * max(growth, growth * growth)
        most = int(room / each)
        # What fits as it is needs no plan, and is run in one piece by the step itself.
        if most >= rows:
            return None
        return int(most / _PROFILE_TAKES)

    def in_proportion(self, batch_slice: BatchSlice) -> Profile | None:
        """The step on a slice that is a little larger than a known one, and that cannot be cut; ``None`` for others."""
        known = self._known.get(batch_slice.replica.device)
        num_bytes = bytes_of_tensors(batch_slice.batch)
        # Without tensors a batch does not tell how much larger it is.
        if known is None or not (known.num_bytes and num_bytes):
            return None
        growth = max(1.0, num_bytes / known.num_bytes)
        rows = max(1, batch_slice.num_rows)
        # Fewer rows that are longer may take more than in proportion, as attention does. What has no rows that could
        # be told apart counts as one, of any size.
        if max(rows, known.rows) > 1:
            growth *= max(1.0, (num_bytes / rows) / (known.num_bytes / known.rows))
        if growth > _IN_PROPORTION:
            return None
        return replace(scaled(known.profile, growth), scale=known.profile.scale)

    def forget(self) -> None:
        """The next run begins."""
        self._known.clear()
        self._is_off = False
