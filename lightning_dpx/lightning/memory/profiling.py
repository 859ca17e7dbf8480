"""A training step of one replica, profiled on a shadow module before it happens."""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_dpx.devices import free_garbage
from lightning_dpx.errors import PlanError
from lightning_dpx.lightning.lightning_api import (
    rank_zero_info,
)
from lightning_dpx.lightning.lightning_compat import trainer_of
from lightning_dpx.lightning.memory.loss_probe import NO_BACKWARD, Backwards
from lightning_dpx.lightning.memory.shadow_slice import PURPOSE, Step, on_shadow, rows_and_cut, rows_of_slice, shadow_of
from lightning_dpx.lightning.memory.slice_loss import NoBackwardError, SliceLoss
from lightning_dpx.memory import Profile, extrapolate, profile_absent, profile_step
from lightning_dpx.memory.micro_batch_planning import TooFewRowsError, told_as_too_few_rows
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.data import IsWorth
from lightning_dpx.python_objects.preserve import preserve_rng_state
from lightning_dpx.python_objects.trial_garbage import TRIAL_GARBAGE
from lightning_dpx.replicas import BatchSlice, Replica, ReplicaSet, UncuttableBatch
from lightning_dpx.replicas.error_notes import trial_noted
from lightning_dpx.shifting import applied_shift

_MEETS_OTHERS = (
    "A step does not fit without a plan, and cannot be tried on fewer rows: it meets other processes inside of it, and "
    "they do not try it again. Plan it without running it (dpx.search_plan with device) and give plan, or use a "
    "smaller batch."
)
_FEWEST_ROWS = 4  # of a step that is extrapolated from two smaller ones


class DoesNotFitError(PlanError):
    """A step does not fit on its device without a plan, and neither do the few rows that would tell of all."""


def devices_of(replica: Replica) -> list[torch.device]:
    """The devices that a step of ``replica`` runs on: its own, and that of the parts that are shifted."""
    shift = applied_shift(replica.module)
    if shift is None:
        return [replica.device]
    return [replica.device, shift.target]


def announce_profile(rows: int, device: torch.device) -> None:
    """Logs that a step is being profiled, which takes a while."""
    some_rows = "1 row" if rows == 1 else f"{rows} rows"
    rank_zero_info(f"dpx: profiles a step on {some_rows} to plan the memory of {device} ...")


def profile_slice(
    replicas: ReplicaSet,
    batch_slice: BatchSlice,
    run: Step,
    device: torch.device | None = None,
    *,
    accumulates: bool = False,
    counts_gradients: bool = False,
    parts: int = 1,
    by_forward: bool = False,
    is_worth: IsWorth | None = None,
    most_rows: int | None = None,
) -> Profile:
    """A step on ``batch_slice``, run by a shadow module; extrapolated from fewer rows where all do not fit.

    Args:
        replicas: All of them.
        batch_slice: What one of them gets.
        run: ``run(module, rows, num_rows)``: the training step of a replica's shadow module.
        device: The device whose memory is looked at; the replica's own unless given.
        accumulates: Whether gradients are added to those of earlier batches.
        counts_gradients: As :func:`profile_step` takes it; not where gradients are added.
        parts: Of so many such slices a replica's rows will consist.
        by_forward: Whether a step by hand that runs no backward is profiled as a forward.
        is_worth: As :func:`profile_step` takes it.
        most_rows: That are run at a time, where all are known not to fit; all of them unless given, and where the step
            cannot be had from fewer.

    Raises:
        NoLossError: there is nothing to plan from yet.
        NotWorthProfilingError: ``is_worth`` says no.
        PlanError: the step cannot be planned for, or does not fit and too few rows do to extrapolate from.
    """
    noted = trial_noted(batch_slice.replica.index, batch_slice.replica.device, "training_step", PURPOSE)
    profiler = _SliceProfiler(
        replicas=replicas,
        batch_slice=batch_slice,
        run=run,
        device=device or batch_slice.replica.device,
        accumulates=accumulates,
        counts_gradients=counts_gradients and not accumulates,
        parts=parts,
        by_forward=by_forward,
        is_worth=is_worth,
        most_rows=most_rows,
    )
    with noted, TRIAL_GARBAGE.freed():
        return profiler.profile()


@dataclass(frozen=True, slots=True, kw_only=True)
class _SliceProfiler:
    """Profiles a step on a slice: the arguments of :func:`profile_slice`."""

    replicas: ReplicaSet
    batch_slice: BatchSlice
    run: Step
    device: torch.device
    accumulates: bool
    counts_gradients: bool
    parts: int
    by_forward: bool
    is_worth: IsWorth | None
    most_rows: int | None

    def profile(self) -> Profile:
        """The step on all rows, or if need be from steps on fewer.

        Raises:
            PlanError: it cannot be had from either.
            CollectiveError: on fewer rows, it would meet other processes.
        """
        trainer = trainer_of(self.batch_slice.replica.module)
        ranks = getattr(getattr(trainer, "strategy", None), "ranks", None)
        # `dpx plan` looks at a step with a strategy of one device, and there are no other processes.
        num_meetings = 0 if ranks is None else ranks.num_meetings
        if (found := self._from_rows_that_fit()) is not None:
            return found
        try:
            return self._on_rows(self.batch_slice.batch, self.batch_slice.num_rows, self.is_worth)
        # That the step does not fit is the usual reason for a budget, and fewer rows tell as much.
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # they hold on to what did not fit
        free_garbage()  # a shadow module and its gradients are in reference cycles
        if ranks is None:
            return self._from_fewer_rows()
        # All processes try a step at the same time, and those whose rows fit try no other.
        if ranks.num_meetings > num_meetings:
            raise DoesNotFitError(_MEETS_OTHERS)
        with ranks.alone(_MEETS_OTHERS):
            return self._from_fewer_rows()

    def _on_rows(self, batch: Any, rows: int, is_worth: IsWorth | None = None) -> Profile:
        shadow = shadow_of(self.replicas, self.batch_slice)
        end = SliceLoss(self.replicas, shadow, self.parts)
        # The real step must draw what it would have drawn without a profile.
        with preserve_rng_state(self.replicas.devices, [self.replicas.root.module]), Backwards(shadow) as backwards:
            profile = profile_step(
                shadow,
                end.run_of(partial(self.run, shadow, batch, rows)),
                self.device,
                costs=_costs_of(self.device, rows, self.batch_slice.num_rows),
                accumulates=self.accumulates,
                counts_gradients=self.counts_gradients,
                is_worth=is_worth,
            )
        runs_none = profile.peak and not profile.requests and not backwards.have_run
        if runs_none and not shadow.automatic_optimization and not self.by_forward:
            raise NoBackwardError(NO_BACKWARD)
        return profile

    def _from_rows_that_fit(self) -> Profile | None:
        """The line through steps on no more than ``most_rows``; ``None`` where all rows are to be run."""
        all_rows = self.batch_slice.num_rows
        most = all_rows if self.most_rows is None else max(self.most_rows, _FEWEST_ROWS)
        if most >= all_rows:
            return None
        rows = most // 2, most
        try:
            with told_as_too_few_rows(f"on {rows[0]} of its {all_rows} rows a step"):
                return self._on_line(rows)
        # Then the budget is exceeded once, as it was by the first batch; without a profile it might be in every step.
        except (UncuttableBatch, TooFewRowsError, torch.OutOfMemoryError) as error:
            traceback.clear_frames(error.__traceback__)
            free_garbage()
            return None

    def _on_line(self, rows: tuple[int, int]) -> Profile:
        """The step on all rows, on the line through steps on so many."""
        few, more = (self._on_rows(rows_of_slice(self.replicas, self.batch_slice, n), n) for n in rows)
        return extrapolate(few, more, rows, self.batch_slice.num_rows)

    def _from_fewer_rows(self) -> Profile:
        """The line through steps on two numbers of rows, the most that fit.

        Raises:
            PlanError: too few rows fit, or the batch cannot be cut.
        """
        all_rows = self.batch_slice.num_rows
        home = self.batch_slice.replica.device
        # A line needs two profiles, on two rows at the least: batch norm does not train on one.
        if all_rows < _FEWEST_ROWS:
            raise DoesNotFitError(
                f"A step on {all_rows} rows does not fit on {home} without a plan, and there are too few rows to "
                "extrapolate from fewer. Plan it without running it (dpx.search_plan with device) and give plan."
            )
        for rows in _fewer_rows(all_rows):
            try:
                return self._on_line(rows)
            # Rows are cut off by the slicer, which may not have been needed before: one
            # replica takes batches whole.
            except UncuttableBatch as error:
                raise DoesNotFitError(
                    f"The step does not fit on {home} without a plan, and fewer rows to extrapolate from cannot be "
                    f"had. {error} Or plan the step without running it (dpx.search_plan with device) and give plan."
                ) from error
            except torch.OutOfMemoryError as error:
                traceback.clear_frames(error.__traceback__)
            free_garbage()
        raise DoesNotFitError(
            f"Not even {rows[1]} of {all_rows} rows fit on {home} without a plan, beside what is there already. Use a "
            "smaller batch, or plan the step without running it (dpx.search_plan with device) and give plan."
        )


def _fewer_rows(all_rows: int) -> Iterator[tuple[int, int]]:
    """The pairs of numbers of rows that are tried, the larger ones first; the last is (2, 4)."""
    more = all_rows
    while True:
        more = max(_FEWEST_ROWS, more // 4)
        # Two sizes, as parameters and what libraries keep do not grow with the rows.
        yield max(2, more // 2), more
        if more == _FEWEST_ROWS:
            return


def _costs_of(device: torch.device, rows: int, all_rows: int) -> CostModel:
    """Measures a step on ``rows``, which stand for all."""
    # What little is left on the host may do, and fewer rows there are not.
    watches_room = all_rows >= _FEWEST_ROWS
    if rows == all_rows:
        return CostModel(device, watches_room=watches_room)
    # The plan is for all rows, and finds values by the names that they have there.
    return CostModel(device, watches_room=watches_room, part=(rows, all_rows))


def profile_absent_slice(
    replicas: ReplicaSet,
    batch_slice: BatchSlice,
    run: Step,
    target: torch.device,
    *,
    accumulates: bool = False,
    counts_gradients: bool = False,
) -> Profile:
    """A step on ``batch_slice`` as it would be on ``target``, run by a shadow on the host; see :func:`profile_absent`.

    Raises:
        PlanError: the step cannot be planned for.
    """
    with on_shadow(replicas, batch_slice, run, target) as (shadow, step):
        return profile_absent(
            shadow,
            batch_slice.batch,
            target,
            step,
            # The device of the plan need not be there.
            here=torch.device("cpu"),
            few=partial(rows_and_cut, replicas, batch_slice),
            accumulates=accumulates,
            counts_gradients=counts_gradients and not accumulates,
        )
