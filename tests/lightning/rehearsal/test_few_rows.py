"""Which rows of a batch a rehearsal takes."""

import pytest
import torch

from lightning_dpx.lightning.rehearsal.few_rows import FewRows, unequal_sizes
from lightning_dpx.lightning.rehearsal.outcome import Call, NotRehearsed
from lightning_dpx.replicas import ReplicaSet
from tests.conftest import places


@pytest.mark.parametrize(
    ("num_rows", "num_slices", "sizes"),
    [
        (16, 2, (4, 3)),
        (16, 3, (3, 2, 2)),
        (64, 2, (9, 8)),
        (1000, 4, (9, 8, 8, 8)),
        (64, 8, (3, 2, 2, 2, 2, 2, 2, 2)),
        (4, 2, (3, 1)),
        (3, 2, (2, 1)),
    ],
)
def test_slices_have_unequal_rows_and_all_together_no_more_than_one_of_the_batch(num_rows, num_slices, sizes) -> None:
    assert unequal_sizes(num_rows, num_slices) == sizes


class NoCopy:
    def __deepcopy__(self, memo: dict[int, object]) -> object:
        raise TypeError("one only")


def rows_of(batch: object, num_rows: int) -> FewRows:
    replicas = ReplicaSet(torch.nn.Linear(2, 2), places(2))
    call = Call(name="training_step", args=(batch, 0), kwargs={}, active=(0, 1), num_rows=num_rows)
    return FewRows(call, replicas)


def test_slices_are_the_rows_of_the_whole_in_their_order() -> None:
    batch = torch.arange(40.0).reshape(20, 2)
    rows = rows_of(batch, 20)
    first, second = rows.slices((3, 2))
    assert torch.equal(rows.whole(5), torch.cat([first, second]))
    assert torch.equal(first, batch[:3])


def test_other_rows_are_those_behind_what_is_skipped() -> None:
    batch = torch.arange(40.0).reshape(20, 2)
    rows = rows_of(batch, 20)
    rows.skipped = 1.0
    assert torch.equal(rows.whole(5), batch[15:])
    rows.skipped = 0.5
    assert torch.equal(rows.whole(5), batch[7:12])


def test_rows_are_copies() -> None:
    batch = torch.zeros(5, 2)
    rows = rows_of(batch, 5)
    rows.whole(5).add_(1)
    assert not batch.any()


def test_a_batch_that_cannot_be_copied_is_not_rehearsed() -> None:
    rows = rows_of([NoCopy() for _ in range(5)], 5)
    with pytest.raises(NotRehearsed, match=r"cannot be copied.*one only"):
        rows.whole(5)


def test_a_few_rows_take_no_more_than_themselves() -> None:
    batch = {"x": torch.arange(4000.0).reshape(1000, 4), "y": torch.arange(1000)}
    rows = rows_of(batch, 1000)
    whole = rows.whole(5)
    assert torch.equal(whole["x"], batch["x"][:5])
    for part in (whole, *rows.slices((3, 2))):
        for copied in part.values():
            assert copied.untyped_storage().nbytes() == copied.nbytes


def test_tensors_of_the_same_numbers_are_of_the_same_in_the_copy() -> None:
    numbers = torch.zeros(20, 2)
    copied = rows_of([numbers, numbers.view(20, 2)], 20).whole(5)
    copied[0].add_(1)
    assert copied[1].eq(1).all()
    assert not numbers.any()
