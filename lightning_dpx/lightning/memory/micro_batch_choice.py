"""Within a budget the first training batch decides into how many micro-batches every device's slice is cut.

    slices of the first batch --profiles of all rows, and of as few as may fit--> numbers, the fastest within the budget
      --Session.cut_slices--> replicas for the micro-batches --rehearsal--> as on one device: they stay
                                                                            else: one piece, and what that costs

The rehearsal of micro-batches is that of replicas: slices of unequal size beside the whole batch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lightning_dpx.errors import BudgetError
from lightning_dpx.lightning.lightning_api import rank_zero_info, rank_zero_warn
from lightning_dpx.lightning.memory.kept_gradients import keeps_gradients
from lightning_dpx.lightning.memory.micro_batch_cost import seconds_of_a_micro_batch
from lightning_dpx.lightning.memory.part_profiles import PartProfiles
from lightning_dpx.lightning.memory.profiled_steps import TriedSteps, by_device
from lightning_dpx.lightning.memory.profiling import devices_of
from lightning_dpx.lightning.memory.shadow_slice import Step
from lightning_dpx.lightning.memory.slice_loss import NoLossError
from lightning_dpx.memory import BesideActivations, MemoryPlan, MicroBatchChoice, Profile, plan_in_micro_batches
from lightning_dpx.memory.profile import timing_effort
from lightning_dpx.replicas import BatchSlice, UncuttableBatch

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

RoomOf = Callable[[torch.device], int]  # bytes of activations that one replica there is allowed
BesideOf = Callable[[torch.device], BesideActivations]


@dataclass(slots=True)
class MicroBatchChooser:
    """Chooses for the training steps of a session: of the first batch, and of each that is larger than any before.

    Args:
        session: Whose.

    Attributes:
        is_open: Whether nothing is decided yet.
        choices: By device, what was chosen.
        tried: The steps that were profiled.
        is_left: Whether a rehearsal has found that micro-batches are not what one device gives.
        why_whole: What stood in the way of micro-batches, until it is said.
    """

    session: "Session"
    is_open: bool = True
    choices: dict[torch.device, MicroBatchChoice] = field(default_factory=dict)
    tried: TriedSteps = field(default_factory=dict)
    is_left: bool = False
    why_whole: str = ""
    _raised: int = 0  # the number that a step out of memory was given

    def has_chosen_for_less(self, slices: list[BatchSlice]) -> bool:
        """Whether what was chosen, and was not taken back, was for smaller slices than one of these."""
        # Nothing chosen includes a choice that a rehearsal took back: that is not made again.
        return bool(self.choices) and not self.session.strategy.planning.knows(slices)

    def slices_in_one_piece(self, batch: Any) -> list[BatchSlice]:
        """One slice of a batch for each device, none of them cut further."""
        with self.session.replicas.partition.slices_in_one_piece(training=True):
            return self.session.slices.of("training_step", batch)

    def numbers(
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
        self.is_open = False
        # Profiles are known by their rows alone, and this batch may have
        # other shapes than the last.
        self.tried = {}
        devices = self.session.replicas.devices
        # Before any profile, as a profile of a large step takes a while.
        self.why_whole = self.why_in_one_piece(slices)
        if self.why_whole:
            return [1] * len(devices)
        # A device is as full as its largest slice makes it.
        largest = {home: here[0] for home, here in by_device(slices).items()}
        try:
            for home, batch_slice in largest.items():
                room = room_of(home)
                try:
                    self.choices[home] = self._choice(
                        batch_slice, run, room, planner, beside_of(home), counts_gradients=counts_gradients
                    )
                except BudgetError as error:
                    explain(error, home, self._least_in_one_piece(batch_slice.num_rows, room, planner))
                    raise
        except UncuttableBatch as error:
            self.why_whole = error.reason
            self.choices.clear()
        except NoLossError:
            self.is_open = True  # the next step may return a loss
        return [self.choices[device].candidate.number if device in self.choices else 1 for device in devices]

    def say_why_whole(self, plans: Iterable[MemoryPlan]) -> None:
        """Says what stood in the way of micro-batches; not where everything fits, as there would be none."""
        # Said after planning, as only the plans tell whether micro-batches would have helped.
        if self.why_whole and not all(plan.keeps_all for plan in plans):
            rank_zero_info(f"dpx: training steps stay whole, where micro-batches may be faster: {self.why_whole}")
        self.why_whole = ""

    def why_in_one_piece(self, slices: list[BatchSlice]) -> str:
        """What stands in the way of micro-batches, known before anything is profiled."""
        session = self.session
        if not session.module.automatic_optimization:
            return "they optimize by hand."
        if session.shifts:
            return "parts of the module are shifted to other devices."
        if session.whole_batches.reason_for("training_step") is not None:
            return "their batches cannot be cut."
        if session.has_processes:
            return "there are several processes."
        if any(len(devices_of(batch_slice.replica)) > 1 for batch_slice in slices):
            return "a replica runs on several devices."
        if session.options.verify == "off":
            return "verify='off' leaves out the rehearsal that says whether they are what one device gives."
        if torch.are_deterministic_algorithms_enabled():
            return (
                "deterministic algorithms are asked for, and how many would be chosen depends on times that are "
                "measured; micro_batches=M names a number."
            )
        return ""

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
        session = self.session
        module = session.replicas.root.module
        cache = session.strategy.planning.cache
        parts = PartProfiles(session, batch_slice, run, self.tried, counts_gradients=counts_gradients)

        def plan_of(profile: Profile, budget: int | None) -> MemoryPlan:
            return cache.plan_profile(module, profile, planner, budget)

        try:
            _plan, choice = plan_in_micro_batches(
                parts.rows,
                parts.of_rows,
                plan_of,
                room,
                seconds_each=seconds_of_a_micro_batch(batch_slice.replica.device),
                beside=beside,
                # A difference below what predictions are sure of is no reason to cut a step.
                margin=timing_effort.uncertainty(),
                runs_twice=session.end_hook("training_step") is not None,
                profile_if=parts.of_rows_if,
            )
        except BudgetError as error:
            for why in parts.failed[-1:]:
                error.add_note(f"More micro-batches might need less, but {why}.")
            raise
        if choice.candidate.number == 1 and parts.failed:
            self.why_whole = parts.failed[-1]
        return choice

    def _least_in_one_piece(self, rows: int, room: int, planner: Any) -> int | None:
        """Bytes of activations that a step of all rows needs at least; ``None`` where that is not known."""
        session = self.session
        whole = self.tried.get((rows, keeps_gradients(session.trainer)))
        if whole is None:
            return None
        try:
            session.strategy.planning.cache.plan_profile(session.replicas.root.module, whole, planner, room)
        except BudgetError as error:
            return error.smallest
        return None

    def stay_whole(self, reason: str) -> None:
        """Leaves steps in one piece; the reason is told once a plan shows that it matters."""
        self.is_open = False
        self.why_whole = reason

    def raised_to(self, number: int) -> None:
        """Notes the number for a step out of memory, which a rehearsal may take back."""
        self.is_open = False
        self._raised = number

    def leave(self, name: str, reason: str) -> bool:
        """Takes a choice back after a rehearsal: micro-batches are not what one device gives.

        Args:
            name: Of the step.
            reason: What speaks against them, in a sentence that begins with "they".

        Returns:
            Whether they had been chosen here; what the user chose stays.
        """
        del name  # training steps alone
        session = self.session
        # Nothing was chosen here: a number that the user named stays, whatever the rehearsal found.
        if not (self.choices or self._raised) or not session.replicas.partition.has_micro_batches:
            return False
        self.is_left = True
        if self._raised:
            rank_zero_warn(
                f"dpx: {self._raised} micro-batches would need less memory, but {reason} "
                f"So the step stays in one piece; micro_batches={self._raised} cuts it all the same."
            )
            session.cut_slices([1] * len(session.replicas.devices))
            return True
        expected = max(choice.share for choice in self.choices.values())
        number = max(choice.candidate.number for choice in self.choices.values())
        self.choices.clear()
        rank_zero_info(
            f"dpx: {number} micro-batches would be {expected:.2f} x the time of a plain step, but {reason} "
            "So the step stays in one piece, with a memory plan for all of its rows; "
            f"micro_batches={number} cuts it all the same."
        )
        session.cut_slices([1] * len(session.replicas.devices))
        return True
