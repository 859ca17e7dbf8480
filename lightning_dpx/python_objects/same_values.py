"""Whether dicts hold the same objects as before: seen at once, as it is asked at every call of a module."""

import operator
from itertools import chain
from typing import Any


class SameValues:
    """What some dicts held when this was made.

    Args:
        dicts: Which.

    Attributes:
        values: All that they held, one dict after the other.
    """

    def __init__(self, dicts: list[dict[Any, Any]]) -> None:
        self._dicts = dicts
        self.values: list[Any] = self._held()

    def _held(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._dicts)))

    def are_same(self) -> bool:
        """Whether each of them is the same object still."""
        # ``map`` compares them without a loop in Python.
        held = self._held()
        return len(held) == len(self.values) and all(map(operator.is_, held, self.values))
