"""The profile of a step on any number of rows, on a line through two that are made."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lightning_dpx.memory import Profile, extrapolate
from lightning_dpx.memory.profile.scaling import scaled


@dataclass(slots=True)
class ProfilesByRows:
    """Profiles of a step on any number of rows, from two that are made.

    Attributes:
        made: Makes the profile of so many rows.
        few: The smaller number of rows that is profiled.
        more: The larger one; the same where a batch has one row.
    """

    made: Callable[[int], Profile]
    few: int
    more: int
    _known: dict[int, Profile] = field(default_factory=dict)

    def __call__(self, rows: int) -> Profile:
        """The profile of a step on ``rows`` rows."""
        if rows not in self._known:
            self._known[rows] = self._of(rows)
        return self._known[rows]

    def _of(self, rows: int) -> Profile:
        # The two that were run are taken as they were measured.
        if rows in (self.few, self.more):
            return self.made(rows)
        if self.few == self.more:
            # Nothing tells what of one row grows with the rows, so all of it does.
            return replace(scaled(self(self.more), rows / self.more, rows / self.more), scale=1.0)
        found = extrapolate(self(self.few), self(self.more), (self.few, self.more), rows)
        return replace(found, scale=1.0)
