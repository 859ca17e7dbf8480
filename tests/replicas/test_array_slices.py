"""Tensors of every class and layout, arrays and tensordicts, cut by rows."""

from typing import Any

import numpy as np
import pytest
import torch

from lightning_dpx.replicas.array_slices import copied_to
from tests.replicas.same_batch import assert_same, halves


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|Sparse CSC|nested tensors).*:UserWarning")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc"])
def test_sparse_tensors_are_cut_by_rows(layout: str) -> None:
    dense = torch.tensor([[0.0, 1, 0], [0, 0, 0], [2, 0, 3], [0, 4, 0]])
    parts = halves((dense.to_sparse(layout=getattr(torch, layout)), torch.arange(4)), 1)
    assert {part.layout for part, _ in parts} == {getattr(torch, layout)}
    assert torch.equal(torch.cat([part.to_dense() for part, _ in parts]), dense)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("kind", ["jagged", "transposed", "strided"])
def test_nested_tensors_are_cut_by_rows(kind: str) -> None:
    rows = [torch.rand(length, 2) for length in (2, 1, 4, 3)]
    nested = torch.nested.nested_tensor(rows, layout=torch.strided if kind == "strided" else torch.jagged)
    nested = nested.transpose(1, 2) if kind == "transposed" else nested
    found = [row for part, _ in halves((nested, torch.arange(4)), 3) for row in part.unbind()]
    assert_same(found, [row.t() for row in rows] if kind == "transposed" else rows)


def test_jagged_tensors_of_equal_lengths_still_fit_together() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(5, 2), torch.ones(1, 2)], layout=torch.jagged)
    for first, second, _ in halves((nested, nested * 2, torch.arange(3)), 2):
        assert torch.equal((first + second).values(), torch.full_like(first.values(), 3.0))


def test_a_slice_of_a_tensor_keeps_its_attributes_and_may_be_written() -> None:
    rows = torch.rand(4, 2)
    rows.unit = "mm"
    weight = torch.ones(2, requires_grad=True)
    first, second = halves({"rows": rows}, 2)
    assert first["rows"].unit == second["rows"].unit == "mm"
    product = (first["rows"] * weight).sum()
    second["rows"].zero_()
    product.backward()
    assert not rows[2:].any()


class Tagged(torch.Tensor):
    """A subclass that loses nothing but its attributes in operations."""


class Unwrapping(torch.Tensor):
    """A subclass whose operations return plain tensors, as those of torchvision do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Tagged, Unwrapping])
def test_a_tensor_subclass_keeps_class_and_attributes_along_any_dim(kind: type[torch.Tensor]) -> None:
    tagged = torch.arange(8).view(2, 4).as_subclass(kind)
    tagged.tag = "t"
    for dim, expected in ((0, [[4, 5, 6, 7]]), (1, [[3], [7]])):
        part = halves(tagged, -1 + tagged.shape[dim], batch_dim=dim)[1]
        assert (type(part), part.tag, part.tolist()) == (kind, "t", expected)


def test_boxes_of_torchvision_keep_their_format() -> None:
    tv_tensors = pytest.importorskip("torchvision.tv_tensors")
    boxes = tv_tensors.BoundingBoxes(torch.rand(4, 4), format="XYWH", canvas_size=(9, 7))
    image = tv_tensors.Image(torch.rand(4, 3, 5, 5))
    for part, pixels in halves((boxes, image), 1):
        assert (type(part), part.format, part.canvas_size) == (type(boxes), boxes.format, (9, 7))
        assert type(pixels) is tv_tensors.Image
    assert torch.equal(torch.cat([part for part, _ in halves((boxes, image), 1)]), boxes)


@pytest.mark.filterwarnings("ignore")
def test_meta_tensors_of_monai_keep_the_meta_data_of_their_rows() -> None:
    data = pytest.importorskip("monai.data")
    samples = [data.MetaTensor(torch.full((1, 4), float(row)), meta={"filename": f"f{row}"}) for row in range(4)]
    for row, sample in enumerate(samples):
        sample.push_applied_operation({"class": "Flip", "row": row})
    batch = data.list_data_collate(samples)
    parts = halves({"image": batch, "label": torch.arange(4)}, 1)
    expected = [batch[:1], batch[1:]]  # as the library itself does
    for part, theirs in zip((part["image"] for part in parts), expected, strict=True):
        assert (type(part), part.is_batch) == (data.MetaTensor, True)
        assert part.meta["filename"] == theirs.meta["filename"]
        assert [done[0]["row"] for done in part.applied_operations] == [
            done[0]["row"] for done in theirs.applied_operations
        ]
        assert torch.equal(part.as_tensor(), theirs.as_tensor())


def test_tensordicts_are_cut_by_their_own_batch_size() -> None:
    tensordict = pytest.importorskip("tensordict")
    td = tensordict.TensorDict({"a": torch.rand(4, 3), "n": {"b": torch.arange(4)}}, batch_size=[4])
    parts = [part["td"] for part in halves({"td": td, "y": torch.arange(4)}, 3)]
    assert [part.batch_size for part in parts] == [torch.Size([3]), torch.Size([1])]
    assert bool((torch.cat(parts) == td).all())
    unsized = tensordict.TensorDict({"a": torch.rand(4, 3)}, batch_size=[])
    assert [(type(part), len(part["a"])) for part in halves(unsized, 3)] == [(type(td), 3), (type(td), 1)]


def test_arrays_are_cut_along_the_batch_dim() -> None:
    array = np.arange(12).reshape(3, 4)
    parts = halves({"x": array, "y": torch.ones(2, 4)}, 1, batch_dim=1)
    np.testing.assert_array_equal(np.concatenate([part["x"] for part in parts], 1), array)


def test_a_copy_has_tensors_of_its_own_in_the_attributes_as_well() -> None:
    tensor: Any = torch.ones(2, 2)
    tensor.scale = torch.full((2,), 3.0, requires_grad=True) * 1
    tensor.columns = ("x", "y")
    copied: Any = copied_to(tensor, torch.device("meta"))
    assert copied.scale.device.type == "meta"
    assert copied.columns is tensor.columns
    here: Any = copied_to(tensor, torch.device("cpu"))
    assert torch.equal(here.scale, tensor.scale)
    assert here.scale.data_ptr() != tensor.scale.data_ptr()
    assert here.scale.grad_fn is None
