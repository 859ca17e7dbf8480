"""The rows of micro-batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.replicas.micro_batch_sizes import cut_into_micro_batches, parse_micro_batches, sum_by_device


def test_nearly_equal_rows_and_fewer_for_a_short_batch() -> None:
    assert cut_into_micro_batches((13,), (13,), (4,)) == (4, 3, 3, 3)
    assert cut_into_micro_batches((5,), (13,), (4,)) == (3, 2, 0, 0)
    assert cut_into_micro_batches((2,), (2,), (4,)) == (1, 1, 0, 0)
    assert cut_into_micro_batches((7, 6), (7, 6), (3, 1)) == (3, 2, 2, 6)
    assert cut_into_micro_batches((7, 6), (7, 6), (1, 1), (3, 2)) == (7, 0, 0, 6, 0)
    assert cut_into_micro_batches((7, 6), (7, 6), (2, 1), (3, 2)) == (4, 3, 0, 6, 0)
    assert cut_into_micro_batches((7,), (8,), (4,)) == (3, 2, 2, 0)
    assert cut_into_micro_batches((3,), (4,), (2,)) == (3, 0)
    assert cut_into_micro_batches((7,), (7,), (4,)) == (2, 2, 2, 1)  # as was asked for
    assert cut_into_micro_batches((5, 0), (7, 6), (2, 2)) == (3, 2, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=4))
def test_no_row_is_lost_and_none_is_larger_than_usual(devices: list[tuple[int, int, int]]) -> None:
    sizes, usual, numbers = zip(*devices, strict=True)
    rows = cut_into_micro_batches(sizes, usual, numbers)
    assert sum_by_device(rows, numbers) == sizes
    largest = [max(3, -(-max(size, full) // number)) for size, full, number in devices]
    assert all(max(part) <= most for part, most in zip(_by_device(rows, numbers), largest, strict=True))
    assert all(max(part) - min(filter(None, part), default=0) <= 1 for part in _by_device(rows, numbers) if any(part))


def _by_device(rows: tuple[int, ...], numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
    waiting = list(rows)
    return [tuple(waiting.pop(0) for _ in range(number)) for number in numbers]


def test_one_number_for_all_or_one_each() -> None:
    assert parse_micro_batches(3, 2) == (3, 3)
    assert parse_micro_batches([3, 1], 2) == (3, 1)
    with pytest.raises(ConfigurationError, match=r"3 entries \[1, 2, 3\] for 2 devices; give one per device"):
        parse_micro_batches([1, 2, 3], 2)
    with pytest.raises(ConfigurationError, match=r"micro_batches\[1\]=0 is not allowed"):
        parse_micro_batches([1, 0], 2)
