"""Steps on a simulated device take the time of its model, and not the seconds that pass."""

from lightning_dpx.lightning.memory.dry_run.step_profiles import StepProfiles
from lightning_dpx.lightning.tuning.profiles_by_rows import ProfilesByRows
from lightning_dpx.memory.profile.roofline import rates_of


class ModelledPace:
    """Steps on a simulated device, whose time is that of a model.

    Args:
        profiles: Of the step there.
        whole: The step on any rows, with other seconds.
    """

    def __init__(self, profiles: StepProfiles, whole: ProfilesByRows) -> None:
        self._whole = whole
        rates = rates_of(profiles.home)
        self._known: dict[int, float] = {}
        # Times of a model grow with the rows, but for what every kernel takes however few there are: a line.
        for rows in (whole.few, whole.more):
            seconds = profiles.seconds(rows, profiles.home, rates)
            self._known[rows] = seconds.forward + seconds.backward

    def at(self, rows: int) -> float:
        """The time of a step on so many rows over what its profile says."""
        few, more = self._whole.few, self._whole.more
        of_a_row = self._known[more] / more
        if few < more:
            of_a_row = (self._known[more] - self._known[few]) / (more - few)
        return (self._known[more] + of_a_row * (rows - more)) / self._whole(rows).step_seconds
