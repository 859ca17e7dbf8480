from typing import Any

import pytest
import torch

from lightning_dpx.replicas.merging.equality import compare_trees
from lightning_dpx.replicas.merging.tolerance import Tolerance

EXACT = Tolerance.of(torch.float64, 1000)


class Point:
    """Without equality; what it holds is in slots."""

    __slots__ = ("__dict__", "x")

    def __init__(self, x: Any) -> None:
        self.x = x


class Labeled(Point):
    __slots__ = ("label", "unset")

    def __init__(self, x: Any, label: str) -> None:
        super().__init__(x)
        self.label = label


def with_unset(point: Labeled) -> Labeled:
    point.unset = point  # may refer to itself
    return point


def in_a_circle(x: int) -> Point:
    first = Point(None)
    first.x = [Labeled(first, "back"), x]
    return first


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        (Point(1), Point(1), True),
        (Point(1), Point(2), False),
        (Point(torch.ones(2)), Point(torch.ones(2)), True),
        (Labeled(1, "a"), Labeled(1, "b"), False),
        (Labeled(1, "a"), Labeled(2, "a"), False),
        (Labeled(1, "a"), Labeled(1, "a"), True),
        (with_unset(Labeled(1, "a")), Labeled(1, "a"), False),
        (with_unset(Labeled(1, "a")), with_unset(Labeled(1, "a")), True),
        ([Point(Point(1))], [Point(Point(2))], False),
        (in_a_circle(1), in_a_circle(1), True),
        (in_a_circle(1), in_a_circle(2), False),
    ],
)
def test_objects_with_slots_are_the_same_where_those_hold_the_same(one: Any, two: Any, same: bool) -> None:
    ((_, error),) = compare_trees(one, two, EXACT)
    assert (error == 0) is same
