"""Sums in one memory, block by block or list by list."""

import pytest
import torch

from lightning_dpx.reducers.local import BLOCK, add_in_place


@pytest.mark.parametrize("transposed", [False, True])
def test_large_and_small_tensors_are_added_in_order(transposed: bool) -> None:
    def tensors(value: float) -> list[torch.Tensor]:
        large = torch.full((2, BLOCK // 2 + 3), value)
        return [large.t() if transposed else large, torch.full((3,), value), torch.empty(0)]

    total = tensors(1.0)
    first = total[0]
    add_in_place(total, [tensors(2.0), tensors(4.0)])
    assert [tensor.unique().tolist() for tensor in total] == [[7.0], [7.0], []]
    assert total[0] is first, "in place"


def test_nothing_to_add_changes_nothing() -> None:
    total = [torch.ones(2)]
    add_in_place(total, [])
    add_in_place([], [[]])
    assert total[0].tolist() == [1, 1]
