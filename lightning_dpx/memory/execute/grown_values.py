"""How much larger the values of a step are than those that it was planned with, although it saves the same ones.

Batches of equal shapes may hold more: sequences of fewer paddings, molecules whose atoms have more neighbors. A peak
grows no faster than the values do, so their growth tells how much more has to be planned for.
"""

from collections.abc import Mapping

_FEWEST = 0.1  # of the planned bytes: fewer of them, as a forward with hooks in few places sees, tell too little


class GrownValues:
    """Compares the values of forwards with the planned ones.

    Args:
        planned: Bytes of the planned values, by name.

    Attributes:
        most: The greatest growth of a forward so far; 1.0 where all were as large as planned, or smaller.
        num_forwards: How many were compared.
    """

    def __init__(self, planned: Mapping[str, int]) -> None:
        self.most: float = 1.0
        self.num_forwards: int = 0
        self._planned = planned
        self._least = _FEWEST * sum(planned.values())
        self._seen = _Bytes()
        self._kept = _Bytes()

    def begin(self) -> None:
        """A forward begins."""
        self._seen = _Bytes()
        self._kept = _Bytes()

    def add(self, name: str, num_bytes: int, *, is_kept: bool) -> None:
        """The forward has saved a value, which stays or is dropped."""
        planned = self._planned.get(name)
        if planned is None:
            return
        self._seen.add(planned, num_bytes)
        if is_kept:
            self._kept.add(planned, num_bytes)

    def end(self) -> None:
        """The forward is over."""
        self.num_forwards += 1
        # What stays may grow while what is dropped shrinks, as rows go to other experts.
        for those in (self._seen, self._kept):
            if those.planned and those.planned >= self._least:
                self.most = max(self.most, those.found / those.planned)


class _Bytes:
    """Bytes of some values.

    Attributes:
        planned: As planned for.
        found: As they are.
    """

    __slots__ = ("found", "planned")

    def __init__(self) -> None:
        self.planned: int = 0
        self.found: int = 0

    def add(self, planned: int, found: int) -> None:
        """One more value."""
        self.planned += planned
        self.found += found
