"""Batches that go whole to the first replica, while the others idle: nothing is refused that one device can do.

One batch that cannot be cut goes whole, the next one may be cut again. A stage whose result replicas cannot reproduce
gets all of its batches whole. Either is announced once for every stage and reason, with what to do about it.
"""

import warnings
from collections.abc import Hashable, Sequence

from lightning_dpx.lightning.lightning_api import rank_zero_only, rank_zero_warn

_FOR_ALL = "For all devices to take part"  # as advice begins
ADVICE = f"{_FOR_ALL}, return what has a shape of its own for every row."
COUNT_ELSEWHERE = f"{_FOR_ALL}, count in on_train_batch_end."


class WholeBatches:
    """Which stages get their batches whole, and what has been said about it.

    Args:
        num_devices: Of the process.
    """

    def __init__(self, num_devices: int = 2) -> None:
        self._num_devices = num_devices
        self._reasons: dict[str, tuple[str, str]] = {}
        self._keeps_unequal: set[str] = set()
        self._small: dict[str, tuple[int, str]] = {}  # by stage: so many rows of a slice are too few, and why
        self._next_whole: set[str] = set()
        self._announced: set[tuple[str, Hashable]] = set()

    def give_whole(self, stage: str, reason: str, advice: str = "") -> None:
        """From now on ``stage`` runs on the first replica alone, as on one device.

        Args:
            stage: The name of the step, for example ``"training_step"``.
            reason: Why, as a sentence.
            advice: What the user can do about it, in sentences.
        """
        # The first reason stays: it is the one that the user was told.
        self._reasons.setdefault(stage, (reason, advice))
        self._announce(stage, "gets all of its batches", reason, advice, reason)

    def reason_for(self, stage: str) -> str | None:
        """Why ``stage`` gets all of its batches whole; ``None`` if it does not."""
        if stage in self._reasons:
            return self._reasons[stage][0]
        return None

    def advice_for(self, stage: str) -> str:
        """What the user can do about that reason; may be empty."""
        if stage in self._reasons:
            return self._reasons[stage][1]
        return ""

    def give_next_whole(self, stage: str, reason: str, advice: str = "") -> None:
        """The next batch of ``stage`` stays whole, which is announced; those after it may be cut."""
        self.keep_next_whole(stage)
        self._announce(stage, "gets a batch", reason, advice, reason)

    def keep_next_whole(self, stage: str) -> None:
        """The next batch of ``stage`` stays whole; who asks for it says so, or not."""
        self._next_whole.add(stage)

    def pop_next_whole(self, stage: str) -> bool:
        """Whether this batch is the one to stay whole; the next one is not."""
        is_whole = stage in self._next_whole
        # Asked once for a batch: the one after it is cut again.
        self._next_whole.discard(stage)
        return is_whole

    def keep_whole_if_unequal(self, stage: str) -> None:
        """From now on a batch of which ``stage`` would get slices of different sizes stays whole."""
        self._keeps_unequal.add(stage)

    def keep_whole_if_small(self, stage: str, rows: int, reason: str) -> None:
        """From now on a batch of which a slice of ``stage`` would get ``rows`` or fewer stays whole.

        Args:
            stage: The name of the step.
            rows: Of a slice.
            reason: Why they are too few, as a sentence.
        """
        self._small[stage] = rows, reason

    def stays_whole_at(self, stage: str, sizes: Sequence[int]) -> bool:
        """Whether a batch stays whole, which would be cut into slices of these sizes; announced."""
        if stage in self._small and len(sizes) > 1 and min(sizes) <= self._small[stage][0]:
            _, reason = self._small[stage]
            smallest = min(sizes)
            rows = "1 row" if smallest == 1 else f"{smallest} rows"
            advice = "For all devices to take part, give batches of one size (drop_last=True)."
            self.announce_batch(stage, f"A slice would have {rows}. {reason}", advice, "small slices")
            return True
        if stage not in self._keeps_unequal or len(set(sizes)) < 2:
            return False
        rows = ", ".join(map(str, sizes))
        self.announce_batch(
            stage,
            f"Its slices would have {rows} rows, and a collective of the step needs tensors of one shape.",
            "For all devices to take part, give batches whose rows the replicas can share evenly (drop_last=True).",
            "unequal slices",
        )
        return True

    def announce_batch(self, stage: str, reason: str, advice: str, kind: Hashable) -> None:
        """Says that a batch goes whole to the first replica, once for every stage and kind of reason.

        Args:
            stage: The name of the step.
            reason: Why, as a sentence; names all inputs at fault.
            advice: What the user can do about it, in sentences.
            kind: What is the same for all batches with this fault, whatever their sizes.
        """
        self._announce(stage, "gets a batch", reason, advice, kind)

    def _announce(self, stage: str, what: str, reason: str, advice: str, kind: Hashable) -> None:
        # By kind and not by text, which has the sizes of the batch in it.
        if (stage, kind) in self._announced:
            return
        self._announced.add((stage, kind))
        process = getattr(rank_zero_only, "rank", 0)
        where = f"the first replica of process {process}" if process else "the first replica"
        how = f"on {where}, while the others idle"
        # Nothing idles there: what a batch that stays whole is not cut into are micro-batches.
        if self._num_devices == 1:
            how = "in one piece, M = 1"
            advice = advice.replace(_FOR_ALL, "For micro-batches")
        text = f"dpx: {stage} {what} whole, {how}: {reason} {advice}".rstrip()
        if process:  # every process decides about its own batches, and the first one may see no reason
            warnings.warn(text, stacklevel=3)
        else:
            rank_zero_warn(text)
