"""How a value of one device and a value of slices are related: the same, one slice's part of it, or something else."""

from enum import IntEnum
from typing import Any

import torch

from lightning_dpx.python_objects.object_graph import PLAIN
from lightning_dpx.replicas import Weights
from lightning_dpx.replicas.merging.equality import compare_trees
from lightning_dpx.replicas.merging.rule_search import Search
from lightning_dpx.replicas.merging.tolerance import Tolerance

_JOINED = ("join", "items", "union", "children", "equal")  # what an item of a growing list may be put together by


class Relations:
    """How values of one device and of slices are related; a pair of containers that many others hold is asked once.

    Args:
        tolerance: How far numbers may be apart.
    """

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self._known: dict[tuple[int, int], _Relation] = {}  # by ids of what the observations hold

    def same(self, one: Any, two: Any) -> bool:
        """Whether all that both hold is within the tolerance."""
        return self._of(one, two) is _Relation.SAME

    def of_a_slice(self, one: Any, two: Any) -> bool:
        """Whether both have one structure, and differ in tensors and floating-point numbers only."""
        return self._of(one, two) is not _Relation.OTHER

    def _of(self, one: Any, two: Any) -> "_Relation":
        # Observations hold plain lists and dicts only, whatever the containers were.
        if type(one) is not type(two) or not isinstance(one, list | dict):
            return self._of_leaves(one, two)
        # Ids are safe as keys while the observations, which hold both, are compared.
        key = id(one), id(two)
        if key not in self._known:
            pairs = matching_items(one, two)
            found = _Relation.SAME if len(pairs) == len(one) == len(two) else _Relation.OTHER
            for _, mine, theirs in pairs:
                # The relation of containers is the worst one of their items.
                found = max(found, self._of(mine, theirs))
            self._known[key] = found
        return self._known[key]

    def _of_leaves(self, one: Any, two: Any) -> "_Relation":
        # First, as it is the usual answer and takes no tensor; 1 and True are not the same.
        if type(one) in PLAIN and type(two) is type(one) and one == two:
            return _Relation.SAME
        if all(error <= self._tolerance.relative for _, error in compare_trees(one, two, self._tolerance)):
            return _Relation.SAME
        is_float = isinstance(one, torch.Tensor | float) or hasattr(type(one), "dtype")
        if is_float and type(one) is type(two):
            return _Relation.OF_A_SLICE
        return _Relation.OTHER


class _Relation(IntEnum):
    SAME = 0
    OF_A_SLICE = 1
    OTHER = 2


def matching_items(one: Any, two: Any) -> list[tuple[Any, Any, Any]]:
    """The items of two containers with the same keys; none of other values."""
    mine = dict(keyed_items(one))
    theirs = dict(keyed_items(two))
    if mine.keys() == theirs.keys():
        return [(key, value, theirs[key]) for key, value in mine.items()]
    return []


def keyed_items(value: Any) -> list[tuple[Any, Any]]:
    """The keys and items of a dict, or of a list; none of other values."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list):
        return list(enumerate(value))
    return []


def grew_alike(before: Any, whole: Any, sliced: Any, tolerance: Tolerance) -> bool:
    """Whether what slices appended to a list is what one device appended, row after row."""
    if isinstance(whole, dict) and isinstance(sliced, dict) and isinstance(before, dict):
        return whole.keys() == sliced.keys() and all(
            Relations(tolerance).same(value, sliced[key])
            or grew_alike(before.get(key, []), value, sliced[key], tolerance)
            for key, value in whole.items()
        )
    if not all(isinstance(value, list) for value in (before, whole, sliced)):
        return False
    mine = whole[len(before) :]
    theirs = sliced[len(before) :]
    # As many as one device has were compared item by item before.
    if not mine or len(theirs) % len(mine) or len(theirs) == len(mine):
        return False
    num_slices = len(theirs) // len(mine)
    # Equal weights do, as only rules that join or compare are looked for.
    weights = Weights(rows=[1] * num_slices, of_loss=[1] * num_slices)
    search = Search(weights=weights, tolerance=tolerance)
    for index, item in enumerate(mine):
        of_slices = theirs[index :: len(mine)]
        for found in search.examine(item, of_slices, "item"):
            if not found.rules or found.rules[0].kind not in _JOINED:
                return False
    return True
