"""Which resting tensors come back before backward asks for them, and the order that this goes by.

Backward asks nearly in the reverse order of forward, so what was saved just before is fetched next. The rule itself
knows no device: offloaded submodules and plans follow it with tensors, the forecast of a plan with bytes.
"""

import itertools
import weakref
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

_REACH = 8  # so far away from the last one that was asked for is the next one sought


class Fetched(Protocol):
    """What can be fetched, and forgotten again."""

    def start(self) -> None:
        """Begins to fetch; nothing more where that was done."""

    def drop(self) -> None:
        """Forgets what was fetched."""


F = TypeVar("F", bound=Fetched)


class Slot(Generic[F]):
    """What the graph holds in place of a tensor that an operator saved. Nothing else holds it, nor what rests.

    Attributes:
        number: Its place in the order of forward.
        resting: What it stands for; several slots may share it.
        used_by: The last backward that asked.
    """

    def __init__(self, number: int, resting: F) -> None:
        self.number = number
        self.resting = resting
        self.used_by = -1


class Prefetcher(Generic[F]):
    """What rests, in the order of forward, and what of it is on its way back.

    Args:
        count: How many are on their way at the most.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._numbers = itertools.count()
        self._slots: weakref.WeakValueDictionary[int, Slot[F]] = weakref.WeakValueDictionary()
        self._ahead: list[tuple[int, weakref.ref[F]]] = []  # on its way back, for which slot

    def slot_for(self, resting: F) -> Slot[F]:
        """The next slot in the order of forward."""
        slot = Slot(next(self._numbers), resting)
        self._slots[slot.number] = slot
        return slot

    def asked(self, slot: Slot[F], backward: int) -> None:
        """``backward`` has what ``slot`` stands for: the next ones that it will ask for are on their way then.

        Args:
            slot: What was asked for; it is forgotten unless another slot will ask for the same.
            backward: Its number; negative outside of any, where nothing is fetched ahead.
        """
        slot.used_by = backward
        ahead = []
        for number, reference in self._ahead:
            resting = reference()
            if resting is None or resting is slot.resting:
                continue
            if number > slot.number + _REACH:  # backward went by
                resting.drop()
            else:
                ahead.append((number, resting))
        if backward >= 0:
            for other in self._next(slot.number, backward):
                if len(ahead) >= self._count:
                    break
                if all(other.resting is not resting for _, resting in ahead):
                    other.resting.start()
                    ahead.append((other.number, other.resting))
        if all(slot.resting is not resting for _, resting in ahead):
            slot.resting.drop()
        self._ahead = [(number, weakref.ref(resting)) for number, resting in ahead]

    def _next(self, number: int, backward: int) -> Iterator[Slot[F]]:
        """Slots that ``backward`` has yet to ask for, the likeliest first."""
        rest = range(number + 1, number + 1 + _REACH)  # of an operator that keeps several, in the order of forward
        for other in (*rest, *range(number - 1, number - 1 - _REACH, -1)):
            slot = self._slots.get(other)
            if slot is not None and slot.used_by != backward:
                yield slot

    def forget(self) -> None:
        """Nothing is on its way any more."""
        for _, reference in self._ahead:
            if (resting := reference()) is not None:
                resting.drop()
        self._ahead.clear()
