"""When a step is expected to do again what it does now and then only."""

import pytest

from lightning_dpx.lightning.rehearsal.recurrence import Recurrence


@pytest.mark.parametrize(
    ("did_more_in", "expected_in"),
    [
        ((), ()),
        ((5,), (10,)),
        ((5, 10), (10, 15)),
        ((2, 5), (4, 8)),
        ((3, 4, 5), (5, 6)),
        (tuple(range(1, 16)), (2, 3, 4, 5, 6)),  # not for ever
    ],
)
def test_the_next_one_comes_as_many_batches_later(did_more_in: tuple[int, ...], expected_in: tuple[int, ...]) -> None:
    recurrence = Recurrence()
    expected = []
    for number in range(1, 20):
        last = max((earlier for earlier in did_more_in if earlier < number), default=0)
        assert recurrence.begin_batch(last) == number
        if recurrence.is_expected:
            expected.append(number)
    assert tuple(expected) == expected_in
