"""Within a budget the first training batch decides into how many micro-batches every device's slice is cut.

    slices of the first batch --profiles of all rows, and of as few as may fit--> numbers, the fastest within the budget
      --Session.cut_slices--> replicas for the micro-batches --rehearsal--> as on one device: they stay
                                                                            else: one piece, and what that costs

The rehearsal of micro-batches is that of replicas: slices of unequal size beside the whole batch.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_dpx.errors import BudgetError
from lightning_dpx.lightning.lightning_api import rank_zero_info, rank_zero_warn
from lightning_dpx.lightning.memory.freed_gradients import FreedGradients
from lightning_dpx.lightning.memory.kept_gradients import keeps_gradients
from lightning_dpx.lightning.memory.micro_batch_cost import seconds_of_a_micro_batch
from lightning_dpx.lightning.memory.micro_batch_obstacles import RunToCut, why_none_are_chosen
from lightning_dpx.lightning.memory.part_profiles import PartProfiles
from lightning_dpx.lightning.memory.planning import MemoryPlanning
from lightning_dpx.lightning.memory.profiled_steps import KnownProfiles, by_device
from lightning_dpx.lightning.memory.profiling import devices_of
from lightning_dpx.lightning.memory.shadow_run import ShadowRun, StepInput
from lightning_dpx.lightning.memory.shadow_slice import Step
from lightning_dpx.lightning.memory.slice_loss import NoLossError
from lightning_dpx.lightning.memory.static_of_steps import StaticOfSteps
from lightning_dpx.memory import BesideActivations, MemoryPlan, MicroBatchChoice, Profile, plan_in_micro_batches
from lightning_dpx.memory.profile import timing_effort
from lightning_dpx.replicas import BatchSlice, UncuttableBatch
from lightning_dpx.replicas.shared_iterators import iterators_peeked

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

_NO_BOUND = (
    "dpx: memory no longer bounds the batch: a larger one is cut into more micro-batches. What looks for the largest "
    "batch that fits (BatchSizeFinder) ends at its max_trials or max_val, or at the size of the data set."
)
RoomOf = Callable[[torch.device], int]  # bytes of activations that one replica there is allowed
BesideOf = Callable[[torch.device], BesideActivations]


class MicroBatchChooser:
    """Chooses for the training steps of a session: of the first batch, and of each that is larger than any before.

    Args:
        session: Whose.
        planning: Has the budgets, and plans what is chosen.
        static: What a step needs beside its activations.
        freed_gradients: Looks at the step.

    Attributes:
        is_left: Whether a rehearsal has found that micro-batches are not what one device gives.
    """

    def __init__(
        self, session: "Session", planning: MemoryPlanning, static: StaticOfSteps, freed_gradients: FreedGradients
    ) -> None:
        self.is_left: bool = False
        self._session = session
        self._planning = planning
        self._static = static
        self._freed_gradients = freed_gradients
        self._choices: dict[torch.device, MicroBatchChoice] = {}
        self._profiles: KnownProfiles = {}  # of the steps that were profiled
        self._why_whole = ""  # what stood in the way of micro-batches, until it is said
        self._is_open = True  # nothing is decided yet
        self._raised = 0  # the number that a step out of memory was given

    def choose(self, step: StepInput, fits: Callable[[StepInput], bool]) -> bool:
        """Chooses, of the first batch and of larger ones, into how many micro-batches every device's slice is cut.

        Chosen again where parameters were unfrozen. A larger batch never has fewer: what was chosen before is needed
        for the smaller ones.

        Args:
            step: The next one.
            fits: Whether a step is planned as it is cut, and no slower for it than the steps before.

        Returns:
            Whether there are more from this step on; replicas were then made for them.

        Raises:
            BudgetError: the budget cannot be met, whatever the number.
        """
        session = self._session
        planning = self._planning
        replicas = session.replicas
        planning.without_loss.begin_step()
        trains_more = planning.note_trained_parameters(replicas)
        grows = self._has_chosen_for_less(step.slices)
        is_undecided = (self._is_open or grows) and not planning.without_loss.skips_profile
        if not session.options.chooses_micro_batches or not is_undecided:
            return False
        # Cut as earlier batches were, a slightly larger one fits as a rule, and that takes one profile.
        if grows and replicas.cuts_slices and self._may_fit_as_cut(step.slices) and fits(step):
            return False
        planning.peaks.end_plan()  # the profiles of a choice take more than any plan allows
        # What is there in reference cycles only is no reason for more micro-batches.
        planning.rooms.free_what_counts(replicas, step.slices)
        # The choice is among numbers for whole slices, and these are parts of an earlier choice.
        if replicas.cuts_slices:
            step = StepInput(self.slices_in_one_piece(step.args[0]), step.args, step.kwargs)
        present = list(replicas.partition.numbers(training=True))
        numbers = list(map(max, self._profiled_numbers(step), present))
        if numbers != present:
            why_whole = replicas.why_no_micro_batches()
            if why_whole:
                self._choices.clear()
                self.stay_whole(why_whole)
                numbers = present
        is_cut = numbers != present and session.cut_slices(numbers)
        # The plan that follows needs these very profiles; without them every
        # step would run once more.
        planning.micro_batches.profiles = self._profiles
        if not is_cut:
            return False
        # After the cut: making replicas anew removes the plans, and forgets
        # the costs along with them.
        planning.micro_batches.cut_costs = {device: choice.cut_share for device, choice in self._choices.items()}
        if grows and not trains_more:
            session.strategy.announce(_NO_BOUND)
        return True

    def _profiled_numbers(self, step: StepInput) -> list[int]:
        """The numbers for a step, by profiles of it on a shadow."""
        slices = step.slices
        replicas = self._session.replicas
        rooms = self._planning.rooms
        replicas.python_state.share()  # as the step itself would begin: every replica is profiled as it is by then
        with iterators_peeked(replicas.root.module) as peeked:
            run = ShadowRun(self._session, step, peeked)
            self._freed_gradients.look(slices[0], run)
            static = self._static.of(slices)
            return self._numbers(
                slices,
                run,
                partial(rooms.room_of_replica, replicas, slices, static),
                self._planning.planner,
                partial(self._static.beside_micro_batches, slices, static),
                partial(rooms.explain_micro_batches, replicas, slices, static),
                counts_gradients=static.frees_gradients,
            )

    def _has_chosen_for_less(self, slices: list[BatchSlice]) -> bool:
        """Whether what was chosen, and was not taken back, was for smaller slices than one of these."""
        # Nothing chosen includes a choice that a rehearsal took back: that is not made again.
        return bool(self._choices) and not self._planning.covered.has_slices(slices)

    def _may_fit_as_cut(self, slices: list[BatchSlice]) -> bool:
        """Whether the largest micro-batch of every device can be profiled within its budget, for all that rows tell."""
        for home, here in by_device(slices).items():
            choice = self._choices.get(home)
            if choice is None:
                return False
            candidate = choice.candidate
            growth = here[0].num_rows / candidate.rows
            if growth > 1 and candidate.profile.peak * growth > (candidate.budget or 0):
                return False
        return True

    def slices_in_one_piece(self, batch: Any) -> list[BatchSlice]:
        """One slice of a batch for each device, none of them cut further."""
        with self._session.replicas.partition.slices_in_one_piece(training=True):
            return self._session.slices.of("training_step", batch)

    def _numbers(
        self,
        slices: list[BatchSlice],
        run: Step,
        room_of: RoomOf,
        planner: Any,
        beside_of: BesideOf,
        explain: Callable[[BudgetError, torch.device, int | None], None],
        *,
        counts_gradients: bool = False,
    ) -> list[int]:
        """Micro-batches of every device, 1 where its slice had better stay in one piece.

        Args:
            slices: Of the batch that decides, one for each device.
            run: ``run(module, rows, num_rows)``: the training step of a shadow of a replica.
            room_of: What is allowed.
            planner: Who plans.
            beside_of: What micro-batches need beside their activations, and a step in one piece does not.
            explain: Adds to a refusal what else the device holds, and what activations need in one piece.
            counts_gradients: As :func:`profile_slice` takes it, of the step in one piece.

        Raises:
            BudgetError: a budget cannot be met, whatever the number.
        """
        self._is_open = False
        # Profiles are known by their rows alone, and this batch may have
        # other shapes than the last.
        self._profiles = {}
        devices = self._session.replicas.devices
        # Before any profile, as a profile of a large step takes a while.
        self._why_whole = self.why_in_one_piece(slices)
        if self._why_whole:
            return [1] * len(devices)
        # A device is as full as its largest slice makes it.
        largest = {home: here[0] for home, here in by_device(slices).items()}
        try:
            for home, batch_slice in largest.items():
                room = room_of(home)
                try:
                    self._choices[home] = self._choice(
                        batch_slice, run, room, planner, beside_of(home), counts_gradients=counts_gradients
                    )
                except BudgetError as error:
                    explain(error, home, self._least_in_one_piece(batch_slice.num_rows, room, planner))
                    raise
        except UncuttableBatch as error:
            self._why_whole = error.reason
            self._choices.clear()
        except NoLossError:
            self._is_open = True  # the next step may return a loss
        return [self._choices[device].candidate.number if device in self._choices else 1 for device in devices]

    def say_why_whole(self, plans: Iterable[MemoryPlan]) -> None:
        """Says what stood in the way of micro-batches; not where everything fits, as there would be none."""
        # Said after planning, as only the plans tell whether micro-batches would have helped.
        if self._why_whole and not all(plan.keeps_all for plan in plans):
            rank_zero_info(f"dpx: training steps stay whole, where micro-batches may be faster: {self._why_whole}")
        self._why_whole = ""

    def explain(self, error: BudgetError) -> None:
        """Adds to a refusal of steps in one piece what stands in the way of micro-batches, which might need less."""
        if self._why_whole:
            error.add_note(f"Micro-batches might need less, but training steps stay whole: {self._why_whole}")

    def why_in_one_piece(self, slices: list[BatchSlice]) -> str:
        """What stands in the way of micro-batches, known before anything is profiled."""
        session = self._session
        return why_none_are_chosen(
            RunToCut(
                verify=session.options.verify,
                optimizes_by_hand=not session.module.automatic_optimization,
                shifts=bool(session.shifts),
                takes_batches_whole=session.whole_batches.reason_for("training_step") is not None,
                has_processes=session.spans_processes,
                spans_devices=any(len(devices_of(batch_slice.replica)) > 1 for batch_slice in slices),
            )
        )

    def _choice(
        self,
        batch_slice: BatchSlice,
        run: Step,
        room: int,
        planner: Any,
        beside: BesideActivations,
        *,
        counts_gradients: bool,
    ) -> MicroBatchChoice:
        session = self._session
        module = session.replicas.root.module
        cache = self._planning.cache
        # A batch that is larger than those before is not run in one piece, where that exceeds the budget.
        most_rows = self._planning.rows_that_fit.of(batch_slice, room)
        parts = PartProfiles(
            session, batch_slice, run, self._profiles, counts_gradients=counts_gradients, most_rows=most_rows
        )

        def plan_of(profile: Profile, budget: int | None) -> MemoryPlan:
            return cache.plan_profile(module, profile, planner, budget)

        earlier = self._choices.get(batch_slice.replica.device)
        if earlier is None or earlier.candidate.number == 1:
            whole = parts.in_one_piece()
        else:
            # What had to be cut is not tried in one piece once more, which takes several times the budget.
            whole = parts.on_a_line(earlier.candidate.rows, earlier.cut_share)
        try:
            _plan, choice = plan_in_micro_batches(
                parts.rows,
                parts.of_rows,
                plan_of,
                # All micro-batches together leave as much as one piece does.
                max(1, room - whole.left_behind),
                whole,
                seconds_each=seconds_of_a_micro_batch(batch_slice.replica.device),
                beside=replace(beside, left_behind=whole.left_behind),
                # A difference below what predictions are sure of is no reason to cut a step.
                margin=timing_effort.uncertainty(),
                runs_twice=session.end_hook("training_step") is not None,
                profile_if=parts.of_rows_if,
            )
        except BudgetError as error:
            if error.smallest is not None:
                error.smallest += whole.left_behind
            for why in parts.failed[-1:]:
                error.add_note(f"More micro-batches might need less, but {why}.")
            raise
        if choice.candidate.number == 1 and parts.failed:
            self._why_whole = parts.failed[-1]
        return choice

    def _least_in_one_piece(self, rows: int, room: int, planner: Any) -> int | None:
        """Bytes of activations that a step of all rows needs at least; ``None`` where that is not known."""
        session = self._session
        whole = self._profiles.get((rows, keeps_gradients(session.trainer)))
        if whole is None:
            return None
        try:
            self._planning.cache.plan_profile(
                session.replicas.root.module, whole, planner, max(1, room - whole.left_behind)
            )
        except BudgetError as error:
            if error.smallest is not None:
                return error.smallest + whole.left_behind
        return None

    def stay_whole(self, reason: str) -> None:
        """Leaves steps in one piece; the reason is told once a plan shows that it matters."""
        self._is_open = False
        self._why_whole = reason

    def raised_to(self, number: int) -> None:
        """Notes the number for a step out of memory, which a rehearsal may take back."""
        self._is_open = False
        self._raised = number

    def leave(self, reason: str) -> bool:
        """Takes a choice back after a rehearsal: micro-batches are not what one device gives.

        Args:
            reason: What speaks against them, in a sentence that begins with "they".

        Returns:
            Whether they had been chosen here; what the user chose stays.
        """
        session = self._session
        # Nothing was chosen here: a number that the user named stays, whatever the rehearsal found.
        if not (self._choices or self._raised) or not session.replicas.partition.has_micro_batches:
            return False
        self.is_left = True
        if self._raised:
            rank_zero_warn(
                f"dpx: {self._raised} micro-batches would need less memory, but {reason} "
                f"So the step stays in one piece; micro_batches={self._raised} cuts it all the same."
            )
            session.cut_slices([1] * len(session.replicas.devices))
            return True
        expected = max(choice.share for choice in self._choices.values())
        number = max(choice.candidate.number for choice in self._choices.values())
        self._choices.clear()
        rank_zero_info(
            f"dpx: {number} micro-batches would be {expected:.2f} x the time of a plain step, but {reason} "
            "So the step stays in one piece, with a memory plan for all of its rows; "
            f"micro_batches={number} cuts it all the same."
        )
        session.cut_slices([1] * len(session.replicas.devices))
        return True
