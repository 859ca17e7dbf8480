"""Which storages are there at every event of a step: the bookkeeping behind a memory trace.

An event is an operator, the end of a storage, or a mark of the caller's; they are numbered as they come.

[Note: who has the memory of a sum] Autograd may add gradients up in the memory of one of them (see
gradient_terms.py), and while a trace watches, it does so in a storage of its own. Only what comes next tells what would
have been: if the term goes right after the sum, the sum lives on in its memory, and there is no second allocation. If
anything else comes first, others hold the term, and the sum has memory of its own. Until then the sum is *open*.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from lightning_dpx.memory.tracing.allocator_account import OperatorMemory
from lightning_dpx.torch_compat import key_of


class Allocation:
    """One storage: its bytes, and the events at which it came and went (``None``: it is still there)."""

    __slots__ = ("born", "died", "died_operator", "num_bytes")

    def __init__(self, num_bytes: int, born: int) -> None:
        self.num_bytes: int = num_bytes
        self.born: int = born
        self.died: int | None = None
        self.died_operator: int | None = None


class _PeakWithin:
    """What an operator took that also made what stays, such as the gradient of a parameter.

    At the moment when it had most inside, that may not have been there yet.
    """

    __slots__ = ("_before", "_made", "_taken")

    def __init__(self, before: int, taken: OperatorMemory, made: list[Allocation]) -> None:
        self._before = before
        self._taken = taken
        self._made = made

    def most_of_passing(self) -> int:
        """Bytes at the most while it ran, without those of its results that are still there."""
        staying = self._taken.until_each_stays()
        lasting = Counter(allocation.num_bytes for allocation in self._made if allocation.died is None)
        # The gradient of a convolution's input may be as large as that of its weight, and comes first:
        # of several of one size those last that came last, so that the most is never too low.
        passing = Counter(size for size, _ in staying) - lasting
        most = there = 0
        for size, before in staying:
            most = max(most, before - there)
            if passing[size]:
                passing[size] -= 1
            elif lasting[size]:
                lasting[size] -= 1
                there += size
        return self._before + most


@dataclass(frozen=True, slots=True)
class _OpenSum:
    """A sum of gradients of which it is not known yet whether it has memory of its own."""

    storage: torch.UntypedStorage
    term: Allocation  # whose memory it may take over


class StorageLedger:
    """Storages that come and go, as a curve of bytes over events.

    Args:
        makes: Is given the bytes of every storage that comes.

    Attributes:
        lock: Held by whoever notes something; the end of a storage may be told in the middle of anything.
        allocations: All storages that have come.
        live: Bytes of those that are still there.
        curve: The most bytes at every event.
        operators: The event of every operator.
        before_event: Called before every event, with which something else is counted.
    """

    def __init__(self, makes: Callable[[int], None] | None = None) -> None:
        self.lock = threading.RLock()  # backward has a thread per device
        self.allocations: list[Allocation] = []
        self.live: int = 0
        self.curve: list[int] = []
        self.operators: list[int] = []
        self.before_event: Callable[[], None] | None = None
        self._makes = makes
        self._present: dict[int, tuple[weakref.ref[Any], Allocation]] = {}  # by the key of a storage
        self._open: _OpenSum | None = None
        self._courses: dict[int, _PeakWithin] = {}  # by the event of an operator that also made what may stay

    @property
    def now(self) -> int:
        """The number of events so far."""
        return len(self.curve)

    def allocation_of(self, storage: torch.UntypedStorage) -> Allocation | None:
        """What is known of ``storage``; nothing if it was there before."""
        entry = self._present.get(key_of(storage))
        if entry is not None:
            return entry[1]
        return None

    def add_event(self, inside: int = 0) -> int:
        """Adds an event in which ``inside`` bytes are there beside the storages; returns its number."""
        # Fakes of sharded parameters are resized without an operator, so they are asked for at every event.
        if self.before_event is not None:
            self.before_event()
        self.curve.append(self.live + inside)
        return len(self.curve) - 1

    def add_operator(self, inside: int, before: int, num_earlier: int, taken: OperatorMemory) -> None:
        """Adds the event of an operator, whose results have been added.

        Args:
            inside: Bytes that it had at the most beside its results.
            before: Bytes that were there when it began.
            num_earlier: Allocations that there were then.
            taken: What the allocator tells of it.
        """
        # What it made may be the gradient of a parameter, which stays, or an activation, which does not.
        made = self.allocations[num_earlier:]
        if inside and made:
            # Whether its results stay is known only at the end of the step, and the most without them depends on that.
            self._courses[self.now] = _PeakWithin(before, taken, made)
        self.operators.append(self.add_event(inside))

    def add(self, storage: torch.UntypedStorage) -> Allocation:
        """Counts a storage that is new."""
        allocation = Allocation(storage.nbytes(), self.now)
        self.allocations.append(allocation)
        self.live += allocation.num_bytes
        self._follow(storage, allocation)
        if self._makes is not None:
            self._makes(allocation.num_bytes)
        return allocation

    def add_open_sum(self, inside: int, storage: torch.UntypedStorage, term: Allocation) -> None:
        """Adds the event of a sum that may be in the memory of its ``term``.

        Args:
            inside: Bytes that it had at the most beside the sum.
            storage: Of the sum.
            term: The gradient that it may have been added to in place.
        """
        self._open = _OpenSum(storage, term)
        self.operators.append(self.add_event(inside))

    def settle(self) -> None:
        """Before anything else comes: an open sum has memory of its own, as its term is still there."""
        if self._open is not None:
            storage = self._open.storage
            self._open = None
            self.add(storage)

    def _follow(self, storage: torch.UntypedStorage, allocation: Allocation) -> None:
        """From now on the end of ``storage`` is the end of ``allocation``."""
        # The storage itself must not be in what is called at its end: it would never come.
        address = key_of(storage)

        def end(_reference: Any) -> None:
            self._end(address, allocation)

        self._present[address] = weakref.ref(storage, end), allocation

    def _end(self, address: int, allocation: Allocation) -> None:
        """The storage that was followed there as ``allocation`` has ended."""
        with self.lock:
            # Another storage may have got the address before this one's end was told.
            entry = self._present.get(address)
            if entry is not None and entry[1] is allocation:
                del self._present[address]
            # See [Note: who has the memory of a sum].
            if self._open is not None and allocation is self._open.term:
                storage = self._open.storage
                self._open = None
                self._follow(storage, allocation)
                return
            self.live -= allocation.num_bytes
            allocation.died = self.add_event()
            allocation.died_operator = len(self.operators)

    def passing(self, apart: Collection[int] = (), gone: Mapping[int, int] = MappingProxyType({})) -> list[int]:
        """The curve without the allocations that are still there, and without those whose ids are ``apart``.

        Args:
            apart: Ids of allocations.
            gone: Those that are to be in the curve until some event, by their ids.
        """
        # By how much the bytes change that are to be left out, at every event; summed up below.
        lasting = [0] * (len(self.curve) + 1)
        for allocation in self.allocations:
            if allocation.died is None or id(allocation) in apart:
                left_out = gone.get(id(allocation), allocation.born)
                lasting[min(left_out, len(self.curve))] += allocation.num_bytes
                if allocation.died is not None:
                    lasting[allocation.died] -= allocation.num_bytes
        result = []
        sum_so_far = 0
        for event, live in enumerate(self.curve):
            before = sum_so_far
            sum_so_far = sum_so_far + lasting[event]
            result.append(live - sum_so_far)
            # An operator may have had most inside before its result came that is left out here.
            if lasting[event] and event in self._courses:
                result[-1] = max(result[-1], self._courses[event].most_of_passing() - before)
        return result
