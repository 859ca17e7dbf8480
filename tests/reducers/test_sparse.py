"""Sparse gradients as the processes exchange them; the numbers over two processes are in test_processes."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed

import lightning_dpx as dpx
from lightning_dpx.reducers.sparse import Rows, check_layout, sum_over_processes


@pytest.fixture
def one_process() -> Iterator[None]:
    """A group of this process alone: what is sent is what arrives."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_all_gradients_travel_as_one_message_whatever_their_dtypes_and_dims() -> None:
    table, scalars, unused = torch.zeros(5, 2), torch.zeros(3, 3, dtype=torch.float64), torch.zeros(4, 1)
    mine = [
        Rows(torch.tensor([[4, 1, 4]]), torch.tensor([[1, 2], [3, 4], [5, 6]]).bfloat16()),
        Rows(torch.tensor([[0, 2], [1, 2]]), torch.tensor([7.0, 8.0], dtype=torch.float64)),
        None,
    ]
    dtypes = [torch.bfloat16, torch.float64, torch.float32]
    totals = sum_over_processes(mine, [table, scalars, unused], dtypes, torch.device("cpu"))
    assert totals[0].to_dense().tolist() == [[0, 0], [3, 4], [0, 0], [0, 0], [6, 8]]
    assert totals[0].dtype == torch.float32, "sums are wide"
    assert totals[1].to_dense().tolist() == [[0, 7, 0], [0, 0, 0], [0, 0, 8]]
    assert totals[2].shape == (4, 1)
    assert totals[2].to_dense().count_nonzero() == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_layout_that_processes_cannot_sum_is_refused_by_number() -> None:
    check_layout(0, None)
    check_layout(0, torch.ones(2))
    check_layout(0, torch.eye(2).to_sparse_coo())
    with pytest.raises(dpx.UnsupportedError, match=r"Gradient 3 has layout torch\.sparse_csr, which.*to_sparse_coo"):
        check_layout(3, torch.eye(2).to_sparse_csr())
