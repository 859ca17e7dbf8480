"""A value of slices is that of one device, one slice's part of it, or something else."""

import pytest
import torch

from lightning_dpx.lightning.rehearsal.comparison.relations import Relations, grew_alike, matching_items
from lightning_dpx.replicas.merging.tolerance import Tolerance

TOLERANCE = Tolerance.of(torch.float32, 100)


@pytest.mark.parametrize(
    ("one", "two", "is_same", "is_of_a_slice"),
    [
        (1.0, 1.0 + 1e-7, True, True),
        (1.0, 2.0, False, True),
        (1, 2, False, False),
        (torch.ones(2), torch.full((2,), 1.5), False, True),
        ([1, torch.ones(2)], [1, torch.ones(2)], True, True),
        ([1, torch.ones(2)], [2, torch.ones(2)], False, False),
        ({"a": 1.0}, {"a": 2.0}, False, True),
        ({"a": 1.0}, {"b": 1.0}, False, False),
        ([1.0], [1.0, 1.0], False, False),
        ("a", "b", False, False),
        (1.0, None, False, False),
    ],
)
def test_how_values_are_related(one, two, is_same, is_of_a_slice) -> None:
    relations = Relations(TOLERANCE)
    assert relations.same(one, two) is is_same
    assert relations.of_a_slice(one, two) is is_of_a_slice


def test_pairs_are_those_of_containers_with_the_same_keys() -> None:
    assert matching_items({"a": 1}, {"a": 2}) == [("a", 1, 2)]
    assert matching_items([1, 2], [3, 4]) == [(0, 1, 3), (1, 2, 4)]
    assert matching_items({"a": 1}, {"b": 2}) == []
    assert matching_items(1, 2) == []


@pytest.mark.parametrize(
    ("whole", "sliced", "grew"),
    [
        ([torch.arange(4.0)], [torch.arange(2.0), torch.arange(2.0, 4.0)], True),
        ([torch.arange(4.0)], [torch.arange(2.0), torch.arange(2.0)], False),
        (["a"], ["a", "a"], True),
        ([1.0], [1.0], False),
        ([], [], False),
    ],
)
def test_lists_grow_alike_where_items_of_slices_are_rows_of_one(whole, sliced, grew) -> None:
    before = [0.5]
    assert grew_alike(before, before + whole, before + sliced, TOLERANCE) is grew
