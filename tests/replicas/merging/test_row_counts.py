"""A number that has counted rows, and is taken back on a slice, begins again; other numbers do not."""

import pytest

from lightning_dpx.replicas.merging.row_counts import RowCounts


@pytest.mark.parametrize(
    ("steps", "begins_again"),
    [
        ([(4, 4), (-16, -16)], True),  # back to zero
        ([(4, 4), (4, 2)], False),
        ([(4, 4), (4, -12)], True),  # on one slice
        ([(8.0, 8.0), (8.0, 8.0), (-28.0, 8.0)], True),  # two for every row
        ([(-4, -4), (6, 6)], True),  # counted down
        ([(4, 3), (-4, -4)], False),  # hits and misses
        ([(0, 0), (-4, -4)], False),
        ([(4, 4), (3, 4), (-4, -4)], False),  # all were hits, at first
    ],
)
def test_a_count_of_rows_that_is_taken_back(steps: list[tuple[float, float]], begins_again: bool) -> None:
    counts = RowCounts()
    found = []
    for increments in steps:
        rows = (4, 2) if increments == (4, 2) else (4, 4)
        found.append(counts.begin_again("self.count", increments, rows))
    assert found == [False] * (len(steps) - 1) + [begins_again]
