"""When autograd gets what it saves, asks for it, and lets go of it; by numbers, in the order in which it was saved."""

import weakref
from collections import Counter

import torch

from lightning_dpx.memory.profile.data import Request
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace


class AutogradLog:
    """Notes events of a step, as the trace counts them.

    Args:
        trace: Counts them.

    Attributes:
        asks: The event of every request, and the number of what it was for.
        values: By the number of what autograd holds, that of the value; of values that were found to be such.
    """

    def __init__(self, trace: MemoryTrace) -> None:
        self._trace = trace
        self._saved: list[int] = []  # the event at which autograd got each of the things that it holds
        self.asks: list[tuple[int, int]] = []
        self.values: dict[int, int] = {}
        self._released: dict[int, int] = {}  # the event at which autograd let go of what it held
        self._used: dict[int, int] = {}  # by the event of a request, the one at which what autograd got is gone
        # A weak reference tells of the end only while it is there itself.
        self._copies: list[weakref.ref[torch.UntypedStorage]] = []

    def note_saved(self) -> int:
        """Autograd holds one more; its number."""
        self._saved.append(self._trace.now)
        return len(self._saved) - 1

    def note_asked(self, index: int) -> int:
        """Autograd asks for what it holds; the event."""
        event = self._trace.mark()
        self.asks.append((event, index))
        return event

    def note_released(self, index: int) -> None:
        """Autograd lets go of it."""
        self._released[index] = self._trace.mark()

    def watch_use(self, event: int, given: torch.Tensor) -> None:
        """Autograd may ask once more: so only the end of the copy that it was ``given`` tells that it has used it."""
        self._copies.append(weakref.ref(given.untyped_storage(), lambda _: self._note_used(event)))

    def _note_used(self, event: int) -> None:
        self._used[event] = self._trace.mark()

    def requests(self, end: int) -> tuple[list[Request], list[tuple[int, int]]]:
        """What autograd has asked for in a step of ``end`` events; and what it has saved, if that was not once each."""
        times = Counter(index for _, index in self.asks)
        requests: list[Request] = []
        for event, index in self.asks:
            if index not in self.values:
                continue
            released = self._released.get(index, end)
            # What autograd will ask for again it does not let go of: the end of the copy that it
            # was given tells how long this request has used it.
            if times[index] > 1 or index not in self._released:
                released = self._used.get(event, released)
            # What the graph holds goes with it, which may be when the step is over.
            requests.append(Request(event, self.values[index], min(released, end), index))
        saved: list[tuple[int, int]] = []
        if max(times.values(), default=0) > 1:
            saved = [(event, self.values[index]) for index, event in enumerate(self._saved) if index in self.values]
        return requests, saved

    def held(self, end: int) -> tuple[list[int], list[int]]:
        """When autograd first asked for each thing that it holds (-1: never), and let go of it."""
        asked = [-1] * len(self._saved)
        for event, index in reversed(self.asks):  # the first request is the one that remains
            asked[index] = event
        ends = [min(self._released.get(index, end), end) for index in range(len(self._saved))]
        return asked, ends
