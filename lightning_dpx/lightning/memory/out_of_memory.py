"""What happens when memory runs out in a training step: the error says what would help, or the step is repeated."""

import traceback
from collections.abc import Callable
from typing import Literal, TypeVar

import torch

from lightning_dpx.devices import free_garbage, raises_out_of_memory
from lightning_dpx.errors import BudgetError
from lightning_dpx.lightning.lightning_api import rank_zero_warn
from lightning_dpx.lightning.ranks import Ranks
from lightning_dpx.python_objects.preserve import GeneratorStates
from lightning_dpx.replicas import ReplicaSet

OnOOM = Literal["raise", "replan"]
MOST_REPEATS = 3  # of one step
MEETS_OTHERS = (
    "on_oom='replan' does not repeat this step: it meets other processes inside of it, which have gone on and would be "
    "met a second time. Give memory_budget, for which all processes plan together."
)
T = TypeVar("T")


class OutOfMemoryRecovery:
    """Repeats steps that ran out of memory, with a tighter plan and the same random numbers.

    Args:
        on_oom: ``"raise"`` never does.
    """

    def __init__(self, on_oom: OnOOM) -> None:
        self.repeats_steps: bool = on_oom == "replan"
        self._states: GeneratorStates | None = None
        self._repeats_left = 0
        self._ranks: Ranks | None = None
        self._num_meetings = 0  # before the step

    def begin_step(self, replicas: ReplicaSet, ranks: Ranks) -> None:
        """Remembers the random generators, and whom replicas have met, for a repetition of the step that begins."""
        # Only then: a snapshot of the generators in every step is a cost that
        # nothing would come back for.
        if self.repeats_steps:
            self._states = GeneratorStates(replicas.devices, generators=replicas.traits.draws.generators)
            self._repeats_left = MOST_REPEATS
            self._ranks = ranks
            self._num_meetings = ranks.num_meetings

    def run_guarded(self, run: Callable[[], T], tighten: Callable[[], str], repeat: Callable[[], T] | None) -> T:
        """What ``run`` returns, or one of the repetitions of the step.

        Args:
            run: A part of the step.
            tighten: Makes a plan that takes less; says what it is.
            repeat: Does the step anew, up to and with this part; ``None`` if that cannot be.

        Raises:
            OutOfMemoryError: the original error, if the step is not repeated; the last one, if that did not help.
            BudgetError: there is no tighter plan.
            CollectiveError: to plan anew, other processes would have to be met.
        """
        while True:
            try:
                return raises_out_of_memory(run)()
            # A BudgetError is an out-of-memory error as well, but of a plan and not of a
            # device: no repetition helps.
            except BudgetError:
                raise
            except torch.OutOfMemoryError as error:
                states = self._states
                if (
                    states is None or repeat is None or self._repeats_left == 0
                ):  # without states no step is repeated at all
                    raise
                if self._ranks is not None and self._ranks.num_meetings > self._num_meetings:
                    error.add_note(MEETS_OTHERS)
                    raise
                traceback.clear_frames(error.__traceback__)  # they hold on to what did not fit
                # The text alone is kept: the error leads to the frames, and they to the
                # tensors of the failed step.
                what = str(error).splitlines()[0]
            # Graphs and modules are in reference cycles, and what they hold is needed now.
            free_garbage()
            self._repeats_left -= 1
            plan = tighten()
            rank_zero_warn(
                f"dpx: a step ran out of memory ({what}) and is repeated, {MOST_REPEATS - self._repeats_left} of "
                f"{MOST_REPEATS} times at the most: {plan}"
            )
            # The repetition draws what the failed step drew, whatever was drawn since.
            states.restore()
            run = repeat
