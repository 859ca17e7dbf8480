"""The order in which offloaded tensors are prefetched: which come back before backward unpacks them.

Backward unpacks nearly in the reverse order of forward, so what was saved just before is fetched next. The rule itself
knows no device: offloaded submodules and plans follow it with tensors, the forecast of a plan with bytes.
"""

import itertools
import weakref
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

_REACH = 8  # slots: so far away from the one that was unpacked last is the next one sought


class Fetchable(Protocol):
    """What can be fetched, and released again."""

    def start_fetch(self) -> None:
        """Begins to fetch; nothing more where that was done."""

    def release(self) -> None:
        """Gives the memory of what was fetched free."""


F = TypeVar("F", bound=Fetchable)


class PrefetchSlot(Generic[F]):
    """What the graph holds in place of a tensor that an operator saved; nothing else holds the offloaded values.

    Attributes:
        number: Its place in the order of forward.
        offloaded: What it stands for; several slots may share it.
        used_by: The last backward that unpacked it.
    """

    def __init__(self, number: int, offloaded: F) -> None:
        self.number = number
        self.offloaded = offloaded
        # By backward, as a graph that is retained may be gone through again.
        self.used_by = -1


class Prefetcher(Generic[F]):
    """Offloaded values in the order of forward, and those of them that are on their way back.

    Args:
        count: How many are on their way at the most.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._numbers = itertools.count()
        # The graph holds the slots: what it has let go of is not fetched any more.
        self._slots: weakref.WeakValueDictionary[int, PrefetchSlot[F]] = weakref.WeakValueDictionary()
        self._ahead: list[tuple[int, weakref.ref[F]]] = []  # on its way back, for which slot

    def slot_for(self, offloaded: F) -> PrefetchSlot[F]:
        """The next slot in the order of forward."""
        slot = PrefetchSlot(next(self._numbers), offloaded)
        self._slots[slot.number] = slot
        return slot

    def on_unpack(self, slot: PrefetchSlot[F], backward: int) -> None:
        """``backward`` has unpacked ``slot``: the next ones that it will unpack are on their way from then on.

        Args:
            slot: What was unpacked; it is released unless another slot that is on its way stands for the same.
            backward: Its number; negative outside of any, where nothing is fetched ahead.
        """
        slot.used_by = backward
        ahead = []
        for number, reference in self._ahead:
            offloaded = reference()
            # The one was let go of on its way, and the other one has arrived.
            if offloaded is None or offloaded is slot.offloaded:
                continue
            if number > slot.number + _REACH:  # backward went by
                offloaded.release()
            else:
                ahead.append((number, offloaded))
        if backward >= 0:
            for other in self._next(slot.number, backward):
                if len(ahead) >= self._count:
                    break
                # Several slots may stand for one tensor, which is fetched once.
                if all(other.offloaded is not offloaded for _, offloaded in ahead):
                    other.offloaded.start_fetch()
                    ahead.append((other.number, other.offloaded))
        # Another slot that stands for it will be unpacked soon.
        if all(slot.offloaded is not offloaded for _, offloaded in ahead):
            slot.offloaded.release()
        self._ahead = [(number, weakref.ref(offloaded)) for number, offloaded in ahead]

    def _next(self, number: int, backward: int) -> Iterator[PrefetchSlot[F]]:
        """Slots that ``backward`` has yet to unpack, the likeliest first."""
        rest = range(number + 1, number + 1 + _REACH)  # of an operator that keeps several, in the order of forward
        for other in (*rest, *range(number - 1, number - 1 - _REACH, -1)):
            slot = self._slots.get(other)
            if slot is not None and slot.used_by != backward:
                yield slot

    def cancel(self) -> None:
        """Nothing is on its way any more."""
        for _, reference in self._ahead:
            if (offloaded := reference()) is not None:
                offloaded.release()
        self._ahead.clear()
