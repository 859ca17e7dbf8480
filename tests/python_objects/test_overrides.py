"""Attributes that are others for a while."""

import pytest
from torch import nn

from lightning_dpx.python_objects.overrides import Overrides, overridden, preserve_modes


class Owner:
    def __init__(self) -> None:
        self.own = 1

    def method(self) -> str:
        return "its own"


def fails_with_overrides(owner: Owner) -> None:
    with overridden(owner, own=2, method=lambda: "another"):
        assert (owner.own, owner.method()) == (2, "another")
        raise ValueError("odd")


def test_attributes_and_methods_come_back_also_after_an_error() -> None:
    owner = Owner()
    with pytest.raises(ValueError, match="odd"):
        fails_with_overrides(owner)
    assert (vars(owner), owner.method()) == ({"own": 1}, "its own")


def test_an_attribute_that_is_overridden_twice_is_the_first_one_again() -> None:
    owner = Owner()
    overrides = Overrides()
    assert not overrides
    overrides.set(owner, "own", None)
    overrides.set(owner, "own", 3)
    assert overrides
    overrides.put_back()
    assert (owner.own, bool(overrides)) == (1, False)


def test_a_module_registers_nothing_of_what_it_holds_for_a_while() -> None:
    module = nn.Linear(1, 1)
    with overridden(module, held=nn.Linear(1, 1)):
        assert [name for name, _ in module.named_children()] == []
    assert not hasattr(module, "held")


def test_each_module_is_in_its_own_mode_again() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    net[1].eval()
    with preserve_modes(net.modules()):
        net.eval()
    assert [module.training for module in net.modules()] == [True, True, False]
