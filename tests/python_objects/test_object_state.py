"""What lies behind a module's attributes is compared and put back, wherever it is kept."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from lightning_dpx.python_objects.object_state import ObjectState


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = 1
        self.items = [[1]]
        self.table = {"a": {"b": 1}}
        self.seen = {1}
        self.array = np.zeros(3)
        self.slots = Slotted()
        self.noise = random.Random(1)
        held = [0]

        def count() -> int:
            held[0] += 1
            return held[0]

        self.count = count


WRITES: dict[str, Callable[[Keeps], object]] = {
    "number": lambda module: setattr(module, "number", 2),
    "items": lambda module: module.items[0].append(2),
    "table": lambda module: module.table["a"].update(b=2),
    "seen": lambda module: module.seen.add(2),
    "array": lambda module: module.array.fill(1),
    "slots": lambda module: setattr(module.slots, "count", 1),
    "count": lambda module: module.count(),
    "new": lambda module: setattr(module, "new", 1),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_seen_by_its_path_and_put_back(name: str) -> None:
    module = Keeps()
    state = ObjectState([module], follow_code=False, copies=True)
    assert not state.obstacle
    before = state.marks()
    assert state.difference(before, state.marks()) == ""
    WRITES[name](module)
    assert name in state.difference(before, state.marks()) or name == "new"
    assert state.difference(before, state.marks())
    assert state.put_back(before) == ""
    assert state.difference(before, state.marks()) == ""
    assert not hasattr(module, "new")
    assert module.items == [[1]]
    assert module.count() == 1, "the closure counts from where it was"


def test_a_generator_moves_on_without_a_difference_and_is_put_back() -> None:
    module = Keeps()
    state = ObjectState([module])
    before = state.marks()
    first = module.noise.random()
    assert state.difference(before, state.marks()) == ""
    state.put_back(before)
    assert module.noise.random() == first


def test_what_nobody_can_see_into_is_an_obstacle_by_its_path() -> None:
    module = Keeps()
    module.lines = iter([1, 2])
    assert "Keeps.lines" in ObjectState([module]).obstacle
    other = Keeps()
    other._trainer = object()
    assert ObjectState([other]).obstacle == "Keeps belongs to a trainer"


def test_tensors_behind_attributes_count_by_version_and_parameters_not_at_all() -> None:
    module = Keeps()
    module.cache = [torch.zeros(2)]
    module.linear = nn.Linear(1, 1)
    state = ObjectState([module, module.linear])
    assert [id(tensor) for tensor in state.tensors()] == [id(module.cache[0])]
    before = state.marks()
    with torch.no_grad():
        module.linear.weight.add_(1)
    assert state.difference(before, state.marks()) == ""
    module.cache[0].add_(1)
    assert "cache" in state.difference(before, state.marks())
