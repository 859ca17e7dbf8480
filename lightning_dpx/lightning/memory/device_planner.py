"""The plan of one device that need not be there, in one piece or in micro-batches."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

from lightning_dpx.lightning.lightning_api import rank_zero_warn
from lightning_dpx.lightning.memory.micro_batch_obstacles import RunToCut, why_none_are_chosen
from lightning_dpx.memory import BesideActivations, MemoryPlan, Profile, plan_in_micro_batches
from lightning_dpx.memory.micro_batch_planning import (
    FEWER_PARTS,
    PlanOf,
    plan_fixed_micro_batches,
    told_as_too_few_rows,
)
from lightning_dpx.memory.plan.micro_batch_candidates import sizes_of_parts
from lightning_dpx.memory.profile import timing_effort
from lightning_dpx.memory.profile.other_outputs import beside_earlier_outputs
from lightning_dpx.replicas import MicroBatches, ReplicaSet, UncuttableBatch, parse_micro_batches
from lightning_dpx.replicas.batch_norm import batch_norms_by_slice
from lightning_dpx.replicas.micro_batch_sizes import cut_into_micro_batches

Number = int | Literal["auto"]


class DevicePlanner:
    """Plans the step of one device for any room.

    Args:
        rows: Of its slice.
        number: M, the micro-batches, or that the planner chooses it where there is a budget.
        profile_of_slice: Profiles the step on some rows.
        profile_of_part: The same for a micro-batch, whose gradients are added to those before.
        plan_of: Plans a profile.
        seconds_each: What running one micro-batch costs beside its step.
        beside: What micro-batches need beside their activations, and a step in one piece does not.
    """

    def __init__(
        self,
        rows: int,
        number: Number,
        profile_of_slice: Callable[[int], Profile],
        profile_of_part: Callable[[int], Profile],
        plan_of: PlanOf,
        *,
        seconds_each: float = 0.0,
        beside: BesideActivations,
    ) -> None:
        self._rows = rows
        self._number = number
        self._profile_of_slice = profile_of_slice
        self._profile_of_part = profile_of_part
        self._plan_of = plan_of
        self._seconds_each = seconds_each
        self.beside = beside
        if number != "auto":  # as many as the run would make of so many rows
            parts = cut_into_micro_batches([rows], [rows], [number])
            self._number = sum(part > 0 for part in parts)

    @property
    def whole(self) -> Profile:
        """The step in one piece."""
        return self._profile_of_slice(self._rows)

    def plan(self, room: int | None) -> MemoryPlan:
        """The plan for so many bytes of activations; without a limit nothing is computed again.

        Raises:
            BudgetError: there is none.
        """
        # Without a limit one piece is the fastest, so there is nothing to choose.
        if self._number == "auto" and room is not None:
            found = plan_in_micro_batches(
                self._rows,
                self._profile,
                self._plan_of,
                room,
                self.whole,
                seconds_each=self._seconds_each,
                beside=self.beside,
                margin=timing_effort.uncertainty(),
            )
            return found[0]
        number = 1 if self._number == "auto" else self._number
        allowed = self._most(number) if room is None else max(1, room - self.beside.of(number))
        return plan_fixed_micro_batches(
            number, self._rows, self._profile, self._plan_of, allowed, seconds_each=self._seconds_each
        )

    def _most(self, number: int) -> int:
        """Bytes that are enough for the step in so many parts with nothing computed again."""
        if number == 1:
            return self.whole.peak
        # A part of few rows may take more than all rows in one piece: gradients that are added to those before it are
        # made beside them.
        peaks = [self.whole.peak]
        for size in sizes_of_parts(self._rows, number):
            peaks.append(beside_earlier_outputs(self._profile_of_part(size), number).peak)
        return max(peaks)

    def followed(self, plan: MemoryPlan | None) -> Profile:
        """The step that a plan is followed in: on the largest micro-batch where it is cut."""
        # No plan, where the budget cannot be met: the step in one piece says what is missing.
        if plan is None or plan.micro_batches == 1:
            return self.whole
        return beside_earlier_outputs(self._profile_of_part(plan.micro_batch_rows), plan.micro_batches)

    def _profile(self, rows: int, /, *, accumulates: bool) -> Profile:
        if not accumulates:
            return self._profile_of_slice(rows)
        with told_as_too_few_rows(f"On {rows} of its {self._rows} rows a step", FEWER_PARTS):
            return self._profile_of_part(rows)


def micro_batches_of(
    replicas: ReplicaSet, batch: object, given: MicroBatches | Literal["auto"], num_devices: int, run: RunToCut
) -> tuple[tuple[Number, ...], str]:
    """M, or that it is chosen, for each device; and why none is chosen where a run would cut by a number that is named.

    A number that is named and that cannot be planned is announced.

    Args:
        replicas: Of the module.
        batch: The whole of a batch.
        given: What was asked for.
        num_devices: How many there are.
        run: That it is a dry run of.

    Raises:
        ConfigurationError: it is no number of micro-batches, or not one for each device.
    """
    whole = (1,) * num_devices
    if given == "auto":
        # Nothing to tell where a number that is named would not cut it either.
        if _why_in_one_piece(replicas, batch):
            return whole, ""
        why_not = why_none_are_chosen(run) or _what_a_rehearsal_finds(replicas.root.module)
        if why_not:
            return whole, why_not
        automatic: Number = "auto"
        return (automatic,) * num_devices, ""
    numbers = parse_micro_batches(given, num_devices)
    # Whether the batch could be cut is of no interest then.
    if set(numbers) == {1}:
        return numbers, ""
    why_not = _why_in_one_piece(replicas, batch)
    if not why_not:
        return numbers, ""
    rank_zero_warn(f"dpx: micro_batches={given} is planned in one piece: {why_not}")
    return whole, ""


def say_why_whole(why: str, plans: Iterable[MemoryPlan | None]) -> None:
    """Says why no micro-batches are chosen; not where everything fits, as there would be none."""
    # Said after planning, as only the plans tell whether micro-batches might have helped.
    if why and not all(plan is not None and plan.keeps_all for plan in plans):
        rank_zero_warn(f"dpx: the step is planned in one piece, where micro-batches may need less: {why}")


def _what_a_rehearsal_finds(module: Any) -> str:
    """Why a run that chooses the number would take it back, as far as the module tells."""
    norms = batch_norms_by_slice(module)
    if norms:
        return f"{', '.join(norms[:3])} would normalize by micro-batch; micro_batches=M cuts it all the same."
    return ""


def _why_in_one_piece(replicas: ReplicaSet, batch: object) -> str:
    """What stands in the way of micro-batches; nothing if they can be made."""
    module = replicas.root.module
    if not module.automatic_optimization:
        return "the step optimizes by hand."
    # The run has a way in two passes for these, whose time and memory are not
    # those that are planned here.
    if callable(getattr(module, "training_step_end", None)):
        return "training_step_end needs the outputs of all rows, with what they keep for backward."
    try:
        rows = replicas.slicer.num_rows(batch)
        if rows > 1:
            # Tried, as a batch whose rows can be counted may hold something that cannot be cut.
            replicas.slicer.cut(batch, [rows - 1, 1])
    except UncuttableBatch as error:
        return str(error)
    return ""
