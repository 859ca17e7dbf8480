"""What has been set or deleted on the user's module is told once, and by whom; a step may begin again."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.python_objects.object_contents import OF_EVERY_MODULE
from lightning_dpx.replicas.seen_attributes import AttributeChanges, SeenAttributes


@pytest.fixture
def modules() -> list[Any]:
    return [nn.Identity(), nn.Identity()]


@pytest.fixture
def seen(modules: list[Any]) -> SeenAttributes:
    modules[1].count = 1
    seen = SeenAttributes(modules, OF_EVERY_MODULE | {"private"})
    assert list(seen.take_changes()) == []
    return seen


def test_changes_are_told_once(modules: list[Any], seen: SeenAttributes) -> None:
    modules[0].name = "new"
    modules[0].private = 1
    del modules[1].count
    expected = [AttributeChanges(0, {"name": "new"}, set()), AttributeChanges(1, {}, {"count"})]
    assert list(seen.take_changes()) == expected
    assert list(seen.take_changes()) == []


def test_what_the_replicas_could_not_get_is_told_again(modules: list[Any], seen: SeenAttributes) -> None:
    modules[0].name = "new"
    changes = seen.take_changes()
    next(changes)
    changes.close()
    modules[0].other = "to be looked at"
    assert [one.new for one in seen.take_changes()] == [{"name": "new", "other": "to be looked at"}]


def test_what_a_step_sets_is_its_own(modules: list[Any], seen: SeenAttributes) -> None:
    modules[1].count = 2
    seen.note_rebound()
    modules[0].by_hook = 1
    assert seen.is_rebound(1, "count")
    assert not seen.is_rebound(0, "by_hook")
    seen.forget_rebound()
    assert not seen.is_rebound(1, "count")


def test_a_step_that_runs_again_finds_what_it_found(modules: list[Any], seen: SeenAttributes) -> None:
    modules[0].total = torch.zeros(2)
    modules[0].large = torch.zeros(5000)
    list(seen.take_changes())
    seen.hold_tensors()
    modules[0].total = modules[0].total + 1
    modules[1].count = 2
    modules[1].made = "by the step"
    assert not seen.tensors_are_lost
    seen.put_back()
    assert modules[0].total.tolist() == [0, 0]
    assert modules[1].count == 1
    assert not hasattr(modules[1], "made")
    modules[0].large.add_(1)
    assert seen.tensors_are_lost
    seen.begin()
    assert not seen.tensors_are_lost, "another step has begun"


def test_submodules_may_be_exchanged(modules: list[Any], seen: SeenAttributes) -> None:
    others: list[Any] = [nn.Identity(), nn.Identity()]
    others[1].count = 3
    seen.follow(others)
    assert list(seen.take_changes()) == [AttributeChanges(1, {"count": 3}, set())]
