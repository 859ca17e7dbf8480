"""Weak references of a copy."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.replicate import make_shadow_module, replicate

CPU = torch.device("cpu")


class Node:
    """Refers to its parent weakly, as trees do, so that no circle keeps both alive."""

    def __init__(self, parent: "Node | None" = None) -> None:
        self.parent = None if parent is None else weakref.ref(parent)
        self.children: list[Node] = []
        self.count = 0

    def add(self) -> None:
        self.count += 1


class Table(dict[str, int]):
    """A container that can be referred to weakly."""


OUTSIDE = Node()


def linked(tensor: torch.Tensor | None) -> Any:
    """A module with objects that are reached by weak references, too; one of them holds ``tensor``."""
    module: Any = nn.Linear(1, 1)
    module.node = Node()
    module.node.tensor = tensor
    module.node.children.append(Node(module.node))
    module.reference = weakref.ref(module.node)
    module.method = weakref.WeakMethod(module.node.add)
    module.by_name = weakref.WeakValueDictionary(node=module.node)
    module.by_node = weakref.WeakKeyDictionary({module.node: 1})
    module.nodes = weakref.WeakSet([module.node])
    module.proxy = weakref.proxy(module.node)
    module.table = Table()
    module.reference_of_table = weakref.ref(module.table)
    module.outside = weakref.ref(OUTSIDE)
    module.gone = weakref.ref(Node())
    return module


def check_links(module: Any) -> None:
    assert module.reference() is module.node
    assert module.method().__self__ is module.node
    assert module.by_name["node"] is module.node
    assert list(module.by_node.items()) == [(module.node, 1)]
    assert list(module.nodes) == [module.node]
    assert module.node.children[0].parent() is module.node
    assert module.reference_of_table() is module.table
    assert module.outside() is OUTSIDE, "a copy of it would be gone at once"
    assert module.gone() is None


def test_weak_references_in_a_shadow_lead_to_its_own_objects() -> None:
    module = linked(None)
    shadow: Any = make_shadow_module(Replica(0, CPU, module))
    gc.collect()
    for one in (module, shadow):
        check_links(one)
    assert shadow.node is not module.node
    shadow.reference().add()
    shadow.method()()
    shadow.node.children[0].parent().add()
    assert (module.node.count, shadow.node.count) == (0, 3), "it leaves no trace"


@pytest.mark.parametrize("tensor", [None, torch.ones(1)])
def test_weak_references_of_a_replica_lead_where_its_other_references_do(tensor: torch.Tensor | None) -> None:
    module = linked(tensor)
    _, twin = replicate(module, [CPU, CPU])
    gc.collect()
    copied: Any = twin.module
    check_links(copied)
    assert (copied.node is module.node) is (tensor is None)
