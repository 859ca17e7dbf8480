"""Counts of rows that begin again: a step that has added its rows to a number, in every batch, takes from it in one.

self.num_seen += len(batch)         two slices of four rows have added 4 and 4, which comes together as 8
if self.num_seen >= 1000:           each begins again by itself: -996 and -996 are no parts of what one device does
    self.num_seen = 0
"""

import math
from collections.abc import Sequence

_CLOSE = 1e-5


class RowCounts:
    """Which numbers have grown by as much for every row, in all batches so far."""

    def __init__(self) -> None:
        self._per_row: dict[str, float | None] = {}  # by path; None for what is no such count

    def is_count(self, path: str) -> bool:
        """Whether a number has counted rows in all batches so far."""
        return self._per_row.get(path) is not None

    def begin_again(self, path: str, increments: Sequence[float], rows: Sequence[float]) -> bool:
        """Whether a number that has counted rows until now is taken back on a slice.

        Args:
            path: Of the number.
            increments: What each slice has added to it.
            rows: Of each slice.
        """
        per_row = [increment / count for increment, count in zip(increments, rows, strict=True) if count]
        if path not in self._per_row:
            is_count = bool(per_row) and per_row[0] != 0 and _all_close(per_row, per_row[0])
            self._per_row[path] = per_row[0] if is_count else None
            return False
        known = self._per_row[path]
        if known is None or _all_close(per_row, known):
            return False
        if any(increment * known < 0 for increment in per_row):
            return True
        self._per_row[path] = None  # it counts something else
        return False


def _all_close(values: Sequence[float], value: float) -> bool:
    return all(math.isclose(one, value, rel_tol=_CLOSE) for one in values)
