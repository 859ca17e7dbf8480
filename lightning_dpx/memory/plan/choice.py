"""What a planner decides."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """What to drop.

    Attributes:
        dropped: Units.
        uncached: Those of them that are forgotten after every use, for less memory and more time.
    """

    dropped: frozenset[int] = frozenset()
    uncached: frozenset[int] = frozenset()
