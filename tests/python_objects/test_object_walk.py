"""What a walk over objects finds, where it stops, and what stands in the way."""

import itertools
import types
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.python_objects.object_walk import ObjectWalk, WalkOptions


def walk(held: Any, **options: Any) -> ObjectWalk:
    return ObjectWalk((), (), {"self.held": held}, WalkOptions(follow_code=False, **options))


class Plain:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


def test_it_goes_through_containers_objects_closures_and_methods() -> None:
    deep = [1]
    table = {"a": (Plain(deep), None)}
    found = walk([table, Plain(table).__init__, lambda: deep])
    assert found.obstacle == ""
    assert [entry.path for entry in found.entries if entry.value is deep] == ["self.held"]
    (path,) = [entry.path for entry in walk(Plain(deep)).entries if entry.value is deep]
    assert path == "self.held.inside"


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (itertools.count(), "self.held is a count, whose state cannot be seen"),
        (nn.Identity(), "self.held is a module outside of it"),
        ((one for one in range(3)), "self.held is a generator, whose state cannot be seen"),
    ],
    ids=["iterator", "module", "generator"],
)
def test_what_hides_its_state_is_an_obstacle(held: Any, why: str) -> None:
    assert walk(held).obstacle == why


def test_types_that_show_everything_are_told_from_those_that_do_not() -> None:
    assert walk(types.SimpleNamespace(a=[1])).obstacle == ""
    assert walk(Plain([1])).obstacle == ""
    assert "whose state cannot be seen" in walk([iter([1])]).obstacle


def test_of_its_own_only_what_the_user_wrote_is_looked_into() -> None:
    @lru_cache
    def remembered() -> int:
        return 1

    found = walk([Plain(1), remembered], only_own=True)
    assert found.caches == [remembered]
    library = torch.optim.SGD([torch.zeros(1)], 0.1)
    assert walk(library, only_own=True).obstacle == "self.held is a SGD, which is not looked into"


def test_a_walk_ends() -> None:
    assert "too many objects" in walk([[n] for n in range(100)], most=10).obstacle
