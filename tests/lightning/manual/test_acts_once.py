"""Shared optimizers ask the view of the calling replica, and are what they were outside of its code."""

from abc import ABC
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.lightning.manual.acts_once import (
    Exchanged,
    acts_once,
    current_view,
    held_optimizers,
    plain_attribute,
    viewed,
)
from lightning_dpx.replicas.context import RendezvousSlot, ReplicaRank, as_rank

RANK = ReplicaRank(0, 2, RendezvousSlot())


class View:
    """Answers for one replica."""

    def __init__(self) -> None:
        self.assigned: dict[str, Any] = {}

    def attribute(self, owner: Any, name: str) -> Any:
        return f"{name} of the replica"

    def assign(self, owner: Any, name: str, value: Any) -> None:
        self.assigned[name] = value


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def test_inside_a_replica_attributes_are_the_views_and_elsewhere_the_optimizers_own() -> None:
    optimizer = sgd()
    exchanged = Exchanged()
    exchanged.add([optimizer, optimizer])
    view = View()
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    with viewed(view):
        assert current_view() is None, "no replica runs"
        assert len(optimizer.param_groups) == 1
        with as_rank(RANK):
            assert current_view() is view
            assert optimizer.step == "step of the replica"
            optimizer.note = 1
            assert plain_attribute(optimizer, "param_groups")[0]["lr"] == 0.1
    assert view.assigned == {"note": 1}
    assert not hasattr(optimizer, "note")
    exchanged.restore()
    assert type(optimizer) is torch.optim.SGD


def test_for_what_happens_once_the_classes_are_their_own_for_a_while() -> None:
    optimizer = sgd()
    exchanged = Exchanged()
    exchanged.add([optimizer])
    with exchanged.plain():
        assert type(optimizer) is torch.optim.SGD
    assert acts_once(optimizer)
    exchanged.restore()
    assert type(optimizer) is torch.optim.SGD


class Abstract(ABC, torch.optim.SGD):
    """Libraries put an abstract base before or behind torch's own."""


class AlsoAbstract(torch.optim.SGD, ABC):
    pass


@pytest.mark.parametrize("kind", [Abstract, AlsoAbstract])
def test_a_class_with_an_abstract_base_is_exchanged(kind) -> None:
    optimizer = kind([nn.Parameter(torch.ones(1))], lr=0.1)
    exchanged = Exchanged()
    exchanged.add([optimizer])
    with viewed(View()), as_rank(RANK):
        assert optimizer.step == "step of the replica"
    exchanged.restore()
    assert type(optimizer) is kind


def test_optimizers_are_found_in_attributes_and_small_containers() -> None:
    module = nn.Module()
    one, two, three = sgd(), sgd(), sgd()
    module.one = one
    module.several = [two, 1]
    module.by_name = {"three": three}
    module.many = [sgd()] * 65
    assert [id(found) for found in held_optimizers(module)] == [id(one), id(two), id(three)]


def test_a_base_that_registers_its_subclasses_sees_the_name_that_it_knows() -> None:
    seen = list[tuple[str, str]]()

    class Registers(torch.optim.SGD):
        def __init_subclass__(cls, **options: Any) -> None:
            super().__init_subclass__(**options)
            seen.append((cls.__module__, cls.__qualname__))

    class Mine(Registers):
        pass

    optimizer = Mine([nn.Parameter(torch.ones(1))], lr=0.1)
    exchanged = Exchanged()
    exchanged.add([optimizer])
    exchanged.restore()
    assert set(seen) == {(__name__, Mine.__qualname__)}
