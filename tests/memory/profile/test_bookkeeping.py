"""What bookkeeping takes is measured on the host, wherever a program makes its tensors."""

import pytest
import torch

from lightning_dpx.memory.profile.bookkeeping import Bookkeeping, measured_bookkeeping


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_is_measured_on_the_host_whatever_the_default_device(device: str) -> None:
    with torch.device(device):
        found = measured_bookkeeping.__wrapped__()  # not what this process remembers
    assert isinstance(found, Bookkeeping)
    assert min(found.value, found.call, found.tensor, found.again) >= 0.0


def test_random_numbers_are_drawn_as_without_it() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    measured_bookkeeping.__wrapped__()
    assert torch.equal(torch.rand(1), expected)
