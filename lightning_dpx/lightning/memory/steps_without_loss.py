"""Steps that return no loss, or run no backward, one after the other: from none of them a plan can be made.

One that skips a batch has a loss in the next. One that runs a backward of its own, and returns ``None`` with automatic
optimization, never has: to profile all of them would make every step many times as long. A step by hand may never run
a backward, as where weights are found without gradients: after as many it is planned by its forward.
"""

from lightning_dpx.lightning.lightning_api import rank_zero_info, rank_zero_warn
from lightning_dpx.lightning.memory.slice_loss import NoLossError
from lightning_dpx.powers import is_power_of_two

_MOST_LOOKS = 8  # in a row, at every step; later ones are at steps 16, 32, 64, ...


class StepsWithoutLoss:
    """Counts them, and says which are looked at."""

    def __init__(self) -> None:
        self._seen = 0
        self._steps = 0

    def begin_step(self) -> None:
        """A training step begins."""
        self._steps += 1

    @property
    def skips_profile(self) -> bool:
        """Whether so many had none that this step is not looked at."""
        return self._seen >= _MOST_LOOKS and not is_power_of_two(self._steps)

    @property
    def was_last(self) -> bool:
        """Whether the last one had none: then one run of the next tells whether it is worth a profile of ten."""
        return self._seen > 0

    def note_none(self, error: NoLossError) -> bool:
        """A step returned no loss, or ran no backward; says whether so many have that it is how they are."""
        self._seen += 1
        if self._seen == 1:
            rank_zero_info(
                f"dpx: the training step {error.lacks} on this batch, so its memory is planned at the first one that "
                f"does. {error.advice}"
            )
        return self._seen == _MOST_LOOKS

    def warn(self, error: NoLossError) -> None:
        """Says that such steps are not planned."""
        rank_zero_warn(
            f"dpx: {_MOST_LOOKS} training steps in a row {error.lacks}, so their memory is not planned, and "
            f"may exceed the budget; from here on ever fewer of them are looked at. {error.advice}"
        )

    @property
    def remark(self) -> str:
        """What is said of a plan that is made from their forward."""
        return f"; planned by the forward alone, as {_MOST_LOOKS} training steps in a row ran no backward"

    def note_loss(self) -> None:
        """A step returned one."""
        self._seen = 0
