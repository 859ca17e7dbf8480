"""What tensors are made of, and whose memory they look at."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dpx.torch_compat import (
    bytes_of,
    flatten_dense,
    is_refused_by_modes,
    shares_memory,
    stored_parts,
    unflatten_dense,
    with_memory_in,
    write_tensor,
)


def test_a_plain_tensor_has_its_own_memory() -> None:
    plain = torch.ones(3)
    assert with_memory_in(plain) == [plain]


def test_a_jagged_tensor_has_that_of_its_rows_and_of_where_they_begin() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    sizes = [tensor.numel() for tensor in with_memory_in(jagged)]
    assert sorted(filter(None, sizes)) == [3, 5], "the others are empty, and stand for its shortest and longest row"


def test_a_view_and_its_base_share_memory() -> None:
    base = torch.ones(4)
    assert not shares_memory(base)
    view = base[:2]
    assert shares_memory(base)
    assert shares_memory(view)
    del view
    assert not shares_memory(base)


@pytest.mark.parametrize("shapes", [[(2, 3)], [(2, 3), (4,), (1, 1, 2)]])
def test_one_flat_copy_and_back(shapes: list[tuple[int, ...]]) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    flat = flatten_dense(tensors)
    assert flat.ndim == 1
    for made, given in zip(unflatten_dense(flat, tensors), tensors, strict=True):
        assert torch.equal(made, given)
        assert made.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


class Tagged(torch.Tensor):
    """A class of tensors with the constructor of torch."""


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_torch_refuses_the_constructor_of_a_tensor_subclass_under_a_mode() -> None:
    """Once it does not, rehearsals can watch such steps, and need not know of the error."""
    rows = torch.ones(2)
    with Watching(), pytest.raises(RuntimeError) as refused:
        Tagged(rows)
    assert is_refused_by_modes(refused.value)
    with Watching():
        assert type(rows.as_subclass(Tagged)) is Tagged  # which is the way out
    assert not is_refused_by_modes(RuntimeError("of another kind"))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
def test_a_sparse_tensor_is_stored_as_its_indices_and_values(layout: torch.layout) -> None:
    sparse = torch.eye(5).to_sparse(layout=layout)
    *indices, values = stored_parts(sparse)
    assert torch.equal(values, torch.ones(5))
    assert bytes_of([sparse]) == sum(part.nbytes for part in indices) + 20
    assert bytes_of([torch.eye(5)]) == 100


def test_an_expanded_tensor_is_written_by_its_numbers() -> None:
    target = torch.zeros(3).expand(2, 1, 3)
    write_tensor(target, torch.arange(3.0).expand(2, 1, 3).clone())
    assert target.tolist() == [[[0.0, 1.0, 2.0]]] * 2
