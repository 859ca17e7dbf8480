"""Which modules have had an attribute set, exchanged or deleted: none is missed, and quiet ones are not looked at."""

import gc
import weakref

import pytest
import torch
from torch import nn

from lightning_dpx.replicas.attribute_watch import AttributeWatch


@pytest.fixture
def modules() -> list[nn.Module]:
    return [nn.Linear(1, 1), nn.ReLU(), nn.Linear(2, 2), nn.Identity()]


@pytest.fixture
def watch(modules: list[nn.Module]) -> AttributeWatch:
    watch = AttributeWatch(modules)
    for place in watch.suspects():
        watch.note(place)
    return watch


def test_all_are_suspects_until_they_are_noted(modules: list[nn.Module]) -> None:
    assert AttributeWatch(modules).suspects() == [0, 1, 2, 3]


def test_noted_modules_are_no_suspects(watch: AttributeWatch) -> None:
    assert watch.suspects() == []
    assert watch.suspects() == []


def test_what_is_set_exchanged_or_deleted_is_seen(modules: list[nn.Module], watch: AttributeWatch) -> None:
    modules[0].label = "new"
    assert watch.suspects() == [0]
    watch.note(0)
    modules[2].in_features = 3
    del modules[0].label
    assert watch.suspects() == [0, 2]
    assert watch.suspects() == [0, 2], "until they are noted"
    watch.note(0)
    watch.note(2)
    assert watch.suspects() == []


def test_an_equal_value_is_another_one(modules: list[nn.Module], watch: AttributeWatch) -> None:
    modules[1].names = ["a"]
    watch.note(1)
    assert watch.suspects() == []
    modules[1].names = ["a"]
    assert watch.suspects() == [1]


def test_an_attribute_that_moves_to_the_next_module_is_seen(modules: list[nn.Module], watch: AttributeWatch) -> None:
    value = object()
    modules[0].last = value
    watch.note(0)
    watch.suspects()
    del modules[0].last
    vars(modules[1]).update({"last": value, **{key: vars(modules[1]).pop(key) for key in list(vars(modules[1]))}})
    assert watch.suspects() == [0, 1], "although all values are the same, one after the other"


def test_modules_that_change_in_every_step_leave_the_others_quiet(
    modules: list[nn.Module], watch: AttributeWatch
) -> None:
    for count in range(5):
        modules[3].count = count + 1000
        assert watch.suspects() == [3]
        watch.note(3)
        assert watch.suspects() == []


def test_tensors_are_not_kept_alive(modules: list[nn.Module], watch: AttributeWatch) -> None:
    modules[1].last_loss = torch.ones(1)
    watch.note(1)
    loss = weakref.ref(modules[1].last_loss)
    assert watch.suspects() == [1], "it is looked at each time"
    del modules[1].last_loss
    gc.collect()
    assert loss() is None


def test_tensors_of_copies_may_be_kept(modules: list[nn.Module]) -> None:
    modules[1].table = torch.ones(1)
    watch = AttributeWatch(modules, keeps_tensors=True)
    for place in watch.suspects():
        watch.note(place)
    assert watch.suspects() == []
    modules[1].table = torch.ones(1)
    assert watch.suspects() == [1]


def test_a_value_under_another_name_is_seen(modules: list[nn.Module], watch: AttributeWatch) -> None:
    modules[1].first = None
    watch.note(1)
    assert watch.suspects() == []
    del modules[1].first
    modules[1].second = None
    assert watch.suspects() == [1]
    assert watch.suspects() == [1], "until it is noted"


def test_values_of_private_attributes_are_not_asked_for(modules: list[nn.Module]) -> None:
    watch = AttributeWatch(modules, private={"training"})
    for place in watch.suspects():
        watch.note(place)
    modules[0].eval()
    assert watch.suspects() == []
    modules[0].in_features = 7
    modules[1].eval()
    assert watch.suspects() == [0]
