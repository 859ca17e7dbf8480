"""Tightens the plan of a step that ran out of memory under it, so that the step can be repeated with less.

step out of memory --a plan for less, or the first one--> fits: the same slices again
                   --none fits: 2x, 4x, ... micro-batches, each rehearsed and planned--> fits: the slices, cut further
                                                                                        none does: BudgetError
"""

from typing import TYPE_CHECKING

from lightning_dpx.errors import BudgetError
from lightning_dpx.lightning.memory.micro_batch_choice import MicroBatchChooser
from lightning_dpx.lightning.memory.out_of_memory import MEETS_OTHERS
from lightning_dpx.lightning.memory.planning import MemoryPlanning
from lightning_dpx.lightning.memory.profiled_steps import StepToPlan, by_device
from lightning_dpx.lightning.memory.shadow_run import ShadowRun, StepInput
from lightning_dpx.lightning.memory.static_of_steps import StaticOfSteps
from lightning_dpx.lightning.memory.step_planner import StepPlanner
from lightning_dpx.replicas.shared_iterators import iterators_peeked

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


class PlanTightening:
    """Has the steps of a session take less memory than those that ran out of it.

    Args:
        session: Whose steps.
        planning: Has the plans.
        static: What a step needs beside its activations.
        micro_batches: Knows why slices stay in one piece, and is told of the numbers that are made here.
        planner: Profiles and plans a step whose slices were cut anew.
    """

    def __init__(
        self,
        session: "Session",
        planning: MemoryPlanning,
        static: StaticOfSteps,
        micro_batches: MicroBatchChooser,
        planner: StepPlanner,
    ) -> None:
        self._session = session
        self._planning = planning
        self._static = static
        self._micro_batches = micro_batches
        self._planner = planner

    def tighten(self, step: StepInput, *, may_cut: bool = True) -> StepInput:
        """After this step ran out of memory: what it is repeated on, with a plan that takes less.

        Args:
            step: That ran.
            may_cut: Whether its slices may be cut further, where no plan fits them as they are.

        Raises:
            BudgetError: nothing takes less.
        """
        session = self._session
        # The memory of other processes has not run out, and they are somewhere in their steps.
        alone = session.strategy.ranks.alone(MEETS_OTHERS)
        with alone, iterators_peeked(session.replicas.root.module) as peeked:
            run = ShadowRun(session, step, peeked)
            try:
                self._planning.tighten(
                    StepToPlan(replicas=session.replicas, slices=step.slices, run=run, static_of=self._static.of)
                )
            except BudgetError:
                recut = self._cut_further(step) if may_cut else None
                if recut is None:
                    raise
                return recut
        return step

    def _cut_further(self, step: StepInput) -> StepInput | None:
        """Where no plan of the slices as they are fits: more micro-batches, if they are what one device gives.

        Twice as many each time, down to single rows, until there is a plan for them. A number that was asked for stays.
        """
        session = self._session
        replicas = session.replicas
        chooser = self._micro_batches
        # The number is the user's; or micro-batches were found not to be what one device gives.
        is_named = session.options.micro_batches != "auto"
        if is_named or chooser.is_left or chooser.why_in_one_piece(chooser.slices_in_one_piece(step.args[0])):
            return None
        if replicas.why_no_micro_batches():
            return None
        # The fewest that fit are the fastest, as each number halves what a micro-batch keeps.
        while True:
            # Single rows cannot be cut any further.
            rows = [max(one.num_rows for one in here) for here in by_device(step.slices).values()]
            if max(rows) < 2:
                return None
            recut = self._recut(step, [2 * number for number in replicas.partition.numbers(training=True)])
            if recut is None:
                return None
            step = recut
            try:
                self._planner.plan(step)
            except BudgetError:
                continue
            return step

    def _recut(self, step: StepInput, numbers: list[int]) -> StepInput | None:
        """Cuts the slices of the step that runs, and rehearses it; what it runs on then, if they stay cut."""
        session = self._session
        # Noted before the rehearsal, which may take the number back by way of the chooser.
        self._micro_batches.raised_to(max(numbers))
        if not session.cut_slices(numbers):
            return None
        slices = session.training.rehearsed(
            session.slices.of("training_step", step.args[0]), step.args, step.kwargs, is_known=True
        )
        if self._micro_batches.is_left:
            return None
        return StepInput(slices, step.args, step.kwargs)
