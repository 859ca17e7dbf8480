"""Containers that all replicas share are watched for what a step does to them, and can hold again what they held."""

import itertools
from collections import Counter, deque
from typing import Any

import pytest
import torch

from lightning_dpx.replicas.shared_containers import SharedContainers

HELD = (0, "held")


def watched(value: Any) -> SharedContainers:
    containers = SharedContainers(lambda _: False)
    containers.watch(HELD, value)
    return containers


def test_a_change_at_any_depth_is_seen() -> None:
    inner = [1]
    value = {"a": ({"b": inner},)}
    containers = watched(value)
    assert containers.changed() == []
    inner[0] = 2
    assert containers.changed() == [HELD]
    assert containers.has_changed()
    assert list(containers.grown()) == [], "it has as many items as before"
    inner.append(3)
    assert list(containers.grown()) == [HELD]
    containers.forget(HELD)
    assert not containers.has_changed()


def test_the_first_tensor_is_told_from_other_changes() -> None:
    value: dict[str, list[Any]] = {"a": []}
    containers = watched(value)
    value["a"].append(1)
    assert not containers.lead_to_tensors(HELD, value)
    value["a"].append(torch.zeros(1))
    assert containers.lead_to_tensors(HELD, value)
    containers.watch(HELD, value)
    value["a"].append(2)
    assert not containers.has_changed(), "what holds a tensor is mirrored, and watched there"


@pytest.mark.parametrize("make", [list, deque, set, lambda items: Counter(dict.fromkeys(items, 2))])
def test_all_hold_again_what_they_held(make: Any) -> None:
    value = make([1, 2])
    before = make([1, 2])
    containers = watched([value])
    if isinstance(value, Counter):
        value.update([1, 3])
    else:
        value.pop()
    assert value != before
    containers.put_back()
    assert value == before


def test_of_a_long_list_what_was_appended_is_taken_out() -> None:
    value = list(range(1000))
    containers = watched(value)
    value[0] = 7  # which is not known of long ones
    value.append(1)
    containers.put_back()
    assert value == [7, *range(1, 1000)]


def test_tensors_of_other_devices_come_home() -> None:
    value: dict[str, Any] = {"pair": (torch.zeros(2, device="meta"), 1), "items": [torch.ones(1)]}
    containers = SharedContainers(lambda _: False, torch.device("meta"))
    containers.watch(HELD, empty := {"inner": list[Any]()})
    empty["inner"].append(value)
    containers.bring_home()
    assert value["pair"][0].device.type == "meta"
    assert value["pair"][1] == 1
    assert value["items"][0].device.type == "cpu", "a step has put it on the host"


class CountsItsItems(list[Any]):
    """Does more than store, as observable collections do."""

    added = 0

    def append(self, item: Any) -> None:
        type(self).added += 1
        super().append(item)

    def extend(self, items: Any) -> None:
        type(self).added += len(items)
        super().extend(items)


def test_what_a_subclass_does_when_it_is_written_is_not_done_again() -> None:
    value = CountsItsItems([1])
    containers = watched(value)
    value.append(2)
    containers.put_back()
    assert value == [1]
    assert CountsItsItems.added == 1


@pytest.mark.parametrize(("value", "puts_back"), [({1: 1}, True), (dict.fromkeys(range(100)), False)])
def test_a_large_dict_cannot_be_put_back_once_it_has_changed(value: dict[Any, Any], puts_back: bool) -> None:
    containers = watched(value)
    assert containers.can_put_back()
    value["more"] = 1
    assert containers.can_put_back() is puts_back


def test_a_large_list_that_has_grown_can_be_put_back() -> None:
    value = list(range(100))
    containers = watched(value)
    value.append(1)
    assert containers.can_put_back()


def test_what_an_iterator_keeps_is_left_to_it() -> None:
    """A cycle has a list of what it has given; taken from it, it would end with what is left of its first round."""
    listed = [1, 2, 3]
    value = {"weights": itertools.cycle(listed), "listed": listed}
    containers = watched(value)
    assert next(value["weights"]) == 1
    assert list(containers.grown()) == []
    listed.append(4)
    assert list(containers.grown()) == [HELD], "this one is not the iterator's alone"
    assert containers.can_put_back()
    containers.put_back()
    assert listed == [1, 2, 3]
    assert list(itertools.islice(value["weights"], 5)) == [2, 3, 1, 2, 3]


class Reading:
    """An iterator of the user's, beside whose items a step takes notes."""

    def __init__(self) -> None:
        self.items = itertools.count()
        self.given: list[int] = []
        self.notes: list[str] = []

    def __iter__(self) -> "Reading":
        return self

    def __next__(self) -> int:
        self.given.append(next(self.items))
        return self.given[-1]


def test_what_a_step_writes_to_an_iterator_of_the_users_is_the_iterators_only_where_it_was_asked() -> None:
    asked: list[Any] = []
    containers = SharedContainers(lambda _: False, was_asked=lambda iterator: iterator in asked)
    reading = Reading()
    containers.watch(HELD, reading)
    reading.notes.append("a step's")
    assert list(containers.grown()) == [HELD]
    containers.put_back()
    assert reading.notes == []
    asked.append(reading)
    next(reading)
    assert list(containers.grown()) == []
    containers.put_back()
    assert reading.given == [0]
