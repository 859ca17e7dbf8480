"""Which recomputed values are there while a forecast plays a step through, how many bytes they hold, and when.

bytes  ^            _____            spots: something is made, with what comes and goes meanwhile
       |    _______|     |___        spans: between two requests nothing is made, what is held stays the same
       |___|                 |____
       +--------------------------> events of backward
"""

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lightning_dpx.memory.profile.data import SavedValue
from lightning_dpx.prefetch_order import Prefetcher, PrefetchSlot

if TYPE_CHECKING:
    from lightning_dpx.memory.plan.recomputed_values import RecomputedValues


class HeldMemory:
    """The recomputed values that are there.

    A value that is a view takes no memory, and holds that of the values that it is made from.

    Args:
        choice: What is recomputed.

    Attributes:
        there: For each value, whether it is there (V); those that are not lazy always are.
        num_bytes: Of all that was made again and is still there.
        kept: Values that are not forgotten for now, because something on the way needs them once more.
        now: The event of the request that is served.
        in_use: For each value, the event until which autograd uses what it asked for (V).
        views: For each value, how many views of it are there (V).
    """

    def __init__(self, choice: "RecomputedValues") -> None:
        self._sizes = choice.sizes
        self._inputs = choice.inputs
        self.there: list[bool] = [not lazy for lazy in choice.lazy]
        self.num_bytes: int = 0
        self.kept: set[int] = set[int]()
        self.now = 0
        self.in_use: list[int] = [0] * len(self.there)
        self.views: list[int] = [0] * len(self.there)
        self._outlived = [False] * len(self.there)  # forgotten, but for a view
        self.ends: list[tuple[int, int]] = []  # a heap: (event, bytes) of what is forgotten and still in use

    def release_until(self, event: int) -> None:
        """Autograd has no more use for what it asked for until ``event``."""
        ends = self.ends
        while ends and ends[0][0] <= event:
            self.num_bytes -= heapq.heappop(ends)[1]

    def forget(self, index: int) -> None:
        """The value goes, unless it is kept for now; its memory goes with its last view."""
        if self.there[index] and index not in self.kept:
            self.there[index] = False
            self._outlived[index] = self.views[index] > 0
            if not self._outlived[index]:
                self._free(index)

    def _free(self, index: int) -> None:
        size = self._sizes[index]
        if self.in_use[index] > self.now:  # forgotten by us, and still in use by autograd
            heapq.heappush(self.ends, (self.in_use[index], size))
            self.in_use[index] = 0
        else:
            self.num_bytes -= size
        if size:
            return
        # A view held the memory of what it shows: with the last one that goes, too.
        for source in self._inputs[index]:  # of which it is a view
            self.views[source] -= 1
            if self._outlived[source] and not self.views[source]:
                self._outlived[source] = False
                self._free(source)


class HeldCurve:
    """Bytes that are held at every event, noted while a step is played through and added up at the end (E events)."""

    def __init__(self, num_events: int) -> None:
        self._last = num_events - 1
        self._spans: list[int] = []  # numbers of events, one span after the other
        self._bytes_of_spans: list[int] = []
        self._spots: list[int] = []  # events at which something is made
        self._bytes_of_spots: list[int] = []
        self._between = np.zeros(0, dtype=np.int64)
        self._at_spots = np.zeros(0, dtype=np.int64)

    def note_span(self, num_events: int, num_bytes: int) -> None:
        """Notes that so many bytes are held for the next events."""
        self._spans.append(num_events)
        self._bytes_of_spans.append(num_bytes)

    def note_spot(self, event: int, num_bytes: int) -> None:
        """This much is there for a moment, when something is made."""
        self._spots.append(min(event, self._last))
        self._bytes_of_spots.append(num_bytes)

    def end(self, base: np.ndarray) -> int:
        """The spans reach to the end of the step.

        Args:
            base: Bytes at every event of what is there without being made again (E).

        Returns:
            The most bytes that are there at any event.
        """
        self._between = base + np.repeat(self._bytes_of_spans, self._spans)
        self._at_spots = base[self._spots] + np.array(self._bytes_of_spots, dtype=np.int64)
        return int(max(0, self._between.max(initial=0), self._at_spots.max(initial=0)))

    def most(self) -> np.ndarray:
        """Bytes at every event, after :meth:`end`: the most that is there between it and the next (E)."""
        found: np.ndarray = np.maximum(self._between, 0)
        np.maximum.at(found, self._spots, self._at_spots)
        return found


class BytesOnTheWay:
    """Bytes that are on their way back before autograd asks for them."""

    def __init__(self) -> None:
        self.num_bytes = 0


class _OffloadedBytes:
    """An offloaded value: what prefetching does to it, in bytes."""

    def __init__(self, num_bytes: int, on_the_way: BytesOnTheWay) -> None:
        self._num_bytes = num_bytes
        self._on_the_way = on_the_way
        self._started = False

    def start_fetch(self) -> None:
        if not self._started:
            self._started = True
            self._on_the_way.num_bytes += self._num_bytes

    def release(self) -> None:
        if self._started:
            self._started = False
            self._on_the_way.num_bytes -= self._num_bytes


class OffloadedMemory:
    """The offloaded values of a choice: when they leave, and which are on their way back.

    Args:
        order: Their indices, in the order in which forward saves them.
        values: Of the profile (V).
        prefetch_depth: How many are on their way at the most.

    Attributes:
        order: The same.
        on_the_way: Bytes that are on their way back.
    """

    def __init__(self, order: Sequence[int], values: Sequence[SavedValue], prefetch_depth: int) -> None:
        self.order = order
        self.on_the_way: BytesOnTheWay = BytesOnTheWay()
        self._prefetcher = Prefetcher[_OffloadedBytes](prefetch_depth)
        self._slots = dict[int, PrefetchSlot[_OffloadedBytes]]()
        for index in order:
            # The very rule by which tensors are prefetched, applied to bytes: so both fetch the
            # same ones at the same requests.
            self._slots[index] = self._prefetcher.slot_for(_OffloadedBytes(values[index].num_bytes, self.on_the_way))

    def __contains__(self, index: int) -> bool:
        return index in self._slots

    def fetch(self, index: int) -> None:
        """Autograd asks for the value; the next ones are on their way from here on."""
        self._prefetcher.on_unpack(self._slots[index], 0)
