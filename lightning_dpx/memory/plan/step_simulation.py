"""Plays a profiled step through, with a choice of values dropped: every request of backward, as it would be served.

    request --> there already? --no--> compute: first what it is made from, then itself    (fetched, if offloaded)
       |                                  |-- memory: comes, HeldMemory; noted, HeldCurve
       |                                  '-- inputs: one use less each, UseCounts; the last use forgets them
       '--> in use by autograd until it is released; one use less

The rules are those of :mod:`lightning_dpx.memory.execute.values`, which does this with tensors.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_dpx.memory.plan.held_memory import HeldCurve, HeldMemory, OffloadedMemory
from lightning_dpx.memory.plan.kept_memory import KeptMemory, kept_memory
from lightning_dpx.memory.plan.use_counts import UseCounts

if TYPE_CHECKING:
    from lightning_dpx.memory.plan.recomputed_values import Outline, RecomputedValues


@dataclass(frozen=True, slots=True)
class Limits:
    """What a choice may take; where it takes more, the step is not played to its end.

    Attributes:
        computations: How many values are computed.
        num_bytes: At any event.
        seconds: Of all computations.
    """

    computations: float = float("inf")
    num_bytes: float = float("inf")
    seconds: float = float("inf")


class BeyondLimitsError(Exception):
    """A choice takes more than is acceptable."""


class Work:
    """What a step spends on making values again.

    Args:
        outline: Of the profile.
        limits: What is acceptable.

    Attributes:
        seconds: Of all computations.
        computations: How many there were.
        fetches: Seconds of each copy back from the host.
    """

    __slots__ = ("_limits", "_outline", "_was_made", "computations", "fetches", "seconds")

    def __init__(self, outline: "Outline", limits: Limits) -> None:
        self._outline = outline
        self._limits = limits
        self._was_made = [False] * len(outline.profile.values)
        self.seconds: float = 0.0
        self.computations: int = 0
        self.fetches: list[float] = []

    def begin(self) -> None:
        """Another value is made.

        Raises:
            BeyondLimitsError: it is one too many.
        """
        self.computations += 1
        if self.computations > self._limits.computations or self.seconds > self._limits.seconds:
            raise BeyondLimitsError

    def compute(self, index: int) -> None:
        """Its operator runs."""
        if self._was_made[index]:
            self.seconds += self._outline.seconds_again[index]
        else:
            self.seconds += self._outline.profile.values[index].seconds
            self._was_made[index] = True

    def fetch(self, index: int) -> None:
        """It is copied back from the host."""
        self.fetches.append(self._outline.profile.values[index].copying)


class _NestedValues:
    """Values on the way to others that are recomputed: each goes once nothing on the way to one request needs it.

    Args:
        choice: What is dropped.
        memory: Where they come and go.
    """

    def __init__(self, choice: "RecomputedValues", memory: HeldMemory) -> None:
        self._choice = choice
        self._memory = memory
        self._inputs = dict[int, list[int]]()
        self._uses: dict[int, int] | None = None  # to come, in the computation that is under way

    def begin(self) -> None:
        """A computation begins."""
        self._uses = None

    def release(self, target: int, index: int) -> None:
        """Forgets what ``index`` was made from, but for what is needed until ``target`` is there."""
        sources = self._inputs.get(index)
        if sources is None:
            nested = self._choice.nested
            sources = [source for source in self._choice.inputs[index] if nested[source]]
            self._inputs[index] = sources  # asked for once for every time that it is made
        if not sources:
            return
        if self._uses is None:
            self._uses = self._uses_to_come(target)  # without those of ``index``, which is there
        else:
            for source in sources:
                self._uses[source] = self._uses.get(source, 0) - 1
        for source in sources:
            if self._uses.get(source, 0) > 0:
                self._memory.kept.add(source)
            else:
                self._memory.forget(source)

    def _uses_to_come(self, target: int) -> dict[int, int]:
        """How often each nested value is an input of what is not there yet on the way to ``target``."""
        nested = self._choice.nested
        inputs = self._choice.inputs
        there = self._memory.there
        uses = dict[int, int]()
        stack = [target]
        seen = {target}
        while stack:
            index = stack.pop()
            if there[index]:
                continue
            for source in inputs[index]:
                if nested[source]:
                    uses[source] = uses.get(source, 0) + 1
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return uses


class StepSimulation:
    """One step of a profile.

    Args:
        outline: Of the profile.
        choice: What is dropped.
        limits: What is acceptable.

    Attributes:
        curve: Bytes at every event, after :meth:`run`.
        work: What is spent on making values again.
        offloaded: What comes back from the host.
    """

    def __init__(self, outline: "Outline", choice: "RecomputedValues", limits: Limits) -> None:
        profile = outline.profile
        values = profile.values
        self._outline = outline
        self._choice = choice
        self._uses = UseCounts(outline, choice)
        self._memory = HeldMemory(choice)
        self._nested = _NestedValues(choice, self._memory) if any(choice.nested) else None
        self._limits = limits
        self._room: list[float] = list[float]()  # beside what is kept, at each event, where bytes are limited
        self._highest = 0  # bytes that were there at a time, in the computation that is under way
        self._most_now = float("inf")  # that may be
        self.work: Work = Work(outline, limits)
        self.curve: HeldCurve = HeldCurve(len(profile.curve))
        offloaded = [index for index in choice.dropped if values[index].offloaded and values[index].storage >= 0]
        # The order in which forward saves them is that in which copies leave.
        in_order = sorted(offloaded, key=lambda index: (values[index].saved, index))
        self.offloaded: OffloadedMemory = OffloadedMemory(in_order, values, profile.prefetch_depth)

    def run(self) -> tuple[int, KeptMemory]:
        """The most bytes that are there at any event, and what is kept.

        Raises:
            BeyondLimitsError: it takes more than is acceptable.
        """
        profile = self._outline.profile
        kept = kept_memory(self._outline, self._choice, self.offloaded.order)
        if self._limits.num_bytes < float("inf"):
            room = self._limits.num_bytes - kept.curve
            if room.min(initial=0.0) < 0:
                raise BeyondLimitsError
            self._room = room.tolist()
        for value in kept.compressed:  # it is expanded once, to compare
            event = max(0, value.saved - 1)
            num_bytes = self._memory.num_bytes + self.offloaded.on_the_way.num_bytes + value.compact + value.num_bytes
            if num_bytes > self._room_at(event):
                raise BeyondLimitsError
            self.curve.note_spot(event, num_bytes)
        event = 0
        lazy = self._choice.lazy
        for at, target, released in self._outline.requests:
            if lazy[target]:  # nothing changes where autograd asks for what is there all the time
                self._advance(event, at)
                event = at
                self._serve(target, at, released)
        self._advance(event, len(profile.curve))
        return self.curve.end(kept.curve), kept

    def _room_at(self, event: int) -> float:
        if self._room:
            return self._room[min(event, len(self._room) - 1)]
        return float("inf")

    def _advance(self, start: int, stop: int) -> None:
        """Notes what is held between two requests."""
        memory = self._memory
        ends = memory.ends
        event = start
        while event < stop:
            memory.release_until(event)
            # Between two requests only autograd's own releases change anything.
            until = min(stop, ends[0][0]) if ends else stop
            self.curve.note_span(until - event, memory.num_bytes + self.offloaded.on_the_way.num_bytes)
            event = until

    def _serve(self, target: int, event: int, released: int) -> None:
        """A request of backward, for the value ``target``, which it uses until ``released``."""
        memory = self._memory
        memory.now = event
        self._uses.advance(event)
        memory.release_until(event)
        if not memory.there[target]:
            self._compute(target, event)
        in_use = memory.in_use
        in_use[target] = max(in_use[target], released)
        value = self._outline.profile.values[target]
        if value.picked:  # autograd uses the memory of the whole call
            (call,) = value.inputs
            in_use[call] = max(in_use[call], released)
        self._use(target)

    def _compute(self, target: int, event: int) -> None:
        """Makes ``target`` and whatever is missing on the way to it."""
        inputs = self._choice.inputs
        uncached = self._choice.uncached
        there = self._memory.there
        kept = self._memory.kept
        nested = self._nested
        stack = [target]
        made = set[int]()
        later = list[int]()  # whose inputs are used up only when ``target`` is there
        if nested is not None:
            nested.begin()
        self._highest = 0
        self._most_now = self._room_at(event)
        while stack:
            index = stack[-1]
            if there[index]:
                stack.pop()
                continue
            if inputs[index]:
                missing = [source for source in inputs[index] if not there[source]]
                if missing:
                    # As values.py does it: what can be made at once is not to wait for a long way.
                    if len(missing) > 1:
                        missing.sort(key=self._has_all_inputs, reverse=True)
                    stack += missing
                    continue
            stack.pop()
            self._make(index)
            if nested is not None:
                nested.release(target, index)
            # Made twice for one request: after a part of a backward the counts are off, and nothing
            # more is forgotten before the end.
            if later or (index in made and not uncached[index]):
                later.append(index)
            else:
                made.add(index)
                self._use_inputs(index)
            if kept:
                kept.clear()
        for index in later:
            self._use_inputs(index)
        # All of it is made at one event, of which the highest moment counts.
        self.curve.note_spot(event, self._highest)

    def _make(self, index: int) -> None:
        """The value is computed or fetched: its inputs are there."""
        memory = self._memory
        memory.there[index] = True
        self.work.begin()
        if self.offloaded.order and index in self.offloaded:
            self.work.fetch(index)
            self.offloaded.fetch(index)
        else:
            self.work.compute(index)
        size = self._choice.sizes[index]
        # What takes no bytes of its own is a view, and holds those of what it shows.
        if size:
            memory.num_bytes += size
        else:
            for source in self._choice.inputs[index]:  # of which it is a view
                memory.views[source] += 1
        num_bytes = memory.num_bytes + self.offloaded.on_the_way.num_bytes + self._choice.beside[index]
        if num_bytes > self._highest:
            self._highest = num_bytes
            if num_bytes > self._most_now:
                raise BeyondLimitsError

    def _has_all_inputs(self, index: int) -> bool:
        return all(map(self._memory.there.__getitem__, self._choice.inputs[index]))

    def _use_inputs(self, index: int) -> None:
        """The inputs of a value have been used to make it."""
        choice = self._choice
        if not choice.uncached[index]:
            for source in choice.inputs[index]:
                self._use(source)
            return
        for source in choice.inputs[index]:
            if choice.uncached[source] and not choice.nested[source]:
                self._memory.forget(source)

    def _use(self, index: int) -> None:
        """A value has been used once; after the last time, or where it is made for each, it is forgotten."""
        choice = self._choice
        left = self._uses.left
        stack = [index]
        while stack:
            index = stack.pop()
            left[index] -= 1
            if choice.uncached[index] or left[index] <= 0:
                self._memory.forget(index)
            if left[index] <= 0:
                # Another backward through the same graph starts anew.
                left[index] = self._uses.of_backward[index]
                if choice.uncached[index]:
                    stack += choice.inputs[index]
