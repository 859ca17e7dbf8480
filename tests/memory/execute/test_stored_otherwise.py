"""Values that are kept in another form."""

import torch

from lightning_dpx.memory.execute.recomputation import compute
from lightning_dpx.memory.execute.stored_otherwise import compress
from lightning_dpx.memory.execute.values import Value


def kept(tensor: torch.Tensor) -> Value:
    value = Value("layer:1", "MulBackward0")
    value.keep(tensor)
    return value


def test_a_mask_comes_back_from_a_byte_an_element() -> None:
    mask = torch.rand(64, 64).gt(0.5).float() / 0.5
    value = kept(mask)
    assert compress(value)
    assert value.tensor is None
    stored = sum(entry.nbytes for entry in value.inputs if isinstance(entry, torch.Tensor))
    assert stored <= mask.numel() + 8
    assert torch.equal(compute(value), mask)


def test_what_has_two_numbers_beside_zero_stays_as_it_is() -> None:
    tensor = torch.tensor([0.0, 1.0, 2.0])
    value = kept(tensor)
    assert not compress(value)
    assert value.tensor is not None
    assert not value.dropped
