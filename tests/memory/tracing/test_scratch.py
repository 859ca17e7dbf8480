"""What operators allocate inside themselves, by the rules of the libraries."""

import pytest
import torch

from lightning_dpx.memory.tracing.scratch import inside_bytes

aten = torch.ops.aten


def convolution(rows: torch.Tensor, weight: torch.Tensor, transposed: bool = False) -> int:
    args = (rows, weight, None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], 1)
    return inside_bytes(aten.convolution.default, args, aten.convolution.default(*args), "cuda")


def test_a_convolution_copies_its_tensors_into_blocks_of_channels() -> None:
    rows, weight = torch.ones(2, 16, 8, 8), torch.ones(16, 16, 3, 3)
    assert convolution(rows, weight) == rows.nbytes + weight.nbytes
    few = torch.ones(2, 3, 8, 8)
    assert convolution(few, torch.ones(4, 3, 3, 3)) == 2 * 16 * 8 * 8 * 4, "three channels fill a block of sixteen"
    last = rows.contiguous(memory_format=torch.channels_last)
    assert convolution(last, weight) == weight.nbytes, "channels last, only the weights are copied"


def test_a_product_copies_what_has_no_neighbors() -> None:
    plain, strided = torch.ones(8, 8), torch.ones(16, 16)[::2, ::2]
    assert inside_bytes(aten.mm.default, (plain, plain.t()), plain, "cuda") == 0
    assert inside_bytes(aten.mm.default, (plain, strided), plain, "cuda") == strided.nbytes


@pytest.mark.parametrize("kind", ["meta", "sim"])
def test_of_a_device_whose_libraries_are_not_known_nothing_is_said(kind: str) -> None:
    rows = torch.ones(16, 16)[::2]
    assert inside_bytes(aten.mm.default, (rows, rows), rows, kind) == 0
    assert inside_bytes(aten.add.Tensor, (rows, rows), rows, "cuda") == 0
