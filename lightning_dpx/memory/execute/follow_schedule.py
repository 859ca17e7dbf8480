"""How many forwards are followed call by call, before and after what they do is known: see ``routine.py``."""

from collections.abc import Collection

from lightning_dpx.powers import is_power_of_two

_MOST_PATIENCE = 1024  # forwards
_MOST_UNTIL_ALL_IS_MET = 16  # forwards; some of a plan may be of no step at all
_LOOKED_AT_AGAIN = 16  # the first forward that is followed call by call again; then the 32nd, the 64th, ...


class FollowSchedule:
    """How many forwards are still to be followed call by call.

    Args:
        watched: The first ones, and as many again after one that did not follow the routine.
        planned: What is to be seen first: the names of values that the plan drops, and the paths of modules like those
            that save them.

    Attributes:
        num_deviations: Forwards so far that did not follow the routine that they began with.
        follows_growth: Whether larger steps are looked for; who watches plans for larger batches.
    """

    def __init__(self, watched: int, planned: Collection[str]) -> None:
        self.num_deviations: int = 0
        self._unmet = set(planned)
        self._watched = watched
        self._left = watched
        self._num_forwards = 0
        self.follows_growth: bool = watched == 1

    def begin(self) -> bool:
        """Whether the forward that begins is to be followed."""
        self._num_forwards += 1
        if self._is_looked_at(self._num_forwards):
            self._left = max(self._left, 1)
        return self._left > 0

    @property
    def is_left(self) -> bool:
        """Whether there are any."""
        return self._left > 0

    def passes(self) -> bool:
        """Whether the forward that begins need not even be counted among those with hooks."""
        # The second one shows whether the first still waits for its backward.
        if self._left > 0 or self._num_forwards < 2 or self._is_looked_at(self._num_forwards + 1):
            return False
        self._num_forwards += 1
        return True

    def _is_looked_at(self, number: int) -> bool:
        # What is kept outside of the stretches may have grown without a sign of it.
        return self.follows_growth and number >= _LOOKED_AT_AGAIN and is_power_of_two(number)

    def spend(self, met: Collection[str]) -> None:
        """A forward was followed, and may be relied on; it has saved or called what is named in ``met``."""
        self._unmet -= set(met)
        # Steps that leave out parts of it, as with random layers, have to show all of it first: the
        # first call of a part that was never seen loses the routine, with all that comes after it.
        if not self._unmet or self._num_forwards >= _MOST_UNTIL_ALL_IS_MET:
            self._left -= 1

    def begin_anew(self) -> None:
        """The next forwards are followed as the first ones were."""
        self._left = max(self._left, self._watched)

    def end(self, *, changed: bool, grew: bool) -> None:
        """A forward is over, which may have lost its routine or met larger tensors."""
        # Each such one doubles the forwards that are followed, so that steps of a changing
        # structure end up being followed nearly always.
        if changed or (grew and self.follows_growth):
            self.num_deviations += 1
            self._left = max(self._watched, min(2**self.num_deviations, _MOST_PATIENCE))
