"""Sizes are cut into runs of about equal size, from the last on."""

import pytest

from lightning_dpx.boundaries import split_at_boundaries


@pytest.mark.parametrize(
    ("sizes", "num_splits", "expected"),
    [
        ([1, 1, 1, 1], 2, [[3, 2], [1, 0]]),
        ([1, 1, 1, 1], 8, [[3], [2], [1], [0]]),
        ([9, 1, 1, 1], 3, [[3, 2, 1, 0]]),
        ([1, 1, 1, 9], 3, [[3], [2], [1, 0]]),
        ([0, 0], 2, [[1], [0]]),
    ],
)
def test_splits_are_about_equal(sizes: list[int], num_splits: int, expected: list[list[int]]) -> None:
    splits = split_at_boundaries(sizes, num_splits)
    assert sorted(index for split in splits for index in split) == list(range(len(sizes)))
    assert splits == expected
