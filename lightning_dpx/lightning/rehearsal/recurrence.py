"""When a step is expected to do again what it does now and then only, such as a second loss in every fifth batch.

The batch after one in which a step did more than was checked is mostly not one in which it does so again. How many
batches lay between the last two such says when the next one comes.
"""

_AT_MOST = 5  # batches that are expected: what has not come back in one of these comes back at random


class Recurrence:
    """The batches of one stage, by number, and those among them in which its step did what was never checked."""

    def __init__(self) -> None:
        self._number = 0
        self._last = 0
        self._expected = 0
        self._left = _AT_MOST

    def begin_batch(self, did_more_in: int) -> int:
        """Another batch, of which the number is returned.

        Args:
            did_more_in: The number of the last batch in which the step did so; of some it is told a batch later.
        """
        if did_more_in > self._last:
            # The first one counts from the start: what comes in the fifth batch may come in every fifth.
            self._expected = did_more_in + (did_more_in - self._last)
            self._last = did_more_in
        self._number += 1
        if self.is_expected:
            self._left -= 1
        return self._number

    @property
    def is_expected(self) -> bool:
        """Whether this batch may be one in which the step does it again."""
        return self._number == self._expected and self._left >= 0
