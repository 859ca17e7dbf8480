"""What is there at every event of a step without being made again: the profile's own curve, less what is dropped.

bytes ^      ________________
      |   __/   all is kept  \\__          a dropped storage is missing from its last use in forward ("unused")
      |  /  ________________   \\         to the event at which it would have gone ("freed");
      | /__/ some is dropped \\__\\_       a mask that is compressed leaves its compact form there;
      +--------------------------> events    what has yet to be computed from a kept storage holds it longer
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightning_dpx.memory.profile.data import Profile, SavedValue

if TYPE_CHECKING:
    from lightning_dpx.memory.plan.recomputed_values import Outline, RecomputedValues


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """Memory that no recomputation takes.

    Attributes:
        curve: Bytes at every event (E).
        num_bytes: That stay from forward to backward.
        compressed: Dropped values that leave something compact: they are expanded once in forward, to compare.
    """

    curve: np.ndarray
    num_bytes: int
    compressed: list[SavedValue]


def kept_memory(outline: "Outline", choice: "RecomputedValues", offloaded: Sequence[int]) -> KeptMemory:
    """What is there if ``choice`` is dropped.

    Args:
        outline: Of the profile.
        choice: What is dropped.
        offloaded: Which of that leaves for the host, in the order of forward.
    """
    profile = outline.profile
    values = profile.values
    end = len(profile.curve)
    change = [0] * (end + 2)  # bytes that come or go, at each event
    compressed = [values[index] for index in choice.dropped if values[index].compact]
    for value in compressed:  # beside the mask itself, as long as forward has a use for that
        change[value.saved] += value.compact
        change[max(value.saved, profile.storages[value.storage].unused + 1)] -= value.compact
    until, needed = _needed_until(outline, choice)
    # A call that draws random numbers is made again with the states from its beginning, which are
    # kept until the last of it has been asked for.
    for call, begin in choice.drawn_from.items():
        change[begin] += values[call].state
        change[max(begin, until[call])] -= values[call].state
    num_bytes = _change_storages(outline, choice, needed, left_at(profile, offloaded), change)
    curve = outline.curve + np.cumsum(np.array(change[:end], dtype=np.int64))
    return KeptMemory(curve, num_bytes, compressed)


def _change_storages(
    outline: "Outline", choice: "RecomputedValues", needed: Sequence[int], left: Mapping[int, int], change: list[int]
) -> int:
    """Storages that are dropped go early, others stay as long as something is computed from them.

    Args:
        outline: Of the profile.
        choice: What is dropped.
        needed: The event up to which each storage is computed from.
        left: The event at which each offloaded storage has left.
        change: Bytes that come or go at each event; changed.

    Returns:
        Bytes that stay from forward to backward.
    """
    profile = outline.profile
    compact = outline.compact
    dropped = choice.dropped
    # A storage goes only if all values in it are dropped.
    kept_in = {storage for index, storage in enumerate(outline.storages) if index not in dropped}
    kept = 0
    for number, storage in enumerate(profile.storages):
        if number in kept_in:
            kept += storage.num_bytes
            if needed[number] > storage.freed:  # backward has had it, and has yet to compute something from it
                change[storage.freed] += storage.num_bytes
                change[needed[number]] -= storage.num_bytes
        # It goes with its last use in forward, or when its copy to the host is done, if that is
        # later; never after the moment at which it would have gone if it were kept.
        elif storage.unused < storage.freed:
            gone = storage.num_bytes - compact[number]
            change[min(max(storage.unused + 1, left.get(number, 0)), storage.freed)] -= gone
            change[storage.freed] += gone
            kept += compact[number]
    return kept


def _needed_until(outline: "Outline", choice: "RecomputedValues") -> tuple[list[int], list[int]]:
    """The event at which every value and every kept storage goes, if all that holds it is computed from it."""
    # From the end, so that what is computed from a value has its event before the value is looked
    # at.
    until = outline.until.copy()
    storages = [0] * len(outline.profile.storages)
    lazy = choice.lazy
    for index in range(len(until) - 1, -1, -1):  # inputs come first
        event = until[index]
        if lazy[index]:
            for source in outline.inputs[index]:
                if until[source] < event:
                    until[source] = event
        else:
            storage = outline.storages[index]
            if storage >= 0 and storages[storage] < event:
                storages[storage] = event
    return until, storages


def left_at(profile: Profile, offloaded: Sequence[int]) -> dict[int, int]:
    """The event at which the last value of each offloaded storage has left for the host."""
    values = profile.values
    left = dict[int, int]()
    for position, index in enumerate(offloaded):
        event = profile.forward_events
        # A value keeps its memory until so many others were offloaded after it; the last ones
        # leave when forward is over.
        later = position + profile.prefetch_depth
        if later < len(offloaded):
            event = values[offloaded[later]].saved
        storage = values[index].storage
        left[storage] = max(left.get(storage, 0), event)
    return left
