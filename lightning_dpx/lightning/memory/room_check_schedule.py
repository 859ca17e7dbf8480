"""When to check that devices still have the room that plans count on.

Before the first batch, where plans were made without one. Later at the start of every epoch, which is when callbacks
begin to keep copies, and after 1, 2, 4, 8, ... steps: an allocator takes its time to answer.
"""

from lightning_dpx.powers import is_power_of_two


class RoomCheckSchedule:
    """Counts the steps that follow a plan.

    Attributes:
        is_first: Whether the step that runs is the first one of plans that were made before any batch.
    """

    def __init__(self) -> None:
        self.is_first = False
        self._was_before_batches = False
        self._is_over = False
        self._is_asked = False
        self._num_steps = 0

    def restart(self, *, before_batches: bool) -> None:
        """There is a new plan.

        Args:
            before_batches: Whether it was made without any of the run's batches.
        """
        self._was_before_batches = before_batches
        self._is_over = False
        self._is_asked = before_batches
        self._num_steps = 0

    def begin_step(self) -> bool:
        """A step begins; says whether it is one to look at."""
        self._num_steps += 1
        self.is_first = self._was_before_batches
        self._was_before_batches = False
        is_power = is_power_of_two(self._num_steps)
        # The plan of the first step was made a moment ago.
        is_due = self._is_asked or (is_power and self._num_steps > 1)
        self._is_asked = False
        return is_due and not self._is_over

    def ask(self) -> None:
        """Has the next step looked at."""
        self._is_asked = True

    def stop(self) -> None:
        """Stops looking until there is another plan: none meets the budget, and the user was warned."""
        self._is_over = True
