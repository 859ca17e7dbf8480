"""What a choice of values to drop would do to a profiled step: its peak, and the time to compute them again.

The forecast plays the step through: forward without what is dropped, then every request of backward, with the same
rules of sharing and forgetting as :mod:`lightning_dpx.memory.execute.values`, and the same prefetching of what
is offloaded.

The time of offloaded values. Copies run beside the computation, in a queue for each direction, so of all copies out
only what is longer than forward counts, and of those back what is longer than backward with its recomputations; but
nothing hides the last copy out and the first one back, for each of which the longest counts. A copy that hides is not
free: it takes some of the memory's bandwidth and of the host's time, for which :data:`HIDDEN_SHARE` of it counts. That
a queue may run dry at one time and be too long at another is left out, and so is that other devices may copy from and
to the same host at that time. Where no copy may be on its way beside the computation, all of them count.
"""

import heapq
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from lightning_dpx.memory.profile.data import Profile, most_with
from lightning_dpx.memory.profile.places import seconds_of_places
from lightning_dpx.prefetch_order import Prefetcher

_OUT_OF_QUESTION = 2**62  # bytes
HIDDEN_SHARE = 0.02  # of the time of a copy beside the computation: an assumption, a link over a memory's bandwidth


@dataclass(frozen=True, slots=True)
class Forecast:
    """The cost of a choice.

    Attributes:
        peak: Bytes of activations at the most.
        kept: Bytes that are kept from forward to backward.
        seconds: Extra time of a step.
    """

    peak: int
    kept: int
    seconds: float

    def rank(self, budget: int | None) -> tuple[bool, float, float]:
        """Lower is better: the fastest within the budget, then the smallest."""
        if budget is None or self.peak > budget:
            return True, self.peak, self.seconds
        return False, self.seconds, self.peak


def forecast(
    profile: Profile, dropped: Collection[int], uncached: Collection[int] = (), *, most_times: int | None = None
) -> Forecast:
    """The step of ``profile`` if the values with these indices are dropped, some of them after every use.

    Args:
        profile: The step.
        dropped: Indices of values.
        uncached: Those of them that are forgotten after every use.
        most_times: How often values may be computed, on average. A choice that takes more is out of the question, and
            not played to its end: its time is infinite, and so is its peak, as far as a number can be.
    """
    return Outline(profile, most_times).forecast(dropped, uncached)


def with_overheads(profile: Profile, result: Forecast, dropped: Collection[int]) -> Forecast:
    """``result`` with the time that no planner decides about: of the calls that are replayed as a whole, and of the
    places at which values are ``dropped``."""
    more = profile.replaying + seconds_of_places(profile, dropped)
    return replace(result, seconds=result.seconds + more) if more else result


def timeline(profile: Profile, dropped: Collection[int], uncached: Collection[int] = ()) -> list[int]:
    """Bytes of activations at every event of such a step: the most that is there between it and the next."""
    curve: list[int] = Outline(profile).timeline(dropped, uncached)[1].tolist()
    return curve


class Outline:
    """A profile as the forecast reads it: what is the same for all choices is looked up once.

    Args:
        profile: Of a step.
        most_times: See :func:`forecast`.

    Attributes:
        profile: The same.
        curve: Bytes at every event, if all is kept.
        virtual: For each value, whether it has no memory and no name of its own.
        sizes: For each value, the bytes that it takes when it is computed again.
        beside: For each value, what comes and goes meanwhile; the generators' states of now are kept, too.
        inputs: For each value.
    """

    def __init__(self, profile: Profile, most_times: int | None = None) -> None:
        self.profile = profile
        self.curve = np.array(profile.curve, dtype=np.int64)
        self.virtual = [value.storage < 0 and not value.name for value in profile.values]
        self.sizes = [0 if value.picked else value.num_bytes for value in profile.values]
        self.beside = [value.beside + value.state for value in profile.values]
        self.inputs = [value.inputs for value in profile.values]
        self._most = float("inf") if most_times is None else most_times * len(profile.values)

    def forecast(self, dropped: Collection[int], uncached: Collection[int] = ()) -> Forecast:
        """The step if the values with these indices are dropped, some of them after every use."""
        try:
            return self._replay(dropped, uncached).run()
        except _TooOftenError:
            return Forecast(_OUT_OF_QUESTION, 0, float("inf"))

    def timeline(self, dropped: Collection[int], uncached: Collection[int] = ()) -> tuple[Forecast, np.ndarray]:
        """The same, and bytes of activations at every event of such a step."""
        replay = self._replay(dropped, uncached)
        try:
            return replay.run(), replay.curve()
        except _TooOftenError:
            return Forecast(_OUT_OF_QUESTION, 0, float("inf")), np.full_like(self.curve, _OUT_OF_QUESTION)

    def _replay(self, dropped: Collection[int], uncached: Collection[int]) -> "_Replay":
        replay = _Replay(self, frozenset(dropped), frozenset(uncached))
        replay.left = self._most
        return replay


class _TooOftenError(Exception):
    """Values are computed more often than whoever asks would accept."""


class _Coming:
    """Bytes that are on their way back before they were asked for."""

    def __init__(self) -> None:
        self.num_bytes = 0


class _Offloaded:
    """An offloaded value: what prefetching does to it, in bytes."""

    def __init__(self, num_bytes: int, coming: _Coming) -> None:
        self._num_bytes = num_bytes
        self._coming = coming
        self._started = False

    def start_fetch(self) -> None:
        if not self._started:
            self._started = True
            self._coming.num_bytes += self._num_bytes

    def release(self) -> None:
        if self._started:
            self._started = False
            self._coming.num_bytes -= self._num_bytes


class _Replay:
    def __init__(self, outline: Outline, dropped: frozenset[int], uncached: frozenset[int]) -> None:
        profile = outline.profile
        self._outline = outline
        self._profile = profile
        self._dropped = dropped
        values = profile.values
        self._virtual = outline.virtual
        self._inputs = outline.inputs
        self._sizes = outline.sizes.copy()
        self._lazy = [virtual and bool(own) for virtual, own in zip(outline.virtual, outline.inputs, strict=True)]
        for index in dropped:
            self._lazy[index] = True
        self._uncached = [False] * len(values)
        self._nested = [False] * len(values)
        for index in sorted(uncached):
            self._make_uncached(index)
        self._pending = [0] * len(values)
        self._wants = self._wants_in_order() if profile.saves else []  # (event, value), the last one first
        self._wanted = [0] * len(values)
        for request in profile.requests if not profile.saves else ():
            self._pending[request.value] += 1
        self._drawing = dict[int, int]()
        picked = dict[int, list[tuple[int, int]]]()  # what is wanted of each call that is made again
        for index in self._live_users():
            for source in values[index].inputs:
                if not profile.saves:
                    self._pending[source] += 1
                if values[index].picked:
                    picked.setdefault(source, []).append((values[index].gone, values[index].num_bytes))
                    if values[source].state:  # from where on the generators' states are kept
                        self._drawing[source] = min(values[index].saved, self._drawing.get(source, len(profile.curve)))
        self._beside = outline.beside.copy()
        for index, wanted in picked.items():
            self._sizes[index] = sum(size for _, size in wanted)
            if stretches := values[index].stretches:
                most = most_with(stretches, wanted) + values[index].state
                self._beside[index] = max(0, most - self._sizes[index])
        self._there = [not lazy for lazy in self._lazy]
        self._held = 0
        self._seconds = 0.0
        offloaded = [index for index in dropped if values[index].offloaded and values[index].storage >= 0]
        self._offloaded = sorted(offloaded, key=lambda index: (values[index].saved, index))
        self._coming = _Coming()
        self._prefetcher = Prefetcher[_Offloaded](profile.prefetch_depth)
        self._fetches = list[float]()
        self._slots = {
            index: self._prefetcher.slot_for(_Offloaded(values[index].num_bytes, self._coming))
            for index in self._offloaded
        }
        self._views = [0] * len(values)  # that are there, of each value: they hold its memory
        self._outlived = [False] * len(values)  # forgotten, but for a view
        self._now = 0
        self._in_use = [0] * len(values)  # until when autograd uses what it has asked for
        self._ends: list[tuple[int, int]] = []  # (event, bytes) of tensors that are forgotten and still in use
        self._uses: dict[int, int] | None = None  # of nested values, to come in the computation that is under way
        self._needed = set[int]()  # of them, those that are needed once more
        self.left: float = float("inf")  # of the computations that are acceptable
        # Between events nothing is computed: what is held then is noted, and added to the curve at the end.
        self._spans: list[int] = []
        self._held_meanwhile: list[int] = []
        self._spots: list[int] = []  # events at which something is made, and what is held then
        self._held_there: list[int] = []

    def _make_uncached(self, index: int) -> None:
        on_the_way = [index]
        stack = list(self._profile.values[index].inputs)
        nested = False
        while stack:
            source = stack.pop()
            if self._uncached[source]:
                nested = nested or bool(self._profile.values[source].inputs)  # a mask is made from nothing else
            elif self._virtual[source] and self._lazy[source]:
                on_the_way.append(source)
                stack += self._profile.values[source].inputs
        for source in on_the_way:
            self._uncached[source] = True
            self._nested[source] = nested

    def _live_users(self) -> list[int]:
        """The values that will be computed again at some time: the dropped ones and what leads to them."""
        stack = list(self._dropped)
        seen = set(self._dropped)
        while stack:
            for source in self._profile.values[stack.pop()].inputs:
                if self._virtual[source] and self._lazy[source] and source not in seen:
                    seen.add(source)
                    stack.append(source)
        return list(seen)

    def _wants_in_order(self) -> list[tuple[int, int]]:
        """When each value is waited for once more: where autograd saves it, and where what is made from it is saved."""
        values = self._profile.values
        first = dict[int, int]()
        for event, value in self._profile.saves:
            first.setdefault(value, event)
        wants = list(self._profile.saves)
        for index in sorted(self._live_users(), reverse=True):  # inputs come first
            event = first.get(index, len(self._profile.curve))
            for source in values[index].inputs:
                wants.append((event, source))
                if self._virtual[source]:
                    first[source] = min(event, first.get(source, event))
        return sorted(wants, reverse=True)

    def run(self) -> Forecast:
        profile = self._profile
        end = len(profile.curve)
        change = [0] * (end + 2)
        kept_in = {value.storage for index, value in enumerate(profile.values) if index not in self._dropped}
        compact = dict.fromkeys(range(len(profile.storages)), 0)
        for value in profile.values:
            if value.compact:
                compact[value.storage] += value.compact
        compressed = [value for value in (profile.values[index] for index in self._dropped) if value.compact]
        for value in compressed:  # beside the mask itself, as long as forward has a use for that
            change[value.saved] += value.compact
            change[max(value.saved, profile.storages[value.storage].unused + 1)] -= value.compact
        (until, needed) = self._needed_until()
        left = self._left()
        kept = 0
        for call, begun in self._drawing.items():
            change[begun] += profile.values[call].state
            change[max(begun, until[call])] -= profile.values[call].state
        for number, storage in enumerate(profile.storages):
            if number in kept_in:
                kept += storage.num_bytes
                if needed[number] > storage.freed:  # backward has had it, and has yet to compute something from it
                    change[storage.freed] += storage.num_bytes
                    change[needed[number]] -= storage.num_bytes
            elif storage.unused < storage.freed:
                gone = storage.num_bytes - compact[number]
                change[min(max(storage.unused + 1, left.get(number, 0)), storage.freed)] -= gone
                change[storage.freed] += gone
                kept += compact[number]
        base = self._outline.curve + np.cumsum(np.array(change[:end], dtype=np.int64))
        for value in compressed:
            self._see(max(0, value.saved - 1), value.compact + value.num_bytes)  # it is expanded once, to compare
        position = 0
        for request in profile.requests:
            self._advance(position, request.event)
            position = request.event
            self._serve(request.value, request.event, request.released)
        self._advance(position, end)
        self._between = base + np.repeat(self._held_meanwhile, self._spans)
        self._at_spots = base[self._spots] + np.array(self._held_there, dtype=np.int64)
        peak = int(max(0, self._between.max(initial=0), self._at_spots.max(initial=0)))
        return Forecast(peak, kept, self._seconds + self._exposed())

    def curve(self) -> np.ndarray:
        """Bytes at every event, after :meth:`run`: the most that is there between it and the next."""
        found: np.ndarray = np.maximum(self._between, 0)
        np.maximum.at(found, self._spots, self._at_spots)
        return found

    def _left(self) -> dict[int, int]:
        """The event at which the last value of every offloaded storage has left for the host."""
        values = self._profile.values
        left = dict[int, int]()
        for position, index in enumerate(self._offloaded):
            later = position + self._profile.prefetch_depth
            event = (
                values[self._offloaded[later]].saved if later < len(self._offloaded) else self._profile.forward_events
            )
            left[values[index].storage] = max(left.get(values[index].storage, 0), event)
        return left

    def _exposed(self) -> float:
        """Seconds of the copies that no computation hides."""
        out = [self._profile.values[index].copying for index in self._offloaded]
        back = self._fetches
        if not self._profile.prefetch_depth:
            return sum(out) + sum(back)
        forward = self._profile.forward_seconds
        backward = self._profile.step_seconds - forward + self._seconds
        beyond = max(sum(out) - forward, max(out, default=0.0)) + max(sum(back) - backward, max(back, default=0.0))
        return beyond + HIDDEN_SHARE * (sum(out) + sum(back))

    def _needed_until(self) -> tuple[list[int], list[int]]:
        """The event at which every value and every kept storage goes, if all that holds it is computed from it."""
        profile = self._profile
        until = [0] * len(profile.values)
        storages = [0] * len(profile.storages)
        for request in profile.requests:
            until[request.value] = max(until[request.value], request.released)
        for index in range(len(until) - 1, -1, -1):  # inputs come first
            value = profile.values[index]
            if self._lazy[index]:
                for source in value.inputs:
                    until[source] = max(until[source], until[index])
            elif value.storage >= 0:
                storages[value.storage] = max(storages[value.storage], until[index])
        return until, storages

    def _see(self, event: int, beside: int = 0) -> None:
        self._spots.append(min(event, len(self._outline.curve) - 1))
        self._held_there.append(self._held + self._coming.num_bytes + beside)

    def _advance(self, start: int, stop: int) -> None:
        """Notes what is held between two requests."""
        event = start
        ends = self._ends
        while event < stop:
            while ends and ends[0][0] <= event:
                self._held -= heapq.heappop(ends)[1]
            until = min(stop, ends[0][0]) if ends else stop
            self._spans.append(until - event)
            self._held_meanwhile.append(self._held + self._coming.num_bytes)
            event = until

    def _serve(self, wanted: int, event: int, released: int) -> None:
        self._now = event
        while self._wants and self._wants[-1][0] <= event:
            value = self._wants.pop()[1]
            self._pending[value] += 1
            self._wanted[value] += 1
        while self._ends and self._ends[0][0] <= event:
            self._held -= heapq.heappop(self._ends)[1]
        if not self._lazy[wanted]:
            return
        if not self._there[wanted]:
            self._compute(wanted, event)
        self._in_use[wanted] = max(self._in_use[wanted], released)
        if self._profile.values[wanted].picked:  # autograd uses the memory of the whole
            (whole,) = self._profile.values[wanted].inputs
            self._in_use[whole] = max(self._in_use[whole], released)
        self._asked(wanted)

    def _compute(self, wanted: int, event: int) -> None:
        values = self._profile.values
        inputs = self._inputs
        there = self._there
        stack = [wanted]
        made = set[int]()
        later = list[int]()
        self._uses = None
        while stack:
            index = stack[-1]
            if there[index]:
                stack.pop()
                continue
            missing = [source for source in inputs[index] if not there[source]]
            if missing:
                if len(missing) > 1:
                    missing.sort(key=self._has_all, reverse=True)
                stack += missing
                continue
            stack.pop()
            there[index] = True
            self.left -= 1
            if self.left < 0:
                raise _TooOftenError
            if (slot := self._slots.get(index)) is not None:
                self._fetches.append(values[index].copying)
                self._prefetcher.on_unpack(slot, 0)
            else:
                self._seconds += values[index].seconds
            if size := self._sizes[index]:
                self._held += size
            else:
                for source in self._viewed(index):
                    self._views[source] += 1
            self._see(event, self._beside[index])
            self._release_nested(wanted, index)
            if later or (index in made and not self._uncached[index]):
                later.append(index)
            else:
                made.add(index)
                self._used(index)
            self._needed.clear()
        for index in later:
            self._used(index)

    def _has_all(self, index: int) -> bool:
        return all(self._there[source] for source in self._profile.values[index].inputs)

    def _release_nested(self, wanted: int, index: int) -> None:
        """Forgets what ``index`` was made from, of nested values, but for what is needed until ``wanted`` is there."""
        sources = [source for source in self._inputs[index] if self._nested[source]]
        if not sources:
            return
        if self._uses is None:
            self._uses = self._uses_to_come(wanted)  # without those of ``index``, which is there
        else:
            for source in sources:
                self._uses[source] = self._uses.get(source, 0) - 1
        for source in sources:
            if self._uses.get(source, 0) > 0:
                self._needed.add(source)
            else:
                self._forget(source)

    def _uses_to_come(self, wanted: int) -> dict[int, int]:
        """How often each nested value is an input of what is not there yet on the way to ``wanted``."""
        uses = dict[int, int]()
        stack = [wanted]
        seen = {wanted}
        while stack:
            index = stack.pop()
            if self._there[index]:
                continue
            for source in self._profile.values[index].inputs:
                if self._nested[source]:
                    uses[source] = uses.get(source, 0) + 1
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return uses

    def _used(self, index: int) -> None:
        for source in self._profile.values[index].inputs:
            if not self._uncached[index]:
                self._asked(source)
            elif self._uncached[source] and not self._nested[source]:
                self._forget(source)

    def _asked(self, index: int) -> None:
        stack = [index]
        while stack:
            index = stack.pop()
            self._pending[index] -= 1
            if not self._lazy[index]:
                continue
            if self._uncached[index] or self._pending[index] <= 0:
                self._forget(index)
            if self._pending[index] <= 0:
                self._pending[index] = self._wanted[index]  # another backward through the same graph starts anew
                if self._uncached[index]:
                    stack += self._profile.values[index].inputs

    def _viewed(self, index: int) -> tuple[int, ...]:
        """What a value without memory of its own is a view of."""
        return tuple(source for source in self._inputs[index] if self._lazy[source])

    def _forget(self, index: int) -> None:
        if self._there[index] and index not in self._needed:
            self._there[index] = False
            self._outlived[index] = self._views[index] > 0
            if not self._outlived[index]:
                self._free(index)

    def _free(self, index: int) -> None:
        size = self._sizes[index]
        if self._in_use[index] > self._now:  # forgotten by us, and still in use by autograd
            heapq.heappush(self._ends, (self._in_use[index], size))
            self._in_use[index] = 0
        else:
            self._held -= size
        for source in () if size else self._viewed(index):
            self._views[source] -= 1
            if self._outlived[source] and not self._views[source]:
                self._outlived[source] = False
                self._free(source)
