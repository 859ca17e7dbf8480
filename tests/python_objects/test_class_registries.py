"""Lists of instances that classes keep are found, whatever they are."""

import weakref
from typing import Any, ClassVar

import pytest
from torch import nn

from lightning_dpx.python_objects.class_registries import class_registries


def registering(held: Any, add: str) -> type[nn.Linear]:
    class Layer(nn.Linear):
        instances: ClassVar[Any] = held
        widths: ClassVar[dict[str, int]] = {"first": 2}

        def __init__(self) -> None:
            super().__init__(2, 2)
            getattr(type(self).instances, add)(self)

    return Layer


@pytest.mark.parametrize(("held", "add"), [([], "append"), (set(), "add"), (weakref.WeakSet(), "add")])
def test_a_list_of_instances_is_found(held, add) -> None:
    kind = registering(held, add)
    assert class_registries(nn.Sequential(kind(), nn.ReLU())) == ["Layer.instances"]


def test_one_of_other_instances_is_none() -> None:
    kind = registering([], "append")
    others = [kind(), kind()]
    assert class_registries(nn.Sequential(nn.Linear(2, 2))) == []
    assert class_registries(others[0]) == [], "the module itself, as a list of experiments has it"


def test_a_mapping_that_holds_its_values_weakly_is_one() -> None:
    class Named(nn.Linear):
        by_name: ClassVar[weakref.WeakValueDictionary[str, nn.Module]] = weakref.WeakValueDictionary()

    layer = Named(2, 2)
    Named.by_name["first"] = layer
    assert class_registries(nn.Sequential(layer)) == ["Named.by_name"]
