"""What forwards that were followed call by call have shown, put together as one routine."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from lightning_dpx.memory.execute.routine import Entered, Routine, make_routine
from lightning_dpx.memory.execute.routine_forwards import FollowedForward


class LearnedRoutine:
    """Learns from one forward after the other.

    Args:
        parts: The modules that forwards may call, by path.

    Attributes:
        routine: Of all forwards so far; ``None`` before the first.
        is_lost: Whether a forward has not kept to it: that the next one is another one is known then.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        self.routine: Routine | None = None
        self.is_lost: bool = False
        self._parts = parts
        self._containers = {path.rpartition(".")[0] for path in parts}

    def routine_of(self, forward: FollowedForward, needed: set[str]) -> Routine:
        """What this forward alone has shown.

        Args:
            forward: One that is over.
            needed: The names of values for which hooks have to be on.
        """
        routine = make_routine(forward.events, forward.calls, needed, self._containers, forward.unpacked)
        return replace(routine, unseen=routine.unseen | self._uncalled(forward))

    def join(self, forward: FollowedForward, routine: Routine) -> None:
        """Takes in what a forward has shown, and notes in it whether that contradicts what was known."""
        # Steps that take turns would lose the routine of the last kind time and again, and exceed the budget.
        if self.routine is not None and not self.is_lost:
            forward.changed = self.routine.contradicts(routine)
        self.is_lost = False
        # All of it: a step that leaves a part out takes nothing away from what others have shown.
        self.routine = routine if self.routine is None else self.routine.joined(routine)

    def _uncalled(self, forward: FollowedForward) -> set[Entered]:
        """First calls of modules that this forward has not called: nothing is known of what is saved in them."""
        uncalled = [path for path in self._parts if path not in forward.calls]
        return {Entered(path, 0) for path in uncalled if type(self._parts[path]).forward is not nn.Module.forward}
