import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.reducers.buckets import flatten


def make_grads() -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in ((64, 64), (64,), (128, 64), (3000,), (1,), (50, 50))]


def test_packs_are_cut_at_boundaries_in_the_order_of_backward() -> None:
    packer = dpx.GradientPacker(num_splits=4)
    assert packer.plan(make_grads())
    assert [index for split in packer.splits for index in split] == [5, 4, 3, 2, 1, 0]
    assert 2 <= len(packer.splits) <= 4


def test_unpacking_gives_views_and_the_values_back() -> None:
    packer, grads = dpx.GradientPacker(2), make_grads()
    packer.plan(grads)
    buckets = packer.pack(grads)
    for own, view in zip(grads, packer.unpack(buckets), strict=True):
        assert torch.equal(own, view)
        assert any(view.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr() for bucket in buckets)
    again = packer.pack(packer.unpack(buckets))
    assert [bucket.data_ptr() for bucket in again] == [bucket.data_ptr() for bucket in buckets], "views without a copy"
    many = packer.unpack_all(packer.pack_all([grads, make_grads()]))
    assert all(torch.equal(own, view) for own, view in zip(grads, many[0], strict=True))


def test_tensors_that_are_no_neighbors_are_copied() -> None:
    rows = torch.arange(10.0)
    assert flatten([rows[:4], rows[4:]]).data_ptr() == rows.data_ptr()
    for parts in ([rows[4:], rows[:4]], [rows[:4], rows[5:]], [rows[::2], rows[5:]], [rows[:4], torch.ones(2)]):
        assert torch.equal(flatten(parts), torch.cat(parts))


def test_what_is_not_packed_says_why() -> None:
    packer = dpx.GradientPacker(8)
    assert not packer.plan([torch.ones(1000)])
    assert "1000 elements in 8 splits are fewer than 1024 each" in packer.refusal
    assert not packer.plan([torch.ones(9000), torch.ones(9000, dtype=torch.float64)])
    assert "different dtypes" in packer.refusal
    sparse = torch.ones(9000).to_sparse()
    assert not packer.plan([torch.ones(9000), sparse])
    assert packer.refusal == "gradient 1 is sparse"
    with pytest.raises(dpx.ConfigurationError, match=r"no plan .*gradient 1 is sparse"):
        packer.pack([sparse])


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(dpx.ConfigurationError, match="num_splits=0"):
        dpx.GradientPacker(0)
    packer, grads = dpx.GradientPacker(1), make_grads()
    packer.plan(grads)
    with pytest.raises(dpx.ConfigurationError, match=r"Gradient 0 has shape \(2,\), planned was \(64, 64\)"):
        packer.pack([torch.ones(2), *grads[1:]])


def test_what_is_not_as_planned_is_told() -> None:
    packer, grads = dpx.GradientPacker(2), make_grads()
    packer.plan(grads)
    for given in (grads[:-1], [*grads, torch.ones(1)]):
        with pytest.raises(dpx.ConfigurationError, match=f"There are {len(given)} gradients, planned were 6"):
            packer.pack(given)
    with pytest.raises(dpx.ConfigurationError, match=r"Gradient 1 is of torch\.float64, planned was torch\.float32"):
        packer.pack([grads[0], grads[1].double(), *grads[2:]])
    buckets = packer.pack(grads)
    with pytest.raises(dpx.ConfigurationError, match="There are 1 buckets, planned were 2"):
        packer.unpack(buckets[:1])
    with pytest.raises(dpx.ConfigurationError, match=r"A bucket of gradients .* elements, planned was"):
        packer.unpack([bucket[:-1] for bucket in buckets])


@pytest.mark.parametrize(("second", "told"), [(None, "gradient 1 is None"), ("meta", "on different devices: cpu and")])
def test_gradients_that_are_missing_or_elsewhere_are_not_packed(second, told) -> None:
    packer = dpx.GradientPacker(1)
    assert not packer.plan([torch.ones(9000), None if second is None else torch.ones(9000, device=second)])
    assert told in packer.refusal
