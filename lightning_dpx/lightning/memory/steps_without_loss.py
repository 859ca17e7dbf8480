"""Steps that return no loss, one after the other: from none of them a plan can be made.

One that skips a batch has a loss in the next. One that runs a backward of its own, and returns ``None`` with automatic
optimization, never has: to profile all of them would make every step many times as long.
"""

from lightning_dpx.lightning.lightning_api import rank_zero_info, rank_zero_warn
from lightning_dpx.lightning.memory.profiling import NoLossError
from lightning_dpx.powers import is_power_of_two

_MOST_PROFILES = 8  # in a row, of every step; later ones are of steps 16, 32, 64, ...


class StepsWithoutLoss:
    """Counts them, and says which are profiled."""

    def __init__(self) -> None:
        self._profiled = 0
        self._steps = 0

    def begin_step(self) -> None:
        """A training step begins."""
        self._steps += 1

    @property
    def skips_profile(self) -> bool:
        """Whether so many had none that this step is not profiled."""
        return self._profiled >= _MOST_PROFILES and not is_power_of_two(self._steps)

    def note_none(self, error: NoLossError) -> None:
        """A profiled step returned no loss, or ran no backward."""
        self._profiled += 1
        if self._profiled == 1:
            rank_zero_info(
                f"dpx: the training step {error.lacks} on this batch, so its memory is planned at the first one that "
                f"does. {error.advice}"
            )
        elif self._profiled == _MOST_PROFILES:
            rank_zero_warn(
                f"dpx: {_MOST_PROFILES} training steps in a row {error.lacks}, so their memory is not planned, and "
                f"may exceed the budget; from here on ever fewer of them are looked at. {error.advice}"
            )

    def note_loss(self) -> None:
        """A profiled step returned one."""
        self._profiled = 0
