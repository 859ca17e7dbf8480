"""Which dim of a batch holds its rows, and what cannot be told for certain."""

import ast
import re
from collections import deque
from typing import Any

import pytest
import torch

from lightning_dpx.replicas.slicing import (
    BatchSlicer,
    UncuttableBatch,
    batch_size,
    check_paths,
    slice_batch,
)
from tests.replicas.same_batch import assert_same


class Box:
    """An object that nobody knows."""


def boxes(*counts: int) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": torch.full((count, 4), float(row))} for row, count in enumerate(counts)]


UNCUTTABLE = {
    "two sizes": ((torch.ones(4), torch.ones(3, 2)), r"0 \(Tensor of shape \(4\)\): 4; 1 .*: 3"),
    "one row beside others": ((torch.ones(4, 3), torch.ones(1, 3)), r"1 \(Tensor of shape \(1, 3\)\): 1"),
    "several at fault": ({"x": torch.ones(4), "a": Box(), "b": [Box()]}, r"a \(Box\) cannot be cut\. b\.0 \(Box\)"),
    "labeled and unlabeled": ({"l": torch.ones(4), "u": torch.ones(8)}, "l .*: 4; u .*: 8"),
    "ragged": ([torch.ones(2, 3), torch.ones(4, 3)], "do not agree"),
    "detection lists": (([torch.ones(3, 4), torch.ones(3, 5)], boxes(1, 2)), "one item per row, or columns"),
    "samples": ([(torch.ones(3, 4), Box()), (torch.ones(3, 5), Box())], "one item per row, or columns"),
    "columns or rows": ({"x": torch.ones(3), "y": [torch.ones(3, 2)] * 3}, r"y \(list of 3 Tensor\) may hold"),
    "as many columns as rows": ([torch.ones(2, 4), torch.zeros(2, 4)], r"the batch \(list of 2 Tensor\) may hold"),
    "boxes as many as rows": ((torch.ones(2, 9), boxes(2, 2)), r"1 \(list of 2 dict\) may hold"),
    "only lists of tensors": ({"views": [torch.ones(4, 2), torch.ones(4, 2)]}, "views .* may hold"),
    "an int": (3, r"Nothing in the batch \(int\)"),
    "a dict of ints": ({"a": 1, "b": 2}, r"Nothing in the batch \(dict\)"),
    "an object": (Box(), r"the batch \(Box\) cannot be cut"),
    "None": (None, "Nothing in the batch"),
    "no items": ([], "Nothing in the batch"),
}  # fmt: skip


def in_two(batch: Any) -> list[Any]:
    return slice_batch(batch, [batch_size(batch) - 1, 1])


@pytest.mark.parametrize("name", UNCUTTABLE)
def test_what_cannot_be_cut_for_certain_is_not_cut_and_every_input_at_fault_is_named(name: str) -> None:
    batch, message = UNCUTTABLE[name]
    with pytest.raises(UncuttableBatch, match=message) as caught:
        in_two(batch)
    assert caught.value.reason
    assert "slice_batch(self, batch, sizes)" in caught.value.advice


LAST = torch.tensor([2])


@pytest.mark.filterwarnings("ignore:Sparse BSR")
def test_a_layout_that_cannot_be_cut_is_named() -> None:
    with pytest.raises(UncuttableBatch, match=r"1 .*cannot be cut .*sparse_bsr"):
        in_two((torch.ones(4), torch.ones(4, 4).to_sparse_bsr((2, 2))))


def advised(error: UncuttableBatch, which: int) -> dict[str, int]:
    """One of the settings of ``batch_dim`` that a message advises."""
    return ast.literal_eval(re.findall(r"batch_dim=(\{.*?\})", error.advice)[which])


@pytest.mark.parametrize(
    ("batch", "which", "sizes", "second"),
    [
        ((torch.arange(4), torch.arange(3)), 1, [3, 1], (torch.tensor([3]), torch.arange(3))),
        (([torch.ones(3, 4), torch.zeros(3, 5)], ["a", "b"]), 0, [1, 1], ([torch.zeros(3, 5)], ["b"])),
        ([torch.ones(2), torch.zeros(4)], 0, [1, 1], [torch.zeros(4)]),
        ({"v": [torch.arange(3), torch.arange(3) * 2]}, 0, [2, 1], {"v": [torch.tensor([2]), torch.tensor([4])]}),
        ({"v": [torch.arange(3), torch.arange(3) * 2]}, 1, [1, 1], {"v": [torch.arange(3) * 2]}),
        ([[torch.arange(3), "x"], [torch.arange(3), "y"]], 0, [2, 1], [[LAST, "x"], [LAST, "y"]]),
    ],
)  # fmt: skip
def test_what_an_announcement_advises_works_and_keeps_rows_together(batch, which, sizes, second) -> None:
    with pytest.raises(UncuttableBatch) as caught:
        batch_size(batch)
    dims = advised(caught.value, which)
    check_paths(batch, dims)
    assert batch_size(batch, dims) == sum(sizes)
    assert_same(slice_batch(batch, sizes, dims)[1], second)


def test_advice_keeps_what_batch_dim_said_before() -> None:
    x, table = torch.arange(8).view(2, 4), torch.arange(6).view(3, 2)
    with pytest.raises(UncuttableBatch) as caught:
        batch_size({"x": x, "y": x, "table": table}, 1)
    dims = advised(caught.value, 0)
    assert dims == {"x": 1, "y": 1, "table": -1}
    assert batch_size({"x": x, "y": x, "table": table}, dims) == 4


@pytest.mark.parametrize(
    "targets",
    [
        boxes(1, 3, 0),
        [(torch.ones(2, 4), "cat"), (torch.ones(0, 4), "dog"), (torch.ones(5, 4), "cow")],
        [Box(), Box(), Box()],
        [torch.ones(1, 4), torch.ones(2, 4), torch.ones(0, 4)],
        (None, torch.ones(2, 4), None),
        deque(["a", "b", "c"], maxlen=3),
    ],
)
def test_a_list_with_an_item_per_row_is_cut_whatever_its_items_are(targets) -> None:
    first, second = slice_batch((torch.arange(3), targets), [2, 1])
    assert type(first[1]) is type(targets)
    assert [id(item) for item in (*first[1], *second[1])] == [id(item) for item in targets]


def test_a_list_of_inputs_of_other_kinds_is_not_taken_for_rows() -> None:
    batch = {"x": torch.arange(2), "masks": [torch.ones(2, 3), torch.ones(2, dtype=torch.bool)], "anchors": [1, 2, 4]}
    _, second = slice_batch(batch, [1, 1])
    assert [tuple(mask.shape) for mask in second["masks"]] == [(1, 3), (1,)]
    assert second["anchors"] == [1, 2, 4]


def test_a_list_with_a_part_for_each_of_several_loaders_holds_columns() -> None:
    batch = [[torch.arange(4), torch.arange(4) * 2], [torch.arange(4), torch.arange(4)]]
    loaders = ("0", "1")
    slicer = BatchSlicer(0)
    slicer.loaders = loaders
    assert slicer.num_rows(batch) == 4
    assert slicer.cut(batch, [3, 1])[1] == [[torch.tensor([3]), torch.tensor([6])], [torch.tensor([3])] * 2]
