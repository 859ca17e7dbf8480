"""Copies across a cut: one per tensor and device, and none that was written past its original."""

import pytest
import torch

from lightning_dpx.shifting.copies import Copies, Extent
from tests.conftest import SIMULATED, sim_device

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)


class WrittenError(Exception):
    """A copy was written."""


def copies() -> Copies:
    def refuse(*_: object) -> None:
        raise WrittenError

    return Copies(["caller"], refuse)


def test_a_tensor_is_copied_once_to_a_device_and_comes_back_as_itself() -> None:
    known = copies()
    tensor = torch.ones(3)
    there = known.copy(tensor, sim_device(1))
    assert known.copy(tensor, sim_device(1)) is there
    assert known.copy(there, torch.device("cpu")) is tensor
    tensor.add_(1)
    assert known.copy(tensor, sim_device(1)).cpu().tolist() == [2, 2, 2], "anew after a write"


def test_reading_the_original_of_a_written_copy_is_refused_also_through_a_view_that_overlaps() -> None:
    known = copies()
    tensor = torch.ones(4)
    known.copy(tensor[:2], sim_device(1)).add_(1)
    known.check(tensor[2:])  # no byte of what was copied
    with pytest.raises(WrittenError):
        known.check(tensor.view(2, 2)[0])


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        (lambda t: t[:, 0], lambda t: t[:, 1], False),
        (lambda t: t[:, 0], lambda t: t[1], True),
        (lambda t: t[:2], lambda t: t[2:], False),
        (lambda t: t.t(), lambda t: t[3, 3], True),
    ],
)
def test_two_extents_overlap_exactly_where_a_byte_is_in_both(one, other, overlap: bool) -> None:
    table = torch.zeros(4, 4)
    assert Extent(one(table)).overlaps(Extent(other(table))) == overlap
