"""What leads to a target: through containers, slots, closures and weak references, up to what is shared."""

import functools
import gc
import weakref
from typing import Any

import torch
from torch import nn

from lightning_dpx.python_objects.object_graph import (
    ObjectGraph,
    children_of_object,
    content_of,
    is_tensor_or_module,
    items_of,
    pairs_of,
    size_of,
)


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def walked(root: Any, **options: Any) -> ObjectGraph:
    graph = ObjectGraph(lambda value: isinstance(value, torch.Tensor), **options)
    graph.walk([root])
    return graph


def test_containers_slots_closures_and_references_lead_to_what_they_hold() -> None:
    tensor = torch.ones(1)

    def closure() -> torch.Tensor:
        return tensor

    for holder in (
        [tensor], {"a": tensor}, {tensor: 1}, Slotted(tensor), closure, functools.partial(print, tensor),
        weakref.ref(tensor), functools.lru_cache(closure), (number for number in [tensor]),
    ):  # fmt: skip
        assert id(holder) in walked([holder]).leading(), holder


def test_what_leads_nowhere_or_beyond_a_boundary_is_not_among_them() -> None:
    tensor, words = torch.ones(1), ["a", "b"]
    shared = [tensor]
    root = [words, shared, nn.Linear]
    graph = walked(root, is_boundary=lambda value: value is shared)
    assert graph.leading() == set()
    assert id(root) in walked(root).leading()
    assert id(words) not in walked(root).leading()


def test_circles_end_and_targets_are_looked_into_only_where_asked() -> None:
    circle: list[Any] = []
    circle.append(circle)
    tensor = torch.ones(1)
    tensor.extra = [torch.zeros(1)]
    circle.append(tensor)
    assert id(tensor.extra) not in walked(circle).leading()
    inside = walked(circle, descend=lambda value: True)
    assert {id(circle), id(tensor), id(tensor.extra)} <= inside.leading()


class Answers(dict[str, Any]):
    """Its own ``items`` is somebody else's business."""

    def items(self) -> Any:
        raise AssertionError("asked")

    __len__ = __iter__ = values = keys = items


class Rows(list[int]):
    def __iter__(self) -> Any:
        raise AssertionError("asked")

    __len__ = __iter__


def test_data_is_left_out_where_nothing_in_it_can_be_a_target() -> None:
    """A vocabulary of 200,000 pairs would be walked at every look at a module."""
    target = torch.zeros(1)
    words: list[Any] = [(number, f"word{number}") for number in range(100)]
    held = {"words": words, "ids": [[number] for number in range(100)], "mixed": [(1, [2, {"deep": (target,)}])]}
    gc.collect()  # tracks tuples no longer in which it has found nothing
    found = []
    for skips_data in (False, True):
        graph = ObjectGraph(is_tensor_or_module, skips_data=skips_data)
        graph.walk([held])
        found.append(graph)
    assert all(id(target) in graph.leading() for graph in found)
    assert [len(graph.objects) > 100 for graph in found] == [True, False]


def test_containers_are_read_past_their_own_methods() -> None:
    assert pairs_of(Answers(a=1)) == [("a", 1)]
    assert items_of(Answers(a=1)) == [1]
    assert items_of(Rows((3, 4))) == [3, 4]
    assert items_of({"a": 1}) == [1]
    assert items_of((1, 2)) == [1, 2]
    assert [size_of(Answers(a=1)), size_of(Rows((3, 4))), size_of("abc"), size_of({1})] == [1, 2, 3, 1]


def test_an_empty_cell_is_none() -> None:
    def outer() -> Any:
        def inner() -> Any:
            return later

        cell = inner.__closure__[0]
        empty = content_of(cell)
        later = 5
        return empty, content_of(cell)

    assert outer() == (None, 5)
    assert list(children_of_object({"a": 1})) == [1]
