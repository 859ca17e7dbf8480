"""Dense gradients are added in the memory of the first, sparse ones in a new tensor."""

import pytest
import torch

from lightning_dpx.replicas.gradient_addition import added_gradient

DENSE = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize("earlier", [DENSE, DENSE.to_sparse()])
@pytest.mark.parametrize("gradient", [DENSE, DENSE.to_sparse()])
def test_the_sum_of_any_two_is_that_of_dense_ones(earlier: torch.Tensor, gradient: torch.Tensor) -> None:
    first = earlier.clone()
    total = added_gradient(first, gradient)
    assert total.to_dense().tolist() == [2.0, 4.0]
    is_dense = not earlier.is_sparse and not gradient.is_sparse
    assert (total is first) == is_dense
