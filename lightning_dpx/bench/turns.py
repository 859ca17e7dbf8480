"""In which order the contestants of a comparison take their turns."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """``items`` from another one on at every turn, so that none always comes after the same neighbor.

    Args:
        items: At least one.
        turn: Counted from 0; after as many turns as items the first order comes again.
    """
    # What a step leaves behind (caches, a warm processor) would else always favor the same one.
    start = turn % len(items)
    return [*items[start:], *items[:start]]
