"""Bytes at every event of a step that is put together from two others."""

from collections.abc import Mapping, Sequence

import numpy as np

from lightning_dpx.memory.profile.joining.event_map import EventMap
from lightning_dpx.memory.profile.joining.splice import Splice


def joined_curve(splice: Splice, events: EventMap, kept: Sequence[int]) -> np.ndarray:
    """The curve of the joined step.

    Args:
        splice: What it is made of.
        events: Where its cuts are.
        kept: Bytes that each piece keeps, as of :func:`kept_by_pieces`.

    Returns:
        One number of bytes for each of its events.
    """
    base = np.array(splice.base.curve, dtype=np.int64)
    donor = np.array(splice.donor.curve, dtype=np.int64)
    parts = []
    higher = 0  # bytes that pieces keep at this place, beyond what the base has there
    done = 0  # events of the base
    for cut in events.cuts:
        parts.append(base[done : cut.event] + higher)
        done = cut.event
        # Within a piece the curve is the donor's, moved to the level at which the piece begins.
        if not cut.is_backward:
            level = bytes_at(base, cut.event - 1) + higher - bytes_at(donor, cut.begin - 1)
            higher += kept[cut.piece]
        # In backward a piece gives back what it has kept, and ends at the level of what comes after it.
        else:
            higher -= kept[cut.piece]
            level = bytes_at(base, cut.event) + higher - bytes_at(donor, cut.end)
        parts.append(donor[cut.begin : cut.end] + level)
    parts.append(base[done:] + higher)
    return np.maximum(np.concatenate(parts), 0)


def curve_without_pieces(splice: Splice, kept: Sequence[int]) -> np.ndarray:
    """The curve of the donor as if its pieces were not there; it has their events still.

    Args:
        splice: Whose donor it is.
        kept: Bytes that each piece keeps, as of :func:`kept_by_pieces`.
    """
    curve = np.array(splice.donor.curve, dtype=np.int64)
    for piece, num_bytes in zip(splice.pieces, kept, strict=True):
        curve[piece.forward[1] : piece.backward[0]] -= num_bytes
        # In the order of forward: what lies before a piece is without the earlier ones already.
        curve[slice(*piece.forward)] = bytes_at(curve, piece.forward[0] - 1)
        curve[slice(*piece.backward)] = bytes_at(curve, piece.backward[1])
    return np.maximum(curve, 0)


def kept_by_pieces(splice: Splice, new_storages: Mapping[int, int]) -> list[int]:
    """Bytes that each piece keeps from its forward to its backward.

    Args:
        splice: Whose pieces they are.
        new_storages: The donor's storages that the base lacks, with the number of the piece that keeps each.
    """
    kept = [0] * len(splice.pieces)
    for storage, number in new_storages.items():
        # The curve cannot tell it alone: what a piece makes may be used, and kept, by calls of the base as well.
        kept[number] += splice.donor.storages[storage].num_bytes
    # What is too small to be a value has no storage: only the curve shows that it is kept.
    curve = np.array(splice.donor.curve, dtype=np.int64)
    for number, piece in enumerate(splice.pieces):
        # Both ends are looked at: what rises in forward without falling in backward is no activation.
        risen = bytes_at(curve, piece.forward[1] - 1) - bytes_at(curve, piece.forward[0] - 1)
        fallen = bytes_at(curve, piece.backward[0]) - bytes_at(curve, piece.backward[1])
        # What is there in passing at one of these moments is not there at all of them.
        kept[number] = max(kept[number], min(risen, fallen))
    return kept


def bytes_at(curve: np.ndarray, event: int) -> int:
    """Bytes at that event; nothing is there before the first one and after the last."""
    if 0 <= event < len(curve):
        return int(curve[event])
    return 0
