"""How a tensor is known again."""

import pytest
import torch

from lightning_dpx.memory.execute.tensor_identity import identity_of


def test_a_detached_tensor_is_the_same_until_either_is_written_to() -> None:
    tensor = torch.randn(4, 3)
    before = identity_of(tensor)
    assert identity_of(tensor.detach()) == before
    assert identity_of(tensor[1:]) != before
    tensor.detach().add_(1)
    assert identity_of(tensor) != before


@pytest.mark.parametrize(
    ("saved", "made", "is_unlike"),
    [
        (torch.empty(2, 3, 4), torch.empty(2, 3, 4), False),
        (torch.empty(4, 3, 2).permute(2, 1, 0), torch.empty(2, 3, 4), True),
        (torch.empty(2, 3, 1), torch.empty(3, 2, 1).transpose(0, 1), True),
        (torch.empty(2, 6)[:, :3], torch.empty(2, 3), False),  # a part of something larger
    ],
    ids=["same", "permuted", "made permuted", "part"],
)
def test_dims_in_another_order_in_memory_are_told_where_they_can_be_relied_on(
    saved: torch.Tensor, made: torch.Tensor, is_unlike: bool
) -> None:
    assert identity_of(saved).is_dense_unlike(made) == is_unlike
